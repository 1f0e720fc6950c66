"""Reuse of the whole stack by hand, to hold the library against: blocks are run or passed by, as a plain rule says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from street_doubles import random_world
from torch import Tensor, nn

import rollcache
from rollcache import Action, Cell, Decision, Pass, Reason, Role
from rollcache.policies.base import PolicyConfig, StackEvidence, StackPolicy, Stored
from rollcache.street.protocol import Protocol
from rollcache.street.rig import CELLS
from rollcache.street.world import Session, Start, World

Did = tuple[int, int, str, str]
"""Chunk, step, branch, and what was done: compute, replay or predict."""


class Place(NamedTuple):
    chunk: int
    step: int
    branch: str
    time: float


class Kept(NamedTuple):
    place: Place
    residual: Tensor


class Rule:
    """A method, written down plainly: which stored residuals are added with which weights, or None to compute."""

    def __init__(self) -> None:
        self.kept: list[Kept] = []
        self.did: list[Did] = []

    def past(self, at: Place) -> list[Kept]:
        """What may be reused, the newest first: residuals of this chunk and branch."""
        mine = [k for k in self.kept if (k.place.chunk, k.place.branch) == (at.chunk, at.branch)]
        return mine[::-1]

    def weights(self, at: Place, modulated: Tensor, past: list[Kept]) -> list[float] | None:
        raise NotImplementedError

    def choose(self, at: Place, modulated: Tensor) -> Tensor | None:
        past = self.past(at)
        weights = self.weights(at, modulated, past)
        did = "compute" if weights is None else "replay" if len(weights) == 1 else "predict"
        self.did.append((at.chunk, at.step, at.branch, did))
        if weights is None:
            return None
        return sum(w * k.residual for w, k in zip(weights, past, strict=False))  # type: ignore[return-value]


class ByHand:
    """The blocks of a model under a rule."""

    def __init__(self, model: nn.Module, rule: Rule) -> None:
        self.model, self.rule, self.at = model, rule, None
        self.blocks: list[Any] = list(model.blocks)  # type: ignore[arg-type]

    def __enter__(self) -> ByHand:
        for index, block in enumerate(self.blocks):
            block.forward = partial(self._block, index, block.forward)
        self.model.forward = partial(self._model, self.model.forward)
        return self

    def __exit__(self, *_: object) -> None:
        for module in (self.model, *self.blocks):
            del module.forward

    def _model(self, forward: Callable[..., Any], *args: Any, where: Any = None, **kwargs: Any) -> Any:
        if where is None:
            return forward(*args, **kwargs)
        denoises = where.role == "denoise"
        self.at = Place(where.chunk, where.step, "cond", where.sigma) if denoises else None
        return forward(*args, where=where, **kwargs)

    def _block(self, index: int, forward: Callable[..., Tensor], h: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.at is None:
            return forward(h, *args, **kwargs)
        if index == 0:
            block = self.blocks[0]
            self.entered = h.clone()
            shown = block.modulated(h, *args) if hasattr(block, "modulated") else h.clone()
            self.added = self.rule.choose(self.at, shown)
        if self.added is not None:
            return h + self.added if index == 0 else h
        out = forward(h, *args, **kwargs)
        if index == len(self.blocks) - 1:
            self.rule.kept.append(Kept(self.at, out - self.entered))
        return out


def closed_loop(
    model: nn.Module,
    mark: Callable[[Place], object],
    chunk: Callable[[], AbstractContextManager[Any]] = nullcontext,
    chunks: int = 3,
    steps: int = 12,
    branches: tuple[str, ...] = ("cond",),
    shape: tuple[int, ...] = (1, 5, 8),
    seed: int = 0,
) -> list[Tensor]:
    """Euler steps on what a bare stack returns, from fresh noise in every chunk. Returns what left the stack."""
    generator = torch.Generator().manual_seed(seed)
    sigmas = Protocol(steps=steps).sigmas.tolist()
    out = []
    with torch.no_grad():
        for n in range(chunks):
            x = {b: torch.randn(shape, generator=generator) for b in branches}
            with chunk():
                for t in range(steps):
                    for b in branches:
                        mark(Place(n, t, b, sigmas[t]))
                        out.append(model(x[b]))
                        x[b] = x[b] - (sigmas[t] - sigmas[t + 1]) * 0.5 * out[-1]
    return out


def by_library(model: nn.Module, policy: PolicyConfig, **loop: Any) -> tuple[list[Tensor], list[Did]]:
    """A closed loop under a policy."""
    with cached(model, policy) as handle:
        rollout = handle.rollout()
        with rollout:
            out = closed_loop(
                model, lambda at: handle.step(at.step, branch=at.branch, time=at.time), handle.chunk, **loop
            )
        return out, did(handle)


def by_hand(model: nn.Module, rule: Rule, **loop: Any) -> tuple[list[Tensor], list[Did]]:
    """The same closed loop under a rule."""
    with ByHand(model, rule) as hand:
        out = closed_loop(model, lambda at: setattr(hand, "at", at), **loop)
    return out, rule.did


@contextmanager
def cached(model: nn.Module, policy: PolicyConfig) -> Any:
    handle = rollcache.enable(model, policy, blocks=list(model.blocks), kv_writes="commit_only")  # type: ignore[arg-type]
    try:
        yield handle
    finally:
        rollcache.disable(model)


def did(handle: Any) -> list[Did]:
    return [(r.chunk, r.step, r.branch, str(r.action)) for r in handle.trace]


def street(world: World | None = None, chunks: int = 3, steps: int = 12) -> list[Tensor]:
    """A chunked rollout of the random street model; returns the latents of every chunk."""
    world = world or random_world(depth=2)
    start = Start(torch.randn(8, CELLS, 24, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 4))
    session = Session(world, start, Protocol.named("chunked", steps=steps), seed=3)
    return [session.step(torch.zeros(8, 2)).latents for _ in range(chunks)]


def street_by_library(policy: PolicyConfig, **rollout: Any) -> tuple[list[Tensor], list[Did]]:
    world = random_world(depth=2)
    handle = rollcache.enable(world.model, policy)
    return street(world, **rollout), did(handle)


def street_by_hand(rule: Rule, **rollout: Any) -> tuple[list[Tensor], list[Did]]:
    world = random_world(depth=2)
    with ByHand(world.model, rule):
        return street(world, **rollout), rule.did


def same(one: tuple[list[Tensor], list[Did]], other: tuple[list[Tensor], list[Did]]) -> None:
    """The same decisions, and the same hidden states but for rounding."""
    assert one[1] == other[1]
    for a, b in zip(one[0], other[0], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


def drive(
    policy: StackPolicy,
    signal: list[Tensor],
    residuals: list[Tensor] | None = None,
    times: list[float] | None = None,
    chunk: int = 0,
    branch: str = "cond",
) -> list[Decision]:
    """One chunk of decisions on what a policy would see, without any model: the engine's part, for one branch."""
    stored: tuple[Stored, ...] = ()
    found = []
    for t, shown in enumerate(signal):
        time = 1 - t / len(signal) if times is None else times[t]
        where = Pass(role=Role.DENOISE, chunk=chunk, step=t, branch=branch, time=time)
        seen = StackEvidence(where, lambda _, shown=shown: shown, stored=stored)  # type: ignore[misc]
        cell = Cell(branch, t, 0, 4)
        decision = policy.decide(cell, seen) if stored else Decision(Action.COMPUTE, Reason.NOTHING_STORED)
        residual = torch.ones(1, 2, 2) if residuals is None else residuals[t]
        seen.output = seen.hidden
        policy.conclude(cell, decision, seen)
        if decision.action is Action.COMPUTE:
            stored = (Stored(chunk, t, time, residual), *stored)[: policy.history]
        found.append(decision)
    return found


def computed(decisions: list[Decision]) -> int:
    return sum(d.action is Action.COMPUTE for d in decisions)
