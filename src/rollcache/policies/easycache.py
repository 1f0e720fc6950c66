"""EasyCache: how fast the output follows the input was measured at the last computed steps, and is taken to last.

Source: Zhou et al., "Less is Enough: Training-Free Video Diffusion Acceleration via Runtime-Adaptive Caching"
(arXiv 2507.02860) and its repository H-EmbodVis/EasyCache; read in code.

What is reused is v - x of the last computed step, for x what enters and v what leaves: v_t = x_t + (v - x). With c the
last computed step and p the computed one before it, and |.| the mean of absolute values,

    k   = |v_c - v_p| / |x_c - x_p|                    (the transformation rate)
    A_t = A_{t-1} + k |x_t - x_{t-1}| / |v_c|,

a step reuses while A_t < `max_drift` (the paper's tau); a computed step sets A to 0. x_{t-1} is that of the step
before, computed or not. The first `warmup` steps and the last `tail` ones are computed.

Published: tau .05, 10 warm-up steps for Wan2.1; tau .05 (.06 text to video), 7 warm-up steps for Wan2.2; last step
exact. Choices of this library: x and v are the hidden states that enter and leave the stack of blocks, where the
release takes the latent and the velocity, so the head runs with the present timestep; each branch decides for itself,
where the release lets the conditional branch decide for both; nothing is reused before k was measured once.

Because k and |v_c| depend on which steps were computed, a larger `max_drift` need not skip more in every single case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollcache.decision import Action, Decision, Record
from rollcache.passes import Cell
from rollcache.policies.base import StackEvidence
from rollcache.policies.teacache import DriftPolicy, check_drift, explain, own


@dataclass(frozen=True, kw_only=True)
class EasyCache:
    """Settings of EasyCache.

    Attributes:
        max_drift: estimated relative change of the output, summed since the last computed step, from which on a step is
            computed. The speed knob: 0 never reuses.
        warmup: steps at the beginning of a chunk that are computed. The rate needs two computed steps.
        tail: steps at its end that are computed, where the number of steps is known.
        steps: denoising steps of a chunk. None takes what the loop says; if it says nothing, `tail` has no effect.
    """

    max_drift: float = 0.05
    warmup: int = 10
    tail: int = 1
    steps: int | None = None

    def __post_init__(self) -> None:
        check_drift(self.max_drift, self.warmup, self.tail, self.steps)

    def build(self, blocks: int) -> EasyCachePolicy:
        """See `PolicyConfig.build`."""
        return EasyCachePolicy(self, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        return explain(record, "the output should have changed by", self.warmup, self.tail)


@dataclass(frozen=True)
class _Computed:
    """The last computed step: what entered and what left the stack, and k / |v| as a scalar (NaN while unknown)."""

    entered: Tensor
    left: Tensor
    rate: Tensor


class EasyCachePolicy(DriftPolicy):
    """EasyCache in one rollout."""

    def __init__(self, config: EasyCache, blocks: int) -> None:
        """Settings, and the depth of the stack."""
        super().__init__(blocks, config.max_drift, config.warmup, config.tail, config.steps)
        self._computed: dict[str, _Computed] = {}

    def begin(self, branch: str) -> None:
        """See `DriftPolicy.begin`."""
        self._computed.pop(branch, None)

    def look(self, evidence: StackEvidence) -> Tensor:
        """What enters the stack [B, L, C]."""
        return own(evidence.hidden)

    def change(self, branch: str, now: Tensor, before: Tensor) -> Tensor:
        """How much the output should have changed, relative to its size."""
        return self._computed[branch].rate * _distance(now, before)

    def conclude(self, cell: Cell, decision: Decision, evidence: StackEvidence) -> None:
        """Measure the rate anew at a computed step."""
        super().conclude(cell, decision, evidence)
        if decision.action is not Action.COMPUTE:
            return
        assert evidence.output is not None
        entered, left = self._trails[cell.branch].signal, own(evidence.output)
        last = self._computed.get(cell.branch)
        if last is None:
            rate = torch.full((), torch.nan, device=left.device)
        else:
            rate = _distance(left, last.left) / _distance(entered, last.entered) / left.float().abs().mean()
        self._computed[cell.branch] = _Computed(entered, left, rate)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Mean |a - b|, as a float32 scalar."""
    return (a.float() - b.float()).abs().mean()
