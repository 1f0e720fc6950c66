"""What methods across steps measure: how much a tensor changed, and how much of it is signal at a noise level.

Pure functions. Shapes: `B` batch, `L` tokens, `Z` channels; (F, H, W) is the token grid of one camera.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollcache.passes import RollcacheError, Segment
from rollcache.tokens import fold, unfold

TINY = 1e-16


def relative_change(now: Tensor, then: Tensor) -> Tensor:
    """mean|now - then| / mean|then| of two tensors of one shape, as a float32 scalar; NaN where both are zero."""
    now, then = now.float(), then.float()
    return (now - then).abs().mean() / then.abs().mean()


def polynomial(coefficients: Sequence[float], x: float) -> float:
    """A polynomial at x; the coefficient of the highest power comes first.

    >>> polynomial((2, 0, -1), 3)
    17.0
    """
    value = 0.0
    for c in coefficients:
        value = value * x + c
    return value


def sea_filter(latent: Tensor, sigma: float, segments: tuple[Segment, ...], power: float = 3.0) -> Tensor:
    """What of a noisy latent is signal, as SeaCache's filter sees it (arXiv 2602.18993).

    Natural video has the power S(f) = 1/|f|^power along each axis, so at noise level s, where the latent is
    (1 - s) x0 + s eps, the share of the signal in a frequency is estimated per axis by

        g(f) = (1 - s) S(f) / ((1 - s)^2 S(f) + s^2).

    The gain is the product over the axes F, H and W, divided by its mean over the grid, so that distances at different
    noise levels compare. Cameras are filtered each by itself, and channels likewise.

    Args:
        latent: [B, L, Z].
        sigma: noise level s in [0, 1]; 1 is pure noise.
        segments: token layout; empty: one row of tokens.
        power: exponent of the spectrum of natural video.

    Returns:
        [B, L, Z], float32; tokens of no segment are 0.

    Raises:
        RollcacheError: the hidden state is a list of tensors.
    """
    batch, length, _ = latent.shape
    layout = segments or (Segment.contiguous("tokens", 1, (1, 1, length)),)
    if any(s.tensor for s in layout):
        raise RollcacheError("the SEA filter needs a hidden state that is one tensor: use another method here.")
    channels = latent.float().movedim(0, 1).flatten(1)  # [L, B*Z]
    filtered = []
    for segment, part in zip(layout, unfold(channels, layout), strict=True):  # [views, F, cells, B*Z]
        gain = _gain(segment.grid, sigma, power, latent.device)[..., None]
        spectrum = torch.fft.fftn(part.reshape(segment.views, *segment.grid, -1), dim=(1, 2, 3))
        filtered.append(torch.fft.ifftn(spectrum * gain, dim=(1, 2, 3)).real.flatten(2, 3))
    return fold(tuple(filtered), layout, length).reshape(length, batch, -1).movedim(1, 0)


def _gain(grid: tuple[int, int, int], sigma: float, power: float, device: torch.device) -> Tensor:
    """The gain of every frequency [F, H, W], of mean 1."""
    noise = min(max(sigma, 1e-6), 1 - 1e-6)
    signal = 1 - noise
    axes = []
    for size in grid:
        prior = 1 / (torch.fft.fftfreq(size, device=device).abs() ** power + TINY)
        axes.append(signal * prior / (signal**2 * prior + noise**2))
    f, h, w = axes
    gain: Tensor = f[:, None, None] * h[:, None] * w
    return gain / gain.mean()
