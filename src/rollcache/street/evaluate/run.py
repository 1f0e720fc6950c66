"""Evaluate a world on scenes, part by part; what is finished is kept when somebody stops it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rollcache.measure import Frames, compare
from rollcache.street.evaluate.actions import following, otherwise, response
from rollcache.street.evaluate.agents import evidence
from rollcache.street.evaluate.fidelity import mean_psnr, over_horizon, windows
from rollcache.street.evaluate.probe import Probe, per_latent, read
from rollcache.street.evaluate.result import Evaluation, SceneResult, mean
from rollcache.street.evaluate.rollout import Rollout, cost, decoded, generate
from rollcache.street.evaluate.stability import stability
from rollcache.street.evaluate.truth import Draw, Plan, Truth, rendered
from rollcache.street.protocol import Protocol
from rollcache.street.rig import FRAMES_PER_LATENT
from rollcache.street.world import World

TEACHER_STEPS = (50, 4)
NO_PROBE = "no probe in this weights file"
NO_TEACHER = "not asked for"
NO_SCENERY = "nothing is told of this scene"


@dataclass(frozen=True)
class Watch:
    """What an evaluation tells about itself while it runs; the defaults say nothing.

    Attributes:
        stage: called with the scene and what is done now.
        tick: called after every generation step with the transformer passes that it took.
        strip: called with the scene's result, generated and rendered frames, to keep pictures of them.
    """

    stage: Callable[[str, str], None] = lambda scene, what: None
    tick: Callable[[int], None] = lambda passes: None
    strip: Callable[[SceneResult, Frames, Frames], None] = lambda scene, frames, truth: None


@dataclass(frozen=True)
class Worlds:
    """What is evaluated.

    Attributes:
        student: the few-step world.
        teacher: the many-step one; None leaves the comparison out.
        probe: reads actions back; None leaves action following out.
    """

    student: World
    teacher: World | None = None
    probe: Probe | None = None


def evaluate(
    plans: Sequence[Plan],
    worlds: Worlds,
    evaluation: Evaluation,
    *,
    protocol: Protocol | None = None,
    short_chunks: int = 8,
    perceptual: bool = True,
    draw: Draw = rendered,
    watch: Watch | None = None,
) -> Evaluation:
    """Measure all plans; the file of `evaluation` is written after every part.

    A KeyboardInterrupt ends it early and is not passed on: `Evaluation.status` says what is missing.

    Args:
        plans: scenes and drives.
        worlds: what is evaluated.
        evaluation: where results go.
        protocol: of the student's rollout; the teacher's differs in its steps.
        short_chunks: generation steps of the short rollouts: the teacher's, and those with other actions.
        perceptual: whether to compute FLIP and LPIPS.
        draw: makes the truth.
        watch: is told about progress.
    """
    protocol, watch = protocol or Protocol(), watch or Watch()
    try:
        for plan in plans:
            scene = SceneResult.of(plan)
            watch.stage(scene.name, "renders the truth")
            truth = plan.make(draw)
            for name, value in _parts(truth, worlds, protocol, short_chunks, perceptual, watch, scene):
                if isinstance(value, str):
                    scene.skipped[name] = value
                else:
                    scene.parts[name] = value
                if scene not in evaluation.scenes:
                    evaluation.scenes.append(scene)
                evaluation.save()
    except KeyboardInterrupt:
        evaluation.interrupted = True
    evaluation.save()
    return evaluation


def _parts(
    truth: Truth,
    worlds: Worlds,
    protocol: Protocol,
    short_chunks: int,
    perceptual: bool,
    watch: Watch,
    scene: SceneResult,
) -> Iterator[tuple[str, Any]]:
    """Name and result of every part as it is finished; a text is the reason why it is left out."""
    plan, world = truth.plan, worlds.student
    real = truth.after()
    encoded = world.codec.encode({g: x.to(world.device) for g, x in real.items()}).float().cpu()
    through_codec = decoded(world, encoded)
    yield "codec", _codec(through_codec, real)

    watch.stage(plan.name, f"generates {plan.frames} frames")
    rollout = generate(world, truth, protocol, tick=_ticker(watch, protocol))
    frames = decoded(world, rollout.latents)
    watch.stage(plan.name, "measures")
    yield "cost", asdict(cost(rollout, protocol, plan.per_step))
    last = {g: x[-1:].float() / 255 for g, x in truth.start.items()}
    horizon = over_horizon(frames, real, last, perceptual=perceptual)
    watch.strip(scene, frames, real)
    yield "horizon", asdict(horizon)
    yield "stability", asdict(stability(frames, real))
    if truth.scenery is None:
        yield "agents", NO_SCENERY
    else:
        yield "agents", asdict(evidence(frames, real, truth.scenery, plan.begin, through_codec))
    if worlds.probe is None:
        yield "actions", NO_PROBE
        yield "response", NO_PROBE
    else:
        yield "actions", asdict(following(worlds.probe, rollout.latents, encoded, rollout.before, truth.commanded))
        yield "response", _response(truth, world, worlds.probe, rollout, protocol, short_chunks, watch)
    if worlds.teacher is None:
        yield "teacher", NO_TEACHER
    else:
        yield "teacher", _teacher(truth, worlds.teacher, frames, real, protocol, short_chunks, watch)


def _codec(frames: Frames, real: Frames) -> dict[str, Any]:
    """What the codec alone loses; sharpness and flow are taken in every fourth window."""
    close = compare(frames, real)
    some = [windows(f)[::4] for f in (frames, real)]
    ours, theirs = ({g: torch.cat([w[g] for w in ws]) for g in frames} for ws in some)
    steady = stability(ours, theirs)
    return {
        "psnr": close.psnr,
        "ssim": close.ssim,
        "cameras": {n: q.psnr for n, q in close.cameras.items()},
        "sharpness": mean(steady.sharpness),
        "flow": mean(steady.flow),
    }


def _teacher(
    truth: Truth, teacher: World, frames: Frames, real: Frames, protocol: Protocol, chunks: int, watch: Watch
) -> dict[str, Any]:
    """PSNR of student and teacher against the truth over the first generation steps, and the student's lead in dB."""
    chunks = min(chunks, truth.plan.chunks)
    count = chunks * truth.plan.per_step
    first = {g: x[:count] for g, x in real.items()}
    student = mean_psnr({g: x[:count] for g, x in frames.items()}, first)
    out: dict[str, Any] = {"chunks": chunks, "student_steps": protocol.steps, "student": student, "teacher": {}}
    for steps in TEACHER_STEPS:
        watch.stage(truth.plan.name, f"teacher at {steps} steps")
        rules = Protocol.named(protocol.kind, steps=steps)
        rollout = generate(teacher, truth, rules, chunks=chunks, tick=_ticker(watch, rules))
        psnr = mean_psnr(decoded(teacher, rollout.latents), first)
        out["teacher"][str(steps)] = {"psnr": psnr, "student_lead": student - psnr}
    return out


