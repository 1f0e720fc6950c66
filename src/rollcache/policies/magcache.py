"""MagCache: a table of how fast the residual shrinks or grows, measured once, says how long it may be reused.

Reused is the residual r of the whole stack, as the last computed step of the chunk left it, unscaled. Nothing is
looked at while a rollout runs: from one step to the next the magnitude of the residual changes almost alike for every
prompt and seed, so it is measured in a calibration run. With g_t = mean over tokens of |r_t| / |r_(t-1)| and s the step
that was computed last, the error that reuse at step t is charged with is

    E(s, t) = sum over j = s+1 .. t of |1 - g_(s+1) * ... * g_j|

Step t is reused while E(s, t) <= `max_error` and t - s <= `max_skips` (K); the first `retention` share of the steps is
computed. For a given table this is a fixed schedule. A larger `max_error` never computes more where all ratios lie on
one side of 1, as they mostly do; where they cross it, errors of opposite sign cancel, and single settings may.

Source: "MagCache: Fast Video Generation with Magnitude-Aware Cache", arXiv 2506.09045; repository Zehong-Ma/MagCache;
the hook `mag_cache` of diffusers. The rule above is theirs; that its running sums are a function of (s, t) alone is
what lets this file hold no state. Settings that they publish, over 50 steps unless given:

| backbone | max_error | max_skips | retention | source |
|---|---|---|---|---|
| Wan2.1 T2V 1.3B, 480p | .12 | 2 or 4 | .2 | repository |
| Wan2.1 T2V 14B, 720p | .24 | 6 | .2 | repository |
| Wan2.1 I2V 14B | .12 / .24 | 4 / 6 | .2 | repository |
| diffusers, any model | .06 or .24 | 3 or 5 | .2 or .1 | its hook, by version, with 28 steps |

Ours: the last steps can be kept exact (`tail`), which theirs does not do; `max_error` or `max_skips` of 0 never reuses,
even where a ratio is exactly 1. Ratios belong to one model, one number of steps and one shift of the schedule:
`MagnitudeProbe` measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from typing import Any

import torch
from torch import Tensor

from rollcache.decision import Action, Decision, Reason, Record
from rollcache.passes import Cell, RollcacheError
from rollcache.policies.base import StackEvidence, StackPolicy
from rollcache.settings import check_count, check_range

_EXACT = Decision(Action.COMPUTE, Reason.SCHEDULE)


@dataclass(frozen=True, kw_only=True)
class MagCache:
    """Settings of MagCache.

    Every chunk begins anew, and branches have residuals of their own. Passes that write K/V are computed.

    Attributes:
        steps: denoising steps of a chunk (N).
        ratios: g_t for every step; the first is 1, for nothing precedes it. See `MagnitudeProbe` and `interpolated`.
        max_error: summed error up to which a residual is reused. The speed knob; 0 never reuses.
        max_skips: steps in a row that are reused at most (K); 0 never reuses.
        retention: share of the steps that is computed at the start, in [0, 1].
        tail: steps that are computed at the end.
    """

    steps: int
    ratios: tuple[float, ...]
    max_error: float = 0.12
    max_skips: int = 4
    retention: float = 0.2
    tail: int = 0

    @classmethod
    def interpolated(cls, ratios: Sequence[float], steps: int, **settings: Any) -> MagCache:
        """Settings with a table that was measured over another number of steps, by its nearest entries.

        As the reference does it. The ratio of two neighbouring steps of 50 is not that of two of 25, so a table that
        was measured with the right number is better.
        """
        check_count("steps", steps, 1)
        if not ratios:
            raise ValueError("ratios are empty: there is nothing to interpolate.")
        stretch = (len(ratios) - 1) / max(steps - 1, 1)
        return cls(steps=steps, ratios=tuple(ratios[round(t * stretch)] for t in range(steps)), **settings)

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 1)
        object.__setattr__(self, "ratios", tuple(self.ratios))
        if len(self.ratios) != self.steps:
            raise ValueError(
                f"ratios has {len(self.ratios)} entries for {self.steps} steps: measure them with that number of "
                "steps, or use MagCache.interpolated."
            )
        for step, ratio in enumerate(self.ratios):
            if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < inf:
                raise ValueError(f"ratios[{step}] must be positive and finite, got {ratio!r}.")
        if self.ratios[0] != 1:
            raise ValueError(f"ratios[0] must be 1, for nothing precedes step 0; got {self.ratios[0]!r}.")
        check_range("max_error", self.max_error, 0)
        check_count("max_skips", self.max_skips)
        check_range("retention", self.retention, 0, 1)
        check_count("tail", self.tail)
        if self.tail > self.steps:
            raise ValueError(f"tail ({self.tail}) is more than the {self.steps} steps of a chunk.")

    @property
    def retained(self) -> int:
        """Steps that are computed at the start."""
        return int(self.retention * self.steps + 0.5)

    def error(self, computed: int, step: int) -> float:
        """E(s, t): what reuse of the residual of step `computed` at `step` is charged with."""
        ratio, total = 1.0, 0.0
        for g in self.ratios[computed + 1 : step + 1]:
            ratio *= g
            total += abs(1 - ratio)
        return total

    def build(self, blocks: int) -> MagCachePolicy:
        """See `PolicyConfig.build`."""
        return MagCachePolicy(self, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        did = "replayed" if record.action is Action.REPLAY else "computed"
        numbers = ""
        if isfinite(record.drift):
            sign = "<=" if record.drift <= record.limit else ">"
            numbers = (
                f": summed error of the magnitude {record.drift:.4g} {sign} {record.limit:g}, "
                f"at most {self.max_skips} steps in a row"
            )
        return (
            f"Chunk {record.chunk}, step {record.step}, whole stack ({record.branch}): {did}, {record.reason}{numbers}."
        )


class MagCachePolicy(StackPolicy):
    """MagCache in one rollout; remembers nothing of its own."""

    def __init__(self, config: MagCache, blocks: int) -> None:
        """Settings, and the depth of the stack."""
        super().__init__(blocks)
        self.config = config
        self.steps = config.steps

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        """The table decides."""
        config, step = self.config, cell.step
        if step < config.retained or step >= config.steps - config.tail:
            return _EXACT
        computed = evidence.stored[0].step
        error = config.error(computed, step)
        if not (error <= config.max_error and config.max_error > 0):
            return Decision(Action.COMPUTE, Reason.DRIFT, drift=error, limit=config.max_error)
        if step - computed > config.max_skips:
            return Decision(Action.COMPUTE, Reason.STALE, drift=error, limit=config.max_error)
        return Decision(Action.REPLAY, Reason.STEADY, drift=error, limit=config.max_error)


@dataclass(frozen=True, kw_only=True)
class MagnitudeProbe:
    """Measures the ratios of `MagCache`: computes everything, and takes note of how large the residuals are.

    The settings hold what all rollouts that run under them measured:

        probe = MagnitudeProbe(steps=50)
        handle = rollcache.enable(model, probe)
        ...  # a few chunks, with any prompt
        handle.disable()
        rollcache.enable(model, MagCache(steps=50, ratios=probe.ratios()))

    Models that write into their input leave nothing that could be measured; `ratios` says so.

    Attributes:
        steps: denoising steps of a chunk (N).
        records: by (branch, step), g_t of every chunk, as scalars on the model's device; step 0 has none.
    """

    steps: int
    records: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 1)

    def ratios(self) -> tuple[float, ...]:
        """g_t for every step, the mean over branches and chunks.

        Raises:
            RollcacheError: a step was never measured, or what was measured is of no use.
        """
        out = [1.0]
        for step in range(1, self.steps):
            seen = [g for (_, at), found in self.records.items() if at == step for g in found]
            mean = float(torch.stack([g.cpu() for g in seen]).mean()) if seen else nan
            if not seen:
                raise RollcacheError(f"step {step} was never measured: run at least one whole chunk under the probe.")
            if not 0 < mean < inf:
                raise RollcacheError(f"the ratio of step {step} came out as {mean}, which no residual of use has.")
            out.append(mean)
        return tuple(out)

    def build(self, blocks: int) -> MagnitudeProbePolicy:
        """See `PolicyConfig.build`."""
        return MagnitudeProbePolicy(self, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        found = self.records.get((record.branch, record.step))
        measured = f"; ratio of magnitudes {float(found[-1]):.4g} in the latest of {len(found)} chunks" if found else ""
        return (
            f"Chunk {record.chunk}, step {record.step}, whole stack ({record.branch}): computed, "
            f"{record.reason}{measured}."
        )


class MagnitudeProbePolicy(StackPolicy):
    """The probe in one rollout.

    Remembers per branch the pass before and how large its residual was at every token [B, L].
    """

    def __init__(self, config: MagnitudeProbe, blocks: int) -> None:
        """Settings, and the depth of the stack."""
        super().__init__(blocks)
        self.config = config
        self.steps = config.steps
        self._before: dict[str, tuple[int, int, Tensor]] = {}  # branch: chunk, step, magnitudes

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        """Everything is computed."""
        return _EXACT

    def conclude(self, cell: Cell, decision: Decision, evidence: StackEvidence) -> None:
        """Compare the residual with that of the step before."""
        assert evidence.output is not None
        now = (evidence.output.float() - evidence.hidden.float()).norm(dim=-1)
        chunk = evidence.where.chunk
        before = self._before.get(cell.branch)
        if before is not None and before[:2] == (chunk, cell.step - 1):
            # The floor keeps a token with no residual at all from making the mean infinite, as in the reference.
            ratio = (now / (before[2] + 1e-8)).mean()
            self.config.records.setdefault((cell.branch, cell.step), []).append(ratio)
        self._before[cell.branch] = (chunk, cell.step, now)

    def reset(self) -> None:
        """The pass before belonged to another rollout."""
        self._before.clear()
