"""Keep, amend or replan: Replan beside X-Cache, window reuse and the frozen window, with three ways to look ahead.

    python benchmarks/replan.py --seeds 0 1 --json replan.json

A receding window holds the actions that are not known yet at the last one (`hold`), lets their change go on
(`extrapolate`), or takes them from the plan that a driving policy has anyway (`plan`: here the drive's own next rows,
with an error of `--plan-error` of an action's scale, which grows with the time ahead). Fidelity is against full compute
that looks ahead in the same way; speed is a paired ratio of transformer time over whole KV cycles, in one process.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rollcache import Replan, WindowReuse, XCache
from rollcache.bench.costs import PassClock
from rollcache.bench.decisions import Decisions, Window
from rollcache.bench.lanes import FULL, Lane, Plan, open_lane, race
from rollcache.bench.options import FlatMachine, Machine
from rollcache.bench.progress import Narrator
from rollcache.bench.results import dump
from rollcache.bench.takes import Take, plan_take
from rollcache.measure import compare, motion, provenance, write_atomic
from rollcache.street.dit import ACTION_SD
from rollcache.street.protocol import Protocol

Ahead = Literal["hold", "extrapolate", "plan"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which drives, how long, and how the loop looks ahead."""

    scenarios: tuple[Literal["urban", "highway", "u-turn"], ...] = ("urban", "highway", "u-turn")
    actions: Path | None = None
    """A recorded drive (CSV at 12 rows a second) instead of the scripted ones."""
    seeds: tuple[int, ...] = (0,)
    chunks: int = 32
    ahead: tuple[Ahead, ...] = ("hold", "extrapolate", "plan")
    plan_error: float = 0.03
    tolerances: tuple[float, ...] = (0.03, 0.05, 0.1)
    """`amend_above` of Replan: below it the plan is kept."""
    replan_above: tuple[float, ...] = (0.3,)
    """`replan_above`: below it the emitted frame is amended."""
    target: float = 55.0
    """Pooled PSNR in dB that the proposed limits must reach on every take."""
    json: Path | None = None
    machine: FlatMachine = field(default_factory=Machine)


def variants(tolerances: Sequence[float], limits: Sequence[float]) -> list[Plan]:
    """What runs beside full compute."""
    found = [
        Plan(key="xcache", label="X-Cache", policy=XCache()),
        Plan(key="paper", label="X-Cache as in the paper", policy=XCache.paper()),
        Plan(key="reuse", label="WindowReuse, no pass", policy=WindowReuse(), no_pass=True),
        Plan(key="frozen", label="frozen window", frozen=True),
        Plan(key="floor", label="numerical floor", start_noise=1e-3),
    ]
    for low, high in itertools.product(tolerances, limits):
        if high >= low:
            policy = Replan(amend_above=low, replan_above=high)
            key, label = f"replan {low:g} {high:g}", f"Replan, amend above {low:g}, replan above {high:g}"
            found.append(Plan(key=key, label=label, policy=policy, no_pass=True))
    return found


def plans(take: Take, ahead: Ahead, error: float) -> list[Tensor | None]:
    """What is known at every chunk of what comes after it: the next rows of the drive, the further the less exactly."""
    if ahead != "plan":
        return [None] * take.chunks
    generator = torch.Generator().manual_seed(take.seed)
    rows = take.actions.flatten(0, 1)
    per = take.actions.shape[1]
    found: list[Tensor | None] = []
    for n in range(take.chunks):
        coming = rows[(n + 1) * per : (n + 4) * per]
        drift = error * torch.randn(2, generator=generator) * torch.tensor(ACTION_SD)
        growing = torch.linspace(0, 1, len(coming) + 1)[1:, None] if len(coming) else torch.zeros(0, 1)
        found.append(coming + growing * drift)
    return found


def row(
    lane: Lane, full: Lane, frames: Mapping[str, Tensor], reference: Mapping[str, Tensor], clock: PassClock
) -> dict[str, Any]:
    """The figures of one lane."""
    protocol = lane.session.protocol
    window = Window.of(len(full.seconds), protocol)
    spent = [sum(one.seconds[n] for n in window.chunks) for one in (full, lane)]
    decisions = Decisions.of(lane)
    reached = decisions.ceiling(clock.times(window, full.seconds), window)
    pooled = sum(float((frames[g] - reference[g]).double().square().sum()) for g in frames)
    pooled /= sum(x.numel() for x in frames.values())
    trace = list(lane.handle.trace) if lane.handle is not None else []
    levels = Counter(r.level or str(r.action) for r in trace if r.step == 0 and r.block == 0)
    return {
        "plan": lane.key,
        "label": lane.plan.label,
        "speedup": spent[0] / spent[1],
        "ceiling": reached.full / reached.left if lane.handle is not None and reached.left > 0 else None,
        "skip": reached.skip_rate if lane.handle is not None else None,
        "psnr": compare(frames, reference).psnr,
        "pooled": -10 * math.log10(max(pooled, 1e-12)),
        "motion": motion(frames, reference).ratio,
        "levels": dict(levels),
    }


