"""`rollcache demo`, `rollcache compare` and `rollcache report`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro
from rich.console import Console

from rollcache.bench import tables
from rollcache.bench.compare import Outcome, compare
from rollcache.bench.controls import cached_plan, control_plans, floor_plans
from rollcache.bench.fidelity import Perceptual
from rollcache.bench.lanes import Plan
from rollcache.bench.options import Driving, FlatDriving, FlatMachine, Machine, PolicyName, Scenario
from rollcache.bench.progress import Narrator
from rollcache.bench.results import Results, load_results
from rollcache.measure import WriteError, provenance
from rollcache.measure.provenance import plain
from rollcache.policies import WindowReuse, XCache

if TYPE_CHECKING:
    from rollcache.street.world import World

INTERRUPTED = 130
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
        folder = self.runs / self.name
        world = self.machine.world()
        cached = cached_plan("xcache")
        results = Results(
            kind="demo",
            provenance=_provenance(self, world, self.seed),
            planned=self.scenarios,
            path=folder / "results.json",
            folder=folder,
        )
        results.save()
        stopped = False
        with Narrator() as narrator:
            for left, scenario in zip(range(len(self.scenarios), 0, -1), self.scenarios, strict=True):
                drive = Driving(scenario=scenario, chunks=self.chunks, seed=self.seed)
                protocol = drive.rules()
                try:
                    outcome = _one(
                        world,
                        drive,
                        cached,
                        controls=control_plans(protocol, "xcache") if self.controls else [],
                        floors=floor_plans(_name(world), other=False),
                        perceptual=Perceptual(),
                        machine=self.machine,
                        narrator=narrator,
                        seconds=(deadline - time.monotonic()) / left,
                    )
                    _keep(results, scenario, outcome, narrator, with_media=True)
                    stopped = outcome.interrupted
                except KeyboardInterrupt:
                    stopped = True
                if stopped:
                    break
        return _finish(results, stopped, report=True)


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

    @classmethod
    def default(cls, words: Sequence[str]) -> Compare:
        """Defaults for a command line: --policy decides those of X-Cache, and which settings may be given.

        Raises:
            ValueError: settings of another policy than the chosen one.
        """
        policy = _value_of("--policy", words) or "xcache"
        for prefix, takers in (("--xcache.", ("xcache", "xcache-paper")), ("--window-reuse.", ("window-reuse",))):
            given = [w.split("=")[0] for w in words if w.replace("_", "-").startswith(prefix)]
            if given and policy not in takers:
                raise ValueError(
                    f"{given[0]} has no effect with --policy {policy}; it is for --policy {' or '.join(takers)}."
                )
        return cls(xcache=XCache.paper() if policy == "xcache-paper" else XCache())

    def run(self) -> int:
        """Run it; returns the exit code."""
        settings: Any = {"xcache": self.xcache, "xcache-paper": self.xcache, "window-reuse": self.window_reuse}
        changes = {} if self.policy == "none" else vars(settings[self.policy])
        cached = cached_plan(self.policy, dict(changes))
        protocol = self.driving.rules()
        perceptual = Perceptual(
            lpips_weights=None if self.lpips_weights is None else str(self.lpips_weights), require=self.require
        )
        if self.require:
            _check_metrics(perceptual)
        world = self.machine.world()
        scenario = self.driving.scenario
        path = self.json or (self.out / "results.json" if self.out is not None else None)
        results = Results(
            kind="compare",
            provenance=_provenance(self, world, self.driving.seed),
            planned=(scenario,),
            path=path or Path("results.json"),
            folder=self.out,
        )
        if path is not None:
            results.save()
        stopped = False
        with Narrator() as narrator:
            try:
                outcome = _one(
                    world,
                    self.driving,
                    cached,
                    controls=control_plans(protocol, self.policy) if self.controls else [],
                    floors=floor_plans(_name(world), other=False) if self.floor else [],
                    perceptual=perceptual,
                    machine=self.machine,
                    narrator=narrator,
                )
                stopped = outcome.interrupted
                _keep(results, scenario, outcome, narrator, with_media=self.report, write=path is not None)
            except KeyboardInterrupt:
                stopped = True
        if self.json is not None and self.out is not None:
            Results(**{**vars(results), "path": self.out / "results.json"}).save()
        return _finish(results, stopped, report=self.report and self.out is not None, wrote=path is not None)


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

        document = load_results(self.results)
        if document["kind"] not in ("demo", "compare"):
            raise ValueError(f"{self.results} comes from rollcache {document['kind']}, which has no report.")
        folder = self.results if self.results.is_dir() else self.results.parent
        written = write_atomic(self.out or folder / "report.html", render(document, folder))
        Console().print(str(written), highlight=False)
        return 0


def _one(
    world: World,
    driving: Driving,
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
    narrator.begin(driving.scenario, driving.chunks)
    narrator.stage("drawing the scene")
    return compare(
        world,
        driving.take(world),
        driving.rules(),
        cached,
        controls=controls,
        floors=floors,
        perceptual=perceptual,
        seconds=None if seconds is None else GENERATING * seconds,
        reload=machine.reload,
        on_chunk=narrator.chunk,
        on_stage=narrator.stage,
    )


def _keep(
    results: Results, scenario: str, outcome: Outcome, narrator: Narrator, *, with_media: bool, write: bool = True
) -> None:
    """Keep a result at once; videos and figures after it, so that a full disk costs those alone."""
    results.scenarios[scenario] = outcome.result
    if write:
        results.save()
    if with_media and results.folder is not None:
        from rollcache.bench.report import media

        narrator.stage("videos and figures")
        try:
            outcome.result["media"] = media(outcome, results.folder, scenario)
            results.save()
        except WriteError as error:
            kept = f"; the numbers are in {results.path}" if write else ""
            raise WriteError(error.errno, f"{error.strerror}{kept}") from error
    r = outcome.result
    narrator.done(f"{r['speedup']:.2f}x at {r['psnr']:.1f} dB, {100 * r['skip_rate']:.1f}% skipped")


def _finish(results: Results, stopped: bool, *, report: bool, wrote: bool = True) -> int:
    """Print the tables, write the report, say what is kept; returns the exit code."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    if results.scenarios:
        console.print(tables.main_table(results.scenarios))
        if any(s["controls"] or s["floor"] for s in results.scenarios.values()):
            console.print(tables.controls_table(results.scenarios))
        for note in tables.notes(results.scenarios):
            console.print(note, style="dim", highlight=False)
        if wrote:
            console.print(f"results  {results.path}", highlight=False)
        if report and results.folder is not None:
            from rollcache.bench.report import write_report

            console.print(f"report   {write_report(results.to_dict(), results.folder)}", highlight=False)
    if not stopped:
        return 0
    kept = [
        f"{name} ({len(s['decisions']['chunks'])} chunks)" if s["interrupted"] else name
        for name, s in results.scenarios.items()
    ]
    where = f" in {results.path}" if wrote else ""
    said = f"partial results kept{where}: {', '.join(kept)}" if kept else "nothing was finished yet, no results"
    Console(stderr=True).print(f"interrupted: {said}", highlight=False, markup=False, soft_wrap=True)
    return INTERRUPTED


def _provenance(command: Any, world: World, seed: int) -> dict[str, Any]:
    from rollcache.street.weights import describe

    found = provenance(plain(command), seed=seed, dtype=world.dtype, device=world.device)
    weights = describe(command.machine.weights)
    return {**found, "weights": {"file": weights["file"], "sha256": weights["sha256"]}}


def _check_metrics(perceptual: Perceptual) -> None:
    """Fail before the work, not after it, when a required metric has no weights here."""
    import torch

    picture = {"x": torch.zeros(1, 1, 64, 64, 3)}
    perceptual.score(picture, picture)


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
