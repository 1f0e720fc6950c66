"""FSC's staleness risk: how far the noisy latent moved since the last anchor, in two frequency bands.

The low band of a latent frame are two levels of 2x2 mean pooling on the token grid, brought back by repetition; the
high band is the remainder. FSC's figure 5 has the two levels; that they are taken of the latent, per camera and latent
frame and without temporal pooling, is our choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from rollcache.passes import Segment
from rollcache.tokens import fold, unfold

POOLED = 4  # tokens per axis that two levels of 2x2 pooling make one of
EPS = 1e-6


class Drift(NamedTuple):
    """Change of a latent relative to a reference; of a batch the largest.

    Attributes:
        low: |x_L - ref_L| / |ref_L| of the low band, a scalar.
        high: the same of the high band.
        token_low: [L], every token's part of it: |x_L,i - ref_L,i| over the root mean square norm of a token of ref_L.
        token_high: the same of the high band.
    """

    low: Tensor
    high: Tensor
    token_low: Tensor
    token_high: Tensor


def low_band(x: Tensor, segments: tuple[Segment, ...]) -> Tensor:
    """Low band [B, L, Z] of a latent [B, L, Z]; 0 at tokens of no segment.

    Odd grids are padded by repeating the last row or column, at each of the two levels.
    """
    batch, length, width = x.shape
    flat = x.transpose(0, 1).flatten(1).contiguous()  # [L, B*Z]
    parts = []
    for part, segment in zip(unfold(flat, segments), segments, strict=True):
        height, breadth = segment.grid[1:]
        y = part.reshape(-1, height, breadth, batch * width).permute(0, 3, 1, 2)  # [V*F, B*Z, H, W]
        for _ in range(2):
            y = nnf.avg_pool2d(nnf.pad(y, (0, y.shape[3] % 2, 0, y.shape[2] % 2), mode="replicate"), 2)
        y = y.repeat_interleave(POOLED, 2)[:, :, :height].repeat_interleave(POOLED, 3)[:, :, :, :breadth]
        parts.append(y.permute(0, 2, 3, 1).reshape(part.shape))
    return fold(tuple(parts), segments, length).view(length, batch, width).transpose(0, 1)


class Reference:
    """The latent of the last anchor, X_ref, and what later ones are compared with.

    Attributes:
        segments: token layout; one row of tokens where the pass has none.
        latent: a copy [B, L, Z] in float32.
    """

    def __init__(self, latent: Tensor, segments: tuple[Segment, ...]) -> None:
        """Copy a latent [B, L, Z]."""
        length = latent.shape[1]
        self.segments = segments or (Segment.contiguous("tokens", 1, (1, 1, length)),)
        self.latent = latent.detach().to(torch.float32, copy=True)
        low = low_band(self.latent, self.segments)
        self._low = low.norm(dim=(1, 2))  # [B]
        self._high = (self.latent - low).norm(dim=(1, 2))

    def drift(self, latent: Tensor) -> Drift:
        """Of a latent [B, L, Z] since the reference. The bands are linear, so that of the change is enough."""
        change = latent.detach().float() - self.latent
        low = low_band(change, self.segments)
        high = change - low
        step, token = [], []
        for band, norm in ((low, self._low), (high, self._high)):
            step.append((band.norm(dim=(1, 2)) / (norm + EPS)).amax())
            typical = norm / band.shape[1] ** 0.5  # norm of a token of the reference, root mean square
            token.append((band.norm(dim=2) / (typical + EPS)[:, None]).amax(0))
        return Drift(*step, *token)


def by_rank(risk: Tensor, age: Tensor) -> Tensor:
    """Scores [L] whose order is that of `risk` [L], ties by `age` [L], further ties by position."""
    oldest = age.argsort(descending=True, stable=True)
    order = oldest[risk[oldest].argsort(descending=True, stable=True)]
    score = torch.empty_like(risk)
    score[order] = torch.arange(len(risk), 0, -1, device=risk.device, dtype=risk.dtype)
    return score
