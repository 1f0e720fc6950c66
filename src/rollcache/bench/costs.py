"""Measured cost of the parts of a rollout at full compute, from which the ceiling follows.

The stopwatches sit on the full-compute lane of the race itself, so the ceiling and the speedup beside it come from the
same passes: a machine that gets slower or faster in between moves both alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn

from rollcache.bench.decisions import Window
from rollcache.bench.lanes import clone
from rollcache.measure import PassTimes, Stopwatch
from rollcache.street.world import Session, World

if TYPE_CHECKING:
    from rollcache.bench.takes import Take
    from rollcache.street.protocol import Protocol


class PassClock:
    """Stopwatches around a bare model and each of its blocks; a context manager.

    They cost about a hundredth of a per cent of a pass, and no synchronisation on an accelerator.

    Args:
        world: its model must take the keyword `where`, and run every block once in every pass.
    """

    def __init__(self, world: World) -> None:
        self._model = world.model
        self._passes: list[tuple[str, int]] = []  # role and chunk of every pass
        self._whole, self._blocks = Stopwatch(world.device), Stopwatch(world.device)
        self._open: dict[int, AbstractContextManager[None]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> PassClock:
        model = self._model
        self._hooks = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(lambda *_: self._stop(-1)),
        ]
        for i, block in enumerate(model.blocks):
            self._hooks += [
                block.register_forward_pre_hook(lambda *_, i=i: self._start(i, self._blocks)),
                block.register_forward_hook(lambda *_, i=i: self._stop(i)),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def times(self, window: Window, seconds: Sequence[float]) -> PassTimes:
        """Mean costs over the chunks that count; they add up to the time of these chunks.

        Args:
            window: the chunks that count.
            seconds: time in the transformer of every chunk, as the session told.
        """
        depth = len(self._model.blocks)
        whole, laps = self._whole.laps(), self._blocks.laps()
        passes = [(role, i) for i, (role, chunk) in enumerate(self._passes) if chunk in window.chunks]
        blocks = [laps[i * depth : (i + 1) * depth] for role, i in passes if role == "denoise"]
        commits = [whole[i] for role, i in passes if role == "commit"]
        spent = sum(seconds[n] for n in window.chunks)
        rest = spent - sum(commits) - sum(map(sum, blocks))
        return PassTimes(
            blocks=tuple(statistics.fmean(column) for column in zip(*blocks, strict=True)),
            outside=max(0.0, rest / len(blocks)),
            commit=statistics.fmean(commits) if commits else 0.0,
        )

    def _enter(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        where = kwargs["where"]
        self._passes.append((where.role, where.chunk))
        self._start(-1, self._whole)

    def _start(self, key: int, watch: Stopwatch) -> None:
        self._open[key] = watch.lap()
        self._open[key].__enter__()

    def _stop(self, key: int) -> None:
        self._open.pop(key).__exit__(None, None, None)


def measure_passes(world: World, take: Take, protocol: Protocol) -> PassTimes:
    """The same from a run of its own: two KV cycles, at most the take, at full compute on a copy of the model."""
    chunks = min(take.chunks, max(3, 2 * protocol.kv_every))
    world = clone(world)
    with PassClock(world) as clock:
        session = Session(world, take.start, protocol, seed=take.seed)
        seconds = [session.step(action).seconds for action in take.actions[:chunks]]
    return clock.times(Window.of(chunks, protocol), seconds)
