"""`rollcache profile`, `rollcache ablate` and `rollcache inject`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollcache.bench.ablate import ablate, rows
from rollcache.bench.checks import check_plans, warn_short
from rollcache.bench.commands import _name, _provenance
from rollcache.bench.controls import floor_plans
from rollcache.bench.costs import measure_passes
from rollcache.bench.decisions import Window
from rollcache.bench.fidelity import Cut, brief
from rollcache.bench.inject import check_place, inject, plans
from rollcache.bench.keep import INTERRUPTED, Ending
from rollcache.bench.lanes import FULL, clone, open_lane, race
from rollcache.bench.options import Driving, FlatDriving, FlatMachine, Machine
from rollcache.bench.profile import Profiler
from rollcache.bench.progress import Narrator
from rollcache.bench.results import Results
from rollcache.bench.tables import number, percent, psnr_pair, times
from rollcache.bench.takes import Injection
from rollcache.measure import WriteError
from rollcache.measure.cost import structural_ceiling

if TYPE_CHECKING:
    from rollcache.street.world import World


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Will caching help this model under this protocol? Measured at full compute, nothing is skipped.

    Prints how alike the block inputs of neighbouring generation steps are, how much residuals change, the skip and
    speed that the structure allows at most, and the numerical floor of fidelity.
    """

    json: Path | None = None
    """Write the profile to this file."""
    driving: FlatDriving = field(default_factory=lambda: Driving(chunks=13))
    machine: FlatMachine = field(default_factory=Machine)

    @classmethod
    def default(cls, words: Sequence[str]) -> Profile:
        """Thirteen chunks are enough here."""
        return cls()

    def run(self) -> int:
        """Run it; returns the exit code."""
        planned, protocol = self.driving.plan(), self.driving.rules()
        world = self.machine.world()
        check_plans(world, protocol, ())
        warn_short(self.driving.chunks, protocol)
        results = _results("profile", self, world, self.driving, self.json)
        with Narrator() as narrator:
            narrator.begin(self.driving.scenario, self.driving.chunks)
            narrator.stage("drawing the scene")
            take = planned.make(world)
            narrator.stage("timing blocks")
            costs = measure_passes(world, take, protocol)
            watched = clone(world)
            lanes = [open_lane(watched, take, protocol, FULL, reload=self.machine.reload)]
            lanes += [
                open_lane(world, take, protocol, plan, reload=self.machine.reload)
                for plan in floor_plans(_name(world), other=True)
            ]
            narrator.stage("generating")
            profiler = Profiler(watched.model)
            with profiler:
                finished = race(lanes, take.actions, lambda n, _: narrator.units(n + 1))
            chunks = len(lanes[0].seconds)
            if chunks < 2:
                raise KeyboardInterrupt
            profile = profiler.result(protocol).to_dict()
            cut = Cut.of(take, protocol, Window.of(chunks, protocol).first, chunks)
            frames = [world.decode(_latents(lane)) for lane in lanes]
        top = structural_ceiling(costs, chunks=protocol.kv_every, steps=protocol.steps)
        result = {
            "interrupted": not finished,
            "take": take.describe(),
            "protocol": {"text": protocol.describe()},
            **profile,
            "structural_speedup": top.speedup if Window.of(take.chunks, protocol).whole else None,
            "pass_seconds": {"blocks": list(costs.blocks), "outside": costs.outside, "commit": costs.commit},
            "floor": {
                lane.key: {"label": lane.plan.label, **brief(x, frames[0], cut)}
                for lane, x in zip(lanes[1:], frames[1:], strict=True)
            },
        }
        _show_profile(_console(), result)
        return _end(results, self.driving.scenario, result, self.json)


