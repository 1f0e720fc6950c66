"""Schedules run to the end on further clips: what a surrogate promised, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rollcache.bench.calibrate.proposals import Anchors
from rollcache.bench.calibrate.result import CalibrationError
from rollcache.bench.calibrate.window import Window, replayed
from rollcache.bench.results import dump
from rollcache.bench.schema import fault
from rollcache.measure import compare, write_atomic
from rollcache.street.world import Start

SCHEMA = "rollcache/calibration-check-1"
SHAPE = {"made": {}, "runs": {"*": {"psnr": float, "ssim": float, "latent": float}}}
FEWER = "fewer steps"

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """One schedule on one clip, against full compute: frames in dB and SSIM, and the clean latent's relative error."""

    psnr: float
    ssim: float
    latent: float


@dataclass
class Check:
    """All runs of one clip, by what was computed; a file that is written after every run.

    Attributes:
        path: the file.
        made: the settings.
        runs: by `key`.
    """

    path: Path
    made: Mapping[str, Any]
    runs: dict[str, Run] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, made: Mapping[str, Any]) -> Check:
        """Go on with a file, or begin one.

        Raises:
            CalibrationError: it is damaged, or was made under other settings; names the file.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(document, dict) or document.get("schema") != SCHEMA:
                raise ValueError("it has another schema")
        except FileNotFoundError:
            return cls(path, made)
        except (OSError, ValueError) as error:
            raise CalibrationError(f"{path} is no readable check ({error}): delete it, and run again.") from None
        if damage := fault(document, SHAPE):
            raise CalibrationError(f"{path} is damaged: {damage}: delete it, and run again.")
        if document["made"] != json.loads(json.dumps(made)):
            raise CalibrationError(f"{path} was run with other settings: give another --out, or delete it.")
        return cls(path, made, {key: Run(**run) for key, run in document["runs"].items()})

    def add(self, key: str, run: Run) -> None:
        """Keep a run.

        Raises:
            WriteError: the file could not be written.
        """
        self.runs[key] = run
        runs = {k: asdict(v) for k, v in self.runs.items()}
        write_atomic(self.path, dump({"schema": SCHEMA, "made": self.made, "runs": runs}))


def key(how: Anchors | int) -> str:
    """Anchors, or the number of steps of a shorter trajectory."""
    return f"{how} steps" if isinstance(how, int) else " ".join(map(str, how))


def check(window: Window, start: Start, action: Tensor, wanted: list[Anchors | int], done: Check, tell: Tell) -> None:
    """Run what `done` lacks.

    Args:
        window: placed.
        start: what its session began with.
        action: of the window [frames_per_step, 2].
        wanted: schedules, or numbers of steps of shorter trajectories.
        done: takes the runs.
        tell: told what is being done.
    """
    left = [how for how in dict.fromkeys(wanted) if key(how) not in done.runs]
    if not left:
        return
    tell("full compute")
    full = window.follow(window.noise())
    frames = window.world.decode(full)
    for i, how in enumerate(left):
        tell(f"run {i + 1} of {len(left)}")
        x = _fewer(window, start, action, how) if isinstance(how, int) else replayed(window, how)
        quality = compare(window.world.decode(x), frames)
        done.add(key(how), Run(quality.psnr, quality.ssim, float((x - full).norm() / full.norm())))


def _fewer(window: Window, start: Start, action: Tensor, steps: int) -> Tensor:
    """The same window from the same noise in fewer Euler steps."""
    short = Window(window.world, start, replace(window.protocol, steps=steps), seed=window.seed)
    short.place(action)
    return short.follow(short.noise())
