"""Block by block at full compute: how stale a block's residual is after 1 to 10 steps, in two bands.

The low band is the mean over cells of 4 x 4 tokens of a camera's grid (two levels of 2 x 2 pooling; cells at the border
of a grid that is no multiple of 4 are smaller), the high band what is left of it. Both are orthogonal projections, so
|r|^2 = |low|^2 + |high|^2, and only pooled tokens have to be kept of the low band.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rollcache import adapters
from rollcache.adapters.spec import Adapter
from rollcache.passes import Pass, Role, RollcacheError, Segment

AGES = 10
CELL = 4


def cells(segments: Sequence[Segment], length: int) -> Tensor:
    """The pooling cell of every token [L]; tokens of no segment are cells of their own."""
    cell = torch.full((length,), -1, dtype=torch.long)
    count = 0
    for segment in segments:
        frames, height, width = segment.grid
        rows, columns = -(-height // CELL), -(-width // CELL)
        inside = (torch.arange(height)[:, None] // CELL * columns + torch.arange(width) // CELL).flatten()
        for view in range(segment.views):
            for frame in range(frames):
                start = segment.start + view * segment.view_stride + frame * segment.frame_stride
                cell[start : start + segment.cells] = inside + count
                count += rows * columns
    alone = cell < 0
    cell[alone] = torch.arange(count, count + int(alone.sum()))
    return cell


def low_band(residual: Tensor, cell: Tensor) -> Tensor:
    """The low band of [B, L, C], one entry a cell and scaled so that its length is that of the band [B, cells, C]."""
    counts = torch.bincount(cell).to(residual.device, residual.dtype)
    pooled = residual.new_zeros(residual.shape[0], len(counts), residual.shape[2])
    return pooled.index_add_(1, cell.to(residual.device), residual) / counts.sqrt()[:, None]


@dataclass
class BlockWatch:
    """Watches a model at full compute, one branch and one chunk; a context manager.

    Attributes:
        model: the model.
        adapter: its adapter; default that of its class.
        reuse: relative error of the residual of the step before, per step from 1 and block [N - 1][blocks].
        low: per age 1 .. 10 all relative errors of the low band, over blocks and steps.
        high: likewise of the high band.
    """

    model: nn.Module
    adapter: Adapter | None = None
    reuse: list[list[float]] = field(default_factory=list)
    low: list[list[float]] = field(default_factory=lambda: [[] for _ in range(AGES)])
    high: list[list[float]] = field(default_factory=lambda: [[] for _ in range(AGES)])
    _past: list[deque[tuple[Tensor, Tensor]]] = field(default_factory=list)
    _hooks: list[Any] = field(default_factory=list)
    _where: Pass | None = None
    _cell: Tensor | None = None

    def __enter__(self) -> BlockWatch:
        adapter = self.adapter = self.adapter or adapters.find(self.model)
        blocks = list(adapter.blocks(self.model))
        self._past = [deque(maxlen=AGES) for _ in blocks]
        self._hooks = [self.model.register_forward_pre_hook(self._enter, with_kwargs=True)]
        self._hooks += [block.register_forward_hook(self._watch(i), with_kwargs=True) for i, block in enumerate(blocks)]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._past, self._cell = [], [], None

    def _enter(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        assert self.adapter is not None
        self._where = self.adapter.locate(model, args, kwargs)

    def _watch(self, index: int) -> Any:
        assert self.adapter is not None
        io = self.adapter.io

        def hook(block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            where = self._where
            if where is None or where.role is not Role.DENOISE:
                return
            before, after = io.read(args, kwargs), io.parse(output)
            if len(before) != 1:
                raise RollcacheError(f"{type(self.model).__name__} has a hidden state of {len(before)} tensors.")
            self._note(where, index, after[0].float() - before[0].float())

        return hook

    def _note(self, where: Pass, block: int, residual: Tensor) -> None:
        residual = residual.flatten(1, -2)
        if self._cell is None:
            self._cell = cells(where.segments, residual.shape[1])
        low = low_band(residual, self._cell)
        past = self._past[block]
        size, size_low = float(residual.square().sum()), float(low.square().sum())
        if block == 0 and past:
            self.reuse.append([])
        for age, (old, old_low) in enumerate(past):
            change, change_low = float((residual - old).square().sum()), float((low - old_low).square().sum())
            if age == 0:
                self.reuse[-1].append(_root(change, size))
            self.low[age].append(_root(change_low, size_low))
            self.high[age].append(_root(change - change_low, size - size_low))
        past.appendleft((residual, low))


def _root(change: float, size: float) -> float:
    return (max(change, 0.0) / size) ** 0.5 if size > 0 else 0.0
