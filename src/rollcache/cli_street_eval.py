"""`rollcache street eval`: how good the embedded world is, as one table and one page."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from rollcache.street.evaluate.result import Evaluation
    from rollcache.street.evaluate.run import Watch, Worlds
    from rollcache.street.evaluate.truth import Plan

Scenario = Literal["urban", "highway", "u-turn"]


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Measure the world against the renderer on scenes it was never trained on.

    Writes results.json (after every part) and report.html into the folder --out.
    """

    weights: Path | None = None
    """Weights file; default the weights that come with rollcache."""
    scenario: tuple[Scenario, ...] = ("urban", "highway", "u-turn")
    """Scene groups."""
    seeds: int = 1
    """Held-out scenes of every group; 0 leaves only the recorded drives."""
    chunks: int = 132
    """Generation steps of a rollout; 132 are 264 frames, 22 seconds."""
    actions: tuple[Path, ...] = ()
    """Recorded drives beside the scripted ones: CSV files with t_s, speed_mps, yaw_rate_rps at 12 rows a second."""
    steps: int = 4
    """Denoising steps of the student."""
    teacher: bool = True
    """Compare with the teacher at 50 and at 4 steps."""
    short_chunks: int = 8
    """Generation steps of the short rollouts: the teacher's, and those with other actions."""
    perceptual: bool = True
    """Compute FLIP and, where its weights are found, LPIPS."""
    out: Path = Path("runs/street-eval")
    """Folder of the results."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of matrix products."""
    device: str = "cpu"
    """Torch device."""
    threads: int | None = None
    """Threads of torch."""

    def run(self) -> int:
        """Run it; returns the exit code, 130 when it was interrupted."""
        from rollcache.bench.report.world_page import write_page
        from rollcache.measure import provenance
        from rollcache.street.evaluate.result import Evaluation
        from rollcache.street.evaluate.run import evaluate, work
        from rollcache.street.evaluate.table import print_table
        from rollcache.street.protocol import Protocol
        from rollcache.street.weights import describe

        protocol = Protocol(steps=self.steps)
        plans = self._plans(protocol)
        worlds = self._worlds()
        facts = describe(self.weights)
        evaluation = Evaluation(
            planned=tuple(p.name for p in plans),
            provenance=provenance(self, dtype=worlds.student.dtype, device=self.device),
            settings={
                "protocol": protocol.describe(),
                "weights": {k: facts[k] for k in ("file", "sha256", "facts")},
                "short_chunks": self.short_chunks,
            },
            path=self.out / "results.json",
        )
        evaluation.save()  # a folder that cannot be written is found out before any work
        console = Console(stderr=True, highlight=False)
        total = work(plans, protocol, self.short_chunks, worlds)
        with self._watch(console, total) as watch:
            evaluate(
                plans,
                worlds,
                evaluation,
                protocol=protocol,
                short_chunks=self.short_chunks,
                perceptual=self.perceptual,
                watch=watch,
            )
        return finish(evaluation, self.out, console, print_table, write_page)

    def _plans(self, protocol: object) -> list[Plan]:
        """All scenes and drives.

        Raises:
            ValueError: what is wrong with the numbers or a drive.
        """
        from rollcache.street.evaluate.truth import plan
        from rollcache.street.protocol import Protocol

        assert isinstance(protocol, Protocol)
        if self.seeds < (0 if self.actions else 1) or self.short_chunks < 1 or not self.scenario:
            raise ValueError(
                f"--seeds ({self.seeds}) and --short-chunks ({self.short_chunks}) must be 1 or more (--seeds 0 "
                "goes with --actions), and at least one --scenario named."
            )
        if len(set(self.scenario)) < len(self.scenario):
            raise ValueError(f"--scenario names one twice: {' '.join(self.scenario)}.")
        drives: list[Path | None] = [None, *self.actions]
        plans = [
            plan(s, seed, chunks=self.chunks, protocol=protocol, actions=drive)
            for s in self.scenario
            for drive in drives
            for seed in range(self.seeds if drive is None else 1)
        ]
        names = [p.name for p in plans]
        if double := next((n for n in names if names.count(n) > 1), None):
            raise ValueError(f"two drives would both be called {double!r}; rename one of the --actions files.")
        return plans

    def _worlds(self) -> Worlds:
        """Load all that is evaluated.

        Raises:
            WeightsError: the weights are missing or damaged.
            ValueError: a device or a number of threads that this machine does not have.
        """
        from rollcache.bench.options import Machine
        from rollcache.street.evaluate.run import Worlds
        from rollcache.street.weights import NoProbeError, load_probe

        machine = Machine(weights=self.weights, dtype=self.dtype, device=self.device, threads=self.threads)
        student = machine.world()
        teacher = replace(machine, stage="teacher").world() if self.teacher else None
        try:
            probe = load_probe(self.weights)
        except NoProbeError:
            probe = None
        return Worlds(student, teacher, probe)

    @contextlib.contextmanager
    def _watch(self, console: Console, total: int) -> Iterator[Watch]:
        """A live line on a terminal, plain lines elsewhere."""
        from rollcache.street.evaluate.run import Watch
        from rollcache.street.evaluate.strips import write_strip

        live = console.is_terminal
        progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not live,
        )
        task = progress.add_task("", total=total)

        def stage(scene: str, what: str) -> None:
            progress.update(task, description=f"{scene}: {what}")
            if not live:
                console.print(f"{scene}: {what}", markup=False, soft_wrap=True)

        with progress:
            yield Watch(
                stage=stage,
                tick=lambda passes: progress.advance(task, passes),
                strip=lambda scene, frames, truth: write_strip(self.out, scene, frames, truth),
            )


def finish(evaluation: Evaluation, out: Path, console: Console, table: object, page: object) -> int:
    """Print the table, write the page, say what is missing; returns the exit code."""
    assert callable(table) and callable(page)
    if evaluation.scenes:
        table(evaluation, Console(highlight=False))
        page(evaluation.to_dict(), out)
        console.print(f"{out / 'report.html'}  {out / 'results.json'}", markup=False, soft_wrap=True)
    if evaluation.interrupted:
        kept = "the finished parts are kept" if evaluation.scenes else "nothing was finished"
        console.print(f"{kept}: {evaluation.status}", markup=False, soft_wrap=True)
        return 130
    return 0
