"""Faster autoregressive video diffusion by reusing transformer work between chunks, never inside the K/V cache.

>>> import rollcache
>>> handle = rollcache.enable(model, rollcache.XCache())  # doctest: +SKIP
>>> print(handle.summary())  # doctest: +SKIP
>>> rollcache.disable(model)  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcache.public import *  # noqa: F403

__version__ = "0.1.0"

_ROOMS = ("adapters", "bench", "measure", "noise", "policies", "street", "testing")


def __getattr__(name: str) -> Any:
    """Import what is first used: `rollcache --help` does without torch, most programs without the rooms."""
    if name in _ROOMS:
        return import_module(f"rollcache.{name}")
    public = import_module("rollcache.public")
    if name == "__all__" or name in public.__all__:
        return getattr(public, name)
    raise AttributeError(f"module 'rollcache' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__getattr__("__all__"), *_ROOMS, "__version__"])
