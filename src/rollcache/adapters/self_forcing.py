"""Wan made autoregressive: Self-Forcing, Causal-Forcing, CausVid, LongLive, Matrix-Game 2.0 and Krea's realtime model.

One transformer, `CausalWanModel`, in copies that differ in what they do with their K/V. All are called as

    model(x, t=[B, F], context=..., kv_cache=[{"k", "v", ...}, ...], crossattn_cache=[...], current_start=tokens)

and write the chunk's K/V in place in every forward, so the last forward of a chunk must be exact and of clean latents.
What a call is for follows from three things that every loop passes:

| signal | means |
|---|---|
| the K tensor of the first block | which rollout: each branch and each session has K/V of its own |
| `current_start` | which chunk: it grows by the chunk's tokens |
| `t`, equal in all frames | clean at 0 and at `context_noise`, else a denoising step; it falls inside a chunk |

The first clean pass at the place of a chunk that was denoised commits it. Any other clean pass encodes given frames: it
begins a new generation, as do a `current_start` or a K/V index that goes back, and a `t` that does not fall.

Krea's loop writes the K/V of the past anew before each chunk instead, in a forward under `model.block_mask`, and its
`current_start` stops growing: there that forward is the commit, and begins the next chunk.

Sources: the code of guandeh17/Self-Forcing, thu-ml/Causal-Forcing, tianweiy/CausVid, NVlabs/LongLive (main and v1.0),
SkyworkAI/Matrix-Game (Matrix-Game-2), krea-ai/realtime-video. See docs/backbones/self-forcing.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from rollcache.adapters.spec import Adapter, Args, BlockIO, Kwargs
from rollcache.passes import Condition, Pass, Role, RollcacheError, Segment
from rollcache.settings import check_range

PAGE = "docs/backbones/self-forcing.md"
TIMESTEPS = 1000  # t is sigma in thousandths
CAMERA_STEP = 0.1  # Matrix-Game 2.0: what a held camera key adds to the mouse vector; keys are 0 or 1


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What one of the relatives does with its K/V, where they differ.

    Attributes:
        name: of the model, for messages.
        first_pass_exact: where block 0 stands in the K/V window is published to all blocks, so all of them must move
            their windows in the same pass.
        recomputes: K/V of the past are written before a chunk, under `model.block_mask`, not after it.
    """

    name: str
    first_pass_exact: bool = False
    recomputes: bool = False


_BY_PARAMETER = {  # of `_forward_inference`
    "kv_cache_mouse": Kind(name="Matrix-Game 2.0"),
    "current_end": Kind(name="CausVid"),
    "sink_recache_after_switch": Kind(name="LongLive 1"),
    "defer_cache_updates": Kind(name="LongLive 2", first_pass_exact=True),
}
_SELF_FORCING = Kind(name="Self-Forcing")
_KREA = Kind(name="Krea Realtime", recomputes=True)


def kind(model: Any) -> Kind:
    """Which of the relatives a model is, read off what its code takes.

    Raises:
        RollcacheError: it is none of them, or one whose blocks cannot be left out.
    """
    takes = _takes(model.__class__)
    if "kv_cache" not in takes:
        raise RollcacheError(
            f"{type(model).__name__} has no _forward_inference(kv_cache=...), as CausalWanModel has: it is none of the "
            f"models of {PAGE}. Pass another adapter=, or blocks= and mark the passes."
        )
    if "updating_cache" in takes:
        raise RollcacheError(
            "Rolling Forcing denoises several chunks at different noise levels in one pass, which cannot be told apart "
            "as chunk and step: see docs/backbones/refused.md."
        )
    for parameter, found in _BY_PARAMETER.items():
        if parameter in takes:
            return found
    return _KREA if hasattr(model.blocks[0].self_attn, "fuse_projections") else _SELF_FORCING


@cache
def _takes(model_class: type) -> frozenset[str]:
    """Names that the autoregressive forward of a class takes."""
    forward = getattr(model_class, "_forward_inference", None)
    return frozenset() if forward is None else frozenset(inspect.signature(forward).parameters)


@dataclass
class _Track:
    """Where the loop stands that uses one K/V cache.

    Attributes:
        key: the K tensor of its first block, without keeping it alive.
        chunk: index of the chunk under way, -1 before the first.
        start: its `current_start`.
        step: denoising steps of it so far, less one.
        t: timestep of the last one.
        over: its K/V were committed; the next denoising step begins another chunk.
        end: `global_end_index` of block 0 before the last pass: it falls only when the K/V were reset.
        prompts: how many prompts there have been.
        prompt: the present one, copied.
    """

    key: ref[Any]
    chunk: int = -1
    start: int = -1
    step: int = -1
    t: float = inf
    over: bool = False
    end: int = -1
    prompts: int = 0
    prompt: tuple[Tensor, ...] = ()

    def restart(self) -> None:
        """A new generation begins in this K/V cache."""
        self.chunk, self.start, self.step, self.t, self.over = -1, -1, -1, inf, False


