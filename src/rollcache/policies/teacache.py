"""TeaCache: reuse the residual of the whole stack until the modulated input has drifted too far from the last anchor.

Source: Liu et al., "Timestep Embedding Tells: It's Time to Cache for Video Diffusion Model" (arXiv 2411.19108), and its
repository ali-vilab/TeaCache.

What is reused is the residual of the whole stack, R = output - input of the last computed step. With I_t the input of
block 0 after normalisation, scale and shift (or the embedding that scales and shifts it),

    d_t = P( mean|I_t - I_{t-1}| / mean|I_{t-1}| ),    A_t = A_{t-1} + d_t,

a step reuses while A_t < `max_drift` (the paper's delta, the repository's `rel_l1_thresh`); a computed step sets A to
0. I_{t-1} is that of the step before, computed or not. The first `warmup` steps and the last `tail` are computed.

Published: delta .05 to .2 for Wan2.1, with polynomials P of degree 4 that map the change of the timestep embedding to
that of the output (`WAN_1_3B` and `WAN_14B` below; fitted for 5 warm-up steps and no protected last step, or, the
`..._EARLY` ones, for 1 and 1); up to 4.41x on Open-Sora-Plan. Signal, accumulation and reuse are those of the
repository. Choices of this library: the modulated input is the default signal also where the repository falls back on
the embedding, which knows the timestep but not the content; there is no polynomial by default, since a fit holds for
its backbone alone; a polynomial below 0 counts as 0; chunks begin anew; branches do not share state.

`DriftPolicy` is the rule without its signal. FlowCache, SeaCache and EasyCache are other signals under the same rule.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from torch import Tensor

from rollcache.decision import Action, Decision, Reason, Record
from rollcache.passes import Cell
from rollcache.policies.base import StackEvidence, StackPolicy
from rollcache.policies.signals import polynomial, relative_change
from rollcache.settings import check_choice, check_count, check_range

WAN_1_3B = (-5.21862437e4, 9.23041404e3, -5.28275948e2, 1.36987616e1, -4.99875664e-2)
"""P for Wan2.1 1.3B, fitted on the projected timestep embedding; highest power first."""
WAN_14B = (-3.03318725e5, 4.90537029e4, -2.65530556e3, 5.87365115e1, -3.15583525e-1)
"""P for Wan2.1 14B, likewise."""
WAN_1_3B_EARLY = (2.39676752e3, -1.31110545e3, 2.01331979e2, -8.29855975, 1.37887774e-1)
"""P for Wan2.1 1.3B with reuse from the second step on."""
WAN_14B_EARLY = (-5784.54975374, 5449.50911966, -1811.16591783, 256.27178429, -13.02252404)
"""P for Wan2.1 14B, likewise."""

Signal = Literal["modulated", "embedding"]

_SCHEDULE = Decision(Action.COMPUTE, Reason.SCHEDULE)
_STALE = Decision(Action.COMPUTE, Reason.STALE)
_NOTHING_STORED = Decision(Action.COMPUTE, Reason.NOTHING_STORED)


@dataclass(frozen=True, kw_only=True)
class TeaCache:
    """Settings of TeaCache.

    Attributes:
        max_drift: change of the signal, summed since the last computed step, from which on a step is computed. The
            speed knob: 0 never reuses.
        signal: `modulated` looks at what block 0 attends with; `embedding` at what modulates it, which gives a schedule
            that does not depend on content.
        polynomial: rescales a change before it is summed, highest power first; what is below 0 counts as 0. None leaves
            it as it is.
        warmup: steps at the beginning of a chunk that are computed.
        tail: steps at its end that are computed, where the number of steps is known.
        steps: denoising steps of a chunk. None takes what the loop says; if it says nothing, `tail` has no effect.
    """

    max_drift: float = 0.1
    signal: Signal = "modulated"
    polynomial: tuple[float, ...] | None = None
    warmup: int = 5
    tail: int = 1
    steps: int | None = None

    def __post_init__(self) -> None:
        check_drift(self.max_drift, self.warmup, self.tail, self.steps)
        check_choice("signal", self.signal, Signal)
        object.__setattr__(self, "polynomial", checked_polynomial(self.polynomial))

    def build(self, blocks: int) -> TeaCachePolicy:
        """See `PolicyConfig.build`."""
        return TeaCachePolicy(self, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        seen = {"modulated": "the modulated input", "embedding": "the embedding"}[self.signal]
        rescaled = "" if self.polynomial is None else ", rescaled,"
        return explain(record, f"{seen}{rescaled} changed by", self.warmup, self.tail)


class DriftPolicy(StackPolicy):
    """Reuse while the drift that was summed since the last computed step is below a limit; in one rollout.

    Attributes:
        limit: the drift from which on a step is computed; 0 never reuses.
        warmup: steps at the beginning of a chunk that are computed.
        tail: steps at its end that are computed, where the number of steps is known.
        max_age: steps that are reused in a row at most; None is no limit.
    """

    def __init__(
        self, blocks: int, limit: float, warmup: int, tail: int, steps: int | None, max_age: int | None = None
    ) -> None:
        """The rule's settings, and the depth of the stack."""
        super().__init__(blocks)
        self.limit, self.warmup, self.tail, self.steps, self.max_age = limit, warmup, tail, steps, max_age
        self._trails: dict[str, _Trail] = {}

    @abstractmethod
    def look(self, evidence: StackEvidence) -> Tensor:
        """The signal of a pass, as a tensor that nobody else writes to."""

    def change(self, branch: str, now: Tensor, before: Tensor) -> Tensor:
        """How much the signal changed since the step before; a scalar."""
        return relative_change(now, before)

    def rescale(self, change: float) -> float:
        """What a change adds to the drift."""
        return change

    def reuse(self, evidence: StackEvidence) -> Decision:
        """How a step is made that is not computed."""
        return Decision(Action.REPLAY, Reason.STEADY)

    def begin(self, branch: str) -> None:
        """A chunk begins in a branch: forget what belonged to the one before."""

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        """Schedule, then age, then drift. Looks at the signal in any case: blocks may overwrite it."""
        where, trail = evidence.where, self._trails.get(cell.branch)
        now = evidence.memo["signal"] = self.look(evidence)
        steps = where.steps if self.steps is None else self.steps
        if cell.step < self.warmup or (steps is not None and cell.step >= steps - self.tail):
            return _SCHEDULE
        if trail is None or trail.chunk != where.chunk:
            return _NOTHING_STORED
        if self.max_age is not None and evidence.replays >= self.max_age:
            return _STALE
        (change,) = evidence.numbers(self.change(cell.branch, now, trail.signal).reshape(1))
        drift = evidence.memo["drift"] = trail.drift + self.rescale(change)
        if not isfinite(drift):
            return Decision(Action.COMPUTE, Reason.NOT_FINITE, drift=drift, limit=self.limit)
        if drift >= self.limit or self.limit == 0:
            return Decision(Action.COMPUTE, Reason.DRIFT, drift=drift, limit=self.limit)
        return self.reuse(evidence)._replace(drift=drift, limit=self.limit)

    def conclude(self, cell: Cell, decision: Decision, evidence: StackEvidence) -> None:
        """Keep the signal of this step; a computed step is the new origin."""
        where, trail, memo = evidence.where, self._trails.get(cell.branch), evidence.memo
        if trail is None or trail.chunk != where.chunk or where.step == 0:
            self.begin(cell.branch)
        signal = memo["signal"] if "signal" in memo else self.look(evidence)
        drift = 0.0 if decision.action is Action.COMPUTE else memo["drift"]
        self._trails[cell.branch] = _Trail(where.chunk, signal, drift)

    def reset(self) -> None:
        """Forget everything: a new rollout begins."""
        for branch in self._trails:
            self.begin(branch)
        self._trails.clear()


