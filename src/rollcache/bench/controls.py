"""The controls that a cache must beat to be worth having, each a plan to run beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from rollcache.bench.lanes import Plan
from rollcache.street.protocol import Protocol
from rollcache.street.world import resolve_dtype

PERTURBATION = 1e-3  # standard deviation on the start's latents, which have unit variance


def policy_named(name: str, changes: dict[str, Any] | None = None) -> Any:
    """The policy of `--policy`, with changed fields.

    Raises:
        ValueError: unknown name, or fields that the policy does not have.
    """
    if name == "none":
        if changes:
            raise ValueError(f"--policy none has no settings, but {', '.join(sorted(changes))} was given.")
        return None
    import rollcache

    makers: dict[str, Any] = {
        "xcache": rollcache.XCache,
        "xcache-paper": rollcache.XCache.paper,
        "window-reuse": rollcache.WindowReuse,
        "replan": rollcache.Replan,
    }
    if name not in makers:
        raise ValueError(f"unknown policy {name!r}; choose {', '.join((*makers, 'none'))}.")
    policy = makers[name]()
    fields = {f.name for f in dataclasses.fields(policy)}
    if unknown := sorted(set(changes or {}) - fields):
        raise ValueError(f"policy {name!r} has no setting {unknown[0]!r}; it has {', '.join(sorted(fields))}.")
    return dataclasses.replace(policy, **(changes or {}))


LABELS = {
    "xcache": "X-Cache",
    "xcache-paper": "X-Cache as in the paper",
    "window-reuse": "WindowReuse",
    "replan": "Replan",
    "none": "full compute again",
}


def cached_plan(name: str, changes: dict[str, Any] | None = None) -> Plan:
    """The plan of the cache under test; `none` runs full compute twice, which must give a speedup of 1."""
    policy = policy_named(name, changes)
    return Plan(key=name if name != "none" else "again", label=LABELS[name], policy=policy, no_pass=name == "replan")


def control_plans(protocol: Protocol, tested: str) -> list[Plan]:
    """All controls that the protocol allows, without the policy under test itself."""
    plans = []
    if tested != "xcache":
        plans.append(Plan(key="xcache", label=LABELS["xcache"], policy=policy_named("xcache")))
    if tested != "xcache-paper":
        plans.append(Plan(key="xcache-paper", label=LABELS["xcache-paper"], policy=policy_named("xcache-paper")))
    if tested != "window-reuse":
        plans.append(Plan(key="window-reuse", label=LABELS["window-reuse"], policy=policy_named("window-reuse")))
    if protocol.kind == "receding":
        plans.append(
            Plan(key="action-gate", label="WindowReuse, no pass", policy=policy_named("window-reuse"), no_pass=True)
        )
        if tested != "replan":
            plans.append(cached_plan("replan"))
        plans.append(Plan(key="frozen", label="frozen window", frozen=True))
    plans += [
        Plan(key=f"steps-{n}", label=f"{n} step{'s' if n > 1 else ''} of {protocol.steps}", steps=n)
        for n in fewer_steps(protocol.steps)
    ]
    return plans


def fewer_steps(steps: int) -> list[int]:
    """The step counts below `steps` that are controls: all of a few, the halves of many."""
    if steps <= 4:
        return list(range(steps - 1, 0, -1))
    return [n for n in (steps // 2, steps // 4, steps // 8) if n > 0]


def floor_plans(dtype: str, other: bool, device: str = "cpu") -> list[Plan]:
    """Full compute again with a tiny difference: what is below its distance from the reference is rounding.

    Args:
        dtype: precision of the world.
        other: also run in the other precision, unless that is bfloat16 and the processor would have to emulate it.
        device: where it runs.
    """
    plans = [Plan(key="perturbed", label=f"start moved by {PERTURBATION:g}", start_noise=PERTURBATION)]
    precision = "float32" if dtype == "bfloat16" else "bfloat16"
    fast = precision == "float32" or resolve_dtype("auto", torch.device(device)) is torch.bfloat16
    if other and fast:
        plans.append(Plan(key=precision, label=f"full compute in {precision}", dtype=precision))
    return plans