def _response(
    truth: Truth, world: World, probe: Probe, usual: Rollout, protocol: Protocol, chunks: int, watch: Watch
) -> dict[str, Any]:
    """What the world makes of other actions after the same start: a stop, and a turn away."""
    chunks = min(chunks, truth.plan.chunks)
    count = chunks * truth.plan.per_step
    told, size = per_latent(truth.commanded[:count]), count // FRAMES_PER_LATENT
    as_usual = read(probe, usual.latents[:size], usual.before)
    out: dict[str, Any] = {"chunks": chunks}
    for name, (column, action) in otherwise(truth.plan.drive, truth.plan.begin).items():
        watch.stage(truth.plan.name, f"is {name}")
        rollout = generate(world, truth, protocol, chunks=chunks, action=action, tick=_ticker(watch, protocol))
        found = read(probe, rollout.latents, rollout.before)
        out[name] = response(found, as_usual, per_latent(action[:count]), told, column)
    return out


def _ticker(watch: Watch, protocol: Protocol) -> Callable[[], None]:
    return lambda: watch.tick(protocol.steps)


def work(plans: Sequence[Plan], protocol: Protocol, short_chunks: int, worlds: Worlds) -> int:
    """Denoising passes of a whole evaluation, for a progress bar."""
    short = sum(min(short_chunks, p.chunks) for p in plans)
    passes = sum(p.chunks * protocol.steps for p in plans)
    passes += 0 if worlds.probe is None else 2 * short * protocol.steps
    return passes + (0 if worlds.teacher is None else short * sum(TEACHER_STEPS))
