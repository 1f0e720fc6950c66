"""Which adapter belongs to a model: by its exact class, or by its class name and what it looks like.

Everything is written down as text: no model library is imported to know its models, and an adapter's own module is
imported when a model that it may be for turns up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn

from rollcache.adapters.spec import Adapter
from rollcache.passes import RollcacheError

_NOTHING = object()
_REFUSING = "rollcache.adapters.refused:"  # sources that say why there is no adapter
_COMPILED = "_orig_mod"  # where torch.compile(model) keeps the model
_IN_IT = f".{_COMPILED}"
_WHOLE = (
    "was compiled as a whole, where a cache cannot decide between blocks: leave the model itself as it is, compile its "
    "blocks one by one, then enable the cache on it. See torch.compile in docs/footguns.md."
)

Source = str | Adapter | Callable[[Any], Adapter]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What a model must look like for an adapter to fit, wherever its class was imported from.

    Research code is copied from repository to repository, so that one class lives at many addresses. Its name alone
    proves nothing: all that the adapter relies on is listed here, and a model that lacks any of it is refused by name.

    Attributes:
        class_name: unqualified name of the class.
        attributes: what the model must have, as dotted paths; numbers index into lists: `blocks.0.self_attn.q`.
        parameters: names that `method` of the model must take.
        block_parameters: names that the `forward` of `blocks.0` must take.
        method: see `parameters`.
    """

    class_name: str
    attributes: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    block_parameters: tuple[str, ...] = ()
    method: str = "forward"

    def fits(self, model: nn.Module) -> bool:
        """Whether a model is one of these."""
        return type(model).__name__ == self.class_name and not self.misfits(model)

    def misfits(self, model: nn.Module) -> list[str]:
        """What does not match; empty if the adapter fits."""
        found = [f"has no {path}" for path in self.attributes if not _has(model, path)]
        taken = _parameters(model, self.method)
        found += [f"takes no {name}=" for name in self.parameters if name not in taken]
        if self.block_parameters:
            first = _at(model, "blocks.0")
            taken = set() if first is _NOTHING else _parameters(first, "forward")
            found += [f"its blocks take no {name}=" for name in self.block_parameters if name not in taken]
        return found


_BY_CLASS: dict[str, Source] = {
    "rollcache.street.dit.StreetDiT": "rollcache.adapters.street",
    **{
        f"diffusers.models.transformers.{name}": f"rollcache.adapters.{module}:adapter"
        for name, module in (
            ("transformer_skyreels_v2.SkyReelsV2Transformer3DModel", "diffusers_skyreels"),
            ("transformer_helios.HeliosTransformer3DModel", "diffusers_helios"),
            ("transformer_hunyuan_video_framepack.HunyuanVideoFramepackTransformer3DModel", "diffusers_framepack"),
            ("transformer_anyflow_far.AnyFlowFARTransformer3DModel", "diffusers_anyflow"),
            ("transformer_sana_wm_refiner.SanaWMLTX2RefinerTransformer3DModel", "diffusers_sana"),
        )
    },
}
_BY_STRUCTURE: dict[Structure, Source] = {
    Structure(
        class_name="CausalWanModel",
        attributes=("patch_size", "blocks.0.self_attn", "blocks.0.norm1", "blocks.0.modulation"),
        parameters=("kv_cache", "current_start"),
        method="_forward_inference",
    ): "rollcache.adapters.self_forcing",
    Structure(class_name="VideoDiTModel", attributes=("videodit_blocks.layers",)): f"{_REFUSING}magi",
    Structure(
        class_name="HunyuanVideo_1_5_DiffusionTransformer", attributes=("double_blocks", "action_in")
    ): f"{_REFUSING}worldplay",
}


def register(model_class: str | type | Structure, adapter: Source) -> None:
    """Make a model family known.

    Args:
        model_class: the class, or its exact qualified name `package.module.Class`. Subclasses are not meant: what they
            change is unknown. A `Structure` instead fits every class of that name that looks like it.
        adapter: the adapter; or where it is, `package.module` (there called `ADAPTER`) or `package.module:NAME`. For
            families whose adapter depends on the model, what is there may be a function from a model to its adapter.
    """
    if isinstance(model_class, Structure):
        _BY_STRUCTURE[model_class] = adapter
    else:
        _BY_CLASS[model_class if isinstance(model_class, str) else qualified(model_class)] = adapter