@dataclass(frozen=True, kw_only=True)
class Ablate:
    """Take X-Cache's parts away one by one and sweep its floor, beside the figures of the paper's Table 3."""

    json: Path | None = None
    """Write the table to this file."""
    only: tuple[str, ...] = ()
    """Only these rows, by key (see the JSON file), such as default step0 ours."""
    driving: FlatDriving = field(default_factory=Driving)
    machine: FlatMachine = field(default_factory=Machine)

    def run(self) -> int:
        """Run it; returns the exit code."""
        table = rows()
        known = [row.plan.key for row in table]
        if unknown := [key for key in self.only if key not in known]:
            raise ValueError(f"--only: there is no row {unknown[0]!r}; rows are {', '.join(known)}.")
        chosen = [row for row in table if not self.only or row.plan.key in self.only]
        planned, protocol = self.driving.plan(), self.driving.rules()
        world = self.machine.world()
        check_plans(world, protocol, (row.plan for row in chosen))
        warn_short(self.driving.chunks, protocol)
        results = _results("ablate", self, world, self.driving, self.json)
        with Narrator() as narrator:
            narrator.begin(self.driving.scenario, self.driving.chunks)
            narrator.stage("drawing the scene")
            take = planned.make(world)
            narrator.stage("1 variant" if len(chosen) == 1 else f"{len(chosen)} variants")
            result = ablate(world, take, protocol, chosen, reload=self.machine.reload, on_chunk=narrator.chunk)
        _show_ablation(_console(), result)
        return _end(results, self.driving.scenario, result, self.json)


@dataclass(frozen=True, kw_only=True)
class Inject:
    """Brake, steer, or let a car cut in amid a KV cycle: which cache follows, and which ignores it?"""

    at: int = 10
    """Chunk of the injection. Neither the first chunk of a cycle nor in the first cycle."""
    kinds: tuple[Literal["brake", "steer", "cut-in"], ...] = ("brake", "steer", "cut-in")
    """What is injected."""
    json: Path | None = None
    """Write the measurements to this file."""
    driving: FlatDriving = field(default_factory=lambda: Driving(scenario="highway", chunks=16))
    machine: FlatMachine = field(default_factory=Machine)

    @classmethod
    def default(cls, words: Sequence[str]) -> Inject:
        """Four cycles of a straight drive."""
        return cls()

    def run(self) -> int:
        """Run it; returns the exit code."""
        planned, protocol = self.driving.plan(), self.driving.rules()
        if not self.kinds:
            raise ValueError("--kinds is empty; name brake, steer or cut-in.")
        check_place(self.at, planned.chunks, protocol)
        world = self.machine.world()
        check_plans(world, protocol, plans())
        results = _results("inject", self, world, self.driving, self.json, planned=self.kinds)
        ending = Ending()
        with Narrator() as narrator:
            narrator.begin(self.driving.scenario, self.driving.chunks)
            narrator.stage("drawing the scene")
            take = planned.make(world)
            for kind in self.kinds:
                narrator.stage(kind)
                try:
                    results.scenarios[kind] = inject(
                        world,
                        take,
                        protocol,
                        Injection(kind, self.at),
                        reload=self.machine.reload,
                        on_chunk=narrator.chunk,
                    )
                    results.save()
                except KeyboardInterrupt:
                    ending.stopped = True
                except WriteError as error:
                    ending.failed = error
                if ending.early:
                    break
        for found in results.scenarios.values():
            _show_injection(_console(), found)
        if ending.failed is not None:
            raise ending.failed
        if not ending.stopped:
            return 0
        results.save()  # Ctrl-C may have hit the last writing
        Console(stderr=True).print(
            f"interrupted: finished {', '.join(results.scenarios) or 'nothing'}", highlight=False
        )
        return INTERRUPTED


def _results(
    kind: str, command: Any, world: World, driving: Driving, path: Path | None, planned: tuple[str, ...] = ()
) -> Results:
    """An empty result file, written at once when a path is given, so that a bad path fails before the work."""
    results = Results(
        kind=kind,
        provenance=_provenance(command, world, driving.seed),
        planned=planned or (driving.scenario,),
        path=path,
    )
    results.save()
    return results


