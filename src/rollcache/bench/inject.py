"""Is an abrupt action in the middle of a KV cycle followed? A cache that reuses what it knew before ignores it.

Every variant is run twice from the same start and noise, with and without the injected action. `follow` projects the
difference it makes on the difference it makes at full compute: 1 follows fully, 0 ignores it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollcache.bench.controls import LABELS, cached_plan, policy_named
from rollcache.bench.decisions import Decisions
from rollcache.bench.lanes import FULL, OnChunk, Plan, open_lane, race
from rollcache.measure.fidelity import psnr
from rollcache.policies import XCache

if TYPE_CHECKING:
    from rollcache.bench.takes import Injection, Take
    from rollcache.street.protocol import Protocol
    from rollcache.street.world import World


def plans() -> list[Plan]:
    """The variants that are asked."""
    return [
        Plan(key="xcache", label=LABELS["xcache"], policy=XCache()),
        Plan(key="xcache-paper", label=LABELS["xcache-paper"], policy=XCache.paper()),
        Plan(key="blind", label="X-Cache, blind to actions", policy=XCache.paper(condition_cosine=False)),
        Plan(key="blind-9995", label="blind, floor .9995", policy=XCache(condition_tol=None)),
        Plan(key="action-gate", label="WindowReuse, no pass", policy=policy_named("window-reuse"), no_pass=True),
        cached_plan("replan"),
        Plan(key="frozen", label="frozen window", frozen=True),
    ]


def check_place(at: int, chunks: int, protocol: Protocol) -> None:
    """Fail unless an injection at this chunk leaves the rest of its KV cycle and the next one to look at.

    Raises:
        ValueError: the protocol is not `receding`, or the chunk is in the wrong place.
    """
    every = protocol.kv_every
    if protocol.kind != "receding":
        raise ValueError(f"an action in the middle of a KV cycle needs the receding protocol, not {protocol.kind}.")
    if at < every or at % every == 0 or at - at % every + 2 * every > chunks:
        raise ValueError(
            f"chunk {at} cannot be tested: it must lie inside a cycle of {every} chunks (not first in it) after the "
            f"first cycle, with a whole cycle after it among the {chunks} chunks."
        )


def inject(
    world: World,
    take: Take,
    protocol: Protocol,
    injection: Injection,
    *,
    variants: Sequence[Plan] | None = None,
    reload: Callable[[str], World],
    on_chunk: OnChunk | None = None,
) -> dict[str, Any]:
    """Measure how every variant (default: `plans`) follows one injection.

    Raises:
        ValueError: the protocol is not `receding`, or the injection does not leave the rest of a cycle and the next.
        KeyboardInterrupt: Ctrl-C.
    """
    every, at = protocol.kv_every, injection.chunk
    check_place(at, take.chunks, protocol)
    end = at - at % every + every
    variants = plans() if variants is None else variants
    taken = {"plain": take, "injected": take.injected(injection)}
    frames: dict[str, dict[str, Mapping[str, Tensor]]] = {}
    recomputed: dict[str, list[int]] = {}
    for name, one in taken.items():
        lanes = [open_lane(world, one, protocol, plan, reload=reload) for plan in (FULL, *variants)]
        if not race(lanes, one.actions[: end + every], on_chunk):
            raise KeyboardInterrupt
        frames[name] = {lane.key: world.decode(torch.cat(lane.latents)) for lane in lanes}
        if name == "injected":
            for lane in lanes:
                words = Decisions.of(lane).words[end - every : end]
                recomputed[lane.key] = [sum(word.count("C") + word.count("P") for word in chunk) for chunk in words]
    per = take.actions.shape[1]
    spans = {"rest": slice(at * per, end * per), "next": slice(end * per, (end + every) * per)}
    effect = {key: _difference(frames["injected"][key], frames["plain"][key]) for key in frames["plain"]}
    full = effect[FULL.key]
    rows = []
    for plan in variants:
        row: dict[str, Any] = {"key": plan.key, "label": plan.label, "recomputed": recomputed[plan.key]}
        for span, part in spans.items():
            row[f"follow_{span}"] = follow(effect[plan.key][part], full[part])
            row[f"psnr_{span}"] = _psnr(frames["injected"][plan.key], frames["injected"][FULL.key], part)
        rows.append(row)
    return {
        "interrupted": False,
        "injection": {"kind": injection.kind, "chunk": at, "phase": at % every},
        "take": take.describe(),
        "protocol": {"text": protocol.describe()},
        "cells_per_chunk": protocol.steps * len(world.model.blocks),
        "effect": {
            span: _psnr(frames["injected"][FULL.key], frames["plain"][FULL.key], part) for span, part in spans.items()
        },
        "rows": rows,
    }


def follow(ours: Tensor, full: Tensor) -> float | None:
    """Projection of one difference on another, any shape; None when full compute shows no difference."""
    size = float(full.double().square().sum())
    return float((ours.double() * full.double()).sum()) / size if size > 0 else None


def _difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """All cameras' differences as one tensor [T, pixels]."""
    return torch.cat([(a[group] - b[group]).flatten(1) for group in a], 1)


def _psnr(a: Mapping[str, Tensor], b: Mapping[str, Tensor], part: slice) -> float:
    return float(psnr(_difference(a, b)[part].double().square().mean()))
