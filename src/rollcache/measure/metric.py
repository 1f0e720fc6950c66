"""One perceptual metric of a rollout: a number per camera, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollcache.measure.frames import Frames, Names, by_camera, check_pair, stitch

# (test, reference), both [N, H, W, 3] in [0, 1] -> scores [N]
Score = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Metric:
    """Result of a metric. `value` is None when it could not be computed; `reason` then says why.

    Attributes:
        name: Such as "lpips" or "flip".
        value: Mean over the frames and cameras that were scored; smaller is closer for all metrics of this package.
        stitched: The metric of the mosaic of all cameras, or None.
        cameras: Per camera.
        frames: Frames scored (a metric may take only every k-th; see `settings["stride"]`).
        settings: Everything needed to repeat it: network, weights' checksum, viewing distance, stride.
        short: Two or three words for a table when there is no value, such as "no weights".
        reason: One sentence: what is missing and how to provide it.
    """

    name: str
    value: float | None = None
    stitched: float | None = None
    cameras: dict[str, float] = field(default_factory=dict)
    frames: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    short: str = ""
    reason: str = ""

    def __str__(self) -> str:
        return f"n/a ({self.short})" if self.value is None else f"{self.value:.4f}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a result file; `value` is None (JSON null) when not available."""
        found = {"metric": self.name, "value": self.value, **self.settings}
        if self.value is None:
            return {**found, "reason": self.reason}
        return {**found, "stitched": self.stitched, "cameras": self.cameras, "frames": self.frames}


def stride_for(frames: int, at_most: int) -> int:
    """The smallest k for which every k-th of `frames` frames are `at_most` or fewer."""
    if at_most < 1:
        raise ValueError(f"at_most must be 1 or more, got {at_most}")
    return max(1, -(-frames // at_most))


def over_cameras(
    name: str,
    score: Score,
    test: Frames,
    reference: Frames,
    *,
    at_most: int,
    settings: Mapping[str, Any],
    names: Names | None = None,
    stitched: bool = True,
) -> Metric:
    """Apply `score` to every k-th frame of every camera and of the mosaic.

    Args:
        name: Name of the metric.
        score: Maps two batches `[N, H, W, 3]` to N scores.
        test: Frames `[T, V, H, W, 3]` by view group.
        reference: The full-compute twin.
        at_most: Score at most this many frames, evenly spaced from the first.
        settings: Recorded with the result, `stride` added.
        names: Camera names by group.
        stitched: Whether to score the mosaic too.

    Raises:
        FrameError: the two rollouts do not match.
    """
    check_pair(test, reference)
    stride = stride_for(next(iter(test.values())).shape[0], at_most)
    pair = [
        {group: x[::stride].float().clamp(0, 1).cpu() for group, x in frames.items()} for frames in (test, reference)
    ]
    ours, theirs = (by_camera(frames, names) for frames in pair)
    scores = {camera: score(ours[camera], theirs[camera]) for camera in ours}
    whole = float(score(stitch(pair[0], names), stitch(pair[1], names)).mean()) if stitched else None
    cameras = {camera: float(values.mean()) for camera, values in scores.items()}
    return Metric(
        name=name,
        value=float(torch.tensor(list(cameras.values()), dtype=torch.float64).mean()),
        stitched=whole,
        cameras=cameras,
        frames=len(next(iter(scores.values()))),
        settings={**settings, "stride": stride},
    )
