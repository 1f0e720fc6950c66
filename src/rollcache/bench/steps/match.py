"""Setting a method's knob so that it is as fast as asked for: a search on a speed that grows with the knob.

Speeds come in steps, since whole passes are computed or not: where no setting gives the target, the nearest one is
taken, and the result says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

TOLERANCE = 0.02  # of the target
MOST = 10  # evaluations for one target
NARROWEST = 0.01  # of a knob's value: closer settings are not told apart

Evaluate = Callable[[float], float]


@dataclass(frozen=True)
class Knob:
    """What makes a method faster; a larger value is faster.

    Attributes:
        name: of the setting.
        low: smallest value, where (next to) nothing is reused.
        high: largest value.
        values: the only values there are, rising; empty if all between `low` and `high` are.
    """

    name: str
    low: float = 0.0
    high: float = 0.0
    values: tuple[int, ...] = ()

    @classmethod
    def whole(cls, name: str, values: Sequence[int]) -> Knob:
        """Of whole numbers."""
        rising = tuple(sorted(values))
        return cls(name, rising[0], rising[-1], rising)

    def __post_init__(self) -> None:
        if not self.values and not 0 < self.low < self.high < math.inf:
            raise ValueError(
                f"the range of {self.name} is {self.low:g} to {self.high:g}; it must rise and be positive."
            )


@dataclass(frozen=True)
class Match:
    """A knob for a target.

    Attributes:
        target: speedup that was asked for.
        knob: value that comes nearest.
        speedup: predicted with it.
        note: why it is not the target, empty when it is.
    """

    target: float
    knob: float
    speedup: float
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a result file."""
        return asdict(self)


class Search:
    """Finds knobs for targets; what was evaluated for one target serves the next.

    Args:
        knob: what is turned.
        evaluate: the speedup at a value.
        known: what was evaluated before, value -> speedup.
    """

    def __init__(self, knob: Knob, evaluate: Evaluate, known: dict[float, float] | None = None) -> None:
        self.knob = knob
        self.found: dict[float, float] = dict(known or {})
        self._evaluate = evaluate

    def match(self, target: float, tolerance: float = TOLERANCE) -> Match:
        """The knob for a speedup: bisection, every other time at the point where a line meets the target."""
        for count in range(MOST):
            value = self._next(target, count)
            best = self._best(target)
            if value is None or (best is not None and abs(self.found[best] / target - 1) <= self._enough(tolerance)):
                break
            self.found[value] = self._evaluate(value)
        best = self._best(target)
        assert best is not None
        speedup = self.found[best]
        return Match(target, best, speedup, self._note(target, best, speedup, tolerance))

    def _enough(self, tolerance: float) -> float:
        """Whole numbers are searched to the end: each is its own best."""
        return 0.0 if self.knob.values else tolerance

    def _best(self, target: float) -> float | None:
        """The nearest; of equally near ones the slower, which errs on the side of quality."""
        return min(self.found, key=lambda v: (abs(self.found[v] / target - 1), v), default=None)

    def _next(self, target: float, count: int) -> float | None:
        """The value to try now, or None when there is none left between those that were."""
        above = min((v for v, s in self.found.items() if s >= target), default=None)
        slower = [v for v, s in self.found.items() if s < target and (above is None or v < above)]
        below = max(slower, default=None)
        if self.knob.values:
            return self._next_whole(below, above)
        if above is None:
            return None if below == self.knob.high else self.knob.high
        low = self.knob.low if below is None else below
        if above / low < 1 + NARROWEST:
            return None
        if count % 2 or below is None:
            return _short(math.sqrt(low * above))
        slow, fast = self.found[low], self.found[above]
        part = min(max((target - slow) / (fast - slow), 0.1), 0.9)
        return _short(low * (above / low) ** part)

    def _next_whole(self, below: float | None, above: float | None) -> int | None:
        values = self.knob.values
        first = 0 if below is None else values.index(int(below)) + 1
        stop = len(values) if above is None else values.index(int(above))
        return values[(first + stop) // 2] if first < stop else None

    def _note(self, target: float, value: float, speedup: float, tolerance: float) -> str:
        if abs(speedup / target - 1) <= tolerance:
            return ""
        if speedup < target and all(s < target for s in self.found.values()):
            return f"cannot be reached: at most {speedup:.2f}x"
        if speedup > target and all(s > target for s in self.found.values()):
            return f"cannot be reached: at least {speedup:.2f}x"
        name = "nearest whole number" if self.knob.values else "nearest, speeds come in steps"
        return f"{name}: {speedup:.2f}x"


def _short(value: float) -> float:
    """Few enough digits that a file holds all of them."""
    return float(f"{value:.5g}")
