"""`rollcache demo`, `rollcache compare` and `rollcache report`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro
from rich.console import Console

from rollcache.bench.checks import check_metrics, check_plans, warn_short
from rollcache.bench.compare import Outcome, compare
from rollcache.bench.controls import cached_plan, control_plans, floor_plans
from rollcache.bench.fidelity import Perceptual
from rollcache.bench.keep import Ending, finish, keep
from rollcache.bench.lanes import Plan
from rollcache.bench.options import Driving, FlatDriving, FlatMachine, Machine, PolicyName, Scenario
from rollcache.bench.progress import Narrator
from rollcache.bench.results import Results, fitting, load_results, mark_reported
from rollcache.measure import provenance
from rollcache.measure.provenance import plain
from rollcache.policies import Replan, WindowReuse, XCache

if TYPE_CHECKING:
    from rollcache.bench.takes import TakePlan
    from rollcache.street.protocol import Protocol
    from rollcache.street.world import World

GENERATING = 0.85  # share of a scenario's time budget; the rest is for decoding, metrics and figures


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Drive the seven-camera world through three scenarios, full compute beside X-Cache and its controls.

    Prints one table and writes runs/NAME: results.json, report.html, videos and figures.
    """

    name: str = "demo"
    """Folder under `runs` for everything that is written."""
    runs: Path = Path("runs")
    """Where the folder goes."""
    scenarios: tuple[Scenario, ...] = ("urban", "highway", "u-turn")
    """What is driven."""
    chunks: int = 33
    """Generation steps per scenario; 33 are 5.5 seconds and eight KV cycles."""
    seed: int = 3
    """Seed of scenes and noise. 3 was chosen by its drives alone: a turn, a hard brake, a u-turn."""
    controls: bool = True
    """Also run the controls: frozen window, WindowReuse, fewer steps, the paper's settings."""
    minutes: float = 9.0
    """Time budget. A machine that is too slow for it gets shorter drives, of whole KV cycles, and is told so."""
    machine: FlatMachine = field(default_factory=Machine)

    def run(self) -> int:
        """Run it; returns the exit code."""
        if not self.scenarios:
            raise ValueError("--scenarios is empty; name at least one of urban, highway, u-turn.")
        if not self.minutes > 0:
            raise ValueError(f"--minutes is {self.minutes}; it must be more than 0.")
        deadline = time.monotonic() + 60 * self.minutes
        drives = [Driving(scenario=name, chunks=self.chunks, seed=self.seed) for name in self.scenarios]
        takes = [drive.plan() for drive in drives]
        protocol = Driving().rules()
        check_metrics(Perceptual())
        world = self.machine.world()
        cached = cached_plan("xcache")
        controls = control_plans(protocol, "xcache") if self.controls else []
        check_plans(world, protocol, (cached, *controls))
        warn_short(self.chunks, protocol)
        folder = self.runs / self.name
        results = Results(
            kind="demo",
            provenance=_provenance(self, world, self.seed),
            planned=self.scenarios,
            path=folder / "results.json",
            folder=folder,
            reports=True,
        )
        results.save()
        ending = Ending()
        with Narrator() as narrator:
            for left, take in zip(range(len(takes), 0, -1), takes, strict=True):
                work = partial(
                    _one,
                    world,
                    take,
                    protocol,
                    cached,
                    controls=controls,
                    floors=floor_plans(_name(world), other=False),
                    perceptual=Perceptual(),
                    machine=self.machine,
                    narrator=narrator,
                    seconds=(deadline - time.monotonic()) / left,
                )
                ending = keep(results, take.scenario, work, narrator)
                if ending.early:
                    break
        return finish(results, ending)


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Run one scenario with full compute and with a cache, chunk by chunk in turns, and measure both.

    Every knob of a policy is a flag: --xcache.min-cosine 0.95 --xcache.first-step on.
    """

    world: Literal["street"] = "street"
    """The world model."""
    policy: PolicyName = "xcache"
    """The cache under test. `none` runs full compute twice: the speedup must be 1 and the PSNR 100 dB."""
    json: Path | None = None
    """Write the results to this file."""
    out: Path | None = None
    """Write results.json, report.html, videos and figures into this folder."""
    report: bool = True
    """Make report, videos and figures (only with --out)."""
    controls: bool = False
    """Also run the controls: frozen window, WindowReuse, fewer steps, the paper's settings."""
    floor: bool = True
    """Also measure the numerical floor: full compute with the start moved by 0.001."""
    require: tuple[Literal["lpips", "flip"], ...] = ()
    """Fail unless this metric can be computed."""
    lpips_weights: Path | None = None
    """Weights of the LPIPS backbone (AlexNet of torchvision)."""
    driving: FlatDriving = field(default_factory=Driving)
    machine: FlatMachine = field(default_factory=Machine)
    xcache: XCache = field(default_factory=XCache)
    """Settings of X-Cache; with --policy xcache-paper the defaults are those of the paper's Table 1."""
    window_reuse: WindowReuse = field(default_factory=WindowReuse)
    """Settings of WindowReuse."""
    replan: Replan = field(default_factory=Replan)
    """Settings of Replan."""

    @classmethod
    def default(cls, words: Sequence[str]) -> Compare:
        """Defaults for a command line: --policy decides those of X-Cache, and which settings may be given.

        Raises:
            ValueError: settings of another policy than the chosen one.
        """
        policy = _value_of("--policy", words) or "xcache"
        owners = {
            "--xcache.": ("xcache", "xcache-paper"),
            "--window-reuse.": ("window-reuse",),
            "--replan.": ("replan",),
        }
        for prefix, takers in owners.items():
            given = [w.split("=")[0] for w in words if w.replace("_", "-").startswith(prefix)]
            if given and policy not in takers:
                raise ValueError(
                    f"{given[0]} has no effect with --policy {policy}; it is for --policy {' or '.join(takers)}."
                )
        return cls(xcache=XCache.paper() if policy == "xcache-paper" else XCache())

    def run(self) -> int:
        """Run it; returns the exit code."""
        settings: Any = {
            "xcache": self.xcache,
            "xcache-paper": self.xcache,
            "window-reuse": self.window_reuse,
            "replan": self.replan,
        }
        changes = {} if self.policy == "none" else vars(settings[self.policy])
        cached = cached_plan(self.policy, dict(changes))
        protocol = self.driving.rules()
        perceptual = Perceptual(
            lpips_weights=None if self.lpips_weights is None else str(self.lpips_weights), require=self.require
        )
        take = self.driving.plan()
        check_metrics(perceptual)
        world = self.machine.world()
        controls = control_plans(protocol, self.policy) if self.controls else []
        check_plans(world, protocol, (cached, *controls))
        warn_short(self.driving.chunks, protocol)
        inside = None if self.out is None else self.out / "results.json"
        results = Results(
            kind="compare",
            provenance=_provenance(self, world, self.driving.seed),
            planned=(take.scenario,),
            path=self.json or inside,
            copies=(inside,) if self.json is not None and inside is not None else (),
            folder=self.out,
            reports=self.report and self.out is not None,
        )
        results.save()
        with Narrator() as narrator:
            work = partial(
                _one,
                world,
                take,
                protocol,
                cached,
                controls=controls,
                floors=floor_plans(_name(world), other=False) if self.floor else [],
                perceptual=perceptual,
                machine=self.machine,
                narrator=narrator,
            )
            ending = keep(results, take.scenario, work, narrator)
        return finish(results, ending)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Make report.html again from a result file and the videos beside it."""

    results: tyro.conf.Positional[Path]
    """The result file, or the folder that holds results.json."""
    out: Path | None = None
    """Write here instead of report.html beside the result file."""

    def run(self) -> int:
        """Run it; returns the exit code."""
        from rollcache.bench.report import render
        from rollcache.measure import write_atomic

        path = self.results / "results.json" if self.results.is_dir() else self.results
        document = load_results(path)
        if not document["scenarios"]:
            raise ValueError(f"{path} holds no measured scenario, so there is nothing to report.")
        with fitting(path):
            page = render(document, path.parent)
        written = write_atomic(self.out or path.parent / "report.html", page)
        if self.out is None:
            mark_reported(path, document)
        Console().print(str(written), highlight=False)
        return 0


def _one(
    world: World,
    take: TakePlan,
    protocol: Protocol,
    cached: Plan,
    *,
    controls: Sequence[Plan],
    floors: Sequence[Plan],
    perceptual: Perceptual,
    machine: Machine,
    narrator: Narrator,
    seconds: float | None = None,
) -> Outcome:
    """Draw a scenario and compare, in about `seconds` if given."""
    narrator.begin(take.scenario, take.chunks)
    narrator.stage("drawing the scene")
    return compare(
        world,
        take.make(world),
        protocol,
        cached,
        controls=controls,
        floors=floors,
        perceptual=perceptual,
        seconds=None if seconds is None else GENERATING * seconds,
        reload=machine.reload,
        on_chunk=narrator.chunk,
        on_stage=narrator.stage,
    )


def _provenance(command: Any, world: World, seed: int) -> dict[str, Any]:
    from rollcache.street.weights import describe

    found = provenance(plain(command), seed=seed, dtype=world.dtype, device=world.device)
    weights = describe(command.machine.weights)
    return {**found, "weights": {"file": weights["file"], "sha256": weights["sha256"]}}


def _name(world: World) -> str:
    return str(world.dtype).removeprefix("torch.")


def _value_of(flag: str, words: Sequence[str]) -> str | None:
    """The value of `--flag value` or `--flag=value` on a command line."""
    for word, after in zip(words, [*words[1:], ""], strict=False):
        if word == flag:
            return after
        if word.startswith(f"{flag}="):
            return word.split("=", 1)[1]
    return None
