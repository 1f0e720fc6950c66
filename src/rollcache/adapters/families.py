"""What is known of the models with an adapter, and what a method can do there: the facts behind `docs/support.md`.

Nothing here is looked at when a cache runs. Figures are those of the published models; where they come from is said on
the page of each family. What a method needs of a model is held against runs of small ones in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from math import ceil
from typing import Any, Literal

from torch import nn

from rollcache.adapters.spec import Adapter

Repair = Literal["sparse", "refresh", "none"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A published model and its loop, as methods find them.

    Attributes:
        name: what people call it.
        model: the class that `enable` takes.
        page: of the documentation, relative to `docs/`.
        source: where its adapter is, see `registry.register`.
        blocks: of the transformer (B).
        steps: denoising passes of a chunk in each branch (S).
        chunk: what a chunk is.
        exact: passes that are always computed, per chunk, in denoising passes: commits, and whatever encodes the past.
        fixed: share of the chunks in which no method across chunks can leave anything out, although the rollout is
            under way: the protected ones of a KV cycle, and those of another shape than the one before.
        first_pass_exact: the first denoising pass of a chunk is always computed.
        fresh_noise: every chunk begins with noise of its own.
        grid: whether the adapter tells the token grid.
        frame: whether it tells which frame of a window is emitted.
        announced: chunks of one video are told by `loops.generation` only.
    """

    name: str
    model: str
    page: str
    source: str
    blocks: int
    steps: int
    chunk: str
    exact: float = 0.0
    fixed: float = 0.0
    first_pass_exact: bool = False
    fresh_noise: bool = True
    grid: bool = True
    frame: bool = False
    announced: bool = False

    @property
    def adapter(self) -> Adapter:
        """Its adapter; no model library is imported."""
        module, _, name = self.source.partition(":")
        found: Any = getattr(import_module(module), name or "ADAPTER")
        if isinstance(found, Adapter):
            return found
        stand_in = nn.Module()
        stand_in.blocks = nn.ModuleList()
        made: Adapter = found(stand_in)
        return made

    @property
    def repair(self) -> Repair:
        """How tokens can be repaired."""
        return "none" if not self.grid else "refresh" if self.adapter.sparse is None else "sparse"

    def across_chunks(self) -> float:
        """Share of all block evaluations of a rollout that a method across chunks may leave out, all but block 0."""
        steps = self.steps - self.first_pass_exact
        return (1 - self.fixed) * steps * (self.blocks - 1) / ((self.steps + self.exact) * self.blocks)

    def across_steps(self) -> float:
        """The same for a method across steps that computes every fourth step, the first one included."""
        return (self.steps - ceil(self.steps / 4)) / (self.steps + self.exact)


def _diffusers(name: str, module: str, page: str, label: str, **facts: Any) -> Family:
    source = f"rollcache.adapters.diffusers_{module}:adapter"
    return Family(name=label, model=name, page=f"backbones/{page}.md", source=source, **facts)


def _wan(label: str, page: str = "self-forcing", **facts: Any) -> Family:
    known: dict[str, Any] = {"blocks": 30, "steps": 4, "exact": 1.0, "chunk": "3 latent frames", **facts}
    source = "rollcache.adapters.self_forcing"
    return Family(name=label, model="CausalWanModel", page=f"backbones/{page}.md", source=source, **known)


def _street(label: str, **facts: Any) -> Family:
    source = "rollcache.adapters.street"
    return Family(name=label, model="StreetDiT", page="street.md", source=source, blocks=12, **facts)