@dataclass(frozen=True)
class Locator:
    """Tells what a call of the model is for. Remembers, per model and K/V cache, where its loop stands."""

    context_noise: float
    fresh_noise: bool
    recomputes: bool | None
    _tracks: WeakKeyDictionary[nn.Module, list[_Track]] = field(default_factory=WeakKeyDictionary)

    def __call__(self, model: Any, args: Args, kwargs: Kwargs) -> Pass:
        """See `Adapter.locate`."""
        kv, start = kwargs.get("kv_cache"), kwargs.get("current_start")
        if kv is None:
            raise RollcacheError(
                f"{type(model).__name__} was called without kv_cache=, as for training: rollcache follows its "
                "autoregressive path only. Disable the cache for this call."
            )
        if isinstance(start, bool) or not isinstance(start, int):
            raise RollcacheError(
                "current_start= must be an integer, the first token of the chunk, got "
                f"{type(start).__name__}; with one per row, as in StreamDiffusionV2, chunks cannot be told apart: see "
                "docs/backbones/refused.md."
            )
        levels = _levels(_argument(args, kwargs, 1, "t"))
        slot, track = self._track(model, kv)
        recomputes = kind(model).recomputes if self.recomputes is None else self.recomputes
        if recomputes:
            role = _enter_recomputing(track, levels, model.block_mask is not None)
        else:
            role = self._enter(track, levels, start, int(kv[0].get("global_end_index", 0)))
        segments = (Segment.contiguous("video", 1, grid(model, args, kwargs)),)
        conditions = (*_prompt(track, args, kwargs), *_actions(model, segments[0].grid[0], kwargs))
        return Pass(
            role=role,
            rollout=slot,
            chunk=max(track.chunk, 0),
            step=max(track.step, 0),
            segments=segments,
            conditions=conditions,
            fresh_noise=self.fresh_noise,
            time=levels[-1] / TIMESTEPS,
        )

    def _track(self, model: nn.Module, kv: Any) -> tuple[int, _Track]:
        """The track of a K/V cache, and its number. One whose K/V are gone makes room."""
        tracks = self._tracks.setdefault(model, [])
        key = kv[0]["k"]
        if not isinstance(key, Tensor):
            key = key[0]  # quantised: a list of blocks
        for slot, track in enumerate(tracks):
            if track.key() is key:
                return slot, track
        new = _Track(ref(key))
        for slot, track in enumerate(tracks):
            if track.key() is None:
                tracks[slot] = new
                return slot, new
        tracks.append(new)
        return len(tracks) - 1, new

    def _enter(self, track: _Track, levels: list[float], start: int, end: int) -> Role:
        """Take note of a pass that starts at a token, while the K/V end at another: what is it for?"""
        if end < track.end:
            track.restart()
        track.end = end
        clean = {0.0, float(self.context_noise)}
        if clean.issuperset(levels) and start == track.start and not track.over:
            track.over = True
            return Role.COMMIT
        if clean.issuperset(levels) or (len(levels) == 2 and levels[0] in clean):
            track.restart()  # given frames; inside a chunk that is denoised too little is known to leave anything out
            return Role.PREFILL
        t = _one(levels)
        if start < track.start or (start == track.start and (track.over or t >= track.t)):
            track.restart()
        if start > track.start:
            track.chunk, track.step = track.chunk + 1, -1
        track.start, track.step, track.t, track.over = start, track.step + 1, t, False
        return Role.DENOISE


def _enter_recomputing(track: _Track, levels: list[float], recompute: bool) -> Role:
    """Take note of a pass of a loop that writes the K/V of the past anew before each chunk: what is it for?"""
    if recompute:
        track.over = True
        return Role.COMMIT if track.step >= 0 else Role.PREFILL
    t = _one(levels)
    if not track.over and t >= track.t:
        track.restart()
    if track.over or track.chunk < 0:
        track.chunk, track.step = track.chunk + 1, -1
    track.step, track.t, track.over = track.step + 1, t, False
    return Role.DENOISE


def _argument(args: Args, kwargs: Kwargs, position: int, *names: str) -> Any:
    if position < len(args):
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), None)


def _levels(t: Any) -> list[float]:
    """The timesteps that occur in a pass, rising; one host synchronisation."""
    if not isinstance(t, Tensor):
        raise RollcacheError(f"t= must be a tensor of timesteps [B, F], got {type(t).__name__}.")
    return sorted(set(t.flatten().tolist()))


def _one(levels: list[float]) -> float:
    if len(levels) > 1:
        raise RollcacheError(
            f"one pass holds the timesteps {', '.join(f'{t:g}' for t in levels)}: chunk and step cannot be told. "
            f"Disable the cache for loops that denoise several chunks in one pass; see {PAGE}."
        )
    return levels[0]


