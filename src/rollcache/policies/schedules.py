"""Which denoising steps of a chunk are computed: anchors, as tuples of step indices.

Every schedule begins with step 0 and rises strictly. N is the number of steps, W the warm-up steps that are all exact,
n the anchors after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf, isfinite

END = 0.8  # share of the trajectory at which the last anchor of a dense-to-sparse schedule lies
EXPONENT = 1.88  # reproduces the published gaps 1,1,2,3,4,4,6,5,7 of N=50, W=6, n=10


def uniform(steps: int, exact: int) -> tuple[int, ...]:
    """`exact` steps evenly spread over the whole trajectory, first and last step included."""
    _check(steps, 0, exact)
    return _rising([round(i * (steps - 1) / max(exact - 1, 1)) for i in range(exact)], steps)


def dense_to_sparse(
    steps: int, warmup: int, anchors: int, end: float = END, exponent: float = EXPONENT, tail: Sequence[int] = ()
) -> tuple[int, ...]:
    """FSC's schedule (Eq. 1): a_k = round(W + (E - W) * (k / (n - 1))^g) with E = end * (N - 1), after W warm-up steps.

    Args:
        steps: N.
        warmup: W.
        anchors: n.
        end: where the last anchor lies, as a share of the last step.
        exponent: g; 1 spreads the anchors evenly between W and E.
        tail: further steps after E.
    """
    _check(steps, warmup, warmup + anchors + len(tail))
    if not 0 < end <= 1 or not exponent > 0:
        raise ValueError(f"end must be in (0, 1] and exponent above 0, got {end} and {exponent}.")
    last = int(end * (steps - 1))
    for step in tail:
        if not last < step < steps:
            raise ValueError(f"tail step {step} does not lie after the last anchor, {last}, and before step {steps}.")
    found = [round(warmup + (last - warmup) * (k / max(anchors - 1, 1)) ** exponent) for k in range(anchors)]
    return _rising([*range(warmup), *found, *sorted(tail)], steps)


def sparse_to_dense(
    steps: int, warmup: int, anchors: int, end: float = END, exponent: float = EXPONENT
) -> tuple[int, ...]:
    """The gaps of `dense_to_sparse` in the opposite order, between the same first and last anchor."""
    forward = dense_to_sparse(steps, warmup, anchors, end, exponent)[warmup:]
    gaps = [b - a for a, b in pairwise(forward)]
    return (*range(warmup), *accumulate(gaps[::-1], initial=forward[0]))


def even_in_sigma(sigmas: Sequence[float], exact: int) -> tuple[int, ...]:
    """`exact` steps whose noise levels are evenly spread, for a trajectory with levels `sigmas` (one per step)."""
    _check(len(sigmas), 0, exact)
    first, last = sigmas[0], sigmas[-1]
    wanted = [first + (last - first) * i / max(exact - 1, 1) for i in range(exact)]
    nearest = [min(range(len(sigmas)), key=lambda s, w=w: abs(sigmas[s] - w)) for w in wanted]  # type: ignore[misc]
    return _rising(nearest, len(sigmas))


def best_schedule(cost: Sequence[Sequence[float]], exact: int, steps: int) -> tuple[int, ...]:
    """The `exact` anchors, the first of them 0, under which replaying the other steps costs least in all.

    Dynamic programming over a measured cost. FSC's figure 10 warns that the optimum of such a local cost is not the
    schedule with the best video.

    Args:
        cost: `cost[a][s]` is the error of replaying at step s the residual of anchor a < s, weighted by the influence
            that an error at step s has on the result. Other entries are not read.
        exact: anchors.
        steps: N.
    """
    _check(steps, 0, exact)
    if len(cost) < steps or any(len(row) < steps for row in cost[:steps]):
        raise ValueError(f"cost must have {steps} rows of {steps} entries, one per anchor and step.")
    for a in range(steps):
        for s in range(a + 1, steps):
            if not (isfinite(cost[a][s]) and cost[a][s] >= 0):
                raise ValueError(f"cost[{a}][{s}] is {cost[a][s]}; an error must be finite and not negative.")
    replayed = [[0.0, *accumulate(cost[a][s] for s in range(a + 1, steps))] for a in range(steps)]
    # best[a]: (cost of all steps before a, anchors up to and including a), with as many anchors as the round counts
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, (0,)), *[(inf, ())] * (steps - 1)]
    for _ in range(exact - 1):
        best = [
            min(((best[a][0] + replayed[a][b - a - 1], (*best[a][1], b)) for a in range(b)), default=(inf, ()))
            for b in range(steps)
        ]
    return min((best[a][0] + replayed[a][-1], best[a][1]) for a in range(steps))[1]


def _rising(found: Sequence[int], steps: int) -> tuple[int, ...]:
    """Push what coincides apart: first towards the end, then, past the end, back."""
    out: list[int] = []
    for a in found:
        out.append(max(a, out[-1] + 1 if out else 0))
    limit = steps
    for i in reversed(range(len(out))):
        limit = min(limit - 1, out[i])
        out[i] = limit
    return tuple(out)


def _check(steps: int, warmup: int, exact: int) -> None:
    if warmup < 0 or not 1 <= exact <= steps:
        raise ValueError(f"cannot place {exact} exact steps ({warmup} of them warm-up) among {steps}.")
