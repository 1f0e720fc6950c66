"""Whether the world goes where it is told: speed and yaw rate read from its frames beside the commanded ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollcache.street.drives import Drive
from rollcache.street.evaluate.probe import Probe, per_latent, read
from rollcache.street.rig import FPS, FRAMES_PER_LATENT

TURN = 0.1  # rad/s: a larger yaw rate is a turn
BRAKE = 1.0  # m/s^2: a larger deceleration is a brake
STEER = 0.4  # rad/s that the steered rollout turns with, away from where the drive turns


@dataclass(frozen=True)
class Errors:
    """Errors of recovered actions; None where there is no such moment.

    Attributes:
        speed: mean error, m/s.
        yaw_rate: mean error, rad/s.
        turn_percent: on turns, summed error of the yaw rate in percent of the summed commanded one.
        brake_percent: on brakes, the same of the speed.
        turn_gain: on turns, recovered yaw rate projected on the commanded one: 1 turns as told, 0 not at all.
    """

    speed: float
    yaw_rate: float
    turn_percent: float | None
    brake_percent: float | None
    turn_gain: float | None


@dataclass(frozen=True)
class Following:
    """Action following of a rollout.

    Attributes:
        generated: errors in the generated frames.
        floor: the probe's own errors in the rendered frames of the same drive.
        commanded: (speed m/s, yaw rate rad/s) per latent frame.
        recovered: the same, read from the generated frames.
        rendered: the same, read from the rendered frames.
        turns: latent frames on turns.
        brakes: latent frames on brakes.
    """

    generated: Errors
    floor: Errors
    commanded: tuple[tuple[float, ...], ...]
    recovered: tuple[tuple[float, ...], ...]
    rendered: tuple[tuple[float, ...], ...]
    turns: int
    brakes: int


def following(probe: Probe, latents: Tensor, truth: Tensor, before: Tensor, action: Tensor) -> Following:
    """Read the actions back.

    Args:
        probe: the inverse-dynamics probe.
        latents: generated [F, P, Z].
        truth: rendered frames of the same drive, encoded [F, P, Z].
        before: the last real latents [2, P, Z].
        action: commanded per frame [2F, 2].
    """
    told = per_latent(action)
    turn, brake = moments(told)
    found, floor = read(probe, latents, before), read(probe, truth, before)
    return Following(
        generated=errors(found, told),
        floor=errors(floor, told),
        commanded=_rows(told),
        recovered=_rows(found),
        rendered=_rows(floor),
        turns=int(turn.sum()),
        brakes=int(brake.sum()),
    )


def moments(told: Tensor) -> tuple[Tensor, Tensor]:
    """Which latent frames of commanded actions [F, 2] are on a turn, and which on a brake: bool [F] each."""
    accel = told[:, 0].diff(prepend=told[:1, 0]) * FPS / FRAMES_PER_LATENT
    return told[:, 1].abs() > TURN, accel < -BRAKE


def errors(found: Tensor, told: Tensor) -> Errors:
    """Errors of recovered actions [F, 2] against commanded ones [F, 2]."""
    turn, brake = moments(told)
    off = (found - told).abs()
    mean = off.mean(0)
    square = told[turn, 1].square().sum()
    return Errors(
        speed=float(mean[0]),
        yaw_rate=float(mean[1]),
        turn_percent=_percent(off[turn, 1], told[turn, 1]),
        brake_percent=_percent(off[brake, 0], told[brake, 0]),
        turn_gain=float((found[turn, 1] * told[turn, 1]).sum() / square) if turn.any() else None,
    )


def otherwise(drive: Drive, begin: int) -> dict[str, tuple[int, Tensor]]:
    """Other actions from row `begin` of a drive on: name -> what they change (0 speed, 1 yaw rate), rows [T, 2]."""
    yaw = -STEER if drive.yaw_rate[begin] > 0 else STEER
    changed = {"stopped": (0, drive.with_brake(begin)), "steered": (1, drive.with_steer(begin, yaw))}
    rows = {name: np.stack((d.speed[begin:], d.yaw_rate[begin:]), 1) for name, (_, d) in changed.items()}
    return {name: (changed[name][0], torch.from_numpy(x).float()) for name, x in rows.items()}


def response(found: Tensor, usual: Tensor, told: Tensor, usual_told: Tensor, column: int) -> float | None:
    """How much of a change of the commanded action is found again: 1 all of it, 0 the world does not listen.

    Args:
        found: read from the rollout with other actions [F, 2].
        usual: read from the one with the drive's own [F, 2].
        told: the other actions [F, 2].
        usual_told: the drive's own [F, 2].
        column: 0 for the speed, 1 for the yaw rate.

    Returns:
        The projection of the found change on the commanded one; None when nothing was changed.
    """
    asked, got = (told - usual_told)[:, column], (found - usual)[:, column]
    square = float(asked.square().sum())
    return float((asked * got).sum()) / square if square > 1e-6 else None


def _percent(off: Tensor, told: Tensor) -> float | None:
    whole = told.abs().sum()
    return float(100 * off.sum() / whole) if len(told) and whole > 1e-6 else None


def _rows(x: Tensor) -> tuple[tuple[float, ...], ...]:
    rounded: list[list[float]] = torch.round(x.double(), decimals=4).tolist()
    return tuple(tuple(row) for row in rounded)
