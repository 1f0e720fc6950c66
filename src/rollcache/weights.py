"""Are the weights of the blocks still those that the stored residuals were computed with?

PyTorch counts the writes to a parameter. What it does not count, and what only looks like a change, is told otherwise:

| what happens | told by |
|---|---|
| a write, `load_state_dict`, an optimiser | the version counter |
| a parameter is replaced or put elsewhere | a few of its values: weights that moved are the same weights |
| PEFT merges, scales or switches an adapter | the state of its layers, which merge through `p.data` |
| a write through `p.data`, in `inference_mode`, by a kernel | nothing: `Cache.notify_weights_changed` is for those |

Weights on the meta device, as offloaders leave them between two forwards, say nothing and count as unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from rollcache.passes import RollcacheError

SAMPLES = 32
"""Values of a parameter that are compared when it is another tensor than before."""


class _Seen(NamedTuple):
    """A parameter as it was last seen; `serial` is another one after every change."""

    parameter: ref[Tensor]
    place: tuple[int, int]
    kind: tuple[torch.Size, torch.dtype]
    values: tuple[float, ...]
    serial: int


class Weights:
    """The parameters of some blocks."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        """Nothing was seen yet."""
        self._blocks = blocks
        self._seen: dict[int, _Seen] = {}  # by position
        self._serial = 0
        self._told = 0

    def touch(self) -> None:
        """Somebody says that they changed."""
        self._told += 1

    def token(self) -> object:
        """Something that is different after every change that can be told."""
        modules = [m for block in self._blocks for m in block.modules()]
        parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        stale = [i for i, p in enumerate(parameters) if not p.is_meta and not self._is_known(i, p)]
        for i, values in zip(stale, _values([parameters[i] for i in stale]), strict=True):
            self._look(i, parameters[i], values)
        serials = [None if p.is_meta else self._seen[i].serial for i, p in enumerate(parameters)]
        return self._told, serials, [_tuned(m) for m in modules if "merged_adapters" in vars(m)]

    def sample(self) -> list[tuple[torch.Size, torch.dtype, tuple[float, ...]]]:
        """Shape, dtype and a few values of every parameter: the same in another process that has the same weights."""
        parameters = [p for block in self._blocks for p in block.parameters()]
        if any(p.is_meta for p in parameters):
            raise RollcacheError("weights on the meta device have no values to be told by: load them first.")
        return [(p.shape, p.dtype, v) for p, v in zip(parameters, _values(parameters), strict=True)]

    def _is_known(self, position: int, parameter: Tensor) -> bool:
        """Whether this is the tensor that was last seen here, and nobody wrote to it."""
        seen = self._seen.get(position)
        return seen is not None and seen.parameter() is parameter and seen.place == _place(parameter)

    def _look(self, position: int, parameter: Tensor, values: tuple[float, ...]) -> None:
        """A parameter is new, was written to, or moved."""
        seen, place, kind = self._seen.get(position), _place(parameter), (parameter.shape, parameter.dtype)
        written = seen is not None and seen.parameter() is parameter and seen.place[1] != place[1]
        same = seen is not None and not written and seen.kind == kind and seen.values == values
        if not same:
            self._serial += 1
        serial = seen.serial if seen is not None and same else self._serial
        self._seen[position] = _Seen(ref(parameter), place, kind, values, serial)


def _place(parameter: Tensor) -> tuple[int, int]:
    """Where a parameter lives, and how often it was written to."""
    return _local(parameter).data_ptr(), 0 if parameter.is_inference() else parameter._version


def _local(parameter: Tensor) -> Tensor:
    """The part of a sharded parameter that lives on this rank."""
    part: Tensor = getattr(parameter, "_local_tensor", parameter)
    return part


def _values(parameters: Sequence[Tensor]) -> list[tuple[float, ...]]:
    """A few values of every parameter, spread over it. One host synchronisation a device."""
    parts = []
    for p in parameters:
        flat = _local(p).detach().reshape(-1)
        parts.append(flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES].double())
    found: list[tuple[float, ...]] = [()] * len(parts)
    for device in {part.device for part in parts}:
        mine = [i for i, part in enumerate(parts) if part.device == device]
        numbers = iter(torch.cat([parts[i] for i in mine]).tolist())
        for i in mine:
            found[i] = tuple(next(numbers) for _ in range(len(parts[i])))
    return found


def _tuned(module: nn.Module) -> str:
    """Which adapters a layer of PEFT has merged, applies, and how strongly."""
    state = vars(module)
    return repr([state.get(name) for name in ("merged_adapters", "_active_adapter", "_disable_adapters", "scaling")])
