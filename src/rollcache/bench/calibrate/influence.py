"""Influence: what one replayed step does to the end result, when all others are exact.

A run that replays only step s shares its steps before s with the recorded trajectory, so it goes on from the recorded
latent: N - s passes in place of N. The residual that is replayed is some steps old, so that the damage stands clear of
rounding. Damage grows with the square of a small error; influence is therefore given per squared error, and `gain`,
which is a ratio of two lengths, per error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log

from torch import Tensor

from rollcache.bench.calibrate.splice import Splice
from rollcache.bench.calibrate.trajectory import Trajectory

AGE = 3
"""Steps that lie between the replayed residual and the step; fewer at the start."""
FLOOR = 1e-12

Velocity = Callable[[Tensor, int], Tensor]
Follow = Callable[[Tensor, int], Tensor]
Judge = Callable[[Tensor], float]


@dataclass(frozen=True)
class Touch:
    """One step was replayed, all others were exact.

    Attributes:
        step: which.
        error: relative L2 error of the hidden state there, e.
        local: length of the latent's error right after the step, over the length of the clean latent.
        latent: that of the clean latent's error, likewise.
        damage: 1 - SSIM of what was made, or whatever the judge says.
    """

    step: int
    error: float
    local: float
    latent: float
    damage: float

    @property
    def gain(self) -> float:
        """Latent error at the end per latent error after the step."""
        return self.latent / max(self.local, FLOOR)


def touch(
    trajectory: Trajectory, step: int, splice: Splice, velocity: Velocity, follow: Follow, judge: Judge, age: int = AGE
) -> Touch:
    """Replay one step.

    Args:
        trajectory: at full compute.
        step: from 1.
        splice: around the blocks of the model.
        velocity: the model at (latent, step).
        follow: (latent, step) -> clean latent, exact steps from there.
        judge: damage of a clean latent.
        age: see `AGE`.
    """
    seen, sigmas = trajectory.seen, trajectory.sigmas
    old = seen[max(0, step - age)].residual
    with splice.adding(old):
        guess = velocity(trajectory.latents[step], step)
    x = trajectory.latents[step] - (sigmas[step] - sigmas[step + 1]) * guess
    clean, size = trajectory.latents[-1], float(trajectory.latents[-1].norm())
    local = float((x - trajectory.latents[step + 1]).norm())
    end = follow(x, step + 1)
    error = float((old - seen[step].residual).norm()) / float(seen[step].output.float().norm())
    return Touch(step, error, local / size, float((end - clean).norm()) / size, judge(end))


def spread(sigmas: Sequence[float], count: int) -> tuple[int, ...]:
    """`count` steps of 1 .. N - 1 that are spread evenly in sigma, first and last included."""
    last = len(sigmas) - 1
    wanted = [sigmas[1] + (sigmas[last] - sigmas[1]) * i / max(count - 1, 1) for i in range(count)]
    return tuple(sorted({min(range(1, last + 1), key=lambda s, w=w: abs(sigmas[s] - w)) for w in wanted}))  # type: ignore[misc]


def interpolated(at: Sequence[int], values: Sequence[float], steps: int) -> tuple[float, ...]:
    """Positive `values` at rising steps `at` for all steps 0 .. steps - 1: a line in the logarithm, flat outside."""
    logs = [log(max(v, FLOOR)) for v in values]
    out = []
    for s in range(steps):
        right = next((i for i, a in enumerate(at) if a >= s), len(at) - 1)
        left = max(0, right - 1) if at[right] > s else right
        share = 0.0 if left == right else (s - at[left]) / (at[right] - at[left])
        out.append(exp(logs[left] + min(max(share, 0.0), 1.0) * (logs[right] - logs[left])))
    return tuple(out)
