"""What a model and the arguments of its calls hold: found by the way there, compared, and put back as it was."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Tensor]

_OURS = {"forward", "__getstate__"}  # where a cache wraps a module
_OF_MODULES = frozenset(vars(nn.Module())) | _OURS
_WHOLE = (str, bytes, int, float, complex, type(None), Enum, type, ModuleType)
_FUNCTIONS = ("builtins", "functools", "torch", "weakref")  # callable objects of others may keep something
_MISSING: Any = object()


def tensors_in(value: Any, path: str = "", seen: set[int] | None = None) -> State:
    """All tensors that can be reached from a value, by the way there; of modules all but their parameters.

    Args:
        value: anything.
        path: the way to it.
        seen: `id` of what is not looked into, e.g. since it is looked at elsewhere.
    """
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        return {path: value}
    if id(value) in seen or _is_whole(value):
        return {}
    seen.add(id(value))
    found: State = {}
    for name, part in _parts(value, seen):
        found |= tensors_in(part, path + name, seen)
    return found


def held_by(model: nn.Module) -> State:
    """All tensors that a model holds besides its parameters, wherever: in buffers, attributes, and objects in those."""
    modules = dict(model.named_modules())
    seen = {id(module) for module in modules.values()}
    found: State = {}
    for path, module in modules.items():
        for name, part in _parts(module, seen):
            found |= tensors_in(part, (f"model.{path}" if path else "model") + name, seen)
    return {path: tensor for path, tensor in found.items() if not isinstance(tensor, nn.Parameter)}


def differing(a: State, b: State) -> list[str]:
    """Where two states differ, among the tensors that both have."""
    return [path for path in a if path in b and not _equal(a[path], b[path])]


def is_same(a: Any, b: Any) -> bool:
    """Whether two nested values hold the same tensors, bit for bit; not-a-number is equal to itself."""
    ours, theirs = tensors_in((a,)), tensors_in((b,))
    return ours.keys() == theirs.keys() and not differing(ours, theirs)


def kind_of(path: str) -> str:
    """A path without its numbers: the same for every block, layer and entry of a list."""
    return re.sub(r"\d+", "*", path)


def copied(value: Any) -> Any:
    """Tensors of a nested value, cloned; everything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copied, value))
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return value


def apart(a: Any, b: Any) -> float:
    """The largest difference of two nested values, in units of what rounding may do: above 1 is no rounding."""
    ours, theirs = tensors_in((a,)), tensors_in((b,))
    if ours.keys() != theirs.keys():
        return float("inf")
    worst = 0.0
    for path, x in ours.items():
        y = theirs[path]
        if x.shape != y.shape:
            return float("inf")
        if _equal(x, y) or not x.numel():
            continue
        eps = torch.finfo(y.dtype).eps if y.is_floating_point() else 0.0
        scale = max(float(y.abs().max()), 1e-6) * min(256 * eps, 0.05)
        distance = float((x.double() - y.double()).abs().max())
        worst = max(worst, distance / scale if distance == distance and scale else float("inf"))
    return worst


@dataclass(frozen=True)
class Change:
    """Something that is not what it was.

    Attributes:
        path: the way there.
        numbers: a tensor has other numbers; else something else is there.
        undo: makes it what it was.
    """

    path: str
    numbers: bool
    undo: Callable[[], None]


class Snapshot:
    """What a model holds besides its parameters, and what else is given, as it was: numbers, and which object is where.

    Attributes of modules, what their buffers are, and everything inside of lists, dicts and plain objects are put back
    in place, so that whoever else has such an object sees it as it was.
    """

    def __init__(self, model: nn.Module, also: Any = None) -> None:
        """Look at it now."""
        self._containers: list[tuple[str, Any, Any]] = []
        self._tensors: list[tuple[str, Tensor, Tensor]] = []
        modules = dict(model.named_modules())
        self._seen = {id(module) for module in modules.values()}
        for path, module in modules.items():
            self._look(f"model.{path}" if path else "model", module)
        if also is not None:
            self._look("", also)
        del self._seen

    def _look(self, path: str, value: Any) -> None:
        self._containers.append((path, value, _content(value)))
        for name, part in _parts(value, self._seen):
            if isinstance(part, nn.Parameter) or id(part) in self._seen or _is_whole(part):
                continue
            self._seen.add(id(part))
            if isinstance(part, Tensor):
                self._tensors.append((path + name, part, part.detach().clone()))
            else:
                self._look(path + name, part)

    def changes(self) -> Iterator[Change]:
        """What is not what it was; to be undone from the last to the first."""
        for path, tensor, was in self._tensors:
            if not _equal(tensor, was):
                yield Change(path, True, partial(_write, tensor, was, _mask(tensor, was)))
        for path, value, was in self._containers:
            now = _content(value)
            if isinstance(was, dict):
                for key in [k for k in was.keys() | now.keys() if not _unchanged(was, now, k)]:
                    old = was.get(key, _MISSING)
                    yield Change(path + _step(value, key), False, partial(_set, value, key, old))
            elif was is not None and (len(was) != len(now) or any(a is not b for a, b in zip(was, now, strict=True))):
                yield Change(path, False, partial(_refill, value, was))

    def put_back(self) -> None:
        """Make everything what it was."""
        for change in reversed(list(self.changes())):
            change.undo()


