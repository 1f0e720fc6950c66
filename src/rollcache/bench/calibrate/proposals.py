"""Which steps to compute, for every budget, under every objective.

`replay` and `weighted` are optima of a cost that adds local errors step by step, as FSC's surrogate does. `drift`
searches for the least predicted error of the clean latent (`Drift.cost`), moving one anchor at a time from the best of
the others, and from the budget before with one more: the sum over gaps is one of vectors, which dynamic programming
cannot take apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from rollcache.bench.calibrate.drift import Drift
from rollcache.bench.calibrate.errors import Matrix
from rollcache.policies.schedules import best_schedule, dense_to_sparse, even_in_sigma, uniform

Anchors = tuple[int, ...]
Cost = Callable[[Anchors], float]
FEWEST = 4
WARMUP = 0.12  # FSC's W / N


def weighted(errors: Matrix, weights: Sequence[float]) -> Matrix:
    """e[a][s] times the weight of s."""
    return [[e * w for e, w in zip(row, weights, strict=True)] for row in errors]


def surrogate(errors: Matrix, anchors: Sequence[int]) -> float:
    """J, the sum of e[a][s] over the replayed steps, a being the last anchor before s."""
    total, last, exact = 0.0, 0, set(anchors)
    for s in range(len(errors)):
        if s in exact:
            last = s
        else:
            total += errors[last][s]
    return total


def moved(anchors: Anchors, cost: Cost, steps: int) -> Anchors:
    """Move one anchor after another to where the cost falls most, until no move helps; step 0 stays."""
    best = cost(anchors)
    while True:
        tried = {
            tuple(sorted((*anchors[:i], s, *anchors[i + 1 :])))
            for i in range(1, len(anchors))
            for s in range(1, steps)
            if s not in anchors
        }
        value, found = min(((cost(t), t) for t in tried), default=(best, anchors))
        if not value < best:
            return anchors
        best, anchors = value, found


def proposals(
    sigmas: Sequence[float], errors: Matrix, weights: Sequence[float], drift: Drift
) -> dict[str, dict[int, Anchors]]:
    """Family -> exact steps -> anchors, for 4 .. N exact steps.

    Args:
        sigmas: noise level of every step [N].
        errors: replay errors [N][N].
        weights: influence of a local error at every step, to the first power [N].
        drift: the predicted end error.
    """
    steps = len(sigmas)
    heavy = weighted(errors, weights)
    found: dict[str, dict[int, Anchors]] = {
        name: {} for name in ("drift", "replay", "weighted", "uniform", "even in sigma", "dense to sparse")
    }
    before: Anchors | None = None
    for n in range(min(FEWEST, steps), steps + 1):
        here = {
            "replay": best_schedule(errors, n, steps),
            "weighted": best_schedule(heavy, n, steps),
            "uniform": uniform(steps, n),
            "even in sigma": even_in_sigma(sigmas, n),
        }
        starts = [min((here["weighted"], here["replay"], here["even in sigma"]), key=drift.cost)]
        if before is not None:
            starts.append(_one_more(before, drift.cost, steps))
        best = min((moved(start, drift.cost, steps) for start in starts), key=drift.cost)
        before = here["drift"] = best
        warmup = round(WARMUP * steps)
        if n > warmup + 1:
            here["dense to sparse"] = dense_to_sparse(steps, warmup, n - warmup)
        for name, anchors in here.items():
            found[name][n] = anchors
    return {name: some for name, some in found.items() if some}


def random_schedules(steps: int, exact: int, count: int, seed: int = 0) -> list[Anchors]:
    """Step 0 and others at random."""
    draw = random.Random(seed)
    return [(0, *sorted(draw.sample(range(1, steps), exact - 1))) for _ in range(count)]


def order(costs: Mapping[str, float]) -> list[str]:
    """Names, the least cost first."""
    return sorted(costs, key=lambda name: costs[name])


def _one_more(anchors: Anchors, cost: Cost, steps: int) -> Anchors:
    return min((tuple(sorted((*anchors, s))) for s in range(1, steps) if s not in anchors), key=cost)
