"""FSC, Frequency-Step Cache (Xu et al., October 2026): a schedule of exact steps, and measured repairs between.

Anchors, fixed before a chunk begins, compute the whole stack and replace the reference latent X_ref. Between them a
risk made of the latent's drift from X_ref and the age of the tokens chooses a level: C0 replays the residual of the
whole stack, C1 to C3 recompute a rising share of the tokens, Full computes all and keeps X_ref.

The paper's text is not public beyond captions and tables. Anchors, operating points and the order of the levels are
theirs; weights, thresholds, the low-frequency gate, phase shaping and safeguards are our reconstruction, and settings
here. With latents on a straight line, shift 8 and 50 steps it reproduces the routing shares of their table 18 to a
percent and FSC-Quality's 14.8 of 37.7 PFLOP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import hypot, inf, isfinite
from typing import Any, Literal

import torch

from rollcache.decision import Action, Reason, Record
from rollcache.policies import schedules
from rollcache.policies.fsc_policy import FULL, LEVELS, FSCPolicy, RiskProbePolicy
from rollcache.settings import check_choice, check_count, check_range

QUALITY = 1.65
"""`risk_scale` of FSC-Quality, at which the thresholds were chosen."""

Schedule = Literal["dense_to_sparse", "uniform", "sparse_to_dense"]


@dataclass(frozen=True, kw_only=True)
class FSC:
    """Settings of FSC; the defaults are FSC-Quality. The knob is `risk_scale`: 0 is exact, `inf` never repairs.

    The thresholds belong to a noise schedule (50 steps, shift 8): `recalibrated` finds those of another model.

    Attributes:
        steps: denoising steps of a chunk (N).
        warmup: exact steps first (W). None is round(0.12 N).
        anchors: exact steps after them (n). None is round(0.2 N).
        schedule: how anchors are spread: their gaps grow (Eq. 1), are even, or shrink.
        at: instead: the anchors after the warm-up.
        tail: more anchors after those.
        end: the last scheduled anchor, as a share of the last step. Pinned down by the paper's gaps, as `exponent`.
        exponent: g of Eq. 1.
        risk_scale: factor r on all thresholds; larger repairs less.
        thresholds: risk from which C1, C2, C3, Full are chosen, before r. Ours, fitted to the paper's routing shares.
        shares: tokens that C1, C2, C3 compute, before `share_scale`. Ours.
        share_scale: q_scale.
        full_above: a level with this share or more computes all: then sparse blocks are no faster. Ours.
        low_gate: raise a level by one where much of the picture drifts in the low band.
        low_share: the gate raises when more than this share of the tokens reaches the next threshold by low drift
            alone (p_LF). What p_LF means in the paper is not public; ours.
        phase: `late_relax` raises the thresholds of later steps. Ours; the paper says only that it changes little.
        phase_gain: by how much, at the last step.
        low_weight: of the low band in the risk (w_L). These four are ours.
        high_weight: of the high band (w_H).
        age_weight: of the mean age of the tokens (w_A).
        age_horizon: age in steps that counts as 1 (A).
        max_age: tokens this old are computed whatever their risk (k_tok); all, when they are more than half. None is
            no limit.
        max_replays: C0 in a row after which the level is at least C2. None is no limit. Ours.
        collapsed: ablation: C1, C2 and C3 share the threshold of C1, so that C3 is the only one of them. (Safeguards
            still use C2.)
        coupled: ablation: no anchors after the warm-up; Full replaces X_ref.
        repairs: `sparse` runs chosen tokens alone; `refresh` runs all and keeps the chosen ones; `none` replays where
            the level is C1 to C3.
        order: what C0 adds. 0 is theirs, the residual of the last computed step; 1 and 2 extrapolate those of the last
            two or three over noise levels, until tokens are repaired. Ours.
        table: ablation: the level of every step, by name, in place of the risk. Those of anchors are not read.
    """

    steps: int = 50
    warmup: int | None = None
    anchors: int | None = None
    schedule: Schedule = "dense_to_sparse"
    at: tuple[int, ...] | None = None
    tail: tuple[int, ...] = ()
    end: float = schedules.END
    exponent: float = schedules.EXPONENT
    risk_scale: float = QUALITY
    thresholds: tuple[float, ...] = (0.085, 0.16, 0.21, 0.46)
    shares: tuple[float, ...] = (0.10, 0.15, 0.25)
    share_scale: float = 1.25
    full_above: float = 0.6
    low_gate: bool = True
    low_share: float = 0.2
    phase: Literal["none", "late_relax"] = "none"
    phase_gain: float = 0.2
    low_weight: float = 0.45
    high_weight: float = 0.45
    age_weight: float = 0.1
    age_horizon: int = 10
    max_age: int | None = None
    max_replays: int | None = 10
    collapsed: bool = False
    coupled: bool = False
    repairs: Literal["sparse", "refresh", "none"] = "sparse"
    order: int = 0
    table: tuple[str, ...] | None = None

    @classmethod
    def preset(cls, name: str, steps: int = 50, **changes: Any) -> FSC:
        """The operating point called `quality` or `speed`."""
        check_choice("preset", name, Literal["quality", "speed"])
        return (cls.quality if name == "quality" else cls.speed)(steps, **changes)

    @classmethod
    def quality(cls, steps: int = 50, **changes: Any) -> FSC:
        """FSC-Quality: W=6, n=10, r=1.65 of 50 steps. So are all points below unless they say otherwise."""
        return cls(steps=steps, **changes)

    @classmethod
    def speed(cls, steps: int = 50, **changes: Any) -> FSC:
        """FSC-Speed: W=5, r=1.55."""
        return cls._with(changes, steps=steps, warmup=round(0.1 * steps), risk_scale=1.55)

    @classmethod
    def with_tail(cls, steps: int = 50, **changes: Any) -> FSC:
        """The paper's fastest point: W=5, and anchors at 44 and 47."""
        tail = tuple(dict.fromkeys(round(share * (steps - 1)) for share in (0.9, 0.96)))
        return cls._with(changes, steps=steps, warmup=round(0.1 * steps), tail=tail)

    @classmethod
    def anchors_only(cls, steps: int = 50, **changes: Any) -> FSC:
        """Ablation: no repair at all, and n=13."""
        never = {"risk_scale": inf, "max_replays": None, "repairs": "none"}
        return cls._with(changes, steps=steps, anchors=round(0.26 * steps), **never)

    @classmethod
    def uniform(cls, steps: int = 50, **changes: Any) -> FSC:
        """Ablation: evenly spread anchors."""
        return cls._with(changes, steps=steps, schedule="uniform")

    @classmethod
    def sparse_to_dense(cls, steps: int = 50, **changes: Any) -> FSC:
        """Ablation: the gaps in the opposite order."""
        return cls._with(changes, steps=steps, schedule="sparse_to_dense")

    @classmethod
    def reactive(cls, steps: int = 50, **changes: Any) -> FSC:
        """Ablation: purely reactive (`coupled`), with the r at which the paper matched its latency."""
        return cls._with(changes, steps=steps, coupled=True, risk_scale=1.076)

    @classmethod
    def one_level(cls, steps: int = 50, **changes: Any) -> FSC:
        """Ablation: `collapsed` repair thresholds."""
        return cls._with(changes, steps=steps, collapsed=True)

    @classmethod
    def no_phase(cls, steps: int = 50, **changes: Any) -> FSC:
        """Ablation: no phase shaping. Our default has none either: compare with `phase="late_relax"`."""
        return cls._with(changes, steps=steps, phase="none")

    @classmethod
    def static(cls, steps: int = 50, shift: float = 8.0, **changes: Any) -> FSC:
        """A fixed table of levels, that of `levels_on_a_line` for a timestep shift: what the measured risk adds to.

        Of 50 steps with shift 8: C1 at 37, 38, 42, 43, C2 at 44, C3 at 45 to 47, Full at 48, 49.
        """
        config = cls(steps=steps, **changes)
        left = [1 - i / steps for i in range(steps)]
        return replace(config, table=config.levels_on_a_line([shift * u / (1 + (shift - 1) * u) for u in left]))

    @classmethod
    def _with(cls, changes: dict[str, Any], **settings: Any) -> FSC:
        return cls(**(settings | changes))

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 1)
        if self.warmup is not None:
            check_count("warmup", self.warmup)
        if self.anchors is not None:
            check_count("anchors", self.anchors, 1)
        check_choice("schedule", self.schedule, Schedule)
        check_range("end", self.end, 0, 1)
        check_range("exponent", self.exponent, 0)
        for name in ("risk_scale", "share_scale", "phase_gain", "low_weight", "high_weight", "age_weight"):
            check_range(name, getattr(self, name), 0)
        for name in ("full_above", "low_share"):
            check_range(name, getattr(self, name), 0, 1)
        check_choice("phase", self.phase, Literal["none", "late_relax"])
        check_choice("repairs", self.repairs, Literal["sparse", "refresh", "none"])
        check_count("age_horizon", self.age_horizon, 1)
        check_count("order", self.order)
        if self.order > 2:
            raise ValueError(f"order must be 0, 1 or 2, got {self.order}.")
        for name in ("max_age", "max_replays"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)
        for name, count in (("thresholds", 4), ("shares", 3)):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            _check_rising(name, getattr(self, name), count)
        if self.shares[-1] > 1:
            raise ValueError(f"shares must be in (0, 1], got {self.shares}.")
        object.__setattr__(self, "tail", tuple(self.tail))
        if self.at is not None:
            object.__setattr__(self, "at", tuple(self.at))
        self._check_schedule()
        if self.table is not None:
            object.__setattr__(self, "table", tuple(self.table))
            _check_table(self.table, self.steps)

    def _check_schedule(self) -> None:
        if self.coupled and (self.anchors is not None or self.at is not None or self.tail):
            raise ValueError("coupled has no anchors after the warm-up: leave out anchors, at and tail.")
        if self.at is not None and self.anchors is not None:
            raise ValueError("give anchors, a number, or at, the steps themselves; not both.")
        exact = self.exact
        for name, steps in (("at", self.at or ()), ("tail", self.tail)):
            for step in steps:
                check_count(f"a step of {name}", step)
                if step >= self.steps:
                    raise ValueError(
                        f"step {step} of {name} lies past the last of {self.steps} steps, {self.steps - 1}."
                    )
        if exact[-1:] >= (self.steps,):
            raise ValueError(f"a warm-up of {self.warmup} steps does not fit into {self.steps}.")
        if any(b <= a for a, b in pairwise(exact)):
            raise ValueError(f"warm-up, anchors and tail must rise strictly, got {exact}.")
        if exact[:1] != (0,):
            raise ValueError(f"anchors begin with {exact[:1]}; nothing is stored before step 0, so it must be 0.")

    @property
    def exact(self) -> tuple[int, ...]:
        """All steps that are computed by schedule."""
        warmup = round(0.12 * self.steps) if self.warmup is None else self.warmup
        count = max(1, round(0.2 * self.steps)) if self.anchors is None else self.anchors
        if self.coupled:
            return tuple(range(max(1, warmup)))
        if self.at is not None:
            return (*range(warmup), *self.at, *self.tail)
        if self.schedule == "sparse_to_dense":
            found = schedules.sparse_to_dense(self.steps, warmup, count, self.end, self.exponent)
        else:
            exponent = self.exponent if self.schedule == "dense_to_sparse" else 1
            found = schedules.dense_to_sparse(self.steps, warmup, count, self.end, exponent)
        return (*found, *self.tail)

    def risk(self, low: float, high: float, age: float) -> float:
        """The risk: rho = w_L d_L + w_H d_H + w_A min(age / A, 1), `age` being the mean over the tokens."""
        return self.low_weight * low + self.high_weight * high + self.age_weight * min(age / self.age_horizon, 1)

    def limits(self, step: int) -> tuple[float, ...]:
        """Risk from which C1, C2, C3 and Full are chosen at a step: theta_j r phi(step)."""
        first, _, _, last = self.thresholds
        base = (first, first, first, last) if self.collapsed else self.thresholds
        phi, half = 1.0, self.steps / 2
        if self.phase == "late_relax" and step > half:
            phi += self.phase_gain * (step - half) / (self.steps - 1 - half)
        return tuple(theta * self.risk_scale * phi for theta in base)

    def share(self, level: int) -> float:
        """Tokens that a level computes, as a share of all; 1 where that is `full_above` or more."""
        if level in (0, FULL):
            return float(level == FULL)
        share = self.shares[level - 1] * self.share_scale
        return 1.0 if share >= self.full_above else share

    def route(self, risk: float, step: int, low: Sequence[float] = ()) -> int:
        """The level, 0 for C0 to 4 for Full.

        Args:
            risk: rho.
            step: denoising step.
            low: for C1, C2, C3, Full: share of the tokens whose low-band drift alone reaches that threshold. Left out
                where there is no gate.
        """
        if not isfinite(risk):
            return FULL
        level = sum(risk >= limit for limit in self.limits(step))
        if self.low_gate and low and level < FULL and low[level] > self.low_share:
            level += 1
        return 0 if self.repairs == "none" and level < FULL else level

    def levels_on_a_line(self, sigmas: Sequence[float]) -> tuple[str, ...]:
        """The level of every step if latents are (1 - sigma) x0 + sigma eps with fixed x0 and eps of unit variance.

        Then both bands drift by sqrt(2) |s - s_ref| / |(1 - s_ref, s_ref)|. Without the gate and the safeguards;
        repairs take the oldest tokens. Anchors have level Full.
        """
        levels, parts, reference = [], [(1.0, 0)], sigmas[0]  # parts: (share of the tokens, age), the oldest first
        for step, sigma in enumerate(sigmas):
            drift = 2**0.5 * abs(sigma - reference) / hypot(1 - reference, reference)
            parts = [(share, age + 1) for share, age in parts]
            level = self.route(self.risk(drift, drift, sum(share * age for share, age in parts)), step)
            if step in self.exact:
                level = FULL
            if step in self.exact or (self.coupled and level == FULL):
                reference = sigma
            levels.append(LEVELS[level])
            parts = _renew(parts, self.share(level))
        return tuple(levels)

    def recalibrated(
        self, risks: Sequence[float], at: Sequence[float] = (0.706, 0.824, 0.853, 0.941), scale: float = QUALITY
    ) -> FSC:
        """Thresholds for another model: those that give FSC-Quality's routing shares.

        Args:
            risks: of the steps between anchors of some rollouts, as `RiskProbe` records them.
            at: quantiles of the risks that become the thresholds: 24, 4, 1, 3, 2 of 34 steps at the five levels.
            scale: the `risk_scale` at which they shall hold.
        """
        known = [r for r in risks if isfinite(r)]
        if len(known) < len(at):
            raise ValueError(f"{len(known)} finite risks are too few to calibrate with: record at least {len(at)}.")
        cuts = torch.tensor(known, dtype=torch.float64).quantile(torch.tensor(at, dtype=torch.float64))
        return replace(self, thresholds=tuple((cuts / scale).tolist()))

    def build(self, blocks: int) -> FSCPolicy:
        """See `PolicyConfig.build`."""
        return FSCPolicy(self, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        did = {Action.COMPUTE: "computed", Action.REPLAY: "replayed"}.get(
            record.action, f"{record.share:.1%} of the tokens computed"
        )
        numbers = ""
        if record.drift == record.drift:
            over = record.drift >= record.limit
            numbers = f": risk {record.drift:.4g} {'>=' if over else '<'} {record.limit:.4g}"
            if record.reason is Reason.DRIFT and not over:
                numbers += ", raised by the low band"
        level = f"{record.level}, " if record.level in LEVELS else ""
        return (
            f"Chunk {record.chunk}, step {record.step}, whole stack ({record.branch}): {level}{did}, "
            f"{record.reason}{numbers}."
        )


@dataclass(frozen=True, kw_only=True)
class RiskProbe:
    """Runs the anchors of FSC and replays every other step, and notes the risk of each: for `FSC.recalibrated`.

    Attributes:
        config: whose schedule and weights.
        risks: of all steps between anchors, of all branches, chunks and rollouts, in the order in which they ran.
    """

    config: FSC = field(default_factory=FSC)
    risks: list[float] = field(default_factory=list, repr=False, compare=False)

    def build(self, blocks: int) -> RiskProbePolicy:
        """See `PolicyConfig.build`."""
        return RiskProbePolicy(self, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        return self.config.explain(record)


def _renew(parts: list[tuple[float, int]], share: float) -> list[tuple[float, int]]:
    """Tokens by age, the oldest first, after a `share` of them was computed from the front."""
    left, rest = share, []
    for size, age in parts:
        taken = min(size, left)
        left -= taken
        if size > taken:
            rest.append((size - taken, age))
    return [*rest, (share, 0)] if share else rest


def _check_rising(name: str, values: tuple[float, ...], count: int) -> None:
    """Positive numbers that do not fall."""
    if len(values) != count:
        raise ValueError(f"{name} must be {count} numbers, got {len(values)}.")
    for value in values:
        check_range(f"one of {name}", value, 0)
    if values[0] <= 0 or any(b < a for a, b in pairwise(values)):
        raise ValueError(f"{name} must be positive and rise, got {values}.")


def _check_table(table: tuple[str, ...], steps: int) -> None:
    if len(table) != steps:
        raise ValueError(f"table must name the level of each of {steps} steps, got {len(table)} names.")
    for name in table:
        if name not in LEVELS:
            raise ValueError(f"table names the level {name!r}; the levels are {', '.join(LEVELS)}.")