def grid(model: Any, args: Args, kwargs: Kwargs) -> tuple[int, int, int]:
    """Token grid (F, H, W) of a call: the latent's, in patches."""
    x = _argument(args, kwargs, 0, "x")
    frames, height, width = x[0].shape[-3:]
    f, h, w = model.patch_size
    return frames // f, height // h, width // w


def _prompt(track: _Track, args: Args, kwargs: Kwargs) -> tuple[Condition, ...]:
    """A condition that is infinitely far from that of any other prompt: its name tells which one it is."""
    context = _argument(args, kwargs, 2, "context", "visual_context")
    if context is None:
        return ()
    now = tuple(context)
    if len(now) != len(track.prompt) or not all(
        a.shape == b.shape and a.device == b.device and torch.equal(a, b)
        for a, b in zip(now, track.prompt, strict=True)
    ):
        track.prompts += 1
        track.prompt = tuple(c.detach().clone() for c in now)
    return (Condition(f"prompt {track.prompts}", torch.ones(1), in_cosine=False),)


def _actions(model: Any, frames: int, kwargs: Kwargs) -> tuple[Condition, ...]:
    """Mouse [B, N, 2] and keys [B, N, K] of all pixel frames so far, as much of them as reaches this chunk.

    Every latent frame looks back over `windows_size` latent frames of them; before the first there is the first.
    """
    given = {"mouse": (kwargs.get("mouse_cond"), CAMERA_STEP), "keyboard": (kwargs.get("keyboard_cond"), 1.0)}
    if all(value is None for value, _ in given.values()):
        return ()
    modules = (getattr(block, "action_model", None) for block in model.blocks)
    module = next((m for m in modules if m is not None), None)
    if module is None:
        raise RollcacheError("mouse_cond= or keyboard_cond= was given, but no block has an action_model.")
    rows = module.vae_time_compression_ratio * (frames - 1 + module.windows_size) + 1
    conditions = []
    for name, (value, scale) in given.items():
        if value is not None:
            missing = max(0, rows - value.shape[1])
            recent = torch.cat([value[:, :1].expand(-1, missing, -1), value[:, -rows:]], dim=1)
            conditions.append(Condition(name, recent, torch.tensor(scale)))
    return tuple(conditions)


def latent(model: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """The noisy latent of every token [B, L, Z], Z = C * patch."""
    x = _argument(args, kwargs, 0, "x")
    x = x if isinstance(x, Tensor) else torch.stack(tuple(x))
    f, h, w = model.patch_size
    patches = x.unfold(2, f, f).unfold(3, h, h).unfold(4, w, w)  # [B, C, F, H, W, f, h, w]
    return patches.permute(0, 2, 3, 4, 1, 5, 6, 7).flatten(4).flatten(1, 3)


def modulated(block: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """What block 0 attends with [B, L, C]: (1 + scale) * norm(x) + shift, both per latent frame."""
    x, e = _argument(args, kwargs, 0, "x"), embedding(block, args, kwargs)
    shift, scale = (block.modulation.unsqueeze(1) + e)[:, :, :2].unbind(2)  # [B, F, C]
    frames = block.norm1(x).unflatten(1, (e.shape[1], -1))
    out: Tensor = (frames * (1 + scale.unsqueeze(2)) + shift.unsqueeze(2)).flatten(1, 2)
    return out


def embedding(block: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """What the timestep makes of shifts, scales and gates, per latent frame [B, F, 6, C]."""
    e: Tensor = _argument(args, kwargs, 1, "e")
    return e


def self_forcing(
    *,
    context_noise: float = 0,
    fresh_noise: bool = True,
    first_pass_exact: bool | None = None,
    recomputes: bool | None = None,
) -> Adapter:
    """The adapter of a loop.

    Args:
        context_noise: timestep at which the loop writes the K/V of a finished chunk, `context_noise` in its
            configuration. Passes at 0 are always taken for clean as well.
        fresh_noise: chunks start from noise of their own, as in all published loops. Say False only for a loop that
            gives every chunk the same noise, at its start and between its steps.
        first_pass_exact: see `Kind`; None reads it off the model, as it does for the next.
        recomputes: see `Kind`.
    """
    check_range("context_noise", context_noise, 0, TIMESTEPS)

    def blocks(model: Any) -> Sequence[nn.Module]:
        kind(model)
        return list(model.blocks)

    def exact(model: Any, args: Args, kwargs: Kwargs) -> bool:
        return kind(model).first_pass_exact if first_pass_exact is None else first_pass_exact

    return Adapter(
        blocks=blocks,
        locate=Locator(context_noise, fresh_noise, recomputes),
        io=BlockIO(hidden=(0, "x"), returns="hidden, aux", aux="omit"),
        kv_writes="every_forward",
        first_pass_exact=exact,
        latent=latent,
        modulated=modulated,
        embedding=embedding,
    )


ADAPTER = self_forcing()
