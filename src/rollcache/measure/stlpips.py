"""ST-LPIPS (Ghildyal and Liu 2022), AlexNet variant: a learned distance whose weights come in a pip wheel.

It is not LPIPS: its backbone is anti-aliased (blur before every subsampling) and was trained for that, so that shifts
of a pixel count less. Only the weights of the `stlpips-pytorch` wheel are read (`pip install 'rollcache[stlpips]'`);
its code, which would need torchvision, is never imported.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollcache.measure.frames import Frames, Names
from rollcache.measure.learned import FeatureDistance, WeightsError, batched, fill, read_checked, split_state
from rollcache.measure.metric import Metric, over_cameras

WHEEL, INSIDE = "stlpips-pytorch", "stlpips_pytorch/weights/vST0.0/alex_shift_tolerant.pth"
TAPS = (2, 6, 10, 12, 14)
AT_MOST = 12  # frames scored; a camera of 48 x 96 pixels takes about 50 ms on one core


class Blur(nn.Module):
    """Depthwise 3x3 low-pass filter, then every second pixel; two reflected pixels at the border."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.filt: Tensor
        self.register_buffer("filt", torch.zeros(channels, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, h, w] -> [N, C, h // 2 + 1, w // 2 + 1]."""
        return F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), self.filt, stride=2, groups=x.shape[1])


def backbone() -> nn.Sequential:
    """The anti-aliased AlexNet features, numbered as in the weights file."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 11, padding=2), Blur(64), nn.ReLU()),
        *(nn.MaxPool2d(3, 1), Blur(64), nn.Conv2d(64, 192, 5, padding=2), nn.ReLU()),
        *(nn.MaxPool2d(3, 1), Blur(192), nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()),
    )


def stlpips(
    test: Frames,
    reference: Frames,
    *,
    weights: str | os.PathLike[str] | None = None,
    at_most: int = AT_MOST,
    names: Names | None = None,
    stitched: bool = True,
) -> Metric:
    """Mean ST-LPIPS over frames and cameras, or a metric without a value when its weights are not installed.

    Args:
        test: Frames `[T, V, H, W, 3]` in [0, 1] by view group.
        reference: The full-compute twin.
        weights: File `alex_shift_tolerant.pth`; default: the one of the installed wheel.
        at_most: Only every k-th frame is scored, with k the smallest that gives at most this many.
        names: Camera names by group.
        stitched: Whether to score the mosaic too.

    Raises:
        WeightsError: the file is missing, unreadable or of another network.
        FrameError: the frames do not match.
    """
    settings: dict[str, Any] = {"net": "alex", "version": "ST0.0"}
    path = _installed() if weights is None else Path(weights)
    if path is None:
        reason = "ST-LPIPS needs the weights of the stlpips-pytorch wheel: pip install 'rollcache[stlpips]'."
        return Metric("stlpips", settings=settings, short="no weights", reason=reason)
    model, digest = load(path)
    return over_cameras(
        "stlpips",
        batched(model, pixels=1 << 16),
        test,
        reference,
        at_most=at_most,
        settings={**settings, "weights_sha256": digest},
        names=names,
        stitched=stitched,
    )


def load(path: Path) -> tuple[FeatureDistance, str]:
    """The model with the weights of `path`, and the file's SHA-256.

    Raises:
        WeightsError: the file is missing, unreadable or of another network.
    """
    state, digest = read_checked(path)
    features = backbone()
    try:
        tensors, heads = split_state(state, features)
        fill(features, tensors)
    except WeightsError as error:
        raise WeightsError(f"{path.name} is not for ST-LPIPS: {error}") from error
    if len(heads) != len(TAPS):
        raise WeightsError(f"{path.name} is not for ST-LPIPS: it has {len(heads)} heads, not {len(TAPS)}")
    return FeatureDistance(features, TAPS, heads), digest


def _installed() -> Path | None:
    try:
        wheel = importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(wheel.locate_file(INSIDE)))
    return path if path.is_file() else None
