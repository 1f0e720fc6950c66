"""Everything that is measured on one window of the street world."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from torch import Tensor

from rollcache.bench.calibrate.blocks import BlockWatch
from rollcache.bench.calibrate.clips import Clip
from rollcache.bench.calibrate.drift import push_products
from rollcache.bench.calibrate.errors import predict_errors, replay_errors
from rollcache.bench.calibrate.influence import spread, touch
from rollcache.bench.calibrate.oracle import judge
from rollcache.bench.calibrate.splice import Splice
from rollcache.bench.calibrate.trajectory import Trajectory
from rollcache.bench.calibrate.window import Window, record
from rollcache.measure import Frames, compare
from rollcache.policies.fsc import FSC
from rollcache.policies.magcache import MagnitudeProbe

Tell = Callable[[str], None]


def damage(window: Window, trajectory: Trajectory) -> Callable[[Tensor], float]:
    """1 - SSIM of a clean latent's frames to those of a trajectory."""
    frames: Frames = window.world.decode(trajectory.latents[-1])
    return lambda x: 1 - compare(window.world.decode(x), frames).ssim


def measure(window: Window, name: str, touches: int, tell: Tell = lambda what: None) -> tuple[Clip, Trajectory]:
    """Measure the window that a session stands before; about 6 N passes of the model.

    Args:
        window: placed.
        name: of the clip.
        touches: steps at which influence is measured.
        tell: told what is being done.
    """
    steps = window.protocol.steps
    tell("full compute")
    probe = MagnitudeProbe(steps=steps)
    with BlockWatch(window.world.model) as watch:
        trajectory = record(window, probe)
    sigmas = trajectory.sigmas[:-1]
    found = []
    harm = damage(window, trajectory)
    with Splice(window.world.model) as splice:
        for step in spread(sigmas, touches):
            tell(f"step {step} alone")
            found.append(touch(trajectory, step, splice, window.velocity, window.follow, harm))
        tell("replays from every anchor")
        products = push_products(trajectory, splice, window.velocity)
    tell("risk and oracle")
    clip = Clip(
        name=name,
        sigmas=sigmas,
        replay=replay_errors(trajectory.seen),
        predict=predict_errors(trajectory.seen, sigmas),
        touches=tuple(found),
        reuse=watch.reuse,
        low=[fmean(x) for x in watch.low if x],
        high=[fmean(x) for x in watch.high if x],
        judged=judge(window, FSC(steps=steps)),
        ratios=probe.ratios(),
        products=products,
    )
    return clip, trajectory
