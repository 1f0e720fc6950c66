"""FLIP (Andersson et al. 2020): the perceptual difference a person sees when two pictures alternate on one screen.

It needs no weights, so it is the perceptual metric that always works; it needs the `flip-evaluator` package. FLIP
depends on how large a pixel is for the viewer. Our frames are small and shown enlarged: we fix 16 pixels per degree,
a pixel shown four times enlarged on a common desktop screen (about 64 pixels per degree), and record it in the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rollcache.measure.metric import Metric, over_cameras

if TYPE_CHECKING:
    from torch import Tensor

    from rollcache.measure.frames import Frames, Names

PIXELS_PER_DEGREE = 16.0
AT_MOST = 48  # frames scored; a camera of 48 x 96 pixels takes about 6 ms on one core


def flip(
    test: Frames,
    reference: Frames,
    *,
    pixels_per_degree: float = PIXELS_PER_DEGREE,
    at_most: int = AT_MOST,
    names: Names | None = None,
    stitched: bool = True,
) -> Metric:
    """Mean FLIP error (0 identical, 1 worst) over frames and cameras, in the low-dynamic-range form on sRGB frames.

    Args:
        test: Frames `[T, V, H, W, 3]` in [0, 1] by view group.
        reference: The full-compute twin.
        pixels_per_degree: Pixels per degree of visual angle.
        at_most: Only every k-th frame is scored, with k the smallest that gives at most this many.
        names: Camera names by group.
        stitched: Whether to score the mosaic too.

    Returns:
        The metric, or one without a value when `flip-evaluator` is not installed.

    Raises:
        ValueError: `pixels_per_degree` is not positive, or the frames do not match (`FrameError`).
    """
    if not pixels_per_degree > 0:
        raise ValueError(f"pixels_per_degree must be positive, got {pixels_per_degree}")
    settings = {"pixels_per_degree": pixels_per_degree, "range": "LDR"}
    try:
        from flip_evaluator import evaluate
    except ImportError:
        reason = "FLIP needs the flip-evaluator package: pip install 'rollcache[bench]'."
        return Metric("flip", settings=settings, short="flip-evaluator missing", reason=reason)

    def score(ours: Tensor, theirs: Tensor) -> Tensor:
        means = [
            evaluate(
                y.contiguous().numpy(),
                x.contiguous().numpy(),
                "LDR",
                inputsRGB=True,
                applyMagma=False,
                computeMeanError=True,
                parameters={"ppd": pixels_per_degree},
            )[1]
            for x, y in zip(ours, theirs, strict=True)
        ]
        return torch.tensor(means, dtype=torch.float64)

    return over_cameras(
        "flip", score, test, reference, at_most=at_most, settings=settings, names=names, stitched=stitched
    )
