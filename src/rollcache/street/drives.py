"""Drives: what the ego is told to do, one (speed, yaw rate) row a frame at 12 FPS; recorded, scripted or made up.

Row i is the control that moves the ego *into* frame i.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rollcache.street.rig import FPS
from rollcache.street.scene_layout import SCENARIOS

__all__ = ["FPS", "SCENARIOS", "Drive", "DriveError", "constant", "load_drive", "scripted_drive"]

COLUMNS = ("t_s", "speed_mps", "yaw_rate_rps")
MAX_SPEED = 70.0  # m/s
SPEED_NOISE = 0.1  # m/s below zero that a standing car's sensor may read; taken as standing
MAX_YAW_RATE = 2.0  # rad/s
MAX_ACCEL = 3 * 9.81  # m/s^2
STEP_TOLERANCE = 0.003  # seconds a time step may differ from 1/12 s (times are often rounded to a millisecond or so)


class DriveError(ValueError):
    """A drive that cannot be used; the message names the file, line and column where there is one."""


@dataclass(frozen=True)
class Drive:
    """One row a frame: speed [T] in m/s, yaw_rate [T] in rad/s (positive to the left); `source` is its origin."""

    name: str
    speed: np.ndarray
    yaw_rate: np.ndarray
    source: str

    def __post_init__(self) -> None:
        if np.ndim(self.speed) != 1 or np.shape(self.speed) != np.shape(self.yaw_rate):
            raise DriveError(
                f"drive {self.name!r}: speed {np.shape(self.speed)} and yaw_rate {np.shape(self.yaw_rate)} "
                "must be equally long vectors"
            )
        for field in ("speed", "yaw_rate"):
            value = np.array(getattr(self, field), np.float64)
            if not np.isfinite(value).all():
                raise DriveError(
                    f"drive {self.name!r}: {field} of row {int(np.argmin(np.isfinite(value)))} is not a finite number"
                )
            value.flags.writeable = False
            object.__setattr__(self, field, value)

    def __len__(self) -> int:
        """Number of rows, which is the number of frames."""
        return len(self.speed)

    def first(self, frames: int) -> Drive:
        """The first `frames` rows; raises DriveError when there are fewer."""
        if frames < 1:
            raise DriveError(f"drive {self.name!r}: {frames} frames asked for; ask for at least 1")
        if len(self) < frames:
            raise DriveError(
                f"{self.source}: drive {self.name!r} has {len(self)} rows but {frames} are needed "
                f"(one a frame at {FPS} FPS)"
            )
        return replace(self, speed=self.speed[:frames], yaw_rate=self.yaw_rate[:frames])

    def with_brake(self, at: int, to: float = 0.0, decel: float = 7.0) -> Drive:
        """The same drive with a brake from row `at` on, at `decel` m/s^2 down to `to` m/s, which is then kept.

        The curvature of the path is kept: the yaw rate falls with the speed. Rows slower than that stay as they are.
        """
        self._check_row(at)
        before = float(self.speed[max(at - 1, 0)])
        cap = np.full(len(self), math.inf)
        cap[at:] = np.maximum(before - decel / FPS * np.arange(1, len(self) - at + 1), to)
        speed = np.minimum(self.speed, cap)
        ratio = np.divide(speed, self.speed, out=np.ones(len(self)), where=self.speed > 1e-6)
        return replace(self, name=f"{self.name}+brake@{at}", speed=speed, yaw_rate=self.yaw_rate * ratio)

    def with_steer(self, at: int, yaw_rate: float) -> Drive:
        """The same drive with the yaw rate set to `yaw_rate` rad/s from row `at` on."""
        self._check_row(at)
        turned = self.yaw_rate.copy()
        turned[at:] = yaw_rate
        return replace(self, name=f"{self.name}+steer@{at}", yaw_rate=turned)

    def _check_row(self, at: int) -> None:
        if not 0 <= at < len(self):
            raise DriveError(f"drive {self.name!r}: row {at} does not exist, it has rows 0 to {len(self) - 1}")


def constant(speed: float, yaw_rate: float, frames: int) -> Drive:
    """A drive that never changes: `frames` rows of speed (m/s) and yaw_rate (rad/s)."""
    return Drive(
        f"constant {speed:g} m/s {yaw_rate:g} rad/s",
        np.full(frames, float(speed)),
        np.full(frames, float(yaw_rate)),
        "constant",
    )


def scripted_drive(scenario: str, seed: int, frames: int) -> Drive:
    """A plausible drive through the scene of (scenario, seed), always the same: lanes, turns, stops, u-turns.

    Raises:
        ValueError: the scenario is unknown; the message lists the names.
        DriveError: fewer than one frame.
    """
    from rollcache.street.scene_driver import drive_scene

    if frames < 1:
        raise DriveError(f"{frames} frames asked for; ask for at least 1")
    speed, yaw_rate = drive_scene(scenario, seed, frames)
    return Drive(f"{scenario}-{seed}", speed, yaw_rate, "scripted")


def load_drive(path: str | Path, require_frames: int | None = None) -> Drive:
    """Read a recorded drive: a CSV with columns t_s, speed_mps, yaw_rate_rps (others are ignored), rows 1/12 s apart.

    Args:
        path: the file.
        require_frames: rows that must at least be there.

    Raises:
        DriveError: anything wrong with the file; names file, line, column and the value.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream)
            header = [name.strip() for name in next(reader, [])]
            where = _columns(path, header)
            rows: list[tuple[float, ...]] = []
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    continue
                line = reader.line_num
                if len(cells) != len(header):
                    raise DriveError(
                        f"{path}, line {line}: {len(cells)} cells where the header has {len(header)} columns"
                    )
                row = tuple(_number(path, line, name, cells[i]) for name, i in where.items())
                _check_row(path, line, row, rows[-1] if rows else None)
                rows.append(row)
    except UnicodeDecodeError as error:
        raise DriveError(
            f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start}); "
            f"a drive is a CSV with {', '.join(COLUMNS)}"
        ) from None
    except csv.Error as error:
        raise DriveError(f"{path}: not a readable CSV ({error})") from None
    if not rows:
        raise DriveError(f"{path}: no rows after the header")
    if require_frames is not None and len(rows) < require_frames:
        raise DriveError(
            f"{path}: {len(rows)} rows, but {require_frames} are needed ({require_frames / FPS:.1f} s at {FPS} FPS)"
        )
    data = np.array(rows)
    return Drive(path.stem, np.maximum(data[:, 1], 0.0), data[:, 2], str(path))


