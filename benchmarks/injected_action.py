"""Is a brake or a steer in the middle of a KV cycle followed? On several held-out drives, one table.

    python benchmarks/injected_action.py --seeds 0 1 2 --json injected.json

The measurement itself is `rollcache inject`; this runs it over scenarios and seeds and takes means. Goal: X-Cache with
the scaled action test follows by .95 or more where a gate that is blind to actions does not.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from rollcache.bench.inject import inject
from rollcache.bench.options import FlatMachine, Machine
from rollcache.bench.progress import Narrator
from rollcache.bench.results import dump
from rollcache.bench.takes import Injection, make_take
from rollcache.measure import provenance, write_atomic
from rollcache.street.protocol import Protocol


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which drives, and where the injection falls."""

    scenarios: tuple[Literal["urban", "highway", "u-turn"], ...] = ("urban", "highway")
    seeds: tuple[int, ...] = (0, 1, 2)
    at: int = 10
    chunks: int = 16
    json: Path | None = None
    machine: FlatMachine = field(default_factory=Machine)


def main(settings: Settings) -> int:
    world, protocol = settings.machine.world(), Protocol()
    found: list[dict[str, Any]] = []
    with Narrator() as narrator:
        for scenario in settings.scenarios:
            for seed in settings.seeds:
                narrator.begin(f"{scenario} {seed}", settings.chunks)
                take = make_take(world, scenario, seed=seed, chunks=settings.chunks, protocol=protocol)
                for kind in ("brake", "steer"):
                    narrator.stage(kind)
                    found.append(
                        inject(
                            world,
                            take,
                            protocol,
                            Injection(kind, settings.at),
                            reload=settings.machine.reload,
                            on_chunk=narrator.chunk,
                        )
                    )
    console = Console(width=None if sys.stdout.isatty() else 120)
    for kind in ("brake", "steer"):
        console.print(_table(kind, [f for f in found if f["injection"]["kind"] == kind]))
    if settings.json is not None:
        config = replace(settings, machine=settings.machine)
        write_atomic(settings.json, dump({"runs": found, "provenance": provenance(config, dtype=world.dtype)}))
    return 0


def _table(kind: str, found: list[dict[str, Any]]) -> Table:
    """Means over drives, the smallest value in brackets."""
    table = Table(title=f"{kind}, {len(found)} drives: mean (smallest)", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("variant")
    for name in ("follow, rest of the cycle", "follow, next cycle", "cells recomputed at the injection"):
        table.add_column(name, justify="right")
    for i, row in enumerate(found[0]["rows"]):
        rows = [f["rows"][i] for f in found]
        phase = found[0]["injection"]["phase"]
        table.add_row(
            row["label"],
            *(_mean([r[key] for r in rows if r[key] is not None]) for key in ("follow_rest", "follow_next")),
            f"{statistics.mean(r['recomputed'][phase] for r in rows):.0f} of {found[0]['cells_per_chunk']}",
        )
    return table


def _mean(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ({min(values):.2f})" if values else "–"


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings)))
