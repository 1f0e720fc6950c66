"""`rollcache steps`: every method across the steps of a chunk, at matched speed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from rollcache.bench.options import FlatMachine, Machine
from rollcache.bench.takes import MAX_SEED

if TYPE_CHECKING:
    from rollcache.bench.steps.clips import Clip
    from rollcache.bench.steps.methods import Method
    from rollcache.bench.steps.study import Job, Study
    from rollcache.street.protocol import Protocol
    from rollcache.street.world import World

INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Compare caching methods across denoising steps on the teacher, at the same predicted speedup.

    Knobs are set on development clips; then every method runs on every test clip. All is kept in the folder --out: a
    second call goes on where the first one stopped, and several processes can share the work by the same command.
    """

    out: Path
    """Folder of the study."""
    report_only: bool = False
    """Make tables and figures of what is there."""
    calibration: Path | None = None
    """File of `rollcache calibrate`: measured schedules, FSC's thresholds, MagCache's ratios."""
    targets: tuple[float, ...] = (2.0, 2.3, 2.6)
    """Speedups to match."""
    ablate_at: float = 2.3
    """Speedup of the ablations of FSC, one of the targets."""
    only: tuple[str, ...] = ()
    """Only these methods and ablations, by key; `methods` and `ablations` are all of them."""
    clips: str | None = None
    """Only a range A:B of the test clips, counted from 0; they go seed by seed through the scenarios."""
    scenarios: tuple[Literal["urban", "highway", "u-turn"], ...] = ("urban", "highway", "u-turn")
    """Scene groups of the test clips."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """Seeds of the test clips."""
    dev: tuple[str, ...] = ("urban-100", "u-turn-101")
    """Clips on which knobs are set."""
    ablation_clips: int = 6
    """Ablations run on so many of the test clips, the first ones."""
    windows: int = 2
    """Generated windows of a clip."""
    steps: int = 50
    """Denoising steps of full compute."""
    machine: FlatMachine = field(default_factory=lambda: Machine(stage="teacher"))

    def run(self) -> int:
        """Run it; returns the exit code, 130 when it was interrupted."""
        from rollcache.bench.steps.folder import Folder

        folder = Folder(self.out)
        if self.report_only:
            return self._report(folder, 0)
        from rollcache.bench.progress import Narrator
        from rollcache.bench.steps.study import match_all, needed_matches
        from rollcache.bench.steps.work import Worker

        clips, dev = self._clips()
        protocol = self._protocol()
        methods, absent = self._methods(protocol)
        wanted = self._jobs(methods, absent)
        world = self.machine.world()
        study = self._study(world, protocol, folder, methods, dev)
        code = 0
        try:
            with Narrator() as narrator:
                for key, why in absent.items():
                    narrator.say(f"{key} is left out: {why}")
                matches = match_all(study, needed_matches(methods, wanted), narrator)
                Worker(study, matches, narrator).run([(clip, self._on(clip, wanted)) for clip in clips])
        except KeyboardInterrupt:
            code = INTERRUPTED
            Console(stderr=True).print(f"interrupted: all results so far are kept in {self.out}", highlight=False)
            if not folder.results():
                return code
        return self._report(folder, code)

    def _report(self, folder: Any, code: int) -> int:
        from rollcache.bench.steps.report import report

        console = Console(width=None if sys.stdout.isatty() else 170)
        for path in report(folder, console):
            console.print(str(path), highlight=False, soft_wrap=True)
        return code

    def _clips(self) -> tuple[list[Clip], list[Clip]]:
        """Test and development clips.

        Raises:
            ValueError: what is wrong with them.
        """
        from rollcache.bench.steps.clips import Clip, all_clips, chosen

        for name, values in (("scenarios", self.scenarios), ("seeds", self.seeds), ("dev", self.dev)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"--{name} must name at least one, and none twice.")
        if bad := [s for s in self.seeds if not 0 <= s <= MAX_SEED]:
            raise ValueError(f"--seeds holds {bad[0]}; seeds are from 0 to {MAX_SEED}.")
        if self.windows < 1 or self.ablation_clips < 0:
            raise ValueError(f"--windows ({self.windows}) must be 1 or more, --ablation-clips not negative.")
        tests = all_clips(self.scenarios, self.seeds)
        dev = [Clip.parse(text) for text in self.dev]
        if both := [str(c) for c in dev if c in tests]:
            raise ValueError(f"{both[0]} is a test clip and in --dev: knobs must be set on other clips.")
        return chosen(tests, self.clips), dev

    def _protocol(self) -> Protocol:
        from rollcache.street.protocol import Protocol

        if self.steps < 4:
            raise ValueError(f"--steps is {self.steps}; methods across steps need at least 4.")
        return Protocol.named("chunked", steps=self.steps)

    def _methods(self, protocol: Protocol) -> tuple[dict[str, Method], dict[str, str]]:
        """All that can be made here by key, and what cannot with the reason."""
        from rollcache.bench.calibrate.result import Calibration
        from rollcache.bench.steps import ablations
        from rollcache.bench.steps import methods as table

        found = None if self.calibration is None else Calibration.load(self.calibration)
        if found is not None and found.steps != self.steps:
            raise ValueError(f"{self.calibration} was measured with {found.steps} steps, not {self.steps}.")
        setup = table.Setup(tuple(protocol.sigmas[:-1].tolist()), found)
        made = [*table.methods(setup), *ablations.methods(setup), *ablations.ablations(setup)]
        return {m.key: m for m in made}, table.missing(setup)

    def _jobs(self, methods: dict[str, Method], absent: dict[str, str]) -> list[Job]:
        """What is run on a clip.

        Raises:
            ValueError: a key that is unknown, or a speed that is none.
        """
        from rollcache.bench.steps.study import jobs

        for name, speed in (*(("targets", t) for t in self.targets), ("ablate-at", self.ablate_at)):
            if not 1 < speed < self.steps:
                raise ValueError(f"--{name} holds {speed:g}; a speedup must lie between 1 and {self.steps}.")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError("--targets must name at least one speedup, and none twice.")
        groups = ("methods", "ablations")
        for key in self.only:
            if key in absent:
                raise ValueError(f"--only {key}: {absent[key]}.")
            if key not in methods and key not in groups:
                raise ValueError(f"--only: there is no {key!r}; choose {', '.join((*groups, *methods))}.")
        names = self.only or groups
        chosen = [m for k, m in methods.items() if k in names or m.group in names]
        if self.ablate_at not in self.targets and any(m.group == "ablations" for m in chosen):
            raise ValueError(f"--ablate-at {self.ablate_at:g} must be one of --targets: FSC itself stands beside them.")
        return jobs(chosen, self.targets, self.ablate_at)

    def _on(self, clip: Clip, wanted: list[Job]) -> list[Job]:
        """The jobs of one clip: ablations only on the first of all test clips."""
        from rollcache.bench.steps.clips import all_clips

        ablated = clip in all_clips(self.scenarios, self.seeds)[: self.ablation_clips]
        return [job for job in wanted if ablated or job.method.group == "methods"]

    def _study(
        self, world: World, protocol: Protocol, folder: Any, methods: dict[str, Method], dev: list[Clip]
    ) -> Study:
        """Claim the folder, and check that every method fits the model."""
        from rollcache.bench.checks import check_plans
        from rollcache.bench.steps.study import Study, middle
        from rollcache.measure import provenance
        from rollcache.street.weights import describe

        check_plans(world, protocol, [m.plan(1.0 if m.knob is None else middle(m.knob)) for m in methods.values()])
        folder.claim_study(
            {
                "protocol": protocol.describe(),
                "steps": self.steps,
                "windows": self.windows,
                "stage": self.machine.stage,
                "weights": describe(self.machine.weights)["sha256"],
                "dtype": str(world.dtype).removeprefix("torch."),
                "dev": list(self.dev),
            },
            provenance=provenance(self, dtype=world.dtype, device=world.device),
        )
        return Study(world, protocol, folder, methods, dev, self.windows)
