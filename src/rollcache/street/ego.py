"""The ego car: a kinematic bicycle driven by speed and yaw rate, or by speed and steering angle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rollcache.street.rig import FPS

WHEELBASE = 2.8  # metres
LENGTH, WIDTH = 4.6, 1.9  # metres
CAMERA_HEIGHT = 1.5  # metres


@dataclass(frozen=True)
class EgoState:
    """Pose of the rig: metres, radians (yaw positive to the left of +x), metres per second."""

    x: float
    y: float
    yaw: float
    speed: float = 0.0

    def moved(self, speed: float, yaw_rate: float) -> EgoState:
        """State one frame later, driven with a constant speed (m/s) and yaw rate (rad/s) meanwhile.

        The arc is integrated exactly, so the pose does not depend on how small the steps are.
        """
        dt = 1.0 / FPS
        turn = yaw_rate * dt
        mid = self.yaw + 0.5 * turn
        chord = speed * dt * float(np.sinc(0.5 * turn / math.pi))
        return EgoState(self.x + chord * math.cos(mid), self.y + chord * math.sin(mid), self.yaw + turn, speed)


def yaw_rate_of(speed: float, steer: float) -> float:
    """Yaw rate (rad/s) of the kinematic bicycle at `speed` m/s and front wheel angle `steer` rad."""
    return speed * math.tan(steer) / WHEELBASE


def integrate(start: EgoState, speed: np.ndarray, yaw_rate: np.ndarray) -> np.ndarray:
    """Poses after each frame, float64 [T, 4] = x, y, yaw, speed; entry i is the pose the action of frame i led to."""
    state, poses = start, np.empty((len(speed), 4))
    for i, (v, w) in enumerate(zip(speed, yaw_rate, strict=True)):
        state = state.moved(float(v), float(w))
        poses[i] = state.x, state.y, state.yaw, state.speed
    return poses
