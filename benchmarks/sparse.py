"""How much of what token repair could save does it save?

    python benchmarks/sparse.py --shares 0.1 0.2 --json sparse.json

The many-step teacher denoises a window at full compute; beside it variants with the same exact steps repair, at every
other step, the tokens whose latent changed most since the last exact one, or replay the whole stack. All take every
step in turn, so that a pass is timed next to the full pass of the same step. What is compared is the median of those
ratios, over exact steps and over the others, and the two ideals: cost in proportion to the tokens, and the same above
what a replayed pass costs (embedding, head and the decision, which no method skips). The commit pass is not counted.
On a machine that others use too, `--clock cpu --threads 1` counts only the time in which this process ran.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import rollcache
from rollcache import StepReuse
from rollcache.bench.lanes import clone
from rollcache.bench.options import FlatMachine, Machine
from rollcache.bench.progress import Narrator
from rollcache.bench.results import dump
from rollcache.bench.takes import Take, plan_take
from rollcache.decision import Action, Decision, Reason, Record
from rollcache.measure import provenance, write_atomic
from rollcache.passes import Cell
from rollcache.policies import schedules
from rollcache.policies.base import StackEvidence, StackPolicy
from rollcache.street.data import latent_actions
from rollcache.street.protocol import Protocol
from rollcache.street.world import Session, World
from rollcache.tokens import Tokens, unfold


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is driven, how many steps are exact, and which shares of the tokens the others compute."""

    scenario: Literal["urban", "highway", "u-turn"] = "urban"
    seed: int = 0
    windows: int = 1
    steps: int = 50
    warmup: int = 6
    anchors: int = 10
    shares: tuple[float, ...] = (0.10, 0.15, 0.20, 0.30)
    clock: Literal["wall", "cpu"] = "wall"
    json: Path | None = None
    machine: FlatMachine = field(default_factory=lambda: Machine(stage="teacher"))

    @property
    def exact(self) -> tuple[int, ...]:
        """The exact steps: FSC's schedule."""
        return schedules.dense_to_sparse(self.steps, self.warmup, self.anchors)