FAMILIES = (
    _street(
        "street, 4 steps",
        chunk="a generation step of a receding window",
        steps=4,
        exact=0.25,
        fixed=0.25,
        fresh_noise=False,
        frame=True,
    ),
    _street("street, 50 steps", chunk="4 latent frames", steps=50, exact=1.0),
    _wan("Self-Forcing, Causal-Forcing, LongLive 1"),
    _wan("LongLive 2", chunk="8 latent frames", first_pass_exact=True),
    _wan("CausVid", steps=3),
    _wan("Krea Realtime 14B", blocks=40),
    _wan("Matrix-Game 2.0", "matrix-game", steps=3),
    # Chunks of 1, 3, 3, 3, 3, 3, 3 and 2 frames, of which 15 of 21 can share; encoding takes all so far, the past in a
    # quarter of its tokens: (21 + (0 + 1 + 4 + 7 + 10 + 13 + 16 + 19) / 4) / 21 chunks.
    _diffusers(
        "AnyFlowFARTransformer3DModel",
        "anyflow",
        "anyflow-far",
        "AnyFlow-FAR 1.3B",
        blocks=30,
        steps=4,
        chunk="3 latent frames",
        exact=1.83,
        fixed=6 / 21,
    ),
    _diffusers(
        "SanaWMLTX2RefinerTransformer3DModel",
        "sana",
        "sana-wm-refiner",
        "SANA-WM refiner",
        blocks=48,
        steps=3,
        chunk="3 latent frames",
        exact=1.0,
        grid=False,
    ),
    _diffusers(
        "SkyReelsV2Transformer3DModel",
        "skyreels",
        "skyreels-v2",
        "SkyReels-V2 1.3B",
        blocks=30,
        steps=50,
        chunk="a window of up to 25 latent frames",
        announced=True,
    ),
    _diffusers(
        "HeliosTransformer3DModel",
        "helios",
        "helios",
        "Helios",
        blocks=40,
        steps=50,
        chunk="9 latent frames",
        announced=True,
    ),
    _diffusers(
        "HunyuanVideoFramepackTransformer3DModel",
        "framepack",
        "framepack",
        "FramePack",
        blocks=60,
        steps=30,
        chunk="9 latent frames",
        announced=True,
    ),
)

REFUSED = {
    "MAGI-1": "up to four chunks at four noise levels in one pass, and commits that denoise as well",
    "HY-WorldPlay": "safe, but its exact passes cost as much as all steps of a chunk, and its cameras are absolute",
    "Rolling Forcing": "five chunks at five noise levels in one pass",
    "StreamDiffusionV2": "every forward moves queues that a skipped block would leave behind, and nothing commits",
}
"""Models that `enable` refuses, and why in a line; `docs/backbones/refused.md` has the analysis."""

Fit = Literal["good", "limited", "no"]


@dataclass(frozen=True)
class Method:
    """What a method asks of a model.

    Attributes:
        name: of its settings.
        across: what it reuses work across.
        needs: attributes of `Family` without which it says so, and stops.
        shared_noise: does nothing where every chunk has noise of its own.
    """

    name: str
    across: Literal["chunks", "steps"]
    needs: tuple[str, ...] = ()
    shared_noise: bool = False


METHODS = (
    Method("XCache", "chunks"),
    Method("WindowReuse", "chunks", shared_noise=True),
    Method("C3ache", "chunks"),
    Method("Replan", "chunks", needs=("grid", "frame"), shared_noise=True),
    Method("StepReuse", "steps"),
    Method("FSC", "steps", needs=("grid",)),
    Method("MotionCache", "steps", needs=("grid",)),
    Method("SeaCache", "steps"),
    Method("Scope", "steps"),
    Method("TaylorSeer", "steps"),
    Method("TeaCache", "steps"),
    Method("FlowCache", "steps"),
    Method("EasyCache", "steps"),
    Method("MagCache", "steps"),
)

MANY = 16
"""Steps from which on methods across steps have room; with fewer each of them is a large part of the trajectory."""


def fit(family: Family, method: Method) -> tuple[Fit, str]:
    """Whether a method makes sense on a model, and why not.

    `no` means that it raises or leaves out nothing; `limited` that it runs, with little to find there.
    """
    if missing := [need for need in method.needs if not getattr(family, need)]:
        return "no", {"grid": "the token grid is not known", "frame": "no frame of a window is emitted"}[missing[0]]
    if method.across == "steps":
        return ("good", "") if family.steps >= MANY else ("limited", "few steps, each a large part of the way")
    if not family.fresh_noise:
        return "good", ""
    if method.shared_noise:
        return "no", "every chunk has noise of its own"
    return "limited", "every chunk has noise of its own: inputs resemble each other at late steps only"
