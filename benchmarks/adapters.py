"""What is a cache worth on the model families of diffusers, of what it could be worth?

    OMP_NUM_THREADS=1 python benchmarks/adapters.py --json adapters.json

Every family runs a loop like that of its pipeline with random weights, small enough for a CPU, on two copies of one
model: bare, and under a schedule that says in advance what is skipped. Calls take turns, so that each is timed next to
the bare call of the same step. The ceiling is what is left when the seconds of the skipped blocks, as measured in the
bare copy, are taken away; embedding, head and commit passes are in both. A third run skips nothing and must be the bare
model bit for bit. Nothing is said about quality: random weights have none.

On a machine that others use too, `--clock cpu` counts only the time in which this process ran.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
import tyro
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import rollcache
from rollcache import Action, StepReuse, XCache
from rollcache.adapters import (
    diffusers_anyflow,
    diffusers_framepack,
    diffusers_helios,
    diffusers_sana,
    diffusers_skyreels,
)
from rollcache.adapters.loops import generation
from rollcache.adapters.spec import Adapter
from rollcache.bench.results import dump
from rollcache.measure import provenance, write_atomic

Calls = Iterator[tuple[tuple[Any, ...], dict[str, Any]]]
Seconds = float

OPEN = XCache(min_cosine=-1, margin=1, max_deviation=None)
"""Replays everything but block 0 and the first chunk of its shape."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Size of the models and of what they are called with.

    Attributes:
        depth: blocks.
        heads: attention heads.
        head: channels of one, a multiple of 8.
        frames: latent frames of every chunk.
        cells: tokens of a latent frame, as (height, width).
        steps: denoising steps of a chunk.
    """

    depth: int = 12
    heads: int = 4
    head: int = 32
    frames: tuple[int, ...] = (9, 9, 9)
    cells: tuple[int, int] = (10, 10)
    steps: int = 4

    @property
    def width(self) -> int:
        """Channels."""
        return self.heads * self.head

    @property
    def levels(self) -> list[float]:
        """Timesteps of a chunk."""
        return [1000 * (1 - t / self.steps) for t in range(self.steps)]

    def wan(self) -> dict[str, Any]:
        """Arguments of models built like Wan."""
        return {
            "num_attention_heads": self.heads,
            "attention_head_dim": self.head,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 32,
            "ffn_dim": 4 * self.width,
            "num_layers": self.depth,
        }


@dataclass(frozen=True)
class Inputs:
    """What models are called with: some samples, all alike."""

    scale: Scale
    batch: int

    def rows(self, *shape: int, seed: int) -> Tensor:
        """Noise [batch, ...], the same for every sample."""
        noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed))
        return noise.expand(self.batch, *shape).contiguous()

    def latents(self, frames: int, seed: int) -> Tensor:
        """Noise [batch, 4, frames, h, w], in patches of 2x2."""
        return self.rows(4, frames, 2 * self.scale.cells[0], 2 * self.scale.cells[1], seed=seed)

    def text(self, seed: int = 50) -> Tensor:
        """An embedded prompt [batch, 8, 16]."""
        return self.rows(8, 16, seed=seed)

    def level(self, t: float, *shape: int) -> Tensor:
        """One timestep for all."""
        return torch.full((self.batch, *shape), t)


@dataclass(frozen=True)
class Family:
    """A model, its adapter, and a loop that calls it."""

    model: nn.Module
    adapter: Adapter
    calls: Callable[..., Calls]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A model whose random weights are always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().eval().requires_grad_(False)


def euler(x: Tensor, v: Tensor, scale: Scale) -> Tensor:
    """One step of the loop."""
    return x - v / scale.steps


def skyreels(scale: Scale, branches: int = 1) -> Family:
    """Windows in step."""
    model = seeded(lambda: diffusers.SkyReelsV2Transformer3DModel(**scale.wan()))

    def calls(batch: int = 1) -> Calls:
        its = Inputs(scale, batch)
        prompts = [its.text(50 + i) for i in range(branches)]
        with generation(model):
            for n, frames in enumerate(scale.frames):
                x = its.latents(frames, seed=n)
                for t in scale.levels:
                    timestep, out = its.level(t, frames), []
                    for prompt in prompts:
                        call = {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": prompt}
                        answer = yield (), {**call, "enable_diffusion_forcing": True, "return_dict": False}
                        out.append(answer[0])
                    x = euler(x, torch.stack(out).mean(0), scale)

    return Family(model, diffusers_skyreels.adapter(model), calls)


def helios(scale: Scale, branches: int = 1) -> Family:
    """Chunks behind a compressed history."""
    rope = (scale.head // 2, scale.head // 4, scale.head // 4)
    model = seeded(lambda: diffusers.HeliosTransformer3DModel(**scale.wan(), rope_dim=rope))

    def calls(batch: int = 1) -> Calls:
        its = Inputs(scale, batch)
        prompts = [its.text(50 + i) for i in range(branches)]
        with generation(model):
            past = its.latents(19, seed=9)
            for n, frames in enumerate(scale.frames):
                x, (long, mid, short) = its.latents(frames, seed=n), past[:, :, -19:].split([16, 2, 1], 2)
                history = {
                    "indices_hidden_states": torch.arange(19, 19 + frames)[None],
                    "indices_latents_history_long": torch.arange(16)[None],
                    "indices_latents_history_mid": torch.arange(16, 18)[None],
                    "indices_latents_history_short": torch.arange(18, 19)[None],
                    "latents_history_long": long,
                    "latents_history_mid": mid,
                    "latents_history_short": short,
                }
                for t in scale.levels:
                    timestep, out = its.level(t), []
                    for prompt in prompts:
                        call = {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": prompt}
                        answer = yield (), {**call, **history, "return_dict": False}
                        out.append(answer[0])
                    x = euler(x, torch.stack(out).mean(0), scale)
                past = torch.cat([past, x], 2)

    return Family(model, diffusers_helios.adapter(model), calls)


def framepack(scale: Scale) -> Family:
    """Sections behind a compressed history, in blocks of two streams."""
    double = max(1, scale.depth // 3)
    model = seeded(
        lambda: diffusers.HunyuanVideoFramepackTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=scale.heads,
            attention_head_dim=scale.head,
            num_layers=double,
            num_single_layers=scale.depth - double,
            num_refiner_layers=1,
            text_embed_dim=16,
            pooled_projection_dim=8,
            rope_axes_dim=(scale.head // 4, 3 * scale.head // 8, 3 * scale.head // 8),
            has_image_proj=True,
            image_proj_dim=16,
            has_clean_x_embedder=True,
        )
    )

    def calls(batch: int = 1) -> Calls:
        its = Inputs(scale, batch)
        given = {
            "encoder_hidden_states": its.text(),
            "encoder_attention_mask": torch.ones(batch, 8),
            "pooled_projections": its.rows(8, seed=7),
            "image_embeds": its.rows(3, 16, seed=8),
            "guidance": its.level(6000.0),
            "indices_latents_clean": torch.arange(18, 19),
            "indices_latents_history_2x": torch.arange(16, 18),
            "indices_latents_history_4x": torch.arange(16),
            "return_dict": False,
        }
        with generation(model):
            past = its.latents(19, seed=9)
            for n, frames in enumerate(scale.frames):
                x, (far, near, clean) = its.latents(frames, seed=n), past[:, :, -19:].split([16, 2, 1], 2)
                history = {"latents_clean": clean, "latents_history_2x": near, "latents_history_4x": far}
                for t in scale.levels:
                    call = {
                        "hidden_states": x,
                        "timestep": its.level(t),
                        "indices_latents": torch.arange(19, 19 + frames),
                    }
                    answer = yield (), {**call, **history, **given}
                    x = euler(x, answer[0], scale)
                past = torch.cat([past, x], 2)

    return Family(model, diffusers_framepack.adapter(model), calls)


def anyflow(scale: Scale) -> Family:
    """Chunks, each encoded with all before it when it is done."""
    partition, cells = scale.frames, scale.cells[0] * scale.cells[1]
    model: Any = seeded(lambda: diffusers.AnyFlowFARTransformer3DModel(**scale.wan(), chunk_partition=partition))
    height, width = 2 * scale.cells[0], 2 * scale.cells[1]
    size = {"height": height, "width": width, "device": torch.device("cpu"), "mode": "cache"}
    masks = [
        model.build_attention_mask(chunk_partition=list(partition[: n + 1]), **size) for n in range(len(partition))
    ]

    def calls(batch: int = 1) -> Calls:
        its = Inputs(scale, batch)
        text = its.text()
        room = (2, batch, scale.heads, len(partition) * max(partition) * cells, scale.head)
        kv = {
            layer: {"full_cache": torch.zeros(room), "compressed_cache": torch.zeros(room)}
            for layer in range(scale.depth)
        }
        made = torch.zeros(batch, sum(partition), 4, height, width)
        for n, frames in enumerate(partition):
            x, so_far = its.rows(frames, 4, height, width, seed=n), list(partition[: n + 1])
            given = {"encoder_hidden_states": text, "chunk_partition": so_far, "kv_cache": kv, "return_dict": False}
            for t, r in zip(scale.levels, [*scale.levels[1:], 0.0], strict=True):
                answer = yield (
                    (),
                    {
                        **given,
                        "hidden_states": x,
                        "timestep": its.level(t, frames),
                        "r_timestep": its.level(r, frames),
                        "kv_cache_flag": {"num_cached_chunks": n, "is_cache_step": False},
                    },
                )
                x = euler(x, answer[0], scale)
            made[:, sum(so_far) - frames : sum(so_far)] = x
            yield (
                (),
                {
                    **given,
                    "hidden_states": made[:, : sum(so_far)].clone(),
                    "timestep": its.level(0.0, sum(so_far)),
                    "r_timestep": its.level(0.0, sum(so_far)),
                    "attention_mask": masks[n],
                    "kv_cache_flag": {"num_cached_chunks": n, "is_cache_step": True},
                },
            )

    return Family(model, diffusers_anyflow.adapter(model), calls)


def sana(scale: Scale) -> Family:
    """Blocks of frames with a sink and a history of K/V, captured when a block is done."""
    model: Any = seeded(
        lambda: diffusers.SanaWMLTX2RefinerTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=scale.heads,
            attention_head_dim=scale.head,
            cross_attention_dim=scale.width,
            num_layers=scale.depth,
            caption_channels=16,
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=2,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=16,
        )
    )
    cells = scale.cells[0] * scale.cells[1]

    def calls(batch: int = 1) -> Calls:
        its = Inputs(scale, batch)
        text, kv = its.text(), SanaWMRefinerKVCache(scale.depth)

        def place(frames: range) -> Any:
            grid = {"height": scale.cells[0], "width": scale.cells[1], "device": torch.device("cpu")}
            return model.build_rotary_emb_for_absolute_positions(batch, list(frames), fps=16.0, **grid)

        def call(x: Tensor, t: float, frames: range, mode: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return (), {
                "hidden_states": x,
                "encoder_hidden_states": text,
                "timestep": its.level(t, x.shape[1]),
                "video_rotary_emb": place(frames),
                "kv_cache": kv,
                "kv_cache_mode": mode,
                "return_dict": False,
            }

        yield call(its.rows(cells, 8, seed=20), 0.0, range(1), "capture_pre_rope")
        layers = [kv.get(i) for i in range(scale.depth)]
        for layer in layers:
            layer.store_sink(*layer.get_captured_pre_rope())
        kv.sink_pe, begin = place(range(1)), 1
        for n, length in enumerate(scale.frames):
            frames, x = range(begin, begin + length), its.rows(length * cells, 8, seed=n)
            for t in scale.levels:
                answer = yield call(x, t, frames, "inject")
                x = euler(x, answer[0], scale)
            yield call(x, 0.0, frames, "inject_and_capture_post_rope")
            for layer in layers:
                new, old = layer.get_captured_post_rope(), layer.get_history()
                layer.store_history(*(new if old is None else (torch.cat(p, 1) for p in zip(old, new, strict=True))))
            begin += length

    return Family(model, diffusers_sana.adapter(model), calls)


FAMILIES: dict[str, Callable[[Scale], Family]] = {
    "SkyReels-V2": skyreels,
    "Helios": helios,
    "FramePack": framepack,
    "AnyFlow-FAR": anyflow,
    "SANA-WM refiner": sana,
}

ACROSS_CHUNKS = ("AnyFlow-FAR", "SANA-WM refiner")
"""Families with few steps, measured under X-Cache; the others under step reuse."""


class Lane:
    """A family whose calls are made one by one.

    Attributes:
        seconds: by call, of every round.
        stack: likewise, what of that its blocks took.
        skipped: by call, the share of the blocks that was replayed.
        outputs: of the last round.
    """

    def __init__(self, family: Family, policy: Any, clock: Callable[[], Seconds]) -> None:
        self.family, self.clock = family, clock
        self.handle = None if policy is None else rollcache.enable(family.model, policy, adapter=family.adapter)
        self.seconds: list[list[Seconds]] = []
        self.stack: list[list[Seconds]] = []
        self.skipped: list[float] = []
        self.outputs: list[Tensor | None] = []
        self._inside = 0.0
        blocks = family.adapter.blocks(family.model)
        self.depth = len(blocks)
        if policy is None:
            blocks[0].register_forward_pre_hook(self._enter)
            blocks[-1].register_forward_hook(self._leave)

    def restart(self) -> None:
        """Stand before the first call of a new generation."""
        self._loop = self.family.calls()
        self._next: Any = next(self._loop)
        self._at, self.skipped, self.outputs = 0, [], []

    @property
    def over(self) -> bool:
        """Whether the generation has ended."""
        return self._next is None

    def advance(self) -> None:
        """Make the next call, timed."""
        args, kwargs = self._next
        known = 0 if self.handle is None else len(self.handle.trace)
        began = self.clock()
        output = self.family.model(*args, **kwargs)
        took = self.clock() - began
        if self._at == len(self.seconds):
            self.seconds.append([])
            self.stack.append([])
        self.seconds[self._at].append(took)
        self.stack[self._at].append(self._inside)
        new = [] if self.handle is None else list(self.handle.trace)[known:]
        self.skipped.append(sum(r.blocks for r in new if r.action is not Action.COMPUTE) / self.depth)
        self.outputs.append(output[0])
        self._at += 1
        try:
            self._next = self._loop.send(output)
        except StopIteration:
            self._next = None

    def _enter(self, *_: object) -> None:
        self._inside = self.clock()

    def _leave(self, *_: object) -> None:
        self._inside = self.clock() - self._inside


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    families: tuple[str, ...] = tuple(FAMILIES)
    rounds: int = 3
    anchors: int = 2
    clock: Literal["wall", "cpu"] = "wall"
    json: Path | None = None
    scale: tyro.conf.OmitArgPrefixes[Scale] = field(default_factory=Scale)

    def __post_init__(self) -> None:
        if unknown := [name for name in self.families if name not in FAMILIES]:
            raise ValueError(f"unknown families: {', '.join(unknown)}; known are {', '.join(FAMILIES)}.")


@torch.inference_mode()
def race(lanes: Sequence[Lane], rounds: int, warmup: int = 1) -> None:
    """All lanes through some generations, call by call; who goes first turns. The first generation is not counted."""
    for n in range(warmup + rounds):
        for lane in lanes:
            lane.restart()
        while not lanes[0].over:
            for lane in lanes if lanes[0]._at % 2 == n % 2 else lanes[::-1]:
                lane.advance()
        if n < warmup:
            for lane in lanes:
                lane.seconds.clear()
                lane.stack.clear()


def reached(
    full: Sequence[Sequence[Seconds]],
    stack: Sequence[Sequence[Seconds]],
    cached: Sequence[Sequence[Seconds]],
    skipped: Sequence[float],
) -> dict[str, float]:
    """Speedup over a generation, its ceiling, and the ratio of the two, from the medians of every call over rounds.

    Args:
        full: seconds of every call at full compute.
        stack: what of that the blocks took.
        cached: seconds of the same calls under the cache.
        skipped: share of the blocks that each of them left out.
    """
    a, b, c = ([statistics.median(rounds) for rounds in lane] for lane in (full, stack, cached))
    left = sum(whole - share * blocks for whole, blocks, share in zip(a, b, skipped, strict=True))
    speedup, ceiling = sum(a) / sum(c), sum(a) / left
    return {"speedup": speedup, "ceiling": ceiling, "efficiency": speedup / ceiling}


def measure(name: str, settings: Settings) -> dict[str, Any]:
    """One row of the table."""
    clock = time.process_time if settings.clock == "cpu" else time.perf_counter
    scale, make = settings.scale, FAMILIES[name]
    steps = StepReuse.uniform(scale.steps, settings.anchors)
    policy, never = (
        (OPEN, XCache(min_cosine=1)) if name in ACROSS_CHUNKS else (steps, StepReuse.uniform(scale.steps, scale.steps))
    )
    bare, cached, exact = (Lane(make(scale), p, clock) for p in (None, policy, never))
    race([bare, exact], rounds=0)
    same = all(a is b is None or torch.equal(a, b) for a, b in zip(bare.outputs, exact.outputs, strict=True))
    race([bare, cached], settings.rounds)
    assert cached.handle is not None and exact.handle is not None
    stats = cached.handle.stats()
    return {
        "family": name,
        "method": type(policy).__name__,
        "exact": same and exact.handle.stats().skip_rate == 0,
        "calls": len(bare.seconds),
        "commits": stats.passes.get("commit", 0) // (settings.rounds + 1),
        "skipped": sum(cached.skipped) / len(cached.skipped),
        **reached(bare.seconds, bare.stack, cached.seconds, cached.skipped),
    }


def table(rows: Sequence[dict[str, Any]], scale: Scale) -> Table:
    """Speedups beside their ceilings."""
    tokens = scale.frames[-1] * scale.cells[0] * scale.cells[1]
    title = f"{scale.depth} blocks, width {scale.width}, {tokens} tokens a chunk, {scale.steps} steps, random weights"
    out = Table(box=box.SIMPLE_HEAD, title=title)
    out.add_column("family")
    out.add_column("method")
    for head in ("never skips", "calls", "commits", "blocks skipped", "speedup", "ceiling", "efficiency"):
        out.add_column(head, justify="right")
    for r in rows:
        out.add_row(
            r["family"],
            r["method"],
            "bit for bit" if r["exact"] else "DIFFERS",
            str(r["calls"]),
            str(r["commits"]),
            f"{r['skipped']:.1%}",
            f"{r['speedup']:.2f}x",
            f"{r['ceiling']:.2f}x",
            f"{r['efficiency']:.3f}",
        )
    return out


def main(settings: Settings) -> int:
    """Run, print, store. Fails when a run that skips nothing is not the bare model."""
    warnings.filterwarnings("ignore", message="flex_attention called without")
    rows = [measure(name, settings) for name in settings.families]
    Console(width=None if sys.stdout.isatty() else 120).print(table(rows, settings.scale))
    if settings.json is not None:
        write_atomic(settings.json, dump({"runs": rows, "provenance": provenance(settings, dtype=torch.float32)}))
    return 0 if all(r["exact"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