@dataclass(frozen=True, kw_only=True)
class Repair:
    """Anchors are exact; every other step computes the tokens that changed most since the last of them."""

    steps: int
    anchors: tuple[int, ...]
    share: float

    def build(self, blocks: int) -> RepairPolicy:
        """See `PolicyConfig.build`."""
        return RepairPolicy(self, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        return record.line()


class RepairPolicy(StackPolicy):
    """`Repair` in one rollout: remembers the latent of the last exact step."""

    repairs = True

    def __init__(self, config: Repair, blocks: int) -> None:
        super().__init__(blocks)
        self.config, self.steps = config, config.steps
        self._exact = frozenset(config.anchors)

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        """The schedule decides when, the latent which."""
        if cell.step in self._exact:
            return Decision(Action.COMPUTE, Reason.SCHEDULE)
        segments = evidence.where.segments
        change = (evidence.latent - self._latent).abs().mean((0, 2))
        tokens = Tokens.top(unfold(change, segments), self.config.share)
        return Decision(Action.REPAIR, Reason.SCHEDULE, tokens=tokens, share=tokens.share(segments))

    def conclude(self, cell: Cell, decision: Decision, evidence: StackEvidence) -> None:
        """An exact step is what the next ones are compared with."""
        if decision.action is Action.COMPUTE:
            self._latent = evidence.latent.clone()


class Lane(Session):
    """A variant whose denoising steps are taken one by one."""

    def __init__(self, world: World, take: Take, protocol: Protocol, policy: Any, clock: str) -> None:
        world = world if policy is None else clone(world)
        super().__init__(world, take.start, protocol, seed=take.seed)
        self.handle = None if policy is None else rollcache.enable(world.model, policy)
        self.seconds: list[float] = []
        self._clock = time.process_time if clock == "cpu" else time.perf_counter

    def begin(self, frames: Tensor) -> None:
        """Stand before a window, whose actions these are."""
        self._action = latent_actions(frames.float().to(self.world.device))
        self._seen = self._told(self._action, len(self._action))
        self._here = self._where(self._action, self._seen)
        self.x = self._noise()

    def advance(self, step: int) -> None:
        """One Euler step, timed."""
        t, after = self._sigmas[step], self._sigmas[step + 1]
        self._wait()
        began = self._clock()
        v = self._pass(self.x, t, self._action, self._seen, replace(self._here, step=step, sigma=t))
        self._wait()
        self.seconds.append(self._clock() - began)
        self.x = self.x - (t - after) * v

    def end(self) -> None:
        """Commit the window."""
        self._commit(self.x, self._action, self._seen)
        self.chunk += 1

    def share(self) -> float:
        """Tokens that steps other than anchors computed, as a share of all."""
        assert self.handle is not None
        found = [r.share for r in self.handle.trace if r.action is Action.REPAIR]
        return statistics.fmean(found) if found else 0.0

    def _wait(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()


def ideal(steps: int, exact: int, share: float, floor: float = 0.0) -> float:
    """Speedup when a pass for `share` of the tokens costs `floor + (1 - floor) * share` of a full one."""
    return steps / (exact + (steps - exact) * (floor + (1 - floor) * share))


def measured(full: Sequence[float], lane: Sequence[float], exact: Sequence[int], steps: int) -> dict[str, float]:
    """Cost of exact and of other passes as shares of the full pass beside them, and the speedup that they make.

    Args:
        full: seconds of every pass at full compute, window after window.
        lane: those of the variant.
        exact: steps of a window that are exact.
        steps: of a window.

    Returns:
        Medians `exact` and `other`, the speedup of a window of such passes with that of the quartiles as `low` and
        `high`, and `total`, the plain ratio of the sums.
    """
    ratio = [b / a for a, b in zip(full, lane, strict=True)]
    kinds = {True: [0.0, 0.0, 0.0], False: [0.0, 0.0, 0.0]}
    for kind in kinds:
        found = [r for i, r in enumerate(ratio) if (i % steps in exact) is kind]
        kinds[kind] = statistics.quantiles(found, n=4, method="inclusive")
    n = len(exact)
    slow, middle, fast = (steps / (n * a + (steps - n) * b) for a, b in zip(kinds[True], kinds[False], strict=True))
    return {
        "exact": kinds[True][1],
        "other": kinds[False][1],
        "speedup": middle,
        "low": min(slow, fast),
        "high": max(slow, fast),
        "total": sum(full) / sum(lane),
    }


@torch.inference_mode()
def race(lanes: Sequence[Lane], actions: Tensor, steps: int, narrator: Narrator | None = None) -> None:
    """All lanes through all windows, step by step; who goes first turns."""
    for lane in lanes[:1]:  # the first pass of a process is slow
        lane.begin(actions[0])
        lane.advance(0)
        lane.seconds.clear()
    for n, action in enumerate(actions):
        for lane in lanes:
            lane.begin(action)
        for step in range(steps):
            for lane in lanes if step % 2 == 0 else lanes[::-1]:
                lane.advance(step)
        for lane in lanes:
            lane.end()
        if narrator is not None:
            narrator.chunk(n, [])


def study(world: World, take: Take, settings: Settings, narrator: Narrator | None = None) -> list[dict[str, Any]]:
    """One row a variant."""
    protocol = Protocol.named("chunked", steps=settings.steps)
    exact, steps = settings.exact, settings.steps
    policies = [Repair(steps=steps, anchors=exact, share=q) for q in settings.shares]
    full, replay, *repairs = (
        Lane(world, take, protocol, p, settings.clock) for p in (None, StepReuse(steps=steps, anchors=exact), *policies)
    )
    race([full, *repairs, replay], take.actions[: settings.windows], steps, narrator)
    found = [{"how": "replay", "q": 0.0, "share": 0.0, **measured(full.seconds, replay.seconds, exact, steps)}]
    for q, lane in zip(settings.shares, repairs, strict=True):
        row = measured(full.seconds, lane.seconds, exact, steps)
        found.append({"how": "repair", "q": q, "share": lane.share(), **row})
    floor = found[0]["other"]
    for row in found:
        row["ideal"] = ideal(steps, len(exact), row["share"])
        row["ideal_floor"] = ideal(steps, len(exact), row["share"], floor)
        row["efficiency"] = row["speedup"] / row["ideal"]
        row["efficiency_floor"] = row["speedup"] / row["ideal_floor"]
    return found


def main(settings: Settings) -> int:
    """Run, print, store."""
    world = settings.machine.world()
    protocol = Protocol.named("chunked", steps=settings.steps)
    with Narrator() as narrator:
        narrator.begin(settings.scenario, settings.windows)
        plan = plan_take(settings.scenario, seed=settings.seed, chunks=max(2, settings.windows), protocol=protocol)
        found = study(world, plan.make(world), settings, narrator)
    Console(width=None if sys.stdout.isatty() else 120).print(table(found, settings))
    if settings.json is not None:
        config = replace(settings, machine=settings.machine)
        write_atomic(settings.json, dump({"runs": found, "provenance": provenance(config, dtype=world.dtype)}))
    return 0


def table(found: Sequence[dict[str, Any]], settings: Settings) -> Table:
    """Speedups beside their ideals."""
    title = f"Token repair: {len(settings.exact)} of {settings.steps} steps exact; times as shares of a full pass"
    out = Table(box=box.SIMPLE_HEAD, title=title)
    heads = ("tokens", "exact pass", "other pass", "speedup", "quartiles", "sums", "ideal", "reached", "above floor")
    out.add_column("how")
    for head in (*heads, "reached"):
        out.add_column(head, justify="right")
    for r in found:
        out.add_row(
            r["how"],
            f"{r['share']:.3f}",
            f"{r['exact']:.3f}",
            f"{r['other']:.3f}",
            f"{r['speedup']:.2f}x",
            f"{r['low']:.2f} to {r['high']:.2f}",
            f"{r['total']:.2f}x",
            f"{r['ideal']:.2f}x",
            f"{r['efficiency']:.0%}",
            f"{r['ideal_floor']:.2f}x",
            f"{r['efficiency_floor']:.0%}",
        )
    return out


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
