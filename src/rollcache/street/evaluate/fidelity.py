"""How close the generated frames are to the rendered ones, window by window and camera by camera."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollcache.measure import Frames, Metric, compare, flip, lpips
from rollcache.measure.fidelity import psnr
from rollcache.measure.frames import by_camera
from rollcache.street.rig import FPS

WINDOW_FRAMES = 8  # frames a figure: one window of the world, two thirds of a second


@dataclass(frozen=True)
class Horizon:
    """Fidelity of every window of a rollout; entry 0 is the next window after real frames.

    Attributes:
        seconds: where every window ends.
        psnr: dB, mean over its frames and the cameras.
        ssim: the same.
        flip: of the window's first frame, mean over the cameras; None where it could not be computed.
        lpips: the same.
        held: PSNR of a picture that stands still, the last real frame: what a world must at least beat.
        cameras: metric -> camera -> value per window.
        notes: why a metric has no value.
    """

    seconds: tuple[float, ...]
    psnr: tuple[float, ...]
    ssim: tuple[float, ...]
    flip: tuple[float | None, ...]
    lpips: tuple[float | None, ...]
    held: tuple[float, ...]
    cameras: dict[str, dict[str, tuple[float, ...]]]
    notes: tuple[str, ...] = ()


def windows(frames: Frames, size: int = WINDOW_FRAMES) -> list[dict[str, Tensor]]:
    """The frames in pieces of `size`; the last may be shorter."""
    count = len(next(iter(frames.values())))
    return [{group: x[i : i + size] for group, x in frames.items()} for i in range(0, count, size)]


def mean_psnr(frames: Frames, truth: Frames) -> float:
    """PSNR of every frame and camera, then the mean over both, dB: that of `measure.compare` without the rest."""
    pairs = zip(by_camera(frames).values(), by_camera(truth).values(), strict=True)
    return float(torch.stack([psnr((x.double() - y.double()).square().mean((1, 2, 3))) for x, y in pairs]).mean())


def over_horizon(
    frames: Frames, truth: Frames, last: Mapping[str, Tensor], size: int = WINDOW_FRAMES, perceptual: bool = True
) -> Horizon:
    """Compare a rollout with the truth of the same drive.

    Args:
        frames: generated, group -> [T, V, H, W, 3] in [0, 1].
        truth: rendered, the same shapes.
        last: the last real frame before, group -> [1, V, H, W, 3].
        size: frames a window.
        perceptual: whether to compute FLIP and, where its weights are found, LPIPS.
    """
    found: dict[str, list[Metric]] = {"flip": [], "lpips": []}
    close, held, seconds, done = [], [], [], 0
    for ours, theirs in zip(windows(frames, size), windows(truth, size), strict=True):
        count = len(next(iter(ours.values())))
        done += count
        seconds.append(done / FPS)
        close.append(compare(ours, theirs))
        still = {group: x.expand(count, *x.shape[1:]) for group, x in last.items()}
        held.append(mean_psnr(still, theirs))
        if perceptual:
            found["flip"].append(flip(ours, theirs, at_most=1, stitched=False))
            found["lpips"].append(lpips(ours, theirs, at_most=1, stitched=False))
    cameras = {
        key: {name: tuple(getattr(c.cameras[name], key) for c in close) for name in close[0].cameras}
        for key in ("psnr", "ssim")
    }
    for key, metrics in found.items():
        if metrics and metrics[0].value is not None:
            cameras[key] = {name: tuple(m.cameras[name] for m in metrics) for name in metrics[0].cameras}
    return Horizon(
        seconds=tuple(seconds),
        psnr=tuple(c.psnr for c in close),
        ssim=tuple(c.ssim for c in close),
        flip=tuple(m.value for m in found["flip"]),
        lpips=tuple(m.value for m in found["lpips"]),
        held=tuple(held),
        cameras=cameras,
        notes=tuple(dict.fromkeys(m.reason for ms in found.values() for m in ms if m.value is None)),
    )
