"""What stands in for the `forward` of a module instance, and leaves no trace in copies, in pickles, or when it goes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from rollcache.passes import RollcacheError


class Hook:
    """Stands in for the `forward` of one module instance until it is removed.

    A copy or a pickle of a cached model is a bare model: a module that is asked for its state leaves the hook out. What
    copies attributes in its own way gets the original `forward` for the hook. It has no `__dict__`, since wrappers of
    others copy that of what they wrap, and would hold the engine.
    """

    __slots__ = ("__weakref__", "_run", "_state", "module", "original", "own")

    def __init__(self, module: nn.Module, run: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        """Install on `module`; `run(original, args, kwargs)` is called in its place."""
        self.module = module
        self.original = module.forward
        self.own = vars(module).get("forward")
        self._run: Callable[[Callable[..., Any], Any, Any], Any] | None = run
        self._state = partial(bare_state, module)
        module.forward = self
        vars(module).setdefault("__getstate__", self._state)

    @property
    def active(self) -> bool:
        """Whether it was not removed; under a wrapper of somebody else a hook stays, and does nothing."""
        return self._run is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the original."""
        if torch.compiler.is_compiling():
            _refuse_graph(type(self.module).__name__)
        if self._run is None:
            return self.original(*args, **kwargs)
        return self._run(self.original, args, kwargs)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        """What is copied or pickled is the original."""
        return _itself, (self.original,)

    def remove(self) -> None:
        """Take the hook away. If somebody wrapped it since, it stays under that wrapper and does nothing."""
        self._run = None
        if vars(self.module).get("__getstate__") is self._state:
            del vars(self.module)["__getstate__"]
        if self.module.__dict__.get("forward") is not self:
            return
        if self.own is None:
            del self.module.forward
        else:
            self.module.forward = self.own


def _refuse_graph(name: str) -> NoReturn:
    """The compiler met the cache. It cannot look into this function, so that the error is raised for real."""
    raise RollcacheError(
        f"{name} was compiled after the cache was put on it, and the compiler would trace into the cache: disable the "
        "cache, compile the blocks one by one, and enable it again."
    )


_refuse_graph._torchdynamo_disable = True  # type: ignore[attr-defined]


def _itself(value: Any) -> Any:
    return value


def bare_state(module: nn.Module) -> dict[str, Any]:
    """What a copy or a pickle of a module holds: everything but the hook."""
    ask: Any = type(module).__getstate__
    state = ask(module)
    if not isinstance(state, dict):
        name = type(module).__name__
        raise RollcacheError(
            f"{name} cannot be copied or pickled with a cache on it, for its state is no dictionary: disable the cache "
            "first."
        )
    bare = {name: value for name, value in state.items() if name not in ("forward", "__getstate__")}
    forward = state.get("forward")
    while isinstance(forward, Hook):
        forward = forward.own
    return bare if forward is None else {**bare, "forward": forward}


def is_ours(state: Any) -> bool:
    """Whether a hook is there, perhaps under the wrapper of somebody else."""
    return isinstance(state, partial) and state.func is bare_state


def find_hook(module: nn.Module) -> Hook | None:
    """The hook on a module, if there is one that does something."""
    hook = module.__dict__.get("forward")
    return hook if isinstance(hook, Hook) and hook.active else None
