"""Paired timing: two variants take turns in one process, so that a drifting machine hits both alike.

A speedup is the ratio of two medians with a bootstrap interval over pairs. Warm-up rounds are run and thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Seconds = float


class Stopwatch:
    """Laps in seconds. On CUDA it records events and waits for the device only when the laps are read.

    Args:
        device: Where the timed work runs: "cpu" or "cuda[:i]".

    Example:
        >>> watch = Stopwatch()
        >>> with watch.lap():
        ...     _ = sum(range(1000))
        >>> len(watch.laps()), watch.total() > 0
        (1, True)
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self._device = torch.device(device)
        if self._device.type not in ("cpu", "cuda"):
            raise ValueError(f"can time work on cpu or cuda, not on {self._device}")
        self._laps: list[Seconds] = []
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def lap(self) -> Iterator[None]:
        """Time the body; a lap whose body raises is not kept."""
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                yield
                end.record()
            self._events.append((start, end))
        else:
            began = time.perf_counter()
            yield
            self._laps.append(time.perf_counter() - began)

    def laps(self) -> list[Seconds]:
        """All laps so far, oldest first."""
        for start, end in self._events:
            end.synchronize()
            self._laps.append(start.elapsed_time(end) / 1000)
        self._events.clear()
        return list(self._laps)

    def total(self) -> Seconds:
        """Sum of all laps."""
        return sum(self.laps())


@dataclass(frozen=True)
class Spread:
    """Median and spread of repeated measurements.

    Attributes:
        median: Median.
        q1: First quartile.
        q3: Third quartile.
        smallest: Smallest value.
        count: Number of values.
    """

    median: float
    q1: float
    q3: float
    smallest: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one finite value."""
        if not values:
            raise ValueError("no measurements to summarise")
        x = torch.tensor(values, dtype=torch.float64)
        if not torch.isfinite(x).all():
            raise ValueError("measurements must be finite")
        q1, median, q3 = torch.quantile(x, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
        return cls(median, q1, q3, float(x.min()), len(values))

    @property
    def iqr(self) -> float:
        """Interquartile range."""
        return self.q3 - self.q1


@dataclass(frozen=True)
class Paired:
    """Full compute and a cached variant, timed in turns.

    Attributes:
        full: Seconds of full compute.
        cached: Seconds of the variant.
        speedup: Ratio of the medians.
        low: Lower end of the 95 % bootstrap interval of `speedup`, over pairs.
        high: Upper end.
        samples: The pairs, (full, cached) in seconds.
    """

    full: Spread
    cached: Spread
    speedup: float
    low: float
    high: float
    samples: tuple[tuple[Seconds, Seconds], ...]

    @classmethod
    def of(
        cls, full: Sequence[Seconds], cached: Sequence[Seconds], *, group: int = 1, draws: int = 2000, seed: int = 0
    ) -> Paired:
        """Summarise paired samples.

        Args:
            full: Seconds of full compute, one a round.
            cached: Seconds of the variant in the same rounds.
            group: Sum this many consecutive rounds first; rounds left over are dropped. When a round is one chunk and
                the chunks of a KV cycle cost different amounts by design, a median over chunks would be that of the
                cheap ones: give the chunks of a cycle here.
            draws: Bootstrap draws.
            seed: Seed of the bootstrap.

        Raises:
            ValueError: different or too few samples, or times that are not positive.
        """
        if len(full) != len(cached):
            raise ValueError(f"pairs needed: {len(full)} times of full compute, {len(cached)} of the variant")
        if group < 1 or len(full) < group:
            raise ValueError(f"need at least one group of {group} rounds, got {len(full)} rounds")
        x = torch.tensor([list(full), list(cached)], dtype=torch.float64)
        if not (torch.isfinite(x).all() and (x > 0).all()):
            raise ValueError("times must be positive and finite")
        count = len(full) // group
        x = x[:, : count * group].reshape(2, count, group).sum(2)  # [2, count]
        picks = torch.randint(count, (draws, count), generator=torch.Generator().manual_seed(seed))
        medians = torch.quantile(x[:, picks], 0.5, dim=2)  # [2, draws]
        low, high = torch.quantile(medians[0] / medians[1], torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        slow, fast = Spread.of(x[0].tolist()), Spread.of(x[1].tolist())
        return cls(slow, fast, slow.median / fast.median, low, high, tuple(zip(*x.tolist(), strict=True)))

    def __str__(self) -> str:
        return f"{self.speedup:.2f}x [{self.low:.2f}, {self.high:.2f}]"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a result file."""
        return {
            "speedup": self.speedup,
            "speedup_95": [self.low, self.high],
            "full_s": {"median": self.full.median, "q1": self.full.q1, "q3": self.full.q3},
            "cached_s": {"median": self.cached.median, "q1": self.cached.q1, "q3": self.cached.q3},
            "pairs": self.full.count,
        }


def paired(
    full: Callable[[], object],
    cached: Callable[[], object],
    *,
    rounds: int = 5,
    warmup: int = 1,
    group: int = 1,
    device: str | torch.device = "cpu",
    self_timed: bool = False,
) -> Paired:
    """Time two callables in turns; who goes first changes every round.

    Args:
        full: One run, or one chunk, of full compute.
        cached: The same of the variant.
        rounds: Pairs to keep.
        warmup: Pairs to run first and throw away.
        group: See `Paired.of`.
        device: Where the work runs.
        self_timed: The callables return their own seconds, for example those spent in the transformer alone.

    Raises:
        ValueError: `rounds` or `warmup` out of range.
        TypeError: `self_timed`, but a callable returned no number.
    """
    if rounds < 1 or warmup < 0:
        raise ValueError(f"rounds must be 1 or more and warmup 0 or more, got {rounds} and {warmup}")
    times: dict[str, list[Seconds]] = {"full": [], "cached": []}
    variants = [("full", full), ("cached", cached)]
    for number in range(warmup + rounds):
        for name, run in variants if number % 2 == 0 else reversed(variants):
            watch = Stopwatch(device)
            with watch.lap():
                said = run()
            if self_timed and (isinstance(said, bool) or not isinstance(said, int | float)):
                raise TypeError(f"{name} must return its seconds when self_timed, got {type(said).__name__}")
            seconds = float(said) if self_timed and isinstance(said, int | float) else watch.total()
            if number >= warmup:
                times[name].append(seconds)
    return Paired.of(times["full"], times["cached"], group=group)
