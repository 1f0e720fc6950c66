"""One comparison: full compute, a cache, controls and numerical floors over one take, turned into numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollcache.bench.costs import PassClock
from rollcache.bench.decisions import Decisions, Window
from rollcache.bench.fidelity import Cut, Perceptual, brief, fidelity, psnr_trace
from rollcache.bench.lanes import FULL, Lane, OnChunk, Plan, clone, open_lane, race
from rollcache.bench.profile import Profiler
from rollcache.measure import PassTimes, Spread, motion
from rollcache.measure.provenance import plain

if TYPE_CHECKING:
    from rollcache.bench.takes import Take
    from rollcache.street.protocol import Protocol
    from rollcache.street.world import World

NEEDED = (
    "skip_rate",
    "speedup",
    "ceiling",
    "efficiency",
    "psnr",
    "psnr_stitched",
    "ssim",
    "flip",
    "lpips",
    "motion_ratio",
    "gate_share",
)
Stage = Callable[[str], None]


class MeasuringStopped(KeyboardInterrupt):
    """Ctrl-C after generation, before the fidelity of the cache under test was measured.

    Attributes:
        known: what needs no decoding, as in `Outcome.result`: times, skips, decisions, of the controls too.
        latents: what every lane generated, by key [F, P, Z].
    """

    def __init__(self, known: dict[str, Any], latents: dict[str, Tensor]) -> None:
        super().__init__()
        self.known, self.latents = known, latents


@dataclass(frozen=True)
class Outcome:
    """One finished (or interrupted) comparison.

    Attributes:
        result: plain values for the result file.
        full: decoded frames of full compute, group -> [T, V, H, W, 3] in [0, 1].
        cached: the same of the cache under test.
        truth: rendered frames.
        interrupted: Ctrl-C ended it early; `result` covers the chunks that all lanes finished, and its "unmeasured"
            names the floors, controls or profile that were left out.
    """

    result: dict[str, Any]
    full: Mapping[str, Tensor]
    cached: Mapping[str, Tensor]
    truth: Mapping[str, Tensor]
    interrupted: bool


def compare(
    world: World,
    take: Take,
    protocol: Protocol,
    cached: Plan,
    *,
    controls: Sequence[Plan] = (),
    floors: Sequence[Plan] = (),
    perceptual: Perceptual | None = None,
    profile: bool = True,
    seconds: float | None = None,
    reload: Callable[[str], World],
    on_chunk: OnChunk | None = None,
    on_stage: Stage | None = None,
) -> Outcome:
    """Run all lanes over the take and measure.

    Args:
        world: the bare world.
        take: scene, start, actions and truth.
        protocol: of every lane.
        cached: the cache under test.
        controls: further variants, measured like it.
        floors: full compute with a tiny difference; not timed.
        perceptual: which perceptual metrics; controls are scored on a third of the frames.
        profile: measure the similarity of generation steps on the first floor lane (or on an extra run without one).
        seconds: stop generating after about this time, at the end of a chunk that follows whole KV cycles (two at
            least), so that slow machines get a shorter drive.
        reload: makes the world in another precision.
        on_chunk: progress, after every chunk.
        on_stage: progress, names what is being done.

    Raises:
        KeyboardInterrupt: Ctrl-C before two chunks were finished.
        MeasuringStopped: Ctrl-C (again) before the fidelity of the cache was measured; later, it ends the measuring.
    """
    say = on_stage or (lambda _: None)
    perceptual = perceptual or Perceptual()
    began, every = time.monotonic(), protocol.kv_every
    full_home = clone(world)
    lanes = [open_lane(full_home, take, protocol, FULL, reload=reload)]
    lanes += [open_lane(world, take, protocol, plan, reload=reload) for plan in (cached, *controls)]
    watched = clone(world) if profile and any(plan.dtype is None for plan in floors) else None
    floor_lanes = [
        open_lane(watched if watched is not None and plan.dtype is None else world, take, protocol, plan, reload=reload)
        for plan in floors
    ]
    profiler = Profiler(watched.model) if watched is not None else None

    def enough(done: int) -> bool:
        late = seconds is not None and time.monotonic() - began > seconds
        return late and done > 2 * every and done % every == 1 % every

    say("generating")
    with PassClock(full_home) as clock, profiler or nullcontext():
        finished = race([*lanes, *floor_lanes], take.actions, on_chunk, enough)
    chunks = len(lanes[0].seconds)
    if finished and chunks < take.chunks:
        say(f"stopped after {chunks} of {take.chunks} chunks to stay within the time budget")
    if not finished and chunks < 2:
        raise KeyboardInterrupt
    window = Window.of(chunks, protocol)
    times = clock.times(window, lanes[0].seconds)
    timing = {lane.key: lane_result(lane, lanes[0], times, window) for lane in lanes[1:]}
    known: dict[str, Any] = {
        "interrupted": not finished,
        "take": take.describe(),
        "protocol": {**plain(protocol), "text": protocol.describe()},
        "chunks": chunks,
        "counted": window.describe(),
        "policy": {"key": cached.key, "label": cached.label, "settings": _settings(cached)},
        "timing": timing[cached.key],
        "pass_seconds": {"blocks": list(times.blocks), "outside": times.outside, "commit": times.commit},
        "decisions": _decisions(lanes[1], window, protocol),
    }
    cut = Cut.of(take, protocol, window.first, chunks)
    try:
        if not finished:
            say(f"interrupted, measuring the {chunks} finished chunks (Ctrl-C again keeps times and latents only)")
        say("decoding")
        full, ours = (_decoded(world, lane) for lane in lanes[:2])
        truth = {group: x[: chunks * cut.per_step] for group, x in take.truth.items()}
        say("measuring")
        measured = _fidelity(full, ours, truth, cut, perceptual)
        first = {key: {**measured["fidelity"], **timing[cached.key]}[key] for key in NEEDED}
        result = {**first, **known, **measured}
    except KeyboardInterrupt:
        beside = [{"key": lane.key, "label": lane.plan.label, **timing[lane.key]} for lane in lanes[2:]]
        latents = {lane.key: torch.cat(lane.latents) for lane in (*lanes, *floor_lanes)}
        raise MeasuringStopped({**known, "interrupted": True, "controls": beside}, latents) from None

    def floor(lane: Lane) -> None:
        result["floor"][lane.key] = {"label": lane.plan.label, **brief(_decoded(world, lane), full, cut)}

    def control(lane: Lane) -> None:
        frames = _decoded(world, lane)
        result["controls"].append(_control(lane, timing[lane.key], frames, full, cut, perceptual))

    def similarity() -> None:
        say("profiling")
        result["profile"] = (profiler or _profile_run(world, take, protocol)).result(protocol).to_dict()

    parts: list[tuple[str, Callable[[], None]]] = [(lane.plan.label, partial(floor, lane)) for lane in floor_lanes]
    parts += [(lane.plan.label, partial(control, lane)) for lane in lanes[2:]]
    if profile and (finished or profiler is not None):
        parts.append(("similarity profile", similarity))
    _complete(result, parts)
    return Outcome(result, full, ours, truth, result["interrupted"])


def _decoded(world: World, lane: Lane) -> dict[str, Tensor]:
    return world.decode(torch.cat(lane.latents))


def _fidelity(
    full: Mapping[str, Tensor], ours: Mapping[str, Tensor], truth: Mapping[str, Tensor], cut: Cut, metrics: Perceptual
) -> dict[str, Any]:
    """What a result cannot be without, and room for what stands beside it."""
    return {
        "fidelity": fidelity(ours, full, cut, metrics),
        "truth": _truth(full, ours, truth, cut),
        "floor": {},
        "controls": [],
        "turning": [bool(t) for t in cut.turning],
        "profile": None,
    }


def _complete(result: dict[str, Any], parts: Sequence[tuple[str, Callable[[], None]]]) -> None:
    """Measure what stands beside the cache, part by part; Ctrl-C leaves the rest out and `result` says which."""
    for i, (_, measure) in enumerate(parts):
        try:
            measure()
        except KeyboardInterrupt:
            result.update(interrupted=True, unmeasured=[name for name, _ in parts[i:]])
            return


def lane_result(lane: Lane, full: Lane, times: PassTimes, window: Window) -> dict[str, Any]:
    """Speed, skip and ceiling of a lane beside full compute, over the chunks that count.

    Speedup, ceiling and efficiency are None when these are no whole KV cycle: without its exact first chunk and its
    commit pass a cycle looks far cheaper than it is.
    """
    decisions = Decisions.of(lane)
    steps = full.session.protocol.steps
    reached = decisions.ceiling(times, window)
    whole = len(window.chunks) * steps * times.denoise + window.commits * times.commit
    slow, fast = (sum(x.seconds[n] for n in window.chunks) for x in (full, lane))
    cycles = _cycles(window, full.session.protocol.kv_every)
    ceiling = whole / reached.left if reached.left > 0 and window.whole else None
    speedup = slow / fast if window.whole else None
    row: dict[str, Any] = {
        "skip_rate": reached.skip_rate if decisions.steps == steps else None,
        "speedup": speedup,
        "speedup_per_cycle": _per_cycle(full, lane, cycles) if cycles else None,
        "ceiling": ceiling,
        "efficiency": speedup / ceiling if speedup and ceiling else None,
        "full_seconds_per_chunk": slow / len(window.chunks),
        "seconds_per_chunk": fast / len(window.chunks),
        "chunk_seconds": [round(s, 5) for s in lane.seconds],
        "full_chunk_seconds": [round(s, 5) for s in full.seconds],
        "passes_per_chunk": sum(lane.passes[n] for n in window.chunks) / len(window.chunks),
        "gate_share": None,
    }
    if lane.handle is not None:
        stats, spent = lane.handle.stats(), sum(lane.seconds)
        row["gate_share"] = stats.gate_seconds / spent
        row["keep_share"] = stats.keep_seconds / spent
        row["replay_share"] = stats.replay_seconds / spent
        row["bytes"] = stats.bytes_actual
    return row


def _cycles(window: Window, every: int) -> list[range]:
    """The KV cycles that count; single chunks when each commits, none when there is no whole cycle."""
    return [range(n, n + every) for n in range(window.first, window.stop, every)] if window.whole else []


def _per_cycle(full: Lane, lane: Lane, cycles: Sequence[range]) -> dict[str, float | int]:
    """Spread of the speedup over KV cycles."""
    spread = Spread.of([sum(full.seconds[n] for n in c) / sum(lane.seconds[n] for n in c) for c in cycles])
    return {"median": spread.median, "q1": spread.q1, "q3": spread.q3, "cycles": len(cycles)}


def _control(
    lane: Lane,
    timing: Mapping[str, Any],
    frames: Mapping[str, Tensor],
    full: Mapping[str, Tensor],
    cut: Cut,
    perceptual: Perceptual,
) -> dict[str, Any]:
    """A control's row: the same numbers, on fewer frames where they are costly."""
    few = Perceptual(
        frames=max(1, perceptual.frames // 3) if perceptual.frames else 0, lpips_weights=perceptual.lpips_weights
    )
    close = fidelity(frames, full, cut, few)
    drop = ("chunk_seconds", "full_chunk_seconds")
    return {
        "key": lane.key,
        "label": lane.plan.label,
        **{k: v for k, v in timing.items() if k not in drop},
        **{k: close[k] for k in ("psnr", "pooled", "psnr_stitched", "ssim", "flip", "lpips", "motion_ratio")},
        **{k: close[k] for k in ("turning", "straight", "by_cycle", "by_phase", "trace")},
    }


def _decisions(lane: Lane, window: Window, protocol: Protocol) -> dict[str, Any]:
    decisions = Decisions.of(lane)
    return {
        **decisions.to_dict(),
        "skip_by_step_block": decisions.by_step_block(window),
        "skip_by_phase": decisions.by_phase(window, protocol.kv_every),
    }


def _truth(
    full: Mapping[str, Tensor], ours: Mapping[str, Tensor], truth: Mapping[str, Tensor], cut: Cut
) -> dict[str, Any]:
    """How far both runs are from the renderer: the world model's own error, which dwarfs that of a good cache."""
    traces = {name: psnr_trace(x, truth) for name, x in (("full", full), ("cached", ours))}
    start = cut.first * cut.per_step
    by_cycle = {
        name: [
            sum(part) / len(part)
            for i in range(0, len(trace), cut.per_step * cut.cycle)
            if (part := trace[i : i + cut.per_step * cut.cycle])
        ]
        for name, trace in traces.items()
    }
    return {
        "psnr_full": sum(traces["full"][start:]) / len(traces["full"][start:]),
        "psnr_cached": sum(traces["cached"][start:]) / len(traces["cached"][start:]),
        "psnr_full_by_cycle": by_cycle["full"],
        "psnr_cached_by_cycle": by_cycle["cached"],
        "motion_ratio_full": motion(cut.frames(full), cut.frames(truth)).ratio,
        "motion_ratio_cached": motion(cut.frames(ours), cut.frames(truth)).ratio,
    }


def _profile_run(world: World, take: Take, protocol: Protocol) -> Profiler:
    """Profile an extra full-compute run of at most three KV cycles."""
    watched = clone(world)
    lane = open_lane(watched, take, protocol, FULL, reload=lambda _: watched)
    profiler = Profiler(watched.model)
    with profiler:
        if not race([lane], take.actions[: max(2, 3 * protocol.kv_every)]):
            raise KeyboardInterrupt
    return profiler


def _settings(plan: Plan) -> Any:
    return None if plan.policy is None else {"type": type(plan.policy).__name__, **plain(plan.policy)}