def find(model: nn.Module) -> Adapter:
    """The adapter of a model: that of its exact class, else that of the one structure that it has.

    Raises:
        RollcacheError: none is known, or several structures fit; the message lists what did not match. Or the model
            was compiled as a whole.
    """
    name = qualified(type(model))
    if name in _BY_CLASS:
        return _resolve(_BY_CLASS[name], model)
    compiled = getattr(model, _COMPILED, None)
    if isinstance(compiled, nn.Module):
        raise RollcacheError(f"this {type(compiled).__name__} {_WHOLE}")
    namesakes = {s: s.misfits(model) for s in _BY_STRUCTURE if s.class_name == type(model).__name__}
    fitting = [s for s, misfits in namesakes.items() if not misfits]
    if len(fitting) == 1:
        return _resolve(_BY_STRUCTURE[fitting[0]], model)
    if fitting:
        raise RollcacheError(f"{len(fitting)} adapters fit {name}: pass the right one as adapter=.")
    found = "".join(f" It is no {s.class_name} as known: {', '.join(misfits)}." for s, misfits in namesakes.items())
    known = ", ".join([*_BY_CLASS, *(s.class_name for s in _BY_STRUCTURE)])
    raise RollcacheError(
        f"no adapter for {name} (known: {known}).{found} Pass adapter=, or blocks= and mark the passes."
        f"{_parts_with_adapter(model)}"
    )


def qualified(model_class: type) -> str:
    """The exact name of a class."""
    return f"{model_class.__module__}.{model_class.__qualname__}"


def _parts_with_adapter(model: nn.Module) -> str:
    """A sentence about the modules in a wrapper that have an adapter; empty if there are none. Nothing is imported."""
    parts: list[str] = []
    for path, module in model.named_modules():
        if path and _is_known(module) and not any(path.startswith(f"{outer}.") for outer in parts):
            parts.append(path)
    if not parts:
        return ""
    name = {path: f"`{path.removesuffix(_IN_IT)}` ({type(model.get_submodule(path)).__name__})" for path in parts}
    usable = [name[path] for path in parts if not path.endswith(_IN_IT)]
    if usable:
        return f" But its part {' or '.join(usable)} has one: enable the cache on that."
    return f" But its part {name[parts[0]]} has one; it {_WHOLE}"


def _is_known(module: nn.Module) -> bool:
    """Whether a module has an adapter, as far as can be told without importing it."""
    source = _BY_CLASS.get(qualified(type(module)))
    sources = [s for structure, s in _BY_STRUCTURE.items() if structure.fits(module)] if source is None else [source]
    return any(not str(s).startswith(_REFUSING) for s in sources)


def _resolve(source: Source, model: nn.Module) -> Adapter:
    """The adapter that a source stands for."""
    found: Any = source
    if isinstance(source, str):
        module, _, name = source.partition(":")
        found = getattr(import_module(module), name or "ADAPTER")
    if not isinstance(found, Adapter):
        found = found(model)
    if not isinstance(found, Adapter):
        raise TypeError(f"{source!r} gives no Adapter for {type(model).__name__}, but {type(found).__name__}.")
    return found


def _at(value: Any, path: str) -> Any:
    """What is at a dotted path, `_NOTHING` if nothing is."""
    for part in path.split("."):
        try:
            value = value[int(part)] if part.isdigit() else getattr(value, part)
        except (AttributeError, IndexError, KeyError, TypeError):
            return _NOTHING
    return value


def _has(model: nn.Module, path: str) -> bool:
    return _at(model, path) is not _NOTHING


def _parameters(module: nn.Module, method: str) -> set[str]:
    """Names of the arguments that a module takes; of the class, so that wrappers on the instance do not hide them."""
    called = getattr(type(module), method, None)
    return set() if called is None else set(inspect.signature(called).parameters)
