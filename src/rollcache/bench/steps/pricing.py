"""What a run costs: a latency model that is measured once, so that speeds are matched by decisions and not by noise.

cost = sum over passes of: computed pass | replayed pass | sparse repair at its share of tokens | commit pass.

The same sum in operations instead of seconds gives the executed-token FLOPs. What a method spends on its own signal is
in the measured speedup and not in the predicted one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rollcache import StepReuse, adapters
from rollcache.bench.lanes import Lane, Plan, clone, open_lane, race
from rollcache.bench.steps.tally import Tally
from rollcache.bench.steps.timing import clock
from rollcache.decision import Action, Decision, Reason, Record
from rollcache.measure import count_flops
from rollcache.passes import Cell
from rollcache.policies.base import StackEvidence, StackPolicy
from rollcache.tokens import Tokens, unfold

if TYPE_CHECKING:
    from rollcache.bench.takes import Take
    from rollcache.street.protocol import Protocol
    from rollcache.street.world import World

SHARES = (0.1, 0.15, 0.2, 0.3, 0.5)
STEPS, ROUNDS = 4, 6  # of the runs that are timed


@dataclass(frozen=True)
class Cost:
    """Cost of the parts of a run, in seconds or in operations.

    Attributes:
        compute: a denoise pass with all blocks for all tokens.
        outside: the part of it that is outside the blocks.
        replay: a denoise pass whose stack is replayed or predicted.
        commit: a pass that writes K/V.
        repair: (share of the tokens, cost) of sparse repairs, shares rising; empty where blocks cannot run sparsely.
    """

    compute: float
    outside: float
    replay: float
    commit: float
    repair: tuple[tuple[float, float], ...] = ()

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Cost:
        """From a result file."""
        return cls(**{**found, "repair": tuple((q, c) for q, c in found["repair"])})

    def repaired(self, share: float) -> float:
        """A sparse repair of this share of the tokens, interpolated between those that were measured.

        Outside of them the nearest two go on as a line, never beyond a replayed and a computed pass.
        """
        points = self.repair
        if not points:
            return self.compute
        if len(points) == 1:
            return points[0][1]
        i = min(max(1, sum(q < share for q, _ in points)), len(points) - 1)
        (q0, c0), (q1, c1) = points[i - 1], points[i]
        return min(self.compute, max(self.replay, c0 + (c1 - c0) * (share - q0) / (q1 - q0)))

    def total(self, tally: Tally) -> float:
        """Cost of a run."""
        repairs = sum(self.compute if tally.dense else self.repaired(q) for q in tally.repairs)
        return tally.computed * self.compute + tally.skipped * self.replay + repairs + tally.commits * self.commit

    def full(self, steps: int, chunks: int) -> float:
        """Cost of full compute."""
        return chunks * (steps * self.compute + self.commit)

    def least(self, tally: Tally) -> float:
        """Cost of a run if replays were free and repairs cost their share: what is left at best (Amdahl)."""
        passes = tally.computed + tally.skipped + len(tally.repairs)
        return passes * self.outside + tally.exact * (self.compute - self.outside) + tally.commits * self.commit


@dataclass(frozen=True)
class Price:
    """Both costs of a world on a machine."""

    seconds: Cost
    flops: Cost

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Price:
        """From a result file."""
        return cls(Cost.of(found["seconds"]), Cost.of(found["flops"]))

    def speedup(self, tally: Tally, steps: int) -> float:
        """Predicted: full compute of `steps` steps / this run."""
        return self.seconds.full(steps, tally.chunks) / self.seconds.total(tally)

    def ceiling(self, tally: Tally, steps: int) -> float:
        """The same if what is not computed cost nothing."""
        return self.seconds.full(steps, tally.chunks) / self.seconds.least(tally)


def measure_price(world: World, take: Take, protocol: Protocol) -> Price:
    """Measure all parts: full compute, replays and repairs take turns.

    Of every kind of pass the fastest counts: what other work on the machine adds is no part of its price.

    Args:
        world: bare.
        take: of one window or more; its first is driven again and again.
        protocol: that of the study; short chunks of the same passes are run.
    """
    sparse = adapters.find(world.model).sparse is not None
    plans = [
        Plan(key="full", label="full compute"),
        Plan(key="replay", label="replay", policy=StepReuse(steps=STEPS, anchors=(0,))),
        *(Plan(key=f"{q}", label=f"repair of {q:.0%}", policy=_RepairAll(q)) for q in SHARES if sparse),
    ]
    return Price(_seconds(world, take, protocol, plans), _flops(world, take, protocol, plans))


def _seconds(world: World, take: Take, protocol: Protocol, plans: Sequence[Plan]) -> Cost:
    short = replace(protocol, steps=STEPS)
    home = clone(world)
    lanes = [open_lane(home if p.policy is None else world, take, short, p, reload=lambda _: world) for p in plans]
    watches = [_PassWatch(lane.session.world) for lane in lanes]
    if not race(lanes, take.actions[:1].expand(ROUNDS, -1, -1)):
        raise KeyboardInterrupt
    passes = [watch.close() for watch in watches]
    full = passes[0]
    repairs = [(_share(lane), _fastest(seen, "denoise", 1)) for lane, seen in zip(lanes[2:], passes[2:], strict=True)]
    return Cost(
        compute=_fastest(full, "denoise", 0),
        outside=min(p.outside for p in full if p.role == "denoise"),
        replay=_fastest(passes[1], "denoise", 1),
        commit=_fastest(full, "commit", 0),
        repair=_rising(repairs),
    )


def _flops(world: World, take: Take, protocol: Protocol, plans: Sequence[Plan]) -> Cost:
    def run(plan: Plan, steps: int) -> tuple[float, Lane]:
        lane = open_lane(world, take, replace(protocol, steps=steps), plan, reload=lambda _: world)
        return float(count_flops(lambda: lane.step(take.actions[0]))), lane

    once, _ = run(plans[0], 1)
    twice, _ = run(plans[0], 2)
    compute = twice - once
    two_steps = [replace(p, policy=_two_steps(p.policy)) for p in plans[1:]]
    found = [run(plan, 2) for plan in two_steps]
    replay = found[0][0] - once
    return Cost(
        compute=compute,
        outside=replay,
        replay=replay,
        commit=once - compute,
        repair=_rising([(_share(lane), total - once) for total, lane in found[1:]]),
    )


def _two_steps(policy: Any) -> Any:
    return StepReuse(steps=2, anchors=(0,)) if isinstance(policy, StepReuse) else policy


def _share(lane: Lane) -> float:
    """The share of the tokens that a repair really ran, after rounding to whole cells."""
    assert lane.handle is not None
    return next(r.share for r in lane.handle.trace if r.action is Action.REPAIR)


def _rising(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The points of a curve that must not fall: where a smaller share took longer, that was noise."""
    out: list[tuple[float, float]] = []
    for share, cost in sorted(points, reverse=True):
        out.append((share, min(cost, out[-1][1]) if out else cost))
    return tuple(out[::-1])


