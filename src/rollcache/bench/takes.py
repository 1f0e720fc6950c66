"""A take: everything that the compared rollouts share. Scene, drive, real start, actions per chunk, rendered truth.

The first frames of a rendered episode fill the K/V cache (the start); the rollouts then follow the drive's next rows,
and the renderer's frames of the same rows are the truth that a perfect world model would generate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rollcache.street.data import HELD_OUT_SEED
from rollcache.street.drives import FPS, Drive, DriveError, load_drive, scripted_drive
from rollcache.street.protocol import Protocol
from rollcache.street.rig import FRAMES_PER_LATENT

if TYPE_CHECKING:
    from rollcache.street.scenery import Scenery
    from rollcache.street.world import Start, World

CAR = (0.74, 4.5, 1.85, 1.48)  # height of the middle, length, width, height in metres
RED = (0.80, 0.20, 0.17)
TURNING = 0.1  # rad/s: a frame with a larger yaw rate counts as turning
START_WINDOWS = 2
MAX_SEED = 2**40  # the noise of every cycle has a 64-bit seed that is made from this one

Draw = Callable[[str, int, Drive], Mapping[str, Tensor]]  # (scenario, scene seed, drive) -> uint8 frames by view group
Tell = Callable[[str, int, Drive], "Scenery | None"]  # the same -> what the model is told of the scene


@dataclass(frozen=True)
class Injection:
    """An abrupt action, or an abrupt event, in the middle of a drive.

    Attributes:
        kind: "brake" (to standstill) or "steer" (to `yaw_rate`), both from one frame to the next: harsher than any car,
            and a single change that a gate sees once or never. "cut-in": a car is suddenly `gap` ahead and stays there,
            told to the model and commanded by nobody.
        chunk: the generation step whose first frame feels it.
        yaw_rate: of "steer", rad/s.
        gap: of "cut-in", metres from the ego to the middle of the car.
    """

    kind: str
    chunk: int
    yaw_rate: float = 0.67
    gap: float = 9.0

    def apply(self, drive: Drive, begin: int, per_step: int, chunks: int) -> Drive:
        """The drive with the injection.

        Args:
            drive: rows of the start, then of `chunks` generation steps of `per_step` rows.
            begin: first row after the start.
            per_step: rows per generation step.
            chunks: generation steps.

        Raises:
            ValueError: there is no such chunk.
        """
        if not 0 <= self.chunk < chunks:
            raise ValueError(f"cannot inject a {self.kind} at chunk {self.chunk}: chunks are 0 to {chunks - 1}.")
        row = begin + self.chunk * per_step
        if self.kind == "brake":
            return drive.with_brake(row, decel=float(FPS * drive.speed.max() + 1))
        return drive if self.kind == "cut-in" else drive.with_steer(row, self.yaw_rate)

    def tell(self, scenery: Scenery | None, begin: int, per_step: int) -> Scenery | None:
        """What the model is told with the injection; arguments as in `apply`.

        Raises:
            ValueError: a car cannot cut in where nothing is told.
        """
        if self.kind != "cut-in":
            return scenery
        if scenery is None:
            raise ValueError("a car cannot cut in: this take tells the model nothing of its scene.")
        first = (begin + self.chunk * per_step) // FRAMES_PER_LATENT
        x, y, yaw = scenery.pose.unbind(1)
        box = torch.stack(
            (x + self.gap * yaw.cos(), y + self.gap * yaw.sin(), *(torch.full_like(x, v) for v in CAR), yaw), 1
        )
        there = torch.arange(len(scenery), device=x.device) >= first
        return scenery.with_agent("car", RED, box, there)


@dataclass(frozen=True)
class Take:
    """What all lanes of one comparison share.

    Attributes:
        scenario: name of the scene group.
        seed: seed of the comparison; the scene's seed is `HELD_OUT_SEED + seed`, never trained on.
        drive: all rows, those of the start included.
        start: real latents that fill the K/V cache.
        actions: per generation step [chunks, frames per step, 2] in m/s and rad/s.
        truth: rendered frames of the same rows, group -> [T, V, H, W, 3] in [0, 1].
        injections: what was injected into the drive.
    """

    scenario: str
    seed: int
    drive: Drive
    start: Start
    actions: Tensor
    truth: Mapping[str, Tensor]
    injections: tuple[Injection, ...] = ()

    @property
    def chunks(self) -> int:
        """Generation steps."""
        return self.actions.shape[0]

    @property
    def yaw_rate(self) -> Tensor:
        """Commanded yaw rate of every generated frame [T], rad/s."""
        return self.actions.flatten(0, 1)[:, 1]

    @property
    def turning(self) -> Tensor:
        """Which generated frames turn: bool [T]."""
        return self.yaw_rate.abs() > TURNING

    def injected(self, injection: Injection) -> Take:
        """The same start, then the same drive with `injection`. The truth stays that of the planned drive."""
        per_step = self.actions.shape[1]
        begin = len(self.drive) - self.chunks * per_step
        drive = injection.apply(self.drive, begin, per_step, self.chunks)
        actions = chunk_actions(drive, begin, per_step, self.chunks)
        told = injection.tell(self.start.scenery, begin, per_step)
        start = self.start if told is self.start.scenery else replace(self.start, scenery=told)
        return replace(self, drive=drive, start=start, actions=actions, injections=(*self.injections, injection))

    def describe(self) -> dict[str, object]:
        """Plain values for a result file."""
        return {
            "scenario": self.scenario,
            "seed": self.seed,
            "scene_seed": HELD_OUT_SEED + self.seed,
            "drive": self.drive.name,
            "drive_source": self.drive.source,
            "chunks": self.chunks,
            "frames": int(self.actions.shape[0] * self.actions.shape[1]),
            "start_frames": int(len(self.start.latents) * FRAMES_PER_LATENT),
            "injections": [f"{i.kind} at chunk {i.chunk}" for i in self.injections],
            "speed": [round(float(v), 3) for v in self.actions.flatten(0, 1)[:, 0]],
            "yaw_rate": [round(float(v), 4) for v in self.yaw_rate],
        }


def chunk_actions(drive: Drive, start: int, per_step: int, chunks: int) -> Tensor:
    """Rows `start`, ... of a drive as actions per generation step [chunks, per_step, 2]."""
    rows = slice(start, start + chunks * per_step)
    action = np.stack((drive.speed[rows], drive.yaw_rate[rows]), 1)
    return torch.from_numpy(action).float().reshape(chunks, per_step, 2)


def rendered(scenario: str, scene_seed: int, drive: Drive) -> Mapping[str, Tensor]:
    """Draw every frame of `drive` through the scene: group -> uint8 [T, V, H, W, 3]."""
    from rollcache.street.render import Renderer
    from rollcache.street.scene import Scene

    episode = Scene(scenario, scene_seed).simulate(drive)
    with Renderer() as renderer:
        images = renderer.frames(episode, 0, len(drive))
    return {group: torch.from_numpy(x) for group, x in images.items()}


def told(scenario: str, scene_seed: int, drive: Drive) -> Scenery:
    """What stands and drives along `drive` through the scene."""
    from rollcache.street.scene import Scene
    from rollcache.street.scenery import scenery_of

    return scenery_of(Scene(scenario, scene_seed).simulate(drive))


@dataclass(frozen=True)
class TakePlan:
    """A take before it is drawn. All input is checked here, so nothing that a user got wrong comes up later.

    Attributes:
        scenario: scene group.
        seed: seed of the comparison.
        chunks: generation steps.
        per_step: frames per generation step.
        begin: frames of the start.
        drive: all rows, injections applied.
        injections: what was injected.
    """

    scenario: str
    seed: int
    chunks: int
    per_step: int
    begin: int
    drive: Drive
    injections: tuple[Injection, ...] = ()

    def make(self, world: World, draw: Draw = rendered, tell: Tell = told) -> Take:
        """Draw the episode and encode its start with `world`."""
        drive, begin = self.drive, self.begin
        images = draw(self.scenario, HELD_OUT_SEED + self.seed, drive)
        begin_frames = {group: x[:begin] for group, x in images.items()}
        start_action = torch.from_numpy(np.stack((drive.speed[:begin], drive.yaw_rate[:begin]), 1)).float()
        return Take(
            scenario=self.scenario,
            seed=self.seed,
            drive=drive,
            start=world.start(begin_frames, start_action, tell(self.scenario, HELD_OUT_SEED + self.seed, drive)),
            actions=chunk_actions(drive, begin, self.per_step, self.chunks),
            truth={group: x[begin:].float() / 255 for group, x in images.items()},
            injections=self.injections,
        )


def plan_take(
    scenario: str,
    *,
    seed: int = 0,
    chunks: int = 33,
    protocol: Protocol | None = None,
    actions: Path | None = None,
    injections: tuple[Injection, ...] = (),
) -> TakePlan:
    """Check what is asked for and choose the drive; nothing is drawn.

    Args:
        scenario: scene group.
        seed: of the comparison; scenes are held out from training.
        chunks: generation steps to prepare.
        protocol: decides how many frames a generation step has.
        actions: a recorded drive (CSV), read once; default is the scenario's scripted drive.
        injections: abrupt actions to put into the drive; the truth is that of the drive with them.

    Raises:
        DriveError: a recorded drive is unreadable or too short.
        ValueError: unknown scenario, a seed out of range, too few chunks, or an injection outside of them.
    """
    protocol = protocol or Protocol()
    if chunks < 2:
        raise ValueError(f"chunks is {chunks}; a comparison needs at least 2 (the first is warm-up).")
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed is {seed}; it must be from 0 to {MAX_SEED}.")
    per_step = FRAMES_PER_LATENT * protocol.latents_per_chunk
    begin = START_WINDOWS * protocol.window * FRAMES_PER_LATENT
    frames = begin + chunks * per_step
    if actions is None:
        drive = scripted_drive(scenario, HELD_OUT_SEED + seed, frames)
    else:
        drive = load_drive(actions)
        if len(drive) < frames:
            fit = (len(drive) - begin) // per_step
            hint = f"; it is long enough for --chunks {fit}" if fit >= 2 else ""
            raise DriveError(
                f"{actions}: {len(drive)} rows, but {chunks} chunks need {frames} "
                f"({begin} for the start and {per_step} per chunk){hint}"
            )
        drive = drive.first(frames)
    for injection in injections:
        drive = injection.apply(drive, begin, per_step, chunks)
    return TakePlan(scenario, seed, chunks, per_step, begin, drive, injections)


def make_take(world: World, scenario: str, *, draw: Draw = rendered, **asked: Any) -> Take:
    """Plan a take with the arguments of `plan_take`, draw its episode with `draw`, encode its start with `world`."""
    return plan_take(scenario, **asked).make(world, draw)
