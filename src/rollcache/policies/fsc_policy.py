"""FSC in one rollout; `fsc.py` has the settings and what the method is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite, nan
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollcache.decision import Action, Decision, Reason
from rollcache.passes import Cell, RollcacheError
from rollcache.policies.base import StackEvidence, StackPolicy
from rollcache.policies.extrapolation import over_levels
from rollcache.policies.risk import Drift, Reference, by_rank
from rollcache.tokens import Tokens, unfold

if TYPE_CHECKING:
    from rollcache.policies.fsc import FSC, RiskProbe

LEVELS = ("C0", "C1", "C2", "C3", "Full")
FULL = 4
_ANCHOR = Decision(Action.COMPUTE, Reason.SCHEDULE, level="anchor")


@dataclass
class _State:
    """What FSC remembers of one branch.

    `age` [L]: steps since a token was computed, as of the last pass. `replays`: C0 in a row. `repaired`: tokens were
    repaired since the last computed step, so that the newest residual belongs to no single noise level.
    """

    reference: Reference
    age: Tensor
    replays: int = 0
    repaired: bool = False


class FSCPolicy(StackPolicy):
    """FSC in one rollout: remembers, per branch, X_ref and the age of every token."""

    def __init__(self, config: FSC, blocks: int) -> None:
        """Settings, and the depth of the stack."""
        super().__init__(blocks)
        self.config = config
        self.steps = config.steps
        self.history = config.order + 1
        self.repairs = config.repairs != "none"
        if config.repairs != "none":
            self.backend = config.repairs
        self._exact = frozenset(config.exact)
        self._states: dict[str, _State] = {}

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        """Schedule, then risk, then safeguards."""
        config, step = self.config, cell.step
        if step in self._exact:
            return _ANCHOR
        state = self._states[cell.branch]
        worn = config.max_replays is not None and state.replays >= config.max_replays
        if config.table is not None:
            level = LEVELS.index(config.table[step])
            level = level if self.repairs or level == FULL else 0
            return self._act(level, config.share(level), Reason.SCHEDULE, nan, nan, state, evidence)
        if config.risk_scale == inf and config.max_age is None:  # nothing can reach a threshold
            level, reason = (self._safeguard(0), Reason.STALE) if worn else (0, Reason.STEADY)
            return self._act(level, config.share(level), reason, nan, nan, state, evidence)
        risk, low, stale, needed = self._measure(state, step, evidence)
        if not isfinite(risk):
            return Decision(Action.COMPUTE, Reason.NOT_FINITE, drift=risk, level="Full")
        level, limits = config.route(risk, step, low), config.limits(step)
        limit = limits[level - 1] if level else limits[0] if self.repairs else limits[-1]
        reason = Reason.DRIFT if level else Reason.STEADY
        share = config.share(level)
        if level < FULL and (worn or stale):
            reason, level = Reason.STALE, self._safeguard(level)
            share = max(config.share(level), needed)
            if stale > 0.5 or share >= config.full_above:
                share = 1.0
        return self._act(level, share, reason, risk, limit, state, evidence)

    def conclude(self, cell: Cell, decision: Decision, evidence: StackEvidence) -> None:
        """Ages grow; an anchor replaces X_ref."""
        state = self._states.get(cell.branch)
        if state is None or self._renews(decision):
            reference = self._reference(evidence)
            age = torch.zeros(reference.latent.shape[1], device=reference.latent.device)
            self._states[cell.branch] = _State(reference, age)
        elif decision.action is Action.COMPUTE:
            state.age, state.replays, state.repaired = torch.zeros_like(state.age), 0, False
        elif decision.action is Action.REPAIR:
            assert decision.tokens is not None
            rows = decision.tokens.rows(evidence.where.segments, state.age.device)
            state.age, state.replays, state.repaired = (state.age + 1).index_fill(0, rows, 0), 0, True
        else:
            state.age, state.replays = state.age + 1, state.replays + 1

    def reset(self) -> None:
        """Forget everything."""
        self._states.clear()

    def _renews(self, decision: Decision) -> bool:
        """Whether an executed decision is an anchor; the first of a chunk, with nothing stored, always is one."""
        repair = decision.level in LEVELS or decision.reason is Reason.NOT_FINITE
        return decision.action is Action.COMPUTE and (self.config.coupled or not repair)

    def _reference(self, evidence: StackEvidence) -> Reference:
        where = evidence.where
        if self.repairs and not where.segments:
            raise RollcacheError(
                f"{self.name} repairs tokens camera by camera, and this pass has no token layout: give its segments, "
                "or set repairs='none'."
            )
        if any(s.tensor for s in where.segments):
            raise RollcacheError(f"{self.name} needs a hidden state that is one tensor: use another method here.")
        return Reference(evidence.latent, where.segments)

    def _drift(self, state: _State, evidence: StackEvidence) -> Drift:
        if "drift" not in evidence.memo:
            evidence.memo["drift"] = state.reference.drift(evidence.latent)
        drift: Drift = evidence.memo["drift"]
        return drift

    def _measure(
        self, state: _State, step: int, evidence: StackEvidence
    ) -> tuple[float, tuple[float, ...], float, float]:
        """With one host synchronisation: the risk, and per threshold the share of tokens that reach it by low drift.

        Then the share of tokens that are too old, and the share of every camera and frame that computes them all.
        """
        config, drift = self.config, self._drift(state, evidence)
        scalars = [drift.low, drift.high, state.age.mean() + 1]
        if config.low_gate:
            scalars += [(drift.token_low >= limit).float().mean() for limit in config.limits(step)]
        if config.max_age is not None:
            old = (state.age + 1 >= config.max_age).float()
            parts = unfold(old, state.reference.segments)
            scalars += [old.mean(), torch.stack([part.mean(2).amax() for part in parts]).amax()]
        found = evidence.numbers(torch.stack(scalars))
        evidence.memo["risk"] = risk = config.risk(*found[:3])
        stale, needed = (0.0, 0.0) if config.max_age is None else found[-2:]
        return risk, tuple(found[3:7]) if config.low_gate else (), stale, needed

    def _safeguard(self, level: int) -> int:
        """The level of a safeguard is at least C2; Full where tokens are not repaired."""
        return max(level, 2) if self.repairs else FULL

    def _act(
        self,
        level: int,
        share: float,
        reason: Reason,
        risk: float,
        limit: float,
        state: _State,
        evidence: StackEvidence,
    ) -> Decision:
        """A level as a decision."""
        name = LEVELS[level]
        if share >= 1:
            return Decision(Action.COMPUTE, reason, drift=risk, limit=limit, level="Full")
        if level == 0:
            alone = state.repaired or not self.config.order
            weights = (1.0,) if alone else over_levels(f"FSC(order={self.config.order})", evidence)
            action = Action.PREDICT if len(weights) > 1 else Action.REPLAY
            return Decision(action, reason, drift=risk, limit=limit, weights=weights, level=name)
        segments = evidence.where.segments
        tokens = Tokens.top(unfold(self._score(state, evidence), segments), share)
        return Decision(
            Action.REPAIR,
            reason,
            drift=risk,
            limit=limit,
            tokens=tokens,
            share=tokens.share(segments),
            level=name,
        )

    def _score(self, state: _State, evidence: StackEvidence) -> Tensor:
        """Which tokens come first [L]: the highest rho_i, ties by age; before all, those that are too old."""
        config, drift = self.config, self._drift(state, evidence)
        age = state.age + 1
        risk = config.low_weight * drift.token_low + config.high_weight * drift.token_high
        risk = risk + config.age_weight * (age / config.age_horizon).clamp(max=1)
        if config.max_age is not None:
            risk = torch.where(age >= config.max_age, inf, risk)
        return by_rank(risk, age)


class RiskProbePolicy(FSCPolicy):
    """FSC in one rollout that measures, and never repairs."""

    def __init__(self, probe: RiskProbe, blocks: int) -> None:
        """What is recorded goes into the probe."""
        super().__init__(replace(probe.config, repairs="none", max_age=None, low_gate=False), blocks)
        self._risks = probe.risks

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        """The schedule decides."""
        if cell.step in self._exact:
            return _ANCHOR
        risk = self._measure(self._states[cell.branch], cell.step, evidence)[0]
        if not isfinite(risk):
            return Decision(Action.COMPUTE, Reason.NOT_FINITE, drift=risk, level="Full")
        limit = self.config.limits(cell.step)[0]
        return Decision(Action.REPLAY, Reason.STEADY, drift=risk, limit=limit, level="C0")

    def conclude(self, cell: Cell, decision: Decision, evidence: StackEvidence) -> None:
        """Take note."""
        super().conclude(cell, decision, evidence)
        if decision.action is Action.REPLAY:
            self._risks.append(evidence.memo["risk"])
