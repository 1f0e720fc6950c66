"""How far did the conditions move? The action test: scaled, relative, or the paper's raw cosine."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, nan

import torch
from torch import Tensor

from rollcache.passes import ZERO_NORM, Condition, usable


@dataclass(frozen=True, slots=True)
class Moved:
    """How far the conditions of a pass are from those under which a residual was computed.

    Attributes:
        distance: largest change, in units of `Condition.scale`; the scaled action test.
        cosine: smallest raw cosine, the paper's action entry. Blind to length, and dominated by large units.
    """

    distance: float
    cosine: float


UNMOVED = Moved(0.0, 1.0)
STRANGERS = Moved(inf, 0.0)
NOT_FINITE = Moved(nan, nan)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The conditions of a pass, copied, so that a caller may reuse its tensors."""

    conditions: tuple[Condition, ...] = ()

    @classmethod
    def of(cls, conditions: tuple[Condition, ...]) -> Snapshot:
        """Copy the values."""
        with torch.inference_mode(False):
            return cls(tuple(Condition(c.name, c.value.detach().clone(), c.scale, c.in_cosine) for c in conditions))

    def moved(self, now: tuple[Condition, ...]) -> Moved:
        """How far `now` is from this snapshot. Other names or shapes are infinitely far."""
        then = self.conditions
        if [(c.name, c.value.shape) for c in then] != [(c.name, c.value.shape) for c in now]:
            return STRANGERS
        changes = [_moved(a, b.value) for a, b in zip(now, then, strict=True)]
        if not all(isfinite(m.cosine) for m in changes):
            return NOT_FINITE
        cosines = [m.cosine for m, c in zip(changes, now, strict=True) if c.in_cosine]
        return Moved(max((m.distance for m in changes), default=0.0), min(cosines, default=1.0))


def _moved(condition: Condition, then: Tensor) -> Moved:
    """The change of one condition, in float32. The cosine is not-a-number where anything is not finite."""
    now, then = condition.value.detach().float(), then.float()
    if now.device.type == "cpu" and torch.equal(now, then) and bool(torch.isfinite(now).all()):
        return UNMOVED
    change = now - then
    in_units = change if condition.scale is None else _in_units(change, condition.scale.to(now.device))
    numbers = torch.stack(((now * now).sum(), (then * then).sum(), (now * then).sum(), (change * change).sum()))
    square_now, square_then, dot, square_change, largest = torch.cat((numbers, in_units.abs().amax()[None])).tolist()
    if not isfinite(square_now + square_then + largest):
        return NOT_FINITE
    zeros = (square_now < ZERO_NORM**2) + (square_then < ZERO_NORM**2)
    cosine = float(zeros == 2) if zeros else dot / (square_now * square_then) ** 0.5
    if condition.scale is not None:
        return Moved(largest, cosine)
    if square_change < ZERO_NORM**2:
        return Moved(0.0, cosine)
    return Moved((square_change / square_then) ** 0.5 if square_then else inf, cosine)


def _in_units(change: Tensor, scale: Tensor) -> Tensor:
    """A change in units of its scale. Not-a-number where that is no scale: divided by infinity nothing would move."""
    return change / scale.float().where(usable(scale), nan)
