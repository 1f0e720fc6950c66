"""One rollout of the world along a drawn drive, and what it cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollcache.street.evaluate.truth import Truth
from rollcache.street.protocol import Protocol
from rollcache.street.rig import FPS
from rollcache.street.world import Session, World


@dataclass(frozen=True)
class Rollout:
    """What a world made of a drive.

    Attributes:
        latents: [F, P, Z], start not included, on the CPU.
        before: the last latents of the start [2, P, Z].
        seconds: transformer time of every generation step.
        passes: transformer passes of every generation step.
    """

    latents: Tensor
    before: Tensor
    seconds: tuple[float, ...]
    passes: tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """Transformer time of a generation step; the first KV cycle is not counted when there are more.

    Attributes:
        seconds: median over the steps.
        mean: mean over whole KV cycles, commit passes included.
        passes: mean transformer passes a step.
        share: `mean` over the time that the step's frames last: 1 or less is real time.
        steps: generation steps counted.
    """

    seconds: float
    mean: float
    passes: float
    share: float
    steps: int


def generate(
    world: World,
    truth: Truth,
    protocol: Protocol,
    *,
    chunks: int | None = None,
    action: Tensor | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Rollout:
    """Drive the world along the truth's actions.

    Args:
        world: the world.
        truth: start, actions, scenery. The scene's seed is the noise's.
        protocol: what a generation step does.
        chunks: generation steps, default all of the plan.
        action: other actions than the truth's [frames, 2].
        tick: called after every generation step.
    """
    start = world.start(truth.start, truth.start_action, truth.scenery)
    session = Session(world, start, protocol, truth.plan.seed)
    size = session.frames_per_step
    action = truth.commanded if action is None else action
    latents, seconds, passes = [], [], []
    for n in range(chunks or truth.plan.chunks):
        emission = session.step(action[n * size : (n + 1) * size])
        latents.append(emission.latents.float().cpu())
        seconds.append(emission.seconds)
        passes.append(emission.passes)
        tick()
    return Rollout(torch.cat(latents), start.latents[-2:].float().cpu(), tuple(seconds), tuple(passes))


def decoded(world: World, latents: Tensor) -> dict[str, Tensor]:
    """The frames of latents [F, P, Z] on the CPU, group -> [2F, V, H, W, 3] in [0, 1]."""
    return {group: x.float().cpu() for group, x in world.decode(latents.to(world.device)).items()}


def cost(rollout: Rollout, protocol: Protocol, per_step: int) -> Cost:
    """What a generation step of `per_step` frames costs."""
    warm = protocol.kv_every if len(rollout.seconds) > protocol.kv_every else 0
    seconds, passes = rollout.seconds[warm:], rollout.passes[warm:]
    mean = statistics.fmean(seconds)
    return Cost(
        seconds=statistics.median(seconds),
        mean=mean,
        passes=statistics.fmean(passes),
        share=mean * FPS / per_step,
        steps=len(seconds),
    )
