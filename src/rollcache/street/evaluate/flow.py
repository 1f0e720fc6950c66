"""Optical flow by block matching: where every block of a picture went, to a fraction of a pixel."""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor

BLOCK = 16  # pixels a side
REACH = 6  # pixels searched to every side
LUMA = (0.299, 0.587, 0.114)


def luma(frames: Tensor) -> Tensor:
    """[..., H, W, 3] in [0, 1] -> [..., H, W]."""
    return frames @ frames.new_tensor(LUMA)


def block_flow(first: Tensor, second: Tensor, block: int = BLOCK, reach: int = REACH) -> tuple[Tensor, Tensor]:
    """Displacement of every block of `first` that makes it most alike to `second`.

    The sum of absolute differences is compared for all whole displacements up to `reach` that keep the block inside the
    picture; a parabola through the best one and its neighbours gives the fraction.

    Args:
        first: luma [N, H, W].
        second: luma of the next frame [N, H, W].
        block: pixels a side.
        reach: pixels to every side.

    Returns:
        The flow [N, h, w, 2] as (right, down) in pixels, and which blocks it can be told of [N, h, w]: those whose
        best match differs from the block less than half as much as an average displacement does.
    """
    n, height, width = first.shape
    rows, columns = height // block, width // block
    first, second = first[:, : rows * block, : columns * block], second[:, : rows * block, : columns * block]
    side = 2 * reach + 1
    padded = nnf.pad(second[:, None], (reach,) * 4, mode="replicate")[:, 0]
    cost = first.new_full((n, side, side, rows, columns), torch.inf)
    top, left = (torch.arange(k) * block for k in (rows, columns))
    for i in range(side):
        for j in range(side):
            moved = padded[:, i : i + rows * block, j : j + columns * block]
            sad = nnf.avg_pool2d((first - moved).abs()[:, None], block)[:, 0]
            dy, dx = i - reach, j - reach
            fits_y = (top + dy >= 0) & (top + dy <= (rows - 1) * block)
            fits_x = (left + dx >= 0) & (left + dx <= (columns - 1) * block)
            tie = 1e-6 * (dx * dx + dy * dy)  # a picture without texture stands still
            cost[:, i, j] = torch.where(fits_y[:, None] & fits_x, sad + tie, torch.inf)
    flat = cost.flatten(1, 2)
    best, index = flat.min(1)  # [N, h, w]
    finite = flat.isfinite()
    average = torch.where(finite, flat, 0.0).sum(1) / finite.sum(1)
    y, x = index // side, index % side
    flow = torch.stack((x - reach + _fraction(cost, y, x, 2), y - reach + _fraction(cost, y, x, 1)), -1)
    return flow, (best < 0.5 * average) & (average > 0.01)


def _fraction(cost: Tensor, y: Tensor, x: Tensor, axis: int) -> Tensor:
    """Offset in (-0.5, 0.5) of the parabola's lowest point along `axis` (1 down, 2 right); 0 at the rim."""
    side = cost.shape[1]
    at = {1: y, 2: x}

    def look(step: int) -> Tensor:
        i, j = (at[a] + (step if a == axis else 0) for a in (1, 2))
        flat = (i.clamp(0, side - 1) * side + j.clamp(0, side - 1))[:, None]
        return cost.flatten(1, 2).gather(1, flat)[:, 0]

    before, here, after = look(-1), look(0), look(1)
    bend = before + after - 2 * here
    inside = (at[axis] > 0) & (at[axis] < side - 1) & bend.isfinite() & (bend > 1e-9)
    return torch.where(inside, (before - after) / (2 * bend.clamp_min(1e-9)), 0.0).nan_to_num(0.0).clamp(-0.5, 0.5)
