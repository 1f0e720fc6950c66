"""PSNR and SSIM of a rollout against its full-compute twin, per camera and on the stitched picture.

Conventions, the same for every number in a result file:

* Frames are clamped to [0, 1]; both branches are floats from the same decoder, never decoded video files.
* `psnr` is computed per frame and then averaged over frames and cameras. A frame whose mean squared error is below
  1e-10 counts as 100 dB (an infinite one would swallow the mean) and is counted in `identical`.
* `psnr_global` pools the squared error over frames and pixels first. `psnr_uint8` is `psnr` after rounding to bytes.
* SSIM is that of Wang et al. 2004: 11 x 11 Gaussian window (sigma 1.5), only windows that fit, no sample correction,
  K = (0.01, 0.03), mean over the three colour channels, in float64.
* Stitched figures are taken on the mosaic of all cameras; background pixels do not count.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rollcache.measure.frames import FrameError, Frames, Mosaic, Names, check_pair, mosaic, stitch

__all__ = ["CONVENTION", "Fidelity", "FidelityMeter", "Quality", "compare", "psnr", "ssim_map", "stitch"]

CONVENTION = "float frames in [0,1]; PSNR per frame then mean, 100 dB cap at mse<1e-10; SSIM Wang 2004, valid, RGB mean"
CAP_DB = 100.0
CAP_MSE = 1e-10
WINDOW, SIGMA = 11, 1.5
C1, C2 = 0.01**2, 0.03**2


@dataclass(frozen=True)
class Quality:
    """How close one camera (or the stitched picture) is to the reference.

    Attributes:
        psnr: Mean over frames of the capped PSNR, dB.
        psnr_global: PSNR of the error pooled over all frames, dB.
        psnr_uint8: `psnr` after rounding both sides to bytes, dB.
        ssim: Mean structural similarity.
        identical: Frames at the cap.
        frames: Frames compared.
        psnr_trace: PSNR of every frame, dB.
    """

    psnr: float
    psnr_global: float
    psnr_uint8: float
    ssim: float
    identical: int
    frames: int
    psnr_trace: tuple[float, ...]


@dataclass(frozen=True)
class Fidelity:
    """Fidelity of a whole rollout.

    Attributes:
        overall: Means over cameras (`psnr_global`: error pooled over all pixels; `identical`: frames in which every
            camera is at the cap).
        stitched: The mosaic of all cameras as one picture.
        cameras: Per camera, in rig order.
    """

    overall: Quality
    stitched: Quality
    cameras: dict[str, Quality]

    @property
    def psnr(self) -> float:
        """Mean PSNR over frames and cameras, dB."""
        return self.overall.psnr

    @property
    def ssim(self) -> float:
        """Mean SSIM over frames and cameras."""
        return self.overall.ssim

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a result file, the convention included."""
        return {"convention": CONVENTION, **asdict(self)}


