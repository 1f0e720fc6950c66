"""How many generation steps fit into a time budget, from measured pass times; slow machines get shorter drives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollcache.bench.lanes import Plan
    from rollcache.measure import PassTimes
    from rollcache.street.protocol import Protocol

OVERHEAD = 30.0  # seconds of decoding, metrics and figures per scenario on two cores


def chunk_seconds(times: PassTimes, protocol: Protocol) -> float:
    """Seconds of one generation step at full compute, its share of the commit pass included."""
    return protocol.steps * times.denoise + times.commit / protocol.kv_every


def weight(plan: Plan, protocol: Protocol) -> float:
    """Roughly what a variant costs, full compute being 1. Only used to plan time, never reported."""
    if plan.frozen:
        return 0.35
    if plan.policy is not None:
        return 0.65
    if plan.dtype is not None:
        return 2.5
    return (plan.steps or protocol.steps) / protocol.steps + (0.2 if plan.start_noise else 0.0)


def fitting(wanted: int, seconds: float, times: PassTimes, plans: Sequence[Plan], protocol: Protocol) -> int:
    """The largest number of chunks up to `wanted` that fits: whole KV cycles and one more, two cycles at least."""
    per_chunk = chunk_seconds(times, protocol) * sum(weight(plan, protocol) for plan in plans)
    possible = int((seconds - OVERHEAD) / per_chunk)
    if possible >= wanted:
        return wanted
    every = protocol.kv_every
    return min(wanted, max(2, (possible - 1) // every) * every + 1)
