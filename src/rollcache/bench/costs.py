"""Measured cost of the parts of a rollout at full compute, from which the ceiling follows."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rollcache.bench.lanes import clone
from rollcache.measure import PassTimes
from rollcache.street.world import Session, World

if TYPE_CHECKING:
    from rollcache.bench.takes import Take
    from rollcache.street.protocol import Protocol


def measure_passes(world: World, take: Take, protocol: Protocol, *, chunks: int | None = None) -> PassTimes:
    """Run a few chunks at full compute on a copy of the model with a stopwatch around every block; medians.

    Args:
        world: the bare world (its model gets no hook).
        take: what is driven.
        protocol: of the rollout.
        chunks: chunks to run, default two KV cycles, at most those of the take. The first is not counted.
    """
    chunks = min(take.chunks, chunks or max(3, 2 * protocol.kv_every))
    world = clone(world)
    clock = _Clock(world.model)
    session = Session(world, take.start, protocol, seed=take.seed)
    clock.passes.clear()
    outside: list[float] = []
    try:
        for n, action in enumerate(take.actions[:chunks]):
            before = len(clock.passes)
            emission = session.step(action)
            new = clock.passes[before:]
            if n == 0:
                continue
            commit = sum(p.whole for p in new if p.role == "commit")
            blocks = sum(sum(p.blocks) for p in new if p.role == "denoise")
            outside.append((emission.seconds - commit - blocks) / protocol.steps)
    finally:
        clock.close()
    denoise = [p.blocks for p in clock.passes if p.role == "denoise"][protocol.steps :]
    commits = [p.whole for p in clock.passes if p.role == "commit"]
    return PassTimes(
        blocks=tuple(statistics.median(column) for column in zip(*denoise, strict=True)),
        outside=max(0.0, statistics.median(outside)),
        commit=statistics.median(commits) if commits else 0.0,
    )


class _Timed:
    """One pass: its role, its seconds, and those of every block."""

    def __init__(self, role: str) -> None:
        self.role, self.began, self.whole = role, _now(), 0.0
        self.blocks: list[float] = []


class _Clock:
    """Stopwatches around a model and its blocks."""

    def __init__(self, model: nn.Module) -> None:
        self.passes: list[_Timed] = []
        self._began = 0.0
        self._hooks = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave),
        ]
        for block in model.blocks:  # type: ignore[union-attr]
            self._hooks += [
                block.register_forward_pre_hook(self._enter_block),
                block.register_forward_hook(self._leave_block),
            ]

    def close(self) -> None:
        """Take the stopwatches away."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.passes.append(_Timed(kwargs["where"].role))

    def _leave(self, *_: object) -> None:
        self.passes[-1].whole = _now() - self.passes[-1].began

    def _enter_block(self, *_: object) -> None:
        self._began = _now()

    def _leave_block(self, *_: object) -> None:
        self.passes[-1].blocks.append(_now() - self._began)


def _now() -> float:
    """Seconds, all queued work done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
