"""Model families by exact class, imported when a model of that class turns up."""

from __future__ import annotations

from importlib import import_module

from torch import nn

from rollcache.adapters.spec import Adapter, BlockIO
from rollcache.passes import RollcacheError

__all__ = ["Adapter", "BlockIO", "find", "register"]

_REGISTRY: dict[str, str | Adapter] = {
    "rollcache.street.dit.StreetDiT": "rollcache.adapters.street",
}


def register(model_class: str, adapter: str | Adapter) -> None:
    """Make a model class known.

    Args:
        model_class: exact qualified name, `package.module.Class`. Subclasses are not meant: what they change is
            unknown.
        adapter: the adapter, or the name of a module that has it as `ADAPTER`.
    """
    _REGISTRY[model_class] = adapter


def find(model: nn.Module) -> Adapter:
    """The adapter of a model.

    Raises:
        RollcacheError: no adapter is known for exactly this class.
    """
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    known = _REGISTRY.get(name)
    if known is None:
        raise RollcacheError(
            f"no adapter for {name} (known: {', '.join(_REGISTRY)}). Pass adapter=, or blocks= and mark the passes."
        )
    if isinstance(known, str):
        known = import_module(known).ADAPTER
        assert isinstance(known, Adapter)
    return known