class FidelityMeter:
    """Collects fidelity chunk by chunk, keeping a few numbers a frame and no pixels.

    Example:
        >>> import torch
        >>> meter = FidelityMeter()
        >>> for _ in range(3):
        ...     full = {"front": torch.rand(2, 1, 16, 24, 3)}
        ...     meter.update(full, full)
        >>> meter.result().psnr
        100.0
    """

    def __init__(self, names: Names | None = None) -> None:
        self._names = names
        self._layout: Mosaic | None = None
        self._frames = 0
        self._rows: dict[str, list[Tensor]] = {"mse": [], "mse_uint8": [], "ssim": [], "ssim_stitched": []}

    def update(self, test: Frames, reference: Frames) -> None:
        """Add the next frames of both rollouts, `[T, V, H, W, 3]` by view group; T may differ from call to call.

        Raises:
            FrameError: the two do not match each other or the earlier calls, or a camera is smaller than 11 pixels.
        """
        check_pair(test, reference)
        layout = mosaic(test, self._names)
        if self._layout is not None and layout != self._layout:
            raise FrameError("frames have other cameras or sizes than in the earlier calls of this meter")
        if small := [t.name for t in layout.tiles if min(t.height, t.width) < WINDOW]:
            raise FrameError(f"SSIM needs cameras of {WINDOW} x {WINDOW} pixels or more; too small: {', '.join(small)}")
        self._layout = layout
        covered = layout.mask()[WINDOW // 2 : -(WINDOW // 2), WINDOW // 2 : -(WINDOW // 2)]
        for t in range(next(iter(test.values())).shape[0]):
            # One frame at a time: the working set stays in the cache of a core.
            x, y = (
                layout.draw({g: f[t : t + 1] for g, f in frames.items()})[0].cpu().double().clamp(0, 1)
                for frames in (test, reference)
            )  # [H, W, 3]
            similarity = ssim_map(x.movedim(-1, 0), y.movedim(-1, 0)).mean(0)  # [H - 10, W - 10]
            self._rows["mse"].append(_tile_means((x - y).square().mean(-1), layout))
            self._rows["mse_uint8"].append(_tile_means((_bytes(x) - _bytes(y)).square().mean(-1), layout))
            # A window that fits in a camera is a window of the mosaic, so one map serves both.
            self._rows["ssim"].append(_tile_means(similarity, layout, margin=WINDOW - 1))
            self._rows["ssim_stitched"].append(similarity[covered].mean())
            self._frames += 1

    def result(self) -> Fidelity:
        """The fidelity of everything seen so far.

        Raises:
            FrameError: no frame was seen yet.
        """
        if self._layout is None:
            raise FrameError("no frames were compared; call update() first")
        tiles = self._layout.tiles
        mse, rounded, similarity, mosaic_ssim = (torch.stack(rows) for rows in self._rows.values())  # [T, V] ... [T]
        area = torch.tensor([float(t.height * t.width) for t in tiles], dtype=torch.float64)
        share = area / area.sum()
        cameras = {
            t.name: _quality(psnr(mse[:, v]), mse[:, v].mean(), psnr(rounded[:, v]), similarity[:, v])
            for v, t in enumerate(tiles)
        }
        pooled = mse @ share  # [T]: error of the stitched picture without its background
        overall = _quality(psnr(mse).mean(1), pooled.mean(), psnr(rounded).mean(1), similarity.mean(1))
        stitched = _quality(psnr(pooled), pooled.mean(), psnr(rounded @ share), mosaic_ssim)
        return Fidelity(overall, stitched, cameras)


def compare(test: Frames, reference: Frames, names: Names | None = None) -> Fidelity:
    """Fidelity of `test` against `reference`, both `[T, V, H, W, 3]` in [0, 1] by view group.

    Raises:
        FrameError: wrong groups, shapes, dtypes or values; the message names the culprit.
    """
    meter = FidelityMeter(names)
    meter.update(test, reference)
    return meter.result()


def psnr(mse: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB of mean squared errors of frames in [0, 1], elementwise, capped at 100 dB."""
    return torch.where(mse < CAP_MSE, CAP_DB, -10 * torch.log10(mse.clamp_min(CAP_MSE)))


def ssim_map(x: Tensor, y: Tensor) -> Tensor:
    """Structural similarity of every window that fits: `[..., H, W]` in [0, 1] -> `[..., H - 10, W - 10]`."""
    mu_x, mu_y = _blur(x), _blur(y)
    energy, cross = _blur(x * x + y * y), _blur(x * y)
    mu_cross, mu_energy = mu_x * mu_y, mu_x * mu_x + mu_y * mu_y
    numerator = (2 * mu_cross + C1) * (2 * (cross - mu_cross) + C2)
    return numerator / ((mu_energy + C1) * (energy - mu_energy + C2))


def _gauss() -> list[float]:
    taps = [math.exp(-((i - WINDOW // 2) ** 2) / (2 * SIGMA**2)) for i in range(WINDOW)]
    return [tap / sum(taps) for tap in taps]


_TAPS = _gauss()


def _blur(x: Tensor) -> Tensor:
    # Shifted sums: in float64 on a CPU several times faster than a convolution.
    for axis in (-1, -2):
        size = x.shape[axis] - WINDOW + 1
        y = x.narrow(axis, 0, size) * _TAPS[0]
        for k in range(1, WINDOW):
            y.add_(x.narrow(axis, k, size), alpha=_TAPS[k])
        x = y
    return x


def _bytes(x: Tensor) -> Tensor:
    return (x * 255).round() / 255


def _tile_means(picture: Tensor, layout: Mosaic, margin: int = 0) -> Tensor:
    """Mean of `picture` [H, W] over each camera's rectangle, shortened by `margin` at its far edges: [V]."""
    return torch.stack(
        [picture[t.top : t.top + t.height - margin, t.left : t.left + t.width - margin].mean() for t in layout.tiles]
    )


def _quality(trace: Tensor, pooled: Tensor, rounded: Tensor, similarity: Tensor) -> Quality:
    return Quality(
        psnr=float(trace.mean()),
        psnr_global=float(psnr(pooled)),
        psnr_uint8=float(rounded.mean()),
        ssim=float(similarity.mean()),
        identical=int((trace >= CAP_DB).sum()),
        frames=len(trace),
        psnr_trace=tuple(trace.tolist()),
    )