def _end(results: Results, scenario: str, result: Mapping[str, Any], path: Path | None) -> int:
    results.scenarios[scenario] = dict(result)
    results.save()
    if path is not None:
        _console().print(f"results  {path}", highlight=False, soft_wrap=True)
    if not result["interrupted"]:
        return 0
    kept = f"partial results kept in {path}" if path is not None else "the tables above cover the finished chunks"
    Console(stderr=True).print(f"interrupted: {kept}", highlight=False, soft_wrap=True)
    return INTERRUPTED


def _show_profile(console: Console, result: Mapping[str, Any]) -> None:
    console.print(result["protocol"]["text"], style="dim", highlight=False)
    for j in range(result["phases"]):
        table = Table(box=None, padding=(0, 1), show_edge=False, title_justify="left", title_style="bold")
        mean, change = result["phase_cosine"][j], result["phase_residual_change"][j]
        where = f"j = {j}: " if result["phases"] > 1 else ""
        table.title = f"{where}cosine with the step before {number(mean, 5)}, residuals change by {number(change, 3)}"
        table.add_column("step")
        for b in range(result["depth"]):
            table.add_column(str(b), justify="right")
        for t, row in enumerate(result["cosine"][j]):
            table.add_row(str(t), *(_shade(v) for v in row))
        console.print(table)
    above = ", ".join(f"{percent(v, 0)} reach {floor}" for floor, v in result["share_above_floor"].items())
    console.print(f"inside a cycle, block 0 left out: {above}", highlight=False)
    top = f"{percent(result['structural_skip'])} skipped, {times(result['structural_speedup'])} faster"
    console.print(f"structural ceiling: {top}", highlight=False)
    for floor in result["floor"].values():
        console.print(f"numerical floor: {psnr_pair(floor)} dB ({floor['label']})", highlight=False)
    console.print(result["verdict"], style="bold", highlight=False)


def _shade(value: float | None) -> Text:
    """A cosine, greener the more nines it has."""
    if value is None:
        return Text("–", style="dim")
    style = next(s for limit, s in ((0.9999, "green"), (0.99, "cyan"), (0.97, "yellow"), (-2, "red")) if value >= limit)
    text = f"{value:.5f}" if value < 0.999995 else "1.00000"
    return Text(text.removeprefix("0"), style=style)


def _show_ablation(console: Console, result: Mapping[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("variant", no_wrap=True)
    for name in ("PSNR (pooled)", "skip", "speedup", "ceiling", "gate", "│ paper: PSNR", "skip", "speedup"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        paper = row["paper"] or {}
        table.add_row(
            row["label"],
            psnr_pair(row),
            percent(row["skip_rate"]),
            times(row["speedup"]),
            times(row["ceiling"]),
            percent(row["gate_share"]),
            number(paper.get("psnr"), 2),
            percent(paper.get("skip_rate")),
            number(paper.get("speedup"), 2, "x"),
        )
    console.print(table)
    console.print(
        f"Structural ceiling of the skip rate with one front anchor: {percent(result['structural_skip'])} here, "
        f"72.2% for the paper's 27 blocks. Counted: {result['counted']}. The paper's figures: one highway clip of 264 "
        "frames, an unpublished model, another accelerator; only their pattern can be compared.",
        style="dim",
        highlight=False,
    )


def _show_injection(console: Console, result: Mapping[str, Any]) -> None:
    at = result["injection"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", title_justify="left")
    effect = result["effect"]
    table.title = (
        f"{at['kind']} at chunk {at['chunk']} (j = {at['phase']}): at full compute it changes the picture to "
        f"{effect['rest']:.1f} dB in the rest of the cycle, {effect['next']:.1f} dB in the next"
    )
    table.add_column("variant", no_wrap=True)
    for name in (
        "follow, rest",
        "next cycle",
        "PSNR, rest",
        "next cycle",
        f"recomputed of {result['cells_per_chunk']}, j = 0..",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(
            row["label"],
            number(row["follow_rest"], 2),
            number(row["follow_next"], 2),
            number(row["psnr_rest"]),
            number(row["psnr_next"]),
            " ".join(str(n) for n in row["recomputed"]),
        )
    console.print(table)


def _latents(lane: Any) -> Any:
    import torch

    return torch.cat(lane.latents)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 150)
