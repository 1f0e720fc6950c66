"""Lanes: variants of one rollout that take turns, chunk by chunk, in one process.

Every lane has the same start, noise and actions. Lanes without a cache share one bare model; every cached lane has a
copy of its own, so that full compute is never measured on a model that carries a cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rollcache.street.world import Session, Start, World

if TYPE_CHECKING:
    from rollcache.bench.takes import Take
    from rollcache.cache import Cache
    from rollcache.street.protocol import Protocol, Where

OnChunk = Callable[[int, Sequence["Lane"]], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One variant to run.

    Attributes:
        key: short name in result files, such as "xcache".
        label: what tables call it.
        policy: a rollcache policy, or None for full compute.
        steps: denoising steps, default those of the protocol.
        solver: how they are made, default that of the protocol.
        frozen: emit the first window of every cycle without any further pass.
        no_pass: ask the policy once per chunk and emit without any pass when it would replay all of it.
        start_noise: perturb the start by this standard deviation (measures the numerical floor).
        dtype: run in this precision instead of the world's.
        one_noise: never draw new noise, not even between cycles (an ablation).
        session: extra check for tests and studies.
    """

    key: str
    label: str
    policy: Any = None
    steps: int | None = None
    solver: Literal["euler", "multistep"] | None = None
    frozen: bool = False
    no_pass: bool = False
    start_noise: float = 0.0
    dtype: str | None = None
    one_noise: bool = False

    def needs_receding(self) -> bool:
        """Whether the variant emits from an earlier window, which only the receding protocol can."""
        return self.frozen or self.no_pass


FULL = Plan(key="full", label="full compute")


@dataclass
class Lane:
    """One running variant and what it produced so far."""

    plan: Plan
    session: Session
    handle: Cache | None = None
    seconds: list[float] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    latents: list[Tensor] = field(default_factory=list)

    def step(self, action: Tensor, plan: Tensor | None = None) -> None:
        """Generate the next chunk; see `Session.step`."""
        emission = self.session.step(action, plan)
        self.seconds.append(emission.seconds)
        self.passes.append(emission.passes)
        self.latents.append(emission.latents)

    def cut(self, chunks: int) -> None:
        """Forget everything after the first `chunks` chunks."""
        del self.seconds[chunks:], self.passes[chunks:], self.latents[chunks:]

    @property
    def key(self) -> str:
        """Short name."""
        return self.plan.key


class OneNoiseSession(Session):
    """A session whose noise never changes: the first cycle's noise drives the whole rollout."""

    def _noise(self) -> Tensor:
        chunk, self.chunk = self.chunk, 0
        try:
            return super()._noise()
        finally:
            self.chunk = chunk


def open_lane(world: World, take: Take, protocol: Protocol, plan: Plan, *, reload: Callable[[str], World]) -> Lane:
    """Start a variant's session.

    Args:
        world: the bare world; never gets a cache.
        take: what is driven.
        protocol: of the rollout.
        plan: the variant.
        reload: makes the world in another precision.

    Raises:
        ValueError: the variant needs another protocol.
    """
    import rollcache

    if plan.needs_receding() and protocol.kind != "receding":
        raise ValueError(f"{plan.label} emits from an earlier window, which the {protocol.kind} protocol cannot.")
    if plan.dtype is not None:
        world = reload(plan.dtype)
    handle = None
    if plan.policy is not None:
        world = clone(world)
        handle = rollcache.enable(world.model, plan.policy)
    if plan.steps is not None:
        protocol = replace(protocol, steps=plan.steps)
    if plan.solver is not None:
        protocol = replace(protocol, solver=plan.solver)
    start: Start = take.start.perturbed(plan.start_noise) if plan.start_noise else take.start
    make = OneNoiseSession if plan.one_noise else Session
    session = make(world, start, protocol, seed=take.seed, reuse=_reuse(plan, handle))
    return Lane(plan, session, handle)


def clone(world: World) -> World:
    """A world with its own copy of the model; the codec is shared."""
    return World(
        copy.deepcopy(world.model),
        world.codec,
        dtype="float32" if world.dtype is torch.float32 else "bfloat16",
        device=str(world.device),
    )


def race(
    lanes: Sequence[Lane],
    actions: Tensor,
    on_chunk: OnChunk | None = None,
    enough: Callable[[int], bool] | None = None,
    plans: Sequence[Tensor | None] | None = None,
) -> bool:
    """Run all lanes over `actions` [chunks, frames, 2]; who goes first turns every chunk, odd chunks run backwards.

    Args:
        lanes: what runs.
        actions: one entry per generation step.
        on_chunk: called after every chunk.
        enough: asked after every chunk with the number of finished ones; True ends the race there.
        plans: what will probably be commanded after each chunk, if the loop knows; see `Session.step`.

    Returns:
        False when Ctrl-C ended it early; every lane then holds the same number of finished chunks.
    """
    done = 0
    try:
        for n, action in enumerate(actions):
            for lane in turn(lanes, n):
                lane.step(action, None if plans is None else plans[n])
            done = n + 1
            if on_chunk is not None:
                on_chunk(n, lanes)
            if enough is not None and enough(done):
                break
    except KeyboardInterrupt:
        for lane in lanes:
            lane.cut(done)
        return False
    return True


def turn(lanes: Sequence[Lane], chunk: int) -> list[Lane]:
    """The order of a chunk. The first two lanes (full and the cache under test) always stand side by side."""
    pair, rest = list(lanes[:2]), list(lanes[2:])
    order = [*pair, *rest]
    return order if chunk % 2 == 0 else order[::-1]


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run with this many torch threads."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _reuse(plan: Plan, handle: Cache | None) -> Callable[[Where], bool] | None:
    if plan.frozen:
        return lambda where: True
    if plan.no_pass:
        assert handle is not None
        return handle.skip_chunk
    return None
