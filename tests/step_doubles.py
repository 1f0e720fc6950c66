"""A small denoiser for methods across steps, a way to watch a policy, and loops written by hand to hold it against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from dummies import mixing
from street_doubles import random_world
from torch import Tensor, nn

import rollcache
from rollcache import Action, Adapter, Cell, Decision, Pass, Reason, Role, Segment
from rollcache.policies.base import StackEvidence, Stored
from rollcache.street.protocol import Protocol
from rollcache.street.rig import CELLS
from rollcache.street.world import Session, Start

STEPS = 12
SIGMAS = Protocol(steps=STEPS).sigmas.tolist()
SEGMENTS = (Segment.contiguous("front", 2, (2, 2, 3)), Segment.contiguous("rear", 1, (2, 1, 4), start=24))
TOKENS, CHANNELS, WIDTH = 32, 4, 8


class Denoiser(nn.Module):
    """Velocity of a latent [B, L, Z]: embedding, mixing blocks modulated by the noise level, head."""

    def __init__(self, seed: int = 0, depth: int = 3) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.into = nn.Parameter(torch.randn(CHANNELS, WIDTH, generator=g) / CHANNELS**0.5, requires_grad=False)
        self.out = nn.Parameter(torch.randn(WIDTH, CHANNELS, generator=g) / WIDTH**0.5, requires_grad=False)
        self.blocks = mixing(depth, WIDTH, seed).blocks

    def enter(self, z: Tensor) -> Tensor:
        return z @ self.into

    def condition(self, sigma: float) -> Tensor:
        return 0.5 * torch.cos(sigma * torch.arange(1, WIDTH + 1))

    def stack(self, h: Tensor, c: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h, c)
        return h

    def leave(self, h: Tensor, sigma: float) -> Tensor:
        return (1 + sigma) * (h @ self.out)

    def forward(self, z: Tensor, sigma: float, *, where: Pass | None = None) -> Tensor:
        return self.leave(self.stack(self.enter(z), self.condition(sigma)), sigma)


def modulate(h: Tensor, c: Tensor) -> Tensor:
    return nn.functional.layer_norm(h, h.shape[-1:]) * (1 + c) - c


ADAPTER = Adapter(
    blocks=lambda model: list(model.blocks),
    locate=lambda model, args, kwargs: kwargs["where"],
    latent=lambda model, args, kwargs: args[0],
    modulated=lambda block, args, kwargs: modulate(args[0], args[1]),
    embedding=lambda block, args, kwargs: args[1],
)


@dataclass
class Seen:
    """One pass of one branch as it happened."""

    where: Pass
    hidden: Tensor
    latent: Tensor
    modulated: Tensor
    embedding: Tensor
    output: Tensor
    decision: Decision

    @property
    def computed(self) -> bool:
        return self.decision.action is Action.COMPUTE

    @property
    def residual(self) -> Tensor:
        return self.output - self.hidden


class Watch:
    """The settings of a method, and everything that its policy was shown."""

    def __init__(self, config: Any) -> None:
        self.config, self.seen = config, []
        self.explain = config.explain

    def build(self, blocks: int) -> Any:
        policy = self.config.build(blocks)
        conclude = policy.conclude

        def watched(cell: Cell, decision: Decision, evidence: StackEvidence) -> None:
            shown = (evidence.hidden, evidence.latent, evidence.modulated, evidence.embedding, evidence.output)
            self.seen.append(Seen(evidence.where, *(t.clone() for t in shown), decision))
            conclude(cell, decision, evidence)

        policy.conclude = watched
        return policy


Rule = Callable[[list[Seen], Seen], tuple[float, ...] | None]
"""A method as a function of the whole chunk up to now: weights of the computed residuals (newest first), or None."""


def noises(chunks: int, batch: int = 1, seed: int = 0, scale: float = 1.0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(batch, TOKENS, CHANNELS, generator=g) for _ in range(chunks)]


@torch.no_grad()
def rollout(
    model: Denoiser, starts: dict[str, list[Tensor]], config: Any = None, chunk: int = 0, told: int | None = STEPS
) -> tuple[dict[str, list[Tensor]], Any]:
    """Denoise every chunk of every branch, writing over the latent; returns the clean latents and the handle."""
    handle = None if config is None else rollcache.enable(model, config, adapter=ADAPTER)
    out: dict[str, list[Tensor]] = {branch: [] for branch in starts}
    for n in range(len(next(iter(starts.values())))):
        latents = {branch: noise[n].clone() for branch, noise in starts.items()}
        for t, (sigma, after) in enumerate(pairwise(SIGMAS)):
            for branch, z in latents.items():
                where = Pass(
                    role=Role.DENOISE,
                    chunk=chunk + n,
                    step=t,
                    branch=branch,
                    time=sigma,
                    steps=told,
                    segments=SEGMENTS,
                )
                z.sub_((sigma - after) * model(z, sigma, where=where))
        for branch, z in latents.items():
            out[branch].append(z)
    if handle is not None:
        rollcache.disable(model)
    return out, handle


@torch.no_grad()
def by_hand(model: Denoiser, starts: list[Tensor], rule: Rule) -> tuple[list[Tensor], list[bool]]:
    """The same for one branch with nothing of the library: latents, and which passes were computed."""
    out, computed = [], []
    for n, noise in enumerate(starts):
        z, past = noise, []
        for t, (sigma, after) in enumerate(pairwise(SIGMAS)):
            h, c = model.enter(z), model.condition(sigma)
            where = Pass(role=Role.DENOISE, chunk=n, step=t, time=sigma, steps=STEPS, segments=SEGMENTS)
            now = Seen(where, h, z, modulate(h, c), c, h, Decision(Action.COMPUTE, Reason.SCHEDULE))
            weights = rule(past, now) if past else None
            if weights is None:
                now.output = model.stack(h, c)
            else:
                now.decision = Decision(Action.REPLAY, Reason.STEADY)
                kept = [p.residual for p in reversed(past) if p.computed]
                now.output = h + sum(w * r for w, r in zip(weights, kept, strict=False))
            past.append(now)
            z = z - (sigma - after) * model.leave(now.output, sigma)
        out.append(z)
        computed += [p.computed for p in past]
    return out, computed


def assert_as_by_hand(config: Any, rule: Rule, chunks: int, tolerance: float = 1e-5) -> None:
    """A rollout of the denoiser under a method is the loop by hand under its naive rule, and reuses something."""
    starts = noises(chunks, batch=2)
    ours, handle = rollout(Denoiser(), {"cond": starts}, config)
    theirs, computed = by_hand(Denoiser(), starts, rule)
    assert [r.action is Action.COMPUTE for r in handle.trace] == computed
    assert 0 < sum(computed) < len(computed)
    for a, b in zip(ours["cond"], theirs, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def on_the_street(config: Any, chunks: int = 2, noise: int = 0, scale: float = 1.0) -> tuple[list[Tensor], Any]:
    """A chunked rollout of the random street model; `config` None is the bare model."""
    world = random_world()
    latents = scale * torch.randn(8, CELLS, 24, generator=torch.Generator().manual_seed(noise))
    handle = None if config is None else rollcache.enable(world.model, config)
    session = Session(world, Start(latents, torch.zeros(8, 4)), Protocol.named("chunked", steps=STEPS), seed=noise)
    out = [session.step(torch.zeros(8, 2)).latents for _ in range(chunks)]
    return out, handle


def judged(seen: Sequence[Seen], rule: Rule) -> list[tuple[float, ...] | None]:
    """What the rule says about every pass that was not forced, given what really happened before it in its chunk."""
    out, past = [], []
    for now in seen:
        past = past if past and past[0].where.chunk == now.where.chunk else []
        out.append(rule(past, now) if past else None)
        past = [*past, now]
    return out


def weights_of(decision: Decision) -> tuple[float, ...] | None:
    return None if decision.action is Action.COMPUTE else decision.weights


def open_loop(config: Any, seen: Sequence[Seen]) -> list[Decision]:
    """A policy on recorded passes of one branch: whatever it decides, the next pass is the recorded one."""
    policy, stored, out, age = config.build(3), [], [], 0
    for now in seen:
        w = now.where
        if w.step == 0:
            stored = []
        evidence = StackEvidence(
            w,
            lambda name, now=now: getattr(now, name).clone(),
            numbers=lambda x: x.detach().float().flatten().tolist(),
            stored=tuple(stored),
            replays=age,
        )
        cell = Cell(w.branch, w.step, 0, 3)
        decision = policy.decide(cell, evidence) if stored else Decision(Action.COMPUTE, Reason.NOTHING_STORED)
        evidence.output = now.output
        if decision.action is Action.COMPUTE:
            stored = [Stored(w.chunk, w.step, w.time, now.residual), *stored][: policy.history]
        age = 0 if decision.action is Action.COMPUTE else age + 1
        policy.conclude(cell, decision, evidence)
        out.append(decision)
    return out


def recorded(config: Any, chunks: int = 2, seed: int = 0, scale: float = 1.0) -> list[Seen]:
    """Passes of the denoiser; `config` must never reuse."""
    watch = Watch(config)
    rollout(Denoiser(seed), {"cond": noises(chunks, seed=seed, scale=scale)}, watch)
    assert all(s.computed for s in watch.seen) and len(watch.seen) == chunks * STEPS
    return watch.seen


def on_recorded(config: Any, exact: Any, rule: Rule) -> tuple[list[Any], list[Any]]:
    """What a method, and its naive rule after the same decisions, say to passes recorded under `exact`."""
    seen = recorded(exact)
    decisions = open_loop(config, seen)
    told = [replace(now, decision=d) for now, d in zip(seen, decisions, strict=True)]
    return [weights_of(d) for d in decisions], judged(told, rule)


def spoiled(seen: Sequence[Seen], index: int, name: str) -> list[Seen]:
    """The same passes, one of them with a NaN in what a policy sees."""
    bad = getattr(seen[index], name).clone()
    bad.view(-1)[0] = torch.nan
    return [replace(s, **{name: bad}) if i == index else s for i, s in enumerate(seen)]


def computed_steps(decisions: Sequence[Decision]) -> list[int]:
    return [i for i, d in enumerate(decisions) if d.action is Action.COMPUTE]


def relative(now: Tensor, then: Tensor) -> float:
    """mean|now - then| / mean|then| in double precision."""
    return float((now.double() - then.double()).abs().mean()) / float(then.double().abs().mean())


def since_computed(past: Sequence[Seen], now: Seen) -> list[tuple[Seen, Seen]]:
    """Neighbouring passes (earlier, later) from the last computed one to this one."""
    chain = [*past, now]
    last = max(i for i, p in enumerate(past) if p.computed)
    return [(chain[i - 1], chain[i]) for i in range(last + 1, len(chain))]
