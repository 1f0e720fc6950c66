"""SeaCache: measure drift on what of the latent is signal at its noise level, and extrapolate the residual.

Source: "SeaCache" (arXiv 2602.18993, CVPR 2026), its repository jiwoogit/SeaCache and the `sea_cache` hook of
diffusers. The repository's filter is in a file that was not found, so the filter here is that of diffusers, which is
separable; the chunk-wise port that FSC measured ("SeaCache-AR") is published without a formula and is reconstructed.

What is reused is the residual of the whole stack, R = output - input. With z_t the noisy latent of the chunk at noise
level s_t and E_t = SEA(z_t, s_t) its filtered form (`signals.sea_filter`: a 3-D FFT of each camera inside the chunk),

    A_t = A_{t-1} + mean|E_t - E_{t-1}| / mean|E_{t-1}|,

a step reuses while A_t < `max_drift` (the paper's delta); a computed step sets A to 0. The first `warmup` and the last
`tail` steps are computed, and so is a step after `max_age` reused ones. Of order 0, R is the last computed one. Of
order 1, with s_1 the noise level of the last computed step and s_2 of the one before it,

    R = R_1 + (R_1 - R_2) (s_t - s_1) / (s_1 - s_2),

and R_1 while only one is stored or both noise levels are the same. diffusers extrapolates in the step index; the noise
level is the same on an even grid and right on a shifted one.

Published: repository, Wan2.1: delta .2 (2.1x) to .35 (3.1x), filtered modulated input, order 0, no limit on age, first
and last step exact (or the first 5 and no last one). diffusers, Cosmos 3: .25, filtered latent, order 1, first and last
step exact, at most 2 reused in a row; these are the defaults here. SeaCache-AR on SkyReels-V2: .28. The repository's
first comparison after the warm-up is between a filtered and an unfiltered tensor; here both are filtered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rollcache.decision import Action, Decision, Reason, Record
from rollcache.passes import RollcacheError
from rollcache.policies.base import StackEvidence
from rollcache.policies.signals import sea_filter
from rollcache.policies.teacache import DriftPolicy, check_drift, explain
from rollcache.settings import check_choice, check_count

SAME = 1e-6  # noise levels that are closer coincide

Signal = Literal["latent", "modulated"]


@dataclass(frozen=True, kw_only=True)
class SeaCache:
    """Settings of SeaCache. The loop must tell the noise level of its passes (`Pass.time`, in [0, 1]).

    Attributes:
        max_drift: change of the filtered signal, summed since the last computed step, from which on a step is computed.
            The speed knob: 0 never reuses.
        signal: `latent` filters the noisy latent, `modulated` what block 0 attends with.
        order: 0 reuses the newest residual, 1 extrapolates from the two newest.
        warmup: steps at the beginning of a chunk that are computed.
        tail: steps at its end that are computed, where the number of steps is known.
        max_age: steps that are reused in a row at most; None is no limit.
        steps: denoising steps of a chunk. None takes what the loop says; if it says nothing, `tail` has no effect.
    """

    max_drift: float = 0.25
    signal: Signal = "latent"
    order: int = 1
    warmup: int = 1
    tail: int = 1
    max_age: int | None = 2
    steps: int | None = None

    def __post_init__(self) -> None:
        check_drift(self.max_drift, self.warmup, self.tail, self.steps, self.max_age)
        check_choice("signal", self.signal, Signal)
        check_count("order", self.order)
        if self.order > 1:
            raise ValueError(f"order must be 0 or 1, got {self.order}.")

    def build(self, blocks: int) -> SeaCachePolicy:
        """See `PolicyConfig.build`."""
        return SeaCachePolicy(self, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        seen = {"latent": "latent", "modulated": "modulated input"}[self.signal]
        return explain(record, f"the filtered {seen} changed by", self.warmup, self.tail, self.max_age)


class SeaCachePolicy(DriftPolicy):
    """SeaCache in one rollout."""

    def __init__(self, config: SeaCache, blocks: int) -> None:
        """Settings, and the depth of the stack."""
        super().__init__(blocks, config.max_drift, config.warmup, config.tail, config.steps, config.max_age)
        self.config = config
        self.history = config.order + 1

    def look(self, evidence: StackEvidence) -> Tensor:
        """The filtered signal [B, L, Z]."""
        where = evidence.where
        signal: Tensor = getattr(evidence, self.config.signal)
        return sea_filter(signal.detach(), _sigma(where.time), where.segments)

    def reuse(self, evidence: StackEvidence) -> Decision:
        """The newest residual, or a line through the two newest."""
        stored = evidence.stored
        if self.config.order == 1 and len(stored) > 1:
            now, last, older = (_sigma(time) for time in (evidence.where.time, stored[0].time, stored[1].time))
            if abs(last - older) > SAME:
                ahead = (now - last) / (last - older)
                return Decision(Action.PREDICT, Reason.STEADY, weights=(1 + ahead, -ahead))
        return super().reuse(evidence)


def _sigma(time: float | None) -> float:
    """The noise level of a pass."""
    if time is None or not 0 <= time <= 1:
        raise RollcacheError(f"SeaCache needs the noise level of every pass, in [0, 1]: the loop told time={time}.")
    return time