def main(settings: Settings) -> int:
    """Run all takes; what is finished is saved after every one."""
    world = settings.machine.world()
    found: list[dict[str, Any]] = []
    with Narrator() as narrator:
        for scenario in settings.scenarios if settings.actions is None else ("highway",):
            for seed in settings.seeds:
                for ahead in settings.ahead:
                    protocol = Protocol(ahead="extrapolate" if ahead == "extrapolate" else "hold")
                    narrator.begin(f"{scenario} {seed}, {ahead}", settings.chunks)
                    take = plan_take(
                        scenario, seed=seed, chunks=settings.chunks, protocol=protocol, actions=settings.actions
                    ).make(world)
                    lanes = [
                        open_lane(world, take, protocol, plan, reload=settings.machine.reload)
                        for plan in (FULL, *variants(settings.tolerances, settings.replan_above))
                    ]
                    with PassClock(world) as clock:
                        coming = plans(take, ahead, settings.plan_error)
                        if not race(lanes, take.actions, narrator.chunk, plans=coming):
                            return 130
                    reference = world.decode(torch.cat(lanes[0].latents))
                    for lane in lanes[1:]:
                        frames = world.decode(torch.cat(lane.latents))
                        figures = row(lane, lanes[0], frames, reference, clock)
                        found.append({"scenario": scenario, "seed": seed, "ahead": ahead, **figures})
                    if settings.json is not None:
                        config = replace(settings, machine=settings.machine)
                        document = {"runs": found, "provenance": provenance(config, dtype=world.dtype)}
                        write_atomic(settings.json, dump(document))
    console = Console(width=None if sys.stdout.isatty() else 140)
    for table in tables(found):
        console.print(table)
    for ahead in dict.fromkeys(r["ahead"] for r in found):
        here = [r for r in found if r["ahead"] == ahead]
        console.print(f"{ahead}: {proposal(here, settings.target)}")
    return 0


def proposal(found: Sequence[Mapping[str, Any]], target: float) -> str:
    """The fastest limits of Replan with which every take reaches a pooled PSNR, in words."""
    ours = [r for r in found if r["plan"].startswith("replan")]
    good = []
    for key in dict.fromkeys(r["plan"] for r in ours):
        rows = [r for r in ours if r["plan"] == key]
        if min(r["pooled"] for r in rows) >= target:
            good.append((statistics.fmean(1 / r["speedup"] for r in rows), rows[0]["label"]))
    if not good:
        return f"no limits reach {target:g} dB on every take; try smaller --tolerances"
    return f"for {target:g} dB on every take: {min(good)[1]}"


def tables(found: Sequence[Mapping[str, Any]]) -> list[Table]:
    """One table for every scenario and way to look ahead: medians of speed, means of fidelity over the seeds."""
    out = []
    for scenario, ahead in dict.fromkeys((r["scenario"], r["ahead"]) for r in found):
        table = Table(box=box.SIMPLE_HEAD, title=f"{scenario}, actions ahead: {ahead}")
        table.add_column("how")
        for head in ("speedup", "ceiling", "dB", "pooled dB", "motion", "keep / amend / replan / cycle"):
            table.add_column(head, justify="right")
        here = [r for r in found if (r["scenario"], r["ahead"]) == (scenario, ahead)]
        for key in dict.fromkeys(r["plan"] for r in here):
            rows = [r for r in here if r["plan"] == key]
            ceilings = [r["ceiling"] for r in rows if r["ceiling"] is not None]
            levels = sum((Counter(r["levels"]) for r in rows), Counter())
            counts = [levels[k] for k in ("keep", "amend", "replan", "compute")]
            table.add_row(
                rows[0]["label"],
                f"{statistics.median(r['speedup'] for r in rows):.2f}x",
                f"{statistics.median(ceilings):.2f}x" if ceilings else "-",
                f"{statistics.fmean(r['psnr'] for r in rows):.1f}",
                f"{statistics.fmean(r['pooled'] for r in rows):.1f}",
                f"{statistics.fmean(r['motion'] or 0.0 for r in rows):.2f}",
                " / ".join(map(str, counts)) if key.startswith("replan") else "",
            )
        out.append(table)
    return out


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
