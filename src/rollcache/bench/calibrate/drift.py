"""How far replays between two anchors push the latent, and what a whole schedule does to the end result.

On the true trajectory the Euler step at s moves the latent by (sigma_s - sigma_(s+1)) v(s); with the residual of anchor
a the model says v(a, s) instead. That push is carried to the end by the gain that `influence` measures:

    D(a, s)  = (sigma_s - sigma_(s+1)) (v(s) - v(a, s)) / |x_clean|                 a vector
    S(a, b)  = sum of gain(s) D(a, s) over a < s < b                                between the anchors a and b
    predicted error of the clean latent = | sum of S over the gaps of the schedule |

Vectors, because neighbouring replays err in the same direction and add up in full, distant ones only in part: a cost
that adds local errors step by step cannot know. Only the inner products of the D are kept, which is all that lengths of
their sums need, and which can be averaged over clips.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from rollcache.bench.calibrate.influence import Velocity
from rollcache.bench.calibrate.splice import Splice
from rollcache.bench.calibrate.trajectory import Trajectory

SHRINK = 0.5
"""Inner products between different gaps count this much in `cost`: how far distant errors add up in the direction of
earlier ones is known from few clips only. Chosen on one further clip, where it beat 1 by 0.6 dB and 0 by more."""

REACH = 0.5
"""Longest gap that is looked at, as a share of N; a gap of eight steps always is."""


def gaps(steps: int) -> tuple[tuple[int, int], ...]:
    """All (a, b) with replays between: a + 2 <= b <= N, not longer than the reach."""
    longest = max(8, int(REACH * steps)) + 1
    return tuple((a, b) for a in range(steps) for b in range(a + 2, min(a + longest, steps) + 1))


def push_products(trajectory: Trajectory, splice: Splice, velocity: Velocity) -> Tensor:
    """Inner products of all D(a, s), in the order of `gaps` with s = b - 1 [M, M].

    Args:
        trajectory: at full compute.
        splice: around the blocks of the model.
        velocity: the model at (latent, step).
    """
    sigmas, size = trajectory.sigmas, trajectory.latents[-1].norm()
    rows = []
    for a, b in gaps(trajectory.steps):
        s = b - 1
        with splice.adding(trajectory.seen[a].residual):
            wrong = velocity(trajectory.latents[s], s)
        rows.append(((trajectory.velocity(s) - wrong).flatten().float() * ((sigmas[s] - sigmas[b]) / size)).cpu())
    stacked = torch.stack(rows)
    return stacked @ stacked.T


class Drift:
    """Predicts the end error of schedules of N steps.

    Args:
        steps: N.
        products: from `push_products`, of one clip or the mean of several [M, M].
        gain: of every step [N].
    """

    def __init__(self, steps: int, products: Tensor, gain: Sequence[float]) -> None:
        self.steps = steps
        every = gaps(steps)
        self._index = {gap: i for i, gap in enumerate(every)}
        if products.shape != (len(every), len(every)):
            raise ValueError(f"products are {list(products.shape)}, not those of {steps} steps.")
        weight = np.array([gain[b - 1] for _, b in every])
        self._products = products.double().numpy() * weight[:, None] * weight
        for a in range(steps - 1):
            rows = [i for (first, _), i in self._index.items() if first == a]
            part = slice(rows[0], rows[-1] + 1)
            self._products[part] = self._products[part].cumsum(0)
            self._products[:, part] = self._products[:, part].cumsum(1)

    def error(self, anchors: Sequence[int]) -> float:
        """Predicted error of the clean latent, relative to its length (root mean square over the clips).

        Infinite where a gap is longer than the reach.
        """
        return self._length(anchors, 1.0)

    def cost(self, anchors: Sequence[int]) -> float:
        """What schedules are chosen by: the same with the inner products between gaps shrunk by `SHRINK`."""
        return self._length(anchors, SHRINK)

    def _length(self, anchors: Sequence[int], shrink: float) -> float:
        found = [self._index.get(gap, -1) for gap in pairwise((*anchors, self.steps)) if gap[1] - gap[0] > 1]
        if not found:
            return 0.0
        if min(found) < 0:
            return float("inf")
        own = float(self._products[found, found].sum())
        total = float(self._products[np.ix_(found, found)].sum())
        return sqrt(max(own + shrink * (total - own), 0.0))
