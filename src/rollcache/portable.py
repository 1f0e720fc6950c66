"""The state of a rollout as bytes: a session that moves from one process to another takes its cache along."""

from __future__ import annotations

from collections.abc import Hashable
from copy import deepcopy
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch

from rollcache.passes import RollcacheError
from rollcache.store import Budget

if TYPE_CHECKING:
    from rollcache.engine import Engine

FORMAT = 1


def export(engine: Engine, key: Hashable) -> bytes:
    """See `Cache.export_state`."""
    if key not in engine.rollouts:
        known = ", ".join(map(repr, engine.rollouts)) or "none"
        raise RollcacheError(f"no rollout {key!r} to export (known: {known}).")
    alone = deepcopy(engine.rollouts[key], {id(engine.budget): Budget()})
    buffer = BytesIO()
    torch.save({**_identity(engine), "rollout": alone}, buffer)
    return buffer.getvalue()


def restore(engine: Engine, key: Hashable, state: bytes) -> None:
    """See `Cache.restore_state`."""
    if not isinstance(state, bytes):
        raise RollcacheError(f"restore_state() takes the bytes that export_state() gave, got {type(state).__name__}.")
    device = next((p.device for block in engine.blocks for p in block.parameters()), None)
    try:
        found: dict[str, Any] = torch.load(BytesIO(state), map_location=device, weights_only=False)
        exported = found["rollout"]
    except Exception as error:
        raise RollcacheError(f"these {len(state)} bytes are no exported state: {error}") from error
    for name, mine in _identity(engine).items():
        if found.get(name) != mine:
            told = "" if name == "weights" else f": {found.get(name)!r} there, {mine!r} here"
            raise RollcacheError(f"the state comes from a cache with another {name}{told}.")
    exported.adopt(engine.weights())
    engine.reset(key)
    engine.state(key)
    if engine.budget.admit(exported.bytes):  # else the rollout starts empty
        engine.rollouts[key] = deepcopy(exported, {id(exported.budget): engine.budget})


def _identity(engine: Engine) -> dict[str, Any]:
    """What a state is of no use without."""
    io = engine.adapter.io
    return {
        "format": FORMAT,
        "policy": engine.policy,
        "number of blocks": engine.depth,
        "choice of blocks that are always computed": sorted(engine.required),
        "moment at which K/V is written": engine.adapter.kv_writes,
        "form of what blocks return": (io.returns, io.aux if isinstance(io.aux, str) else "a function"),
        "storage dtype": engine.dtype,
        "weights": engine.sample_weights(),
    }
