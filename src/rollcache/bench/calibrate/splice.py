"""Putting another residual in the place of the stack's, for one forward at a time.

Caching methods do the same under rules of their own; here the experiment says what is added. Works on any model with an
adapter whose hidden state is one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from rollcache import adapters
from rollcache.adapters.spec import Adapter
from rollcache.hook import Hook
from rollcache.passes import RollcacheError


class Splice:
    """Stands around the blocks of a model as a context manager; without `adding` every forward is the model's own.

    Args:
        model: without a cache on it.
        adapter: of the model; default that of its class.

    Attributes:
        entered: what entered the stack in the last forward [B, L, C].
        left: what left it [B, L, C].
    """

    def __init__(self, model: nn.Module, adapter: Adapter | None = None) -> None:
        self._model = model
        self._adapter = adapter or adapters.find(model)
        self._blocks = list(self._adapter.blocks(model))
        self._hooks: list[Hook] = []
        self._add: Tensor | None = None
        self.entered: Tensor | None = None
        self.left: Tensor | None = None

    def __enter__(self) -> Splice:
        self._hooks = [Hook(block, self._runner(i)) for i, block in enumerate(self._blocks)]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.entered, self.left = [], None, None

    @contextmanager
    def adding(self, residual: Tensor | None) -> Iterator[None]:
        """In here the stack returns its input plus `residual` [B, L, C]; None computes."""
        self._add = residual
        try:
            yield
        finally:
            self._add = None

    def _runner(self, index: int) -> Callable[[Callable[..., Any], Any, Any], Any]:
        io, last = self._adapter.io, len(self._blocks) - 1

        def run(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            streams = io.read(args, kwargs)
            if len(streams) != 1:
                raise RollcacheError(f"{type(self._model).__name__} has a hidden state of {len(streams)} tensors.")
            if index == 0:
                self.entered = streams[0]
            if self._add is None:
                output = original(*args, **kwargs)
            else:
                out = (streams[0] + self._add).to(streams[0].dtype) if index == 0 else streams[0]
                output = io.emit((out,), args, kwargs)
            if index == last:
                self.left = io.parse(output)[0]
            return output

        return run
