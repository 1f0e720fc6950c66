"""What a given amount of skipping can be worth at most: Amdahl's ceiling, printed beside every speedup.

Costs are seconds as measured (`time_passes`) or operations as counted (`count_flops`); only ratios are used. The
ceiling assumes that a skipped block, its gate and its replay cost nothing: what is left is everything outside the
blocks, the blocks that were computed, and the commit passes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from rollcache.measure.clock import Stopwatch

Cell = tuple[int, int, int]  # (chunk, step, block)


@dataclass(frozen=True)
class PassTimes:
    """Cost of the parts of a rollout, each at full compute; any one unit.

    Attributes:
        blocks: Each block of one denoise pass, in order.
        outside: The rest of a denoise pass: embedding, head, scheduler.
        commit: One commit pass, 0 when the loop has none.
    """

    blocks: tuple[float, ...]
    outside: float
    commit: float = 0.0

    def __post_init__(self) -> None:
        costs = (*self.blocks, self.outside, self.commit)
        if not self.blocks or min(costs) < 0 or not all(c < float("inf") for c in costs) or sum(self.blocks) <= 0:
            raise ValueError(f"costs must be finite and not negative, with at least one block above 0, got {self}")

    @property
    def denoise(self) -> float:
        """One denoise pass at full compute."""
        return self.outside + sum(self.blocks)


@dataclass(frozen=True)
class Ceiling:
    """The most that the skipped work allows.

    Attributes:
        skip_rate: Skipped / all denoise cells, both after warm-up.
        speedup: Full cost / cost that is left: no cache can be faster at this skip.
        full: Full cost of the counted chunks.
        left: The part of it that was not skipped.
    """

    skip_rate: float
    speedup: float
    full: float
    left: float

    def efficiency(self, speedup: float) -> float:
        """How much of the ceiling a measured speedup reaches: 1 is perfect, 1 / ceiling is no gain at all."""
        return speedup / self.speedup

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a result file."""
        return asdict(self)


def ceiling(
    times: PassTimes,
    *,
    chunks: int,
    steps: int,
    skipped: Iterable[Cell] = (),
    parts: Mapping[Cell, float] | None = None,
    empty_chunks: Iterable[int] = (),
    commits: int = 0,
    warmup: int = 0,
    branches: int = 1,
) -> Ceiling:
    """The ceiling at the skip that was reached.

    Args:
        times: Costs of the parts.
        chunks: Chunks of the rollout, warm-up included; chunk numbers run from 0.
        steps: Denoising steps of a chunk.
        skipped: The cells (chunk, step, block) that were not computed, one entry a branch.
        parts: Cells that were computed for some tokens only, and the share of the tokens that were left out.
        empty_chunks: Chunks that were emitted without any pass; they save the whole of their passes.
        commits: Commit passes after warm-up.
        warmup: Chunks at the start that do not count.
        branches: Forward passes per step (2 with classifier-free guidance).

    Raises:
        ValueError: nothing is left to count, or a cell or chunk lies outside the rollout or is given too often.

    Example:
        Four chunks of two steps and two blocks; the second block is skipped in the last three chunks.
        >>> times = PassTimes(blocks=(1.0, 1.0), outside=1.0, commit=3.0)
        >>> cells = [(n, t, 1) for n in (1, 2, 3) for t in (0, 1)]
        >>> reached = ceiling(times, chunks=4, steps=2, commits=1, skipped=cells)
        >>> reached.skip_rate, reached.full, reached.left
        (0.375, 27.0, 21.0)
    """
    if steps < 1 or branches < 1 or commits < 0 or not 0 <= warmup < chunks:
        raise ValueError(
            f"need steps and branches of 1 or more, commits of 0 or more and fewer warm-up chunks than chunks; got "
            f"steps={steps}, branches={branches}, commits={commits}, warmup={warmup}, chunks={chunks}"
        )
    depth = len(times.blocks)
    empty = set(empty_chunks)
    if outside := sorted(n for n in empty if not 0 <= n < chunks):
        raise ValueError(f"chunk {outside[0]} lies outside the rollout of {chunks} chunks")
    seen: dict[Cell, int] = {}
    for cell in skipped:
        n, t, b = cell
        if not (0 <= n < chunks and 0 <= t < steps and 0 <= b < depth):
            raise ValueError(f"cell {cell} lies outside {chunks} chunks x {steps} steps x {depth} blocks")
        seen[cell] = seen.get(cell, 0) + 1
        if seen[cell] > branches:
            raise ValueError(f"cell {cell} is given {seen[cell]} times, but there are {branches} branches")
    weights: dict[Cell, float] = {**seen}
    for cell, share in (parts or {}).items():
        if cell in seen or not 0 <= share <= 1:
            raise ValueError(f"cell {cell} is left out by a share of {share:g}, and skipped {seen.get(cell, 0)} times")
        weights[cell] = share
    counted = {cell: count for cell, count in weights.items() if cell[0] >= warmup and cell[0] not in empty}
    bare = len([n for n in empty if n >= warmup])
    passes = (chunks - warmup) * steps * branches
    full = passes * times.denoise + commits * times.commit
    saved = bare * steps * branches * times.denoise + sum(
        count * times.blocks[b] for (_, _, b), count in counted.items()
    )
    cells = bare * steps * branches * depth + sum(counted.values())
    left = full - saved
    return Ceiling(cells / (passes * depth), full / left if left > 0 else float("inf"), full, left)