@dataclass(frozen=True)
class _Trail:
    """Where a branch stands: the signal of its last pass, and the drift since the last computed one."""

    chunk: int
    signal: Tensor
    drift: float


class TeaCachePolicy(DriftPolicy):
    """TeaCache in one rollout."""

    def __init__(self, config: TeaCache, blocks: int) -> None:
        """Settings, and the depth of the stack."""
        super().__init__(blocks, config.max_drift, config.warmup, config.tail, config.steps)
        self.config = config

    def look(self, evidence: StackEvidence) -> Tensor:
        """See `DriftPolicy.look`."""
        return own(getattr(evidence, self.config.signal))

    def rescale(self, change: float) -> float:
        """P, not below 0."""
        return change if self.config.polynomial is None else max(polynomial(self.config.polynomial, change), 0.0)


def own(x: Tensor) -> Tensor:
    """A copy that neither blocks nor loop write to."""
    return x.detach().clone()


def check_drift(max_drift: float, warmup: int, tail: int, steps: int | None, max_age: int | None = None) -> None:
    """Raise `ValueError` unless these can be settings of a `DriftPolicy`."""
    check_range("max_drift", max_drift, 0)
    check_count("warmup", warmup)
    check_count("tail", tail)
    if max_age is not None:
        check_count("max_age", max_age)
    if steps is not None:
        check_count("steps", steps, 1)
        if warmup + tail > steps:
            raise ValueError(f"warmup={warmup} and tail={tail} are more than the {steps} steps of a chunk.")


def checked_polynomial(coefficients: tuple[float, ...] | None) -> tuple[float, ...] | None:
    """The coefficients as a tuple; `ValueError` unless there are some, all of them finite."""
    if coefficients is None:
        return None
    found = tuple(float(c) for c in coefficients)
    if not found or not all(map(isfinite, found)):
        raise ValueError(f"polynomial must be finite coefficients, the highest power first, or None, got {found!r}.")
    return found


def explain(record: Record, measured: str, warmup: int, tail: int, max_age: int | None = None) -> str:
    """One sentence on a decision of a `DriftPolicy`; `measured` is followed by the drift."""
    did = {Action.REPLAY: "replayed", Action.PREDICT: "predicted from two residuals"}.get(record.action, "computed")
    text = f"Chunk {record.chunk}, step {record.step}, whole stack ({record.branch}): {did}, {record.reason}"
    if record.reason is Reason.SCHEDULE:
        text += f" (warmup={warmup})" if record.step < warmup else f" (tail={tail})"
    elif record.reason is Reason.STALE:
        text += f" (max_age={max_age})"
    if record.drift == record.drift:
        held = "not below" if record.action is Action.COMPUTE else "below"
        text += f": {measured} {record.drift:.4g} since the last computed step, {held} max_drift={record.limit:.4g}"
    return text + "."
