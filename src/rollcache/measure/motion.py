"""Motion energy: how much the picture changes from frame to frame, relative to the reference.

A frozen video can score well in PSNR when little moves; its motion ratio is 0. A jittering one lies above 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollcache.measure.frames import FrameError, Frames, Names, by_camera, check_pair


@dataclass(frozen=True)
class Motion:
    """Motion energy of a rollout and of its reference; energies are mean absolute frame differences in [0, 1].

    Attributes:
        test: Energy of the rollout, mean over cameras.
        reference: Energy of the reference, mean over cameras.
        cameras: Per camera: (rollout, reference).
        steps: Frame pairs looked at.
    """

    test: float
    reference: float
    cameras: dict[str, tuple[float, float]]
    steps: int

    @property
    def ratio(self) -> float | None:
        """`test / reference`: 1 when both move alike, 0 for a frozen rollout, None when only the reference is still."""
        return _ratio(self.test, self.reference)

    @property
    def camera_ratios(self) -> dict[str, float | None]:
        """The same per camera."""
        return {name: _ratio(*energies) for name, energies in self.cameras.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a result file."""
        return {
            "ratio": self.ratio,
            "test": self.test,
            "reference": self.reference,
            "camera_ratios": self.camera_ratios,
            "steps": self.steps,
        }


class MotionMeter:
    """Collects motion energy chunk by chunk; keeps one frame so that the step between two chunks counts."""

    def __init__(self, names: Names | None = None) -> None:
        self._names = names
        self._last: list[dict[str, Tensor]] | None = None
        self._energy: dict[str, Tensor] = {}
        self._steps = 0

    def update(self, test: Frames, reference: Frames) -> None:
        """Add the next frames of both rollouts, `[T, V, H, W, 3]` in [0, 1] by view group.

        Raises:
            FrameError: the two do not match each other or the earlier calls.
        """
        check_pair(test, reference)
        cameras = [by_camera(frames, self._names) for frames in (test, reference)]
        last = self._last
        if last is not None and {n: x.shape[1:] for n, x in cameras[0].items()} != {
            n: x.shape for n, x in last[0].items()
        }:
            raise FrameError("frames have other cameras or sizes than in the earlier calls of this meter")
        for name in cameras[0]:
            sums = []
            for side, frames in enumerate(cameras):
                x = frames[name].float().clamp(0, 1)
                if last is not None:
                    x = torch.cat([last[side][name].unsqueeze(0), x])
                sums.append((x[1:] - x[:-1]).abs().double().flatten(1).mean(1).sum().cpu())
            self._energy[name] = self._energy.get(name, torch.zeros(2, dtype=torch.float64)) + torch.stack(sums)
        count = next(iter(cameras[0].values())).shape[0]
        self._steps += count if last is not None else count - 1
        self._last = [{n: x[-1].float().clamp(0, 1) for n, x in frames.items()} for frames in cameras]

    def result(self) -> Motion:
        """The motion of everything seen so far.

        Raises:
            FrameError: fewer than two frames were seen.
        """
        if self._steps < 1:
            raise FrameError("motion needs at least two frames")
        cameras = {
            name: (float(sums[0]) / self._steps, float(sums[1]) / self._steps) for name, sums in self._energy.items()
        }
        test, reference = (sum(e[side] for e in cameras.values()) / len(cameras) for side in (0, 1))
        return Motion(test, reference, cameras, self._steps)


def motion(test: Frames, reference: Frames, names: Names | None = None) -> Motion:
    """Motion energy of `test` beside that of `reference`, both `[T, V, H, W, 3]` in [0, 1] by view group.

    Raises:
        FrameError: the two do not match, or have fewer than two frames.
    """
    meter = MotionMeter(names)
    meter.update(test, reference)
    return meter.result()


def _ratio(test: float, reference: float) -> float | None:
    if reference == 0:
        return 1.0 if test == 0 else None
    return test / reference
