"""Faster autoregressive video diffusion by reusing transformer work between chunks, never inside the K/V cache.

>>> import rollcache
>>> handle = rollcache.enable(model, rollcache.XCache())  # doctest: +SKIP
>>> print(handle.summary())  # doctest: +SKIP
>>> rollcache.disable(model)  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rollcache.adapters import Adapter, BlockIO
from rollcache.cache import Cache, disable, enable, summary
from rollcache.decision import Action, Decision, Reason, Record, Stats, Trace
from rollcache.passes import Cell, Condition, Pass, Role, RollcacheError, RollcacheWarning, Segment
from rollcache.policies import Evidence, Policy, PolicyConfig, Similarity, WindowReuse, XCache

__version__ = "0.1.0"

__all__ = [
    "Action",
    "Adapter",
    "BlockIO",
    "Cache",
    "Cell",
    "Condition",
    "Decision",
    "Evidence",
    "Pass",
    "Policy",
    "PolicyConfig",
    "Reason",
    "Record",
    "Role",
    "RollcacheError",
    "RollcacheWarning",
    "Segment",
    "Similarity",
    "Stats",
    "Trace",
    "WindowReuse",
    "XCache",
    "disable",
    "enable",
    "summary",
]

_ROOMS = ("bench", "measure", "street")


def __getattr__(name: str) -> Any:
    """Import a room with heavier dependencies when it is first used."""
    if name in _ROOMS:
        return import_module(f"rollcache.{name}")
    raise AttributeError(f"module 'rollcache' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS, "__version__"])