def _columns(path: Path, header: list[str]) -> dict[str, int]:
    """Index of each needed column."""
    if not any(header):
        raise DriveError(f"{path}, line 1: empty; the header must name {', '.join(COLUMNS)}")
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise DriveError(
            f"{path}, line 1: column {missing[0]} is missing; the header has {', '.join(header)} "
            f"and must have {', '.join(COLUMNS)}"
        )
    double = [name for name in COLUMNS if header.count(name) > 1]
    if double:
        raise DriveError(f"{path}, line 1: column {double[0]} appears twice")
    return {name: header.index(name) for name in COLUMNS}


def _number(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise DriveError(f"{path}, line {line}, column {column}: {text.strip()!r} is not a number") from None
    if not math.isfinite(value):
        raise DriveError(f"{path}, line {line}, column {column}: {text.strip()} is not a finite number")
    return value


def _check_row(path: Path, line: int, row: tuple[float, ...], last: tuple[float, ...] | None) -> None:
    """Raise when a row's values, or its step from the row before, cannot be those of a car filmed at 12 FPS."""
    t, speed, yaw_rate = row
    if not -SPEED_NOISE <= speed <= MAX_SPEED:
        raise DriveError(f"{path}, line {line}, column speed_mps: {speed:g} m/s is outside 0 to {MAX_SPEED:g}")
    if abs(yaw_rate) > MAX_YAW_RATE:
        raise DriveError(
            f"{path}, line {line}, column yaw_rate_rps: {yaw_rate:g} rad/s is beyond +-{MAX_YAW_RATE:g} "
            "(is it in degrees?)"
        )
    if last is None:
        return
    step = t - last[0]
    if step <= 0:
        raise DriveError(f"{path}, line {line}, column t_s: {t:g} s does not come after {last[0]:g} s")
    if abs(step - 1 / FPS) > STEP_TOLERANCE:
        raise DriveError(
            f"{path}, line {line}, column t_s: {step:.4f} s after the row before, "
            f"but rows must be 1/{FPS} s ({1 / FPS:.4f} s) apart; resample it"
        )
    accel = (speed - last[1]) / step
    if abs(accel) > MAX_ACCEL:
        raise DriveError(
            f"{path}, line {line}, column speed_mps: jumps from {last[1]:g} to {speed:g} m/s within a frame "
            f"({abs(accel) / 9.81:.1f} g; at most {MAX_ACCEL / 9.81:g} g)"
        )
