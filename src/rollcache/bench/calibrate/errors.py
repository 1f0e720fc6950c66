"""Local errors: how wrong the stack is when it replays, or predicts, on the true trajectory.

    replay   e[a][s] = |h_in(s) + r(a) - h(s)| / |h(s)| = |r(a) - r(s)| / |h(s)|
    predict  the same with r(a) + (r(a) - r(a')) (sigma_s - sigma_a) / (sigma_a - sigma_a') for r(a)

h is the hidden state that leaves the stack, r(s) = h(s) - h_in(s) its residual. The older anchor of a prediction lies
as far behind the newer one as that is behind the step, a' = max(0, 2a - s); at a = 0 there is none, r(0) is replayed.
Works on what `Recorder` hands out of any model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rollcache.bench.calibrate.trajectory import Seen

Matrix = list[list[float]]


def replay_errors(seen: Sequence[Seen]) -> Matrix:
    """e[a][s] of all pairs [N][N], 0 where s <= a."""
    residuals = [p.residual for p in seen]
    sizes = [float(p.output.float().norm()) for p in seen]
    return _pairs(len(seen), lambda a, s: _relative(residuals[a] - residuals[s], sizes[s]))


def predict_errors(seen: Sequence[Seen], sigmas: Sequence[float]) -> Matrix:
    """The same when the residual is extrapolated over sigma [N][N]."""
    residuals = [p.residual for p in seen]
    sizes = [float(p.output.float().norm()) for p in seen]

    def error(a: int, s: int) -> float:
        guess = residuals[a]
        older = max(0, 2 * a - s)
        if older < a:
            slope = (sigmas[s] - sigmas[a]) / (sigmas[a] - sigmas[older])
            guess = torch.lerp(residuals[older], guess, 1 + slope)
        return _relative(guess - residuals[s], sizes[s])

    return _pairs(len(seen), error)


def by_age(errors: Sequence[Sequence[float]], age: int) -> float:
    """Mean of e[s - age][s] over the steps s of at least twice that age, for which a prediction has two anchors."""
    found = [errors[s - age][s] for s in range(2 * age, len(errors))]
    return sum(found) / len(found) if found else 0.0


def mean_matrix(matrices: Sequence[Matrix]) -> Matrix:
    """Entry by entry."""
    return torch.tensor(matrices, dtype=torch.float64).mean(0).tolist()


def _relative(change: Tensor, size: float) -> float:
    return float(change.norm()) / size if size > 0 else 0.0


def _pairs(steps: int, error: Callable[[int, int], float]) -> Matrix:
    return [[error(a, s) if a < s else 0.0 for s in range(steps)] for a in range(steps)]
