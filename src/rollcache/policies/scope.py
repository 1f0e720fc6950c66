"""SCOPE-style: cache, predict or recompute, by how far the input of the stack has drifted. A reconstruction.

Three modes in one chunk, of which the residual R of the whole stack is the subject:

| mode | when | what is added to the input of the stack |
|---|---|---|
| cache | D < `cache_below` | R_1, the newest computed residual |
| predict | `cache_below` <= D < `predict_below` | R_1 + c (R_1 - R_2), continued in noise level |
| recompute | otherwise | what the stack adds |

    d = mean|I_t - I_(t-1)| / mean|I_(t-1)|      I: what block 0 attends with, normalised, scaled and shifted
    D = sum of d since the last recomputed step
    h = (s - s_1) / (s_1 - s_2)                  s: noise levels, of this step and of the two residuals
    c = eta * clip(h, 0, h_max), and no more than kappa |R_1| / |R_1 - R_2|

so that |R_hat - R_1| <= kappa |R_1|. Noise levels that are closer than 1e-4 are not divided by: c is 0 there. Steps of
warm-up, the last ones, and more than k_max predictions since the last recomputed step are recomputed.

Source: SCOPE, arXiv 2604.02979. **This is a reconstruction**: the formulas and the code of the paper could not be had.
Known from its abstract and from what others report about it: the three modes, a Taylor extrapolation in noise level
rather than in step index, controls for its stability, and two thresholds that are calibrated for every model.
Reconstructed, and ours: the indicator, its accumulation, every formula above, and all defaults (.05 and .15, eta .8,
h_max 2, kappa .3, k_max 2, 5 steps of warm-up, order 1). So its figures say nothing about the original's.

Left out: what SCOPE calls selective computation, where blocks of frames are denoised at noise levels of their own and
only those under way are run. Here a pass has one noise level, hence one c for all of its frames.

Published about the original: up to 4.73x on SkyReels-V2 and 2.55x on MAGI-1, of which selective computation alone gives
1.27x; FSC's measurement of its released settings on SkyReels-V2 1.3B is 4.80x at PSNR 12.1, without selective
computation 3.81x at 14.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

import torch
from torch import Tensor
from torch.linalg import vector_norm

from rollcache.decision import Action, Decision, Reason, Record
from rollcache.passes import Cell, RollcacheError
from rollcache.policies.base import StackEvidence, StackPolicy
from rollcache.policies.signals import relative_change
from rollcache.settings import check_count, check_range

_EXACT = Decision(Action.COMPUTE, Reason.SCHEDULE)
_TOO_FEW = Decision(Action.COMPUTE, Reason.NOTHING_STORED)
_SAME_LEVEL = 1e-4


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Settings of the SCOPE-style scheduler.

    Every chunk begins anew, and branches have a state of their own. Passes that write K/V are computed. Needs a loop
    that tells the noise level of every pass (`Pass.time`).

    Attributes:
        steps: denoising steps of a chunk.
        cache_below: drift below which the newest residual is reused as it is.
        predict_below: drift below which it is continued. The speed knob, together with `cache_below`; 0 never reuses.
        warmup: steps that are computed at the start of a chunk.
        tail: steps that are computed at its end.
        max_predictions: predictions since the last computed step (k_max); 0 only caches.
        damping: of the continuation (eta), in [0, 1].
        max_reach: of a prediction, in gaps between the two residuals (h_max).
        max_change: how far a prediction may lie from the newest residual, as a share of its norm (kappa).
    """

    steps: int
    cache_below: float = 0.05
    predict_below: float = 0.15
    warmup: int = 5
    tail: int = 1
    max_predictions: int = 2
    damping: float = 0.8
    max_reach: float = 2.0
    max_change: float = 0.3

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 1)
        check_range("cache_below", self.cache_below, 0)
        check_range("predict_below", self.predict_below, 0)
        if self.cache_below > self.predict_below:
            raise ValueError(
                f"cache_below ({self.cache_below:g}) lies above predict_below ({self.predict_below:g}): nothing would "
                "be predicted; set both to the same value for that."
            )
        check_count("warmup", self.warmup)
        check_count("tail", self.tail)
        if self.warmup + self.tail > self.steps:
            raise ValueError(
                f"warmup={self.warmup} and tail={self.tail} are more than the {self.steps} steps of a chunk."
            )
        check_count("max_predictions", self.max_predictions)
        check_range("damping", self.damping, 0, 1)
        check_range("max_reach", self.max_reach, 0)
        check_range("max_change", self.max_change, 0)

    def forces(self, step: int) -> bool:
        """Whether a step is computed whatever it looks like."""
        return step < self.warmup or step >= self.steps - self.tail

    def build(self, blocks: int) -> ScopePolicy:
        """See `PolicyConfig.build`."""
        return ScopePolicy(self, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        did = {"cache": "replayed", "predict": "predicted"}.get(record.level, "computed")
        numbers = ""
        if isfinite(record.drift):
            numbers = (
                f": drift {record.drift:.4g} (cached below {self.cache_below:g}, predicted below "
                f"{self.predict_below:g} at most {self.max_predictions} times)"
            )
        return (
            f"Chunk {record.chunk}, step {record.step}, whole stack ({record.branch}): {did}, {record.reason}{numbers}."
        )


@dataclass
class _State:
    """What one branch remembers in one chunk.

    Attributes:
        chunk: the chunk.
        indicator: I of the step before [B, L, C]; None where the next step is computed anyway.
        drift: D after that step.
        predictions: since the last computed step.
        spread: |R_1 - R_2| / |R_1|, once it was measured for the residuals that are stored.
    """

    chunk: int
    indicator: Tensor | None = None
    drift: float = 0.0
    predictions: int = 0
    spread: float | None = None


class ScopePolicy(StackPolicy):
    """The SCOPE-style scheduler in one rollout."""

    history = 2

    def __init__(self, config: Scope, blocks: int) -> None:
        """Settings, and the depth of the stack."""
        super().__init__(blocks)
        self.config = config
        self.steps = config.steps
        self._states: dict[str, _State] = {}

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        """Schedule, then drift. Looks at the indicator even if only the next step needs it: blocks may overwrite it."""
        config, state = self.config, self._states.get(cell.branch)
        if not (config.forces(cell.step) and config.forces(cell.step + 1)):
            evidence.memo["indicator"] = _own(evidence.modulated)
        if config.forces(cell.step):
            return _EXACT
        if len(evidence.stored) < 2 or state is None or state.chunk != evidence.where.chunk or state.indicator is None:
            return _TOO_FEW
        change, spread = self._measure(state, evidence)
        drift = state.drift + change
        evidence.memo["drift"], evidence.memo["spread"] = drift, spread
        if not isfinite(drift):
            return Decision(Action.COMPUTE, Reason.NOT_FINITE, drift=drift, limit=config.predict_below)
        if drift >= config.predict_below:
            return Decision(Action.COMPUTE, Reason.DRIFT, drift=drift, limit=config.predict_below)
        if drift < config.cache_below:
            return Decision(Action.REPLAY, Reason.STEADY, drift=drift, limit=config.cache_below, level="cache")
        if state.predictions >= config.max_predictions:
            return Decision(Action.COMPUTE, Reason.STALE, drift=drift, limit=config.predict_below)
        c = self._continuation(spread, evidence)
        return Decision(
            Action.PREDICT,
            Reason.STEADY,
            drift=drift,
            limit=config.predict_below,
            weights=(1 + c, -c),
            level="predict",
        )

    def conclude(self, cell: Cell, decision: Decision, evidence: StackEvidence) -> None:
        """Remember the indicator, and start to count anew from a computed step."""
        chunk = evidence.where.chunk
        state = self._states.get(cell.branch)
        if state is None or state.chunk != chunk or cell.step == 0:
            state = self._states[cell.branch] = _State(chunk)
        if decision.action is Action.COMPUTE:
            state.drift, state.predictions, state.spread = 0.0, 0, None
        else:
            state.drift, state.spread = evidence.memo["drift"], evidence.memo["spread"]
            state.predictions += decision.level == "predict"
        needed = not self.config.forces(cell.step + 1)
        if not needed:
            state.indicator = None
        elif "indicator" in evidence.memo:
            state.indicator = evidence.memo["indicator"]
        else:
            state.indicator = _own(evidence.modulated)

    def reset(self) -> None:
        """Forget everything."""
        self._states.clear()

    def _measure(self, state: _State, evidence: StackEvidence) -> tuple[float, float]:
        """d, and how far the two residuals lie apart; in one host synchronisation.

        The latter is a ratio of norms, since over ranks the largest ratio bounds all of them, and it is taken once for
        every pair of residuals: in the pass after the newer one was computed.
        """
        assert state.indicator is not None
        change = relative_change(evidence.memo["indicator"], state.indicator)
        if state.spread is not None:
            return evidence.numbers(change[None])[0], state.spread
        newest, older = (s.residual.float() for s in evidence.stored[:2])
        apart = vector_norm(newest - older) / vector_norm(newest)
        found, spread = evidence.numbers(torch.stack((change, apart)))
        return found, spread

    def _continuation(self, spread: float, evidence: StackEvidence) -> float:
        """c: how many times the difference of the two residuals is added."""
        config = self.config
        now, newest, older = evidence.where.time, evidence.stored[0].time, evidence.stored[1].time
        if now is None or newest is None or older is None:
            raise RollcacheError(
                "Scope needs the noise level of every pass: step(time=...), or an adapter that tells Pass.time."
            )
        if abs(newest - older) < _SAME_LEVEL:
            return 0.0
        reach = min(max((now - newest) / (newest - older), 0.0), config.max_reach)
        bound = config.max_change / spread if spread > 0 else inf
        return min(config.damping * reach, bound)


def _own(x: Tensor) -> Tensor:
    """A copy, for models may write into what they show."""
    with torch.inference_mode(False):
        return x.detach().clone()
