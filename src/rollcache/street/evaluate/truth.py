"""What really happens: a held-out scene, rendered along a drive, with its scenery."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rollcache.street.data import HELD_OUT_SEED
from rollcache.street.drives import FPS, SCENARIOS, Drive, DriveError, load_drive, scripted_drive
from rollcache.street.protocol import Protocol
from rollcache.street.rig import FRAMES_PER_LATENT

if TYPE_CHECKING:
    from rollcache.street.scenery import Scenery

START_WINDOWS = 2
MAX_SEED = 2**40

# (scenario, scene seed, drive) -> uint8 frames by view group [T, V, H, W, 3], and what may be told of the scene
Draw = Callable[[str, int, Drive], "tuple[Mapping[str, Tensor], Scenery | None]"]


@dataclass(frozen=True)
class Plan:
    """One scene and one drive before anything is drawn; all input is checked here.

    Attributes:
        scenario: scene group.
        seed: the scene's seed is `HELD_OUT_SEED + seed`.
        drive: all rows, those of the start included.
        chunks: generation steps.
        per_step: frames per generation step.
        begin: frames of the start, which are real.
    """

    scenario: str
    seed: int
    drive: Drive
    chunks: int
    per_step: int
    begin: int

    @property
    def name(self) -> str:
        """Short and different for every plan of a run."""
        if self.drive.source == "scripted":
            return f"{self.scenario} {self.seed}"
        return f"{self.scenario} {self.seed}, {self.drive.name}"

    @property
    def frames(self) -> int:
        """Generated frames."""
        return self.chunks * self.per_step

    def make(self, draw: Draw) -> Truth:
        """Draw all of it."""
        images, scenery = draw(self.scenario, HELD_OUT_SEED + self.seed, self.drive)
        action = torch.from_numpy(np.stack((self.drive.speed, self.drive.yaw_rate), 1)).float()
        return Truth(self, images, action, scenery)


@dataclass(frozen=True)
class Truth:
    """A drawn plan.

    Attributes:
        plan: what was drawn.
        images: uint8 frames by view group [T, V, H, W, 3], the start first.
        action: speed in m/s and yaw rate in rad/s of every frame [T, 2].
        scenery: what may be told of the scene; its latent frame i ends with frame 2i + 1.
    """

    plan: Plan
    images: Mapping[str, Tensor]
    action: Tensor
    scenery: Scenery | None

    @property
    def start(self) -> dict[str, Tensor]:
        """The real frames that a rollout starts from."""
        return {group: x[: self.plan.begin] for group, x in self.images.items()}

    @property
    def start_action(self) -> Tensor:
        """Their actions."""
        return self.action[: self.plan.begin]

    def after(self, frames: int | None = None) -> dict[str, Tensor]:
        """The first `frames` (default all) frames after the start, floats in [0, 1]."""
        rows = slice(self.plan.begin, None if frames is None else self.plan.begin + frames)
        return {group: x[rows].float() / 255 for group, x in self.images.items()}

    @property
    def commanded(self) -> Tensor:
        """Actions after the start [frames, 2]."""
        return self.action[self.plan.begin :]


def plan(
    scenario: str, seed: int = 0, *, chunks: int, protocol: Protocol | None = None, actions: Path | None = None
) -> Plan:
    """Check what is asked for and choose the drive.

    Args:
        scenario: scene group.
        seed: of the scene among those that were never trained on.
        chunks: generation steps.
        protocol: decides how many frames a generation step has.
        actions: a recorded drive (CSV); default is the scenario's scripted drive.

    Raises:
        DriveError: a recorded drive is unreadable or too short.
        ValueError: unknown scenario, a seed out of range, or too few chunks.
    """
    protocol = protocol or Protocol()
    if scenario not in SCENARIOS:
        raise ValueError(f"unknown scenario {scenario!r}; choose one of {', '.join(SCENARIOS)}.")
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed is {seed}; it must be from 0 to {MAX_SEED}.")
    per_step = FRAMES_PER_LATENT * protocol.latents_per_chunk
    fewest = -(-protocol.window // protocol.latents_per_chunk)
    if chunks < fewest:
        raise ValueError(f"chunks is {chunks}; an evaluation needs at least {fewest}, one window.")
    begin = START_WINDOWS * protocol.window * FRAMES_PER_LATENT
    rows = begin + chunks * per_step
    if actions is None:
        return Plan(scenario, seed, scripted_drive(scenario, HELD_OUT_SEED + seed, rows), chunks, per_step, begin)
    drive = load_drive(actions)
    if len(drive) < rows:
        fit = (len(drive) - begin) // per_step
        hint = f"; it is long enough for --chunks {fit}" if fit >= fewest else ""
        raise DriveError(
            f"{actions}: {len(drive)} rows, but {chunks} chunks need {rows} ({begin} for the start and {per_step} per "
            f"chunk, {rows / FPS:.1f} s){hint}"
        )
    return Plan(scenario, seed, drive.first(rows), chunks, per_step, begin)


def rendered(scenario: str, scene_seed: int, drive: Drive) -> tuple[Mapping[str, Tensor], Scenery | None]:
    """Simulate the drive through the scene once; its frames and its scenery."""
    from rollcache.street.render import Renderer
    from rollcache.street.scene import Scene
    from rollcache.street.scenery import scenery_of

    episode = Scene(scenario, scene_seed).simulate(drive)
    with Renderer() as renderer:
        images = renderer.frames(episode)
    return {group: torch.from_numpy(x) for group, x in images.items()}, scenery_of(episode)
