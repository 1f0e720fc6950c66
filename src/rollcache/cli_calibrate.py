"""`rollcache calibrate`: measure where anchors belong, and what FSC's figures look like on this model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollcache.bench.options import FlatMachine, Machine

INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Calibrate the methods that work across the steps of a chunk, on the many-step teacher.

    Writes calibration.json, report.md and figures into the folder --out. Every finished clip is kept there at once: the
    same command goes on after the last of them.
    """

    out: Path
    """Folder of the results."""
    clips: int = 3
    """Held-out drives that are measured, in turn urban, highway, u-turn (seeds 200, 201, ...)."""
    checks: int = 2
    """Further drives on which the proposed schedules are run to the end (seeds 250, 251, ...)."""
    windows: int = 1
    """Windows of every drive."""
    steps: int = 50
    """Denoising steps of a chunk."""
    touches: int = 12
    """Steps at which the influence of a single replayed step is measured."""
    budgets: tuple[int, ...] = ()
    """Numbers of exact steps that are run to the end; default 0.2, 0.32, 0.4 and 0.5 of the steps."""
    machine: FlatMachine = field(default_factory=lambda: Machine(stage="teacher"))

    @classmethod
    def default(cls, words: Sequence[str]) -> Calibrate:
        """The teacher, into a folder under runs/."""
        return cls(out=Path("runs/calibrate"))

    def run(self) -> int:
        """Run it; returns the exit code, 130 when it was interrupted."""
        from rollcache.bench.calibrate.report import headlines, write
        from rollcache.bench.calibrate.run import Plan, calibrate
        from rollcache.bench.progress import Narrator
        from rollcache.measure import provenance
        from rollcache.street.weights import describe

        plan = Plan(
            steps=self.steps,
            clips=self.clips,
            checks=self.checks,
            windows=self.windows,
            touches=self.touches,
            budgets=self.budgets,
        )
        world = self.machine.world()
        facts = {
            "weights": describe(self.machine.weights)["sha256"],
            "stage": self.machine.stage,
            "dtype": str(world.dtype).removeprefix("torch."),
        }
        with Narrator() as narrator:
            try:
                findings = calibrate(plan, world, self.out, narrator, facts)
            except KeyboardInterrupt:
                kept = len(list(self.out.glob("clip-*.safetensors")))
                narrator.say(
                    f"interrupted: {kept} finished clips are kept in {self.out}; run the same command to go on"
                )
                return INTERRUPTED
        known = provenance(self, dtype=world.dtype, device=self.machine.device)
        calibration = replace(findings.calibration, provenance={**known, "made": plan.made(facts)})
        write(calibration, self.out)
        for line in headlines(calibration):
            print(line)
        print(f"{self.out / 'report.md'}  {self.out / 'calibration.json'}", file=sys.stderr)
        return 0
