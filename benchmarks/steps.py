"""What do anchors alone give a many-step model, and do they beat taking fewer steps?

    python benchmarks/steps.py --seeds 0 --windows 3 --json steps.json

The many-step teacher generates windows at full compute; every variant runs beside it from the same start, noise and
actions. Schedules of the same number of exact steps are compared with plain Euler at that number of steps, which costs
the same. PSNR is against the full trajectory, speed a ratio of times in one process.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from rollcache import StepReuse
from rollcache.bench.lanes import FULL, Plan, open_lane, race
from rollcache.bench.options import FlatMachine, Machine
from rollcache.bench.progress import Narrator
from rollcache.bench.results import dump
from rollcache.bench.takes import plan_take
from rollcache.measure import compare, motion, provenance, write_atomic
from rollcache.street.protocol import Protocol


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which drives, how long, and how many exact steps."""

    scenarios: tuple[Literal["urban", "highway", "u-turn"], ...] = ("urban", "highway", "u-turn")
    seeds: tuple[int, ...] = (0,)
    windows: int = 3
    steps: int = 50
    exact: tuple[int, ...] = (10, 16, 25)
    json: Path | None = None
    machine: FlatMachine = field(default_factory=lambda: Machine(stage="teacher"))


def plans(steps: int, exact: Sequence[int], protocol: Protocol) -> list[Plan]:
    """Every schedule at every budget, and fewer steps."""
    sigmas = protocol.sigmas[:-1].tolist()
    found = []
    for n in exact:
        warmup = max(1, round(0.12 * steps)) if n > round(0.12 * steps) + 3 else 1
        policies = {
            "uniform": StepReuse.uniform(steps, n),
            "dense to sparse": StepReuse.dense_to_sparse(steps, warmup, n - warmup),
            "sparse to dense": StepReuse.sparse_to_dense(steps, warmup, n - warmup),
            "even in sigma": StepReuse.even_in_sigma(sigmas, n),
        }
        found += [Plan(key=f"{name} {n}", label=name, policy=policy) for name, policy in policies.items()]
        found.append(Plan(key=f"fewer {n}", label="fewer steps", steps=n))
    return found


def main(settings: Settings) -> int:
    """Run all takes and print the means."""
    protocol = Protocol.named("chunked", steps=settings.steps)
    world = settings.machine.world()
    variants = plans(settings.steps, settings.exact, protocol)
    found: list[dict[str, Any]] = []
    with Narrator() as narrator:
        for scenario in settings.scenarios:
            for seed in settings.seeds:
                narrator.begin(f"{scenario} {seed}", settings.windows)
                take = plan_take(scenario, seed=seed, chunks=settings.windows, protocol=protocol).make(world)
                lanes = [
                    open_lane(world, take, protocol, plan, reload=settings.machine.reload) for plan in (FULL, *variants)
                ]
                if not race(lanes, take.actions, narrator.chunk):
                    return 130
                full = world.decode(torch.cat(lanes[0].latents))
                for lane in lanes[1:]:
                    frames = world.decode(torch.cat(lane.latents))
                    found.append(
                        {
                            "plan": lane.key,
                            "label": lane.plan.label,
                            "exact": int(lane.key.split()[-1]),
                            "scenario": scenario,
                            "seed": seed,
                            "psnr": compare(frames, full).psnr,
                            "psnr_truth": compare(frames, take.truth).psnr,
                            "motion": motion(frames, full).ratio,
                            "speedup": sum(lanes[0].seconds) / sum(lane.seconds),
                        }
                    )
    Console(width=None if sys.stdout.isatty() else 120).print(table(found, settings.steps))
    if settings.json is not None:
        config = replace(settings, machine=settings.machine)
        write_atomic(settings.json, dump({"runs": found, "provenance": provenance(config, dtype=world.dtype)}))
    return 0


def table(found: Sequence[dict[str, Any]], steps: int) -> Table:
    """Means over the takes, with the range of the PSNR."""
    out = Table(box=box.SIMPLE_HEAD, title=f"Exact steps of {steps}, against the full trajectory")
    out.add_column("exact")
    out.add_column("how")
    for head in ("speedup", "dB", "dB, range", "dB to truth", "motion"):
        out.add_column(head, justify="right")
    for key in dict.fromkeys(r["plan"] for r in found):
        rows = [r for r in found if r["plan"] == key]
        psnr = [r["psnr"] for r in rows]
        out.add_row(
            str(rows[0]["exact"]),
            rows[0]["label"],
            f"{statistics.median(r['speedup'] for r in rows):.2f}x",
            f"{statistics.fmean(psnr):.2f}",
            f"{min(psnr):.1f} to {max(psnr):.1f}",
            f"{statistics.fmean(r['psnr_truth'] for r in rows):.2f}",
            f"{statistics.fmean(r['motion'] or 0.0 for r in rows):.2f}",
        )
    return out


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
