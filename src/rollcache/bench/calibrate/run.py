"""A whole calibration of the street world: clips are measured, schedules proposed, and run on other clips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcache.bench.calibrate.checks import Check, Run, check, key
from rollcache.bench.calibrate.clips import Clip
from rollcache.bench.calibrate.measure import measure
from rollcache.bench.calibrate.proposals import Anchors
from rollcache.bench.calibrate.summary import Findings, summarise
from rollcache.bench.calibrate.window import Window
from rollcache.bench.progress import Narrator
from rollcache.bench.takes import Draw, Take, plan_take, rendered
from rollcache.settings import check_count
from rollcache.street.protocol import Protocol
from rollcache.street.world import World

SCENARIOS = ("urban", "highway", "u-turn")
CLIP_SEED, CHECK_SEED = 200, 250  # comparisons use seeds below 200
SHARES = (0.2, 0.32, 0.4, 0.5)  # of N: the budgets that are checked


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        steps: denoising steps of a chunk (N).
        clips: drives that are measured (K), in turn urban, highway, u-turn, on held-out scenes of their own.
        checks: further drives on which schedules are run to the end.
        windows: windows of every drive.
        touches: steps at which influence is measured.
        budgets: numbers of exact steps that are checked; none: 0.2, 0.32, 0.4 and 0.5 of the steps.
    """

    steps: int = 50
    clips: int = 3
    checks: int = 2
    windows: int = 1
    touches: int = 12
    budgets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 6)
        check_count("clips", self.clips, 1)
        check_count("checks", self.checks)
        check_count("windows", self.windows, 1)
        check_count("touches", self.touches, 2)
        budgets = self.budgets or tuple(max(4, round(share * self.steps)) for share in SHARES)
        object.__setattr__(self, "budgets", tuple(dict.fromkeys(budgets)))
        for budget in self.budgets:
            check_count("a budget", budget, 4)
            if budget > self.steps:
                raise ValueError(f"a budget of {budget} exact steps is more than the {self.steps} there are.")

    @property
    def protocol(self) -> Protocol:
        """The rollout protocol."""
        return Protocol.named("chunked", steps=self.steps)

    def made(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """What a clip's numbers depend on."""
        return {"protocol": self.protocol.describe(), "touches": self.touches, **facts}


def calibrate(
    plan: Plan, world: World, folder: Path, narrator: Narrator, facts: Mapping[str, Any], draw: Draw = rendered
) -> Findings:
    """Measure, propose, check. Finished clips and runs are kept in `folder` and are not measured again.

    Args:
        plan: how much.
        world: without a cache.
        folder: where the numbers of clips and checks go.
        narrator: tells what is done.
        facts: what tells one model from another: checksum of the weights, precision, ...
        draw: draws the scenes.

    Raises:
        CalibrationError: a file in `folder` is damaged or of another calibration.
        WriteError: a file could not be written.
        KeyboardInterrupt: from Ctrl-C; what was finished is kept.
    """
    made = plan.made(facts)
    clips: list[Clip] = []
    for i in range(plan.clips):
        scenario, seed = SCENARIOS[i % 3], CLIP_SEED + i
        clips += _clips(plan, world, scenario, seed, folder, narrator, made, draw)
    narrator.begin("schedules", 1)
    findings = summarise(plan.steps, clips)
    narrator.done("proposed")
    runs: dict[str, dict[str, Run]] = {}
    for i in range(plan.checks):
        scenario, seed = SCENARIOS[2 - i % 3], CHECK_SEED + i
        done = Check.open(folder / f"check-{scenario}-{seed}.json", made)
        narrator.begin(f"check {scenario} {seed}", 1)
        wanted = _wanted(plan, findings.schedules)
        if any(key(how) not in done.runs for how in wanted):
            take = _take(plan, world, scenario, seed, draw)
            window = _window(plan, world, take)
            check(window, take.start, take.actions[0], wanted, done, narrator.stage)
        narrator.done("checked")
        runs[f"{scenario} {seed}"] = done.runs
    return findings.checked(runs, plan.budgets)


def _wanted(plan: Plan, schedules: Mapping[str, Mapping[int, Anchors]]) -> list[Anchors | int]:
    found: list[Anchors | int] = []
    for n in plan.budgets:
        found += [schedules[family][n] for family in schedules if n in schedules[family]]
        found.append(n)
    return found


def _clips(
    plan: Plan,
    world: World,
    scenario: str,
    seed: int,
    folder: Path,
    narrator: Narrator,
    made: Mapping[str, Any],
    draw: Draw,
) -> list[Clip]:
    """All windows of one drive; those whose files are there are read."""
    paths = [folder / f"clip-{scenario}-{seed}-{w}.safetensors" for w in range(plan.windows)]
    found = [Clip.load(path, made) for path in paths]
    narrator.begin(f"clip {scenario} {seed}", plan.windows)
    if all(found):
        narrator.done("read")
        return [clip for clip in found if clip is not None]
    take = _take(plan, world, scenario, seed, draw)
    window = _window(plan, world, take)
    out = []
    for w, (path, clip) in enumerate(zip(paths, found, strict=True)):
        if w:
            window.place(take.actions[w])
        clean = None
        if clip is None:
            clip, trajectory = measure(window, f"{scenario} {seed} {w}", plan.touches, narrator.stage)
            clip.save(path, made)
            clean = trajectory.latents[-1]
        if w + 1 < plan.windows:
            window.advance(window.follow(window.noise()) if clean is None else clean)
        out.append(clip)
        narrator.units(w + 1)
    narrator.done("measured")
    return out


def _take(plan: Plan, world: World, scenario: str, seed: int, draw: Draw) -> Take:
    return plan_take(scenario, seed=seed, chunks=max(2, plan.windows), protocol=plan.protocol).make(world, draw)


def _window(plan: Plan, world: World, take: Take) -> Window:
    window = Window(world, take.start, plan.protocol, seed=take.seed)
    window.place(take.actions[0])
    return window
