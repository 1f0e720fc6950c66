"""Predicting a residual from those of earlier steps: weights of the polynomial through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rollcache.passes import RollcacheError
from rollcache.policies.base import StackEvidence

Form = Literal["newton", "published"]
_SAME = 1e-6  # positions that are closer count as one


def over_levels(method: str, evidence: StackEvidence) -> tuple[float, ...]:
    """Weights of the stored residuals, the newest first, at the noise level of the pass under way.

    Args:
        method: who asks, for the message.
        evidence: of the pass; with one stored residual there is nothing to extrapolate, and its weight is 1.

    Raises:
        RollcacheError: a pass did not tell its noise level.
    """
    if len(evidence.stored) == 1:
        return (1.0,)
    time, known = evidence.where.time, [s.time for s in evidence.stored]
    if time is None or None in known:
        raise RollcacheError(
            f"{method} needs the noise level of every pass: step(time=...), or an adapter that tells Pass.time."
        )
    return extrapolation(time, distinct([x for x in known if x is not None]))


def distinct(positions: Sequence[float]) -> Sequence[float]:
    """The leading positions of which no two are the same."""
    for count, x in enumerate(positions):
        if any(abs(x - y) < _SAME for y in positions[:count]):
            return positions[:count]
    return positions


def extrapolation(at: float, known: Sequence[float], form: Form = "newton") -> tuple[float, ...]:
    """Weights of values at the positions `known` (the newest first, one to three) that predict the one at `at`.

    They add up to 1.
    """
    if form == "published" and len(known) == 3:
        ahead, gap, gap_before = at - known[0], known[0] - known[1], known[1] - known[2]
        first, second = ahead / gap, ahead**2 / 2 / gap
        # D_1 = (F_1 - F_2) / gap, D_2 = (D_1 - (F_2 - F_3) / gap_before) / gap
        return (
            1 + first + second / gap,
            -first - second / gap - second / gap_before,
            second / gap_before,
        )
    weights = []
    for i, own in enumerate(known):
        weight = 1.0
        for other in (x for j, x in enumerate(known) if j != i):
            weight *= (at - other) / (own - other)
        weights.append(weight)
    return tuple(weights)