def structural_skip(
    blocks: int, *, exact_every: int | None, front: int = 1, back: int = 0, steps: int = 1, exact_steps: int = 0
) -> float:
    """The largest skip rate that the anchors of a configuration allow: (1 - 1/P) (1 - Fn/B) in the paper's letters.

    Args:
        blocks: Blocks of the transformer (B).
        exact_every: One chunk in this many is always exact (P, the KV cycle); None when no chunk is.
        front: Blocks at the front that are always computed (Fn).
        back: The same at the back.
        steps: Denoising steps of a chunk.
        exact_steps: Steps of every chunk that are always exact (1 with step-0 protection).

    Example:
        >>> round(structural_skip(27, exact_every=4), 3)
        0.722
    """
    if blocks < 1 or not 0 <= front + back <= blocks or front < 0 or back < 0:
        raise ValueError(f"front + back must lie in 0..{blocks}, got {front} + {back}")
    if steps < 1 or not 0 <= exact_steps <= steps:
        raise ValueError(f"exact_steps must lie in 0..{steps}, got {exact_steps}")
    if exact_every is not None and exact_every < 1:
        raise ValueError(f"exact_every must be 1 or more, or None, got {exact_every}")
    free_chunks = 1.0 if exact_every is None else 1 - 1 / exact_every
    return free_chunks * (1 - (front + back) / blocks) * (1 - exact_steps / steps)


def structural_ceiling(
    times: PassTimes, *, chunks: int, steps: int, front: int = 1, back: int = 0, exact_steps: int = 0
) -> Ceiling:
    """The ceiling when all that may be skipped in a KV cycle is: `chunks` chunks, the first one exact, one commit.

    With 1 chunk a cycle nothing but the anchors is exact (the commit pass is protected, not the chunk).
    """
    first = 1 if chunks > 1 else 0
    cells = [
        (n, t, b)
        for n in range(first, chunks)
        for t in range(exact_steps, steps)
        for b in range(front, len(times.blocks) - back)
    ]
    return ceiling(times, chunks=chunks, steps=steps, skipped=cells, commits=1)


def time_passes(
    denoise: Callable[[], object],
    blocks: Sequence[nn.Module],
    commit: Callable[[], object] | None = None,
    *,
    repeats: int = 5,
    warmup: int = 1,
    device: str | torch.device = "cpu",
) -> PassTimes:
    """Measure the parts of a pass with forward hooks on the blocks; medians over `repeats`.

    Args:
        denoise: Runs one denoise pass at full compute.
        blocks: The model's blocks, in order; each must run exactly once in `denoise`.
        commit: Runs one commit pass.
        repeats: Measured passes.
        warmup: Passes before the first measured one.
        device: Where the model runs.

    Raises:
        ValueError: a block did not run once in a pass.
    """
    watches = [Stopwatch(device) for _ in blocks]
    laps: dict[int, Any] = {}
    hooks = []
    for i, block in enumerate(blocks):

        def enter(*_: object, i: int = i) -> None:
            laps[i] = watches[i].lap()
            laps[i].__enter__()

        def leave(*_: object, i: int = i) -> None:
            laps.pop(i).__exit__(None, None, None)

        hooks += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    try:
        whole = _median_laps(denoise, repeats, warmup, device)
    finally:
        for hook in hooks:
            hook.remove()
    found = []
    for i, watch in enumerate(watches):
        if len(watch.laps()) != warmup + repeats:
            raise ValueError(f"block {i} ran {len(watch.laps())} times in {warmup + repeats} passes, not once in each")
        found.append(statistics.median(watch.laps()[warmup:]))
    spent = _median_laps(commit, repeats, warmup, device) if commit is not None else 0.0
    return PassTimes(tuple(found), max(0.0, whole - sum(found)), spent)


def count_flops(run: Callable[[], object]) -> int:
    """Operations of matrix products, convolutions and attention in `run()`; a multiply-add counts as two."""
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter:
        run()
    return int(counter.get_total_flops())


def _median_laps(run: Callable[[], object], repeats: int, warmup: int, device: str | torch.device) -> float:
    watch = Stopwatch(device)
    for _ in range(warmup + repeats):
        with watch.lap():
            run()
    return statistics.median(watch.laps()[warmup:])
