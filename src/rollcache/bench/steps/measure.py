"""One method on one clip: what it decided, what it cost, how close it stayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollcache.bench.fidelity import psnr_trace
from rollcache.bench.lanes import Lane, Plan, open_lane
from rollcache.bench.steps.clips import Reference
from rollcache.bench.steps.pricing import Price
from rollcache.bench.steps.tally import Tally
from rollcache.bench.steps.timing import clock
from rollcache.measure import compare, flip, lpips, motion

if TYPE_CHECKING:
    from rollcache.bench.takes import Take
    from rollcache.street.protocol import Protocol
    from rollcache.street.world import World

FRAMES = 8  # on which perceptual metrics are computed


@dataclass(frozen=True)
class Run:
    """One variant after its run.

    Attributes:
        tally: its decisions.
        seconds: of generating, see `timing.clock`.
        gate_share: part of the time in the transformer that went into deciding, storing and adding.
        cache_bytes: most that the cache held after a chunk; what a method keeps for its own signal is not in it.
        latents: [F, P, Z].
    """

    tally: Tally
    seconds: float
    gate_share: float
    cache_bytes: int
    latents: Tensor


def generate(world: World, take: Take, protocol: Protocol, plan: Plan, windows: int | None = None) -> Run:
    """Run a variant over a take, or its first windows."""
    lane = open_lane(world, take, protocol, plan, reload=lambda _: world)
    now = clock(world.device)
    held, spent = 0, 0.0
    for action in take.actions[:windows]:
        began = now()
        lane.step(action)
        spent += now() - began
        if lane.handle is not None:
            held = max(held, lane.handle.stats().bytes_actual)
    return Run(Tally.of(lane), spent, _gate(lane) / sum(lane.seconds), held, torch.cat(lane.latents))


def _gate(lane: Lane) -> float:
    """Seconds of the day that the cache itself took."""
    if lane.handle is None:
        return 0.0
    stats = lane.handle.stats()
    return stats.gate_seconds + stats.keep_seconds + stats.replay_seconds


def speed(run: Run, price: Price, steps: int, full_seconds: float) -> dict[str, Any]:
    """What a run cost.

    Args:
        run: it.
        price: of this machine.
        steps: denoising steps of full compute.
        full_seconds: of a window at full compute in this process.
    """
    chunks = run.tally.chunks
    flops, whole = price.flops.total(run.tally), price.flops.full(steps, chunks)
    return {
        "predicted": price.speedup(run.tally, steps),
        "measured": full_seconds * chunks / run.seconds,
        "ceiling": price.ceiling(run.tally, steps),
        "seconds_per_window": run.seconds / chunks,
        "full_seconds_per_window": full_seconds,
        "gate_share": run.gate_share,
        "tflops_per_window": flops / chunks / 1e12,
        "flops_share": flops / whole,
        "cache_bytes": run.cache_bytes,
    }


def closeness(frames: Mapping[str, Tensor], reference: Reference) -> dict[str, Any]:
    """How close decoded frames are to full compute, and to the renderer."""
    close = compare(frames, reference.frames)
    truth = psnr_trace(frames, reference.take.truth)
    return {
        "psnr": close.psnr,
        "psnr_pooled": close.overall.psnr_global,
        "ssim": close.ssim,
        "flip": flip(frames, reference.frames, at_most=FRAMES, stitched=False).value,
        "lpips": lpips(frames, reference.frames, at_most=FRAMES, stitched=False).value,
        "motion": motion(frames, reference.frames).ratio,
        "psnr_truth": sum(truth) / len(truth),
        "psnr_trace": list(close.overall.psnr_trace),
    }


def evaluate(
    world: World, reference: Reference, protocol: Protocol, plan: Plan, price: Price, full_seconds: float
) -> dict[str, Any]:
    """Everything of one variant on one clip, as plain values."""
    run = generate(world, reference.take, protocol, plan)
    return {
        "decisions": run.tally.to_dict(),
        "speed": speed(run, price, protocol.steps, full_seconds),
        "fidelity": closeness(world.decode(run.latents), reference),
    }


def predicted(
    world: World, takes: Mapping[str, Take], protocol: Protocol, windows: int, price: Price
) -> Callable[[Plan], float]:
    """The predicted speedup of a variant over some takes: total price of full compute / total price of the runs."""

    def of(plan: Plan) -> float:
        full = spent = 0.0
        for take in takes.values():
            tally = generate(world, take, protocol, plan, windows).tally
            full += price.seconds.full(protocol.steps, tally.chunks)
            spent += price.seconds.total(tally)
        return full / spent

    return of