def _fastest(passes: Sequence[_Timed], role: str, first: int) -> float:
    return min(p.seconds for p in passes if p.role == role and p.step >= first)


class _Timed(NamedTuple):
    """One pass: what it was, its seconds, and those of them outside the blocks."""

    role: str
    step: int
    seconds: float
    outside: float


class _PassWatch:
    """Times every pass of a world's model; the blocks of a pass as one."""

    def __init__(self, world: World) -> None:
        self._now = clock(world.device)
        self._passes: list[_Timed] = []
        self._began = self._stack = self._blocks = 0.0
        blocks = list(world.model.blocks)
        self._hooks = [
            world.model.register_forward_pre_hook(self._enter),
            world.model.register_forward_hook(self._leave, with_kwargs=True),
            blocks[0].register_forward_pre_hook(self._enter_stack),
            blocks[-1].register_forward_hook(self._leave_stack),
        ]

    def _enter(self, *_: object) -> None:
        self._began = self._now()

    def _enter_stack(self, *_: object) -> None:
        self._stack = self._now()

    def _leave_stack(self, *_: object) -> None:
        self._blocks = self._now() - self._stack

    def _leave(self, model: object, args: Any, kwargs: Mapping[str, Any], output: object) -> None:
        where, spent = kwargs["where"], self._now() - self._began
        self._passes.append(_Timed(where.role, where.step, spent, spent - self._blocks))

    def close(self) -> list[_Timed]:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        return self._passes


@dataclass(frozen=True)
class _RepairAll:
    """Settings of a policy that repairs the same share of the tokens in every pass but the first, to be timed."""

    share: float

    def build(self, blocks: int) -> _RepairAllPolicy:
        return _RepairAllPolicy(self, blocks)

    def explain(self, record: Record) -> str:
        return str(record.action)


class _RepairAllPolicy(StackPolicy):
    repairs = True

    def __init__(self, config: _RepairAll, blocks: int) -> None:
        super().__init__(blocks)
        self._share = config.share
        self._generator = torch.Generator().manual_seed(0)

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        hidden, segments = evidence.hidden, evidence.where.segments
        score: Tensor = torch.rand(hidden.shape[1], generator=self._generator).to(hidden.device)
        tokens = Tokens.top(unfold(score, segments), self._share)
        return Decision(Action.REPAIR, Reason.SCHEDULE, tokens=tokens, share=tokens.share(segments))
