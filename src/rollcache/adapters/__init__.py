"""Model families: what must be known about each, one file a family, imported when a model of it turns up."""

from __future__ import annotations

from rollcache.adapters.registry import Structure, find, register
from rollcache.adapters.spec import Adapter, BlockIO

__all__ = ["Adapter", "BlockIO", "Structure", "find", "register"]