def _is_whole(value: Any) -> bool:
    """Whether a value is not looked into: numbers, names, functions."""
    if isinstance(value, _WHOLE):
        return True
    return callable(value) and not isinstance(value, nn.Module) and type(value).__module__.split(".")[0] in _FUNCTIONS


def _parts(value: Any, seen: Iterable[int] = ()) -> list[tuple[str, Any]]:
    """What a value holds, each with its step of the way."""
    if isinstance(value, nn.Module):
        named = _content(value)
        named |= {name: part for name, part in value._modules.items() if id(part) not in seen}
        return [(f".{name}", part) for name, part in named.items()]
    if isinstance(value, dict):
        return [(_step(value, key), part) for key, part in value.items()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    return [(f".{name}", part) for name, part in _attributes(value).items()]


def _content(value: Any) -> Any:
    """What of a value could be changed: a dict or a list; None for what cannot."""
    if isinstance(value, nn.Module):
        return {name: part for name, part in vars(value).items() if name not in _OF_MODULES} | value._buffers
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | set | deque):
        return list(value)
    return None if isinstance(value, tuple | frozenset) else _attributes(value)


def _attributes(value: Any) -> dict[str, Any]:
    """Of an object, those in `__slots__` too."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        for name, place in vars(kind).items():
            if isinstance(place, MemberDescriptorType):
                with suppress(AttributeError):  # nothing in it yet
                    found[name] = place.__get__(value, type(value))
    return found


def _step(value: Any, key: Any) -> str:
    """A step of the way; keys that have another name in every run are counted."""
    if not isinstance(value, dict):
        return f".{key}"
    atoms = key if isinstance(key, tuple) else (key,)
    if all(isinstance(a, str | float | bool | type(None) | Enum) or (type(a) is int and a < 1 << 32) for a in atoms):
        return f"[{key!r}]"
    return f"[#{next((i for i, k in enumerate(value) if k is key), len(value))}]"


def _unchanged(was: dict[Any, Any], now: dict[Any, Any], key: Any) -> bool:
    a, b = was.get(key, _MISSING), now.get(key, _MISSING)
    return a is b or (type(a) is type(b) and isinstance(a, _WHOLE) and bool(a == b))


def _set(value: Any, key: Any, part: Any) -> None:
    if isinstance(value, nn.Module):
        value = value._buffers if key in value._buffers else vars(value)
    elif not isinstance(value, dict) and key in getattr(value, "__dict__", {}):
        value = vars(value)
    if isinstance(value, dict) and part is _MISSING:
        value.pop(key, None)
    elif isinstance(value, dict):
        value[key] = part
    elif part is _MISSING:
        object.__delattr__(value, key)
    else:
        object.__setattr__(value, key, part)


def _refill(value: Any, parts: list[Any]) -> None:
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(parts)


def _write(tensor: Tensor, was: Tensor, mask: Tensor | None) -> None:
    """Put back the numbers where there is a mask, or the whole tensor."""
    with torch.inference_mode():
        if mask is None:
            tensor.data = was.clone()
            return
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if size > 1 and not stride:  # an expanded tensor holds each number once
                tensor, was, mask = (t.narrow(dim, 0, 1) for t in (tensor, was, mask))
        tensor.copy_(torch.where(mask, was, tensor))


def _mask(tensor: Tensor, was: Tensor) -> Tensor | None:
    """Where two tensors differ; None if not even their shapes agree."""
    if tensor.shape != was.shape or tensor.dtype != was.dtype:
        return None
    return (tensor != was) & ~(tensor.isnan() & was.isnan())


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all()))
