"""FlowCache: every chunk has its own drift and decides for itself when its stack is computed again.

Source: "FlowCache" (arXiv 2602.10825, ICLR 2026) and its repository mikeallen39/FlowCache. The code was read, the body
of the paper was not. Its second part, a bounded K/V memory, is no reuse across steps and is not here.

What is reused is the residual of the whole stack, R = output - input of the chunk's last computed step. With k the
chunk's own step counter and e_k its signal,

    d_k = P( mean|e_k - e_{k-1}| / mean|e_{k-1}| ),    A_k = A_{k-1} + d_k,

a step reuses while A_k < `max_drift`; a computed step sets A to 0. The first 5 steps of a chunk and its last one are
computed. This is TeaCache's rule (see `teacache.py`) applied to each chunk, in place of one decision for all chunks of
a window whose noise levels differ.

Published for SkyReels-V2 (50 steps): threshold .10 (slow) and .15 (fast), 5 warm-up steps, last step exact, e the
projected timestep embedding, P TeaCache's fit for Wan2.1 (`WAN_1_3B`, `WAN_14B`), which is negative for changes below
.0043 and is summed as it is, and no limit on how long a residual is reused. `faithful=True` is that. Its signal knows
the timestep and nothing else: the schedule does not depend on content, so it can be written down in advance. Where P is
negative a larger threshold may compute more steps, and on a backbone whose embedding moves by more than .1 a step P is
far below 0, so that nothing is computed between the warm-up and the last step: such a backbone needs a fit of its own.

Published for MAGI-1 (64 steps): threshold .01 or .015, e the patch embedding of the noisy latent, no P;
`signal="hidden"` comes close. There the release reuses the old latent update v dt without the present dt; here the head
always runs and the loop applies the present dt.

The default is the reading that is safe on a backbone without a fit of its own: the modulated input, no polynomial (one
that is given counts as 0 below 0), and at most `max_age` reused steps in a row. A loop in which several chunks are in
flight must give each chunk a rollout of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rollcache.decision import Record
from rollcache.policies.base import StackEvidence
from rollcache.policies.signals import polynomial
from rollcache.policies.teacache import WAN_1_3B, DriftPolicy, check_drift, checked_polynomial, explain, own
from rollcache.settings import check_choice

Signal = Literal["modulated", "hidden", "embedding"]


@dataclass(frozen=True, kw_only=True)
class FlowCache:
    """Settings of FlowCache.

    Attributes:
        max_drift: change of the signal, summed since the chunk's last computed step, from which on a step is computed.
            The speed knob: 0 never reuses.
        faithful: as released for SkyReels-V2: decides on the embedding, with an unclamped polynomial (`WAN_1_3B` unless
            another is given) and without a limit on age. `signal` and `max_age` then have no effect, so they must keep
            their defaults.
        signal: `modulated` looks at what block 0 attends with, `hidden` at what enters it, `embedding` at what
            modulates it.
        polynomial: rescales a change before it is summed, highest power first. None leaves it as it is.
        warmup: steps at the beginning of a chunk that are computed.
        tail: steps at its end that are computed, where the number of steps is known.
        max_age: steps that are reused in a row at most; None is no limit.
        steps: denoising steps of a chunk. None takes what the loop says; if it says nothing, `tail` has no effect.
    """

    max_drift: float = 0.1
    faithful: bool = False
    signal: Signal = "modulated"
    polynomial: tuple[float, ...] | None = None
    warmup: int = 5
    tail: int = 1
    max_age: int | None = 4
    steps: int | None = None

    def __post_init__(self) -> None:
        check_drift(self.max_drift, self.warmup, self.tail, self.steps, self.max_age)
        check_choice("signal", self.signal, Signal)
        object.__setattr__(self, "polynomial", checked_polynomial(self.polynomial))
        for name, default in (("signal", "modulated"), ("max_age", 4)):
            if self.faithful and getattr(self, name) != default:
                raise ValueError(f"{name}={getattr(self, name)!r} has no effect with faithful=True: leave one out.")

    def build(self, blocks: int) -> FlowCachePolicy:
        """See `PolicyConfig.build`."""
        return FlowCachePolicy(self, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        signal = "embedding" if self.faithful else self.signal
        seen = {"modulated": "the modulated input", "hidden": "the input", "embedding": "the embedding"}[signal]
        rescaled = ", rescaled," if self.faithful or self.polynomial is not None else ""
        return explain(record, f"{seen} of this chunk{rescaled} changed by", self.warmup, self.tail, self.max_age)


class FlowCachePolicy(DriftPolicy):
    """FlowCache in one rollout."""

    def __init__(self, config: FlowCache, blocks: int) -> None:
        """Settings, and the depth of the stack."""
        max_age = None if config.faithful else config.max_age
        super().__init__(blocks, config.max_drift, config.warmup, config.tail, config.steps, max_age)
        self._signal = "embedding" if config.faithful else config.signal
        self._polynomial = (config.polynomial or WAN_1_3B) if config.faithful else config.polynomial
        self._clamped = not config.faithful

    def look(self, evidence: StackEvidence) -> Tensor:
        """See `DriftPolicy.look`."""
        return own(getattr(evidence, self._signal))

    def rescale(self, change: float) -> float:
        """P; not below 0 unless as released."""
        if self._polynomial is None:
            return change
        found = polynomial(self._polynomial, change)
        return max(found, 0.0) if self._clamped else found
