"""Scenes and episodes: a seeded world, an ego driven through it by a Drive, and the truth about every frame."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollcache.street.drives import Drive, scripted_drive
from rollcache.street.ego import EgoState
from rollcache.street.scene_grid import Corridor, build_cell
from rollcache.street.scene_highway import build_piece
from rollcache.street.scene_layout import SCENARIOS, GridLayout, Layout, make_layout
from rollcache.street.scene_mesh import Mesh, rng_of
from rollcache.street.scene_objects import SIZES
from rollcache.street.traffic import Box, Traffic

__all__ = ["SCENARIOS", "Box", "EgoState", "Episode", "Scene", "make_episode", "view_distance"]

TRUTH_DISTANCE = 80.0  # metres around the ego within which parked vehicles are listed


def view_distance(scenario: str) -> float:
    """Metres drawn around the ego; the haze hides the edge."""
    return 140.0 if scenario == "highway" else 118.0


@dataclass(frozen=True)
class Chunk:
    """A piece of the static world: its key, its mesh, and x0, x1, y0, y1 of what it covers."""

    key: tuple[int, int]
    mesh: Mesh
    box: tuple[float, float, float, float]


@dataclass(frozen=True)
class Episode:
    """A drive through a scene. Entry i of everything belongs to frame i, the frame the action of frame i led to.

    speed, yaw_rate [T]; poses [T, 3] = x, y, yaw of the ego; boxes: per frame the moving and the near parked agents.
    """

    scenario: str
    seed: int
    drive: Drive
    poses: np.ndarray
    boxes: tuple[tuple[Box, ...], ...]
    moving: tuple[int, ...]  # how many of a frame's boxes move (they come first)
    chunks: tuple[Chunk, ...]
    parked: tuple[Box, ...] = ()  # all of them, near or far

    def __len__(self) -> int:
        """Number of frames."""
        return len(self.poses)

    @property
    def speed(self) -> np.ndarray:
        """Speed in m/s [T]."""
        return self.drive.speed

    @property
    def yaw_rate(self) -> np.ndarray:
        """Yaw rate in rad/s, positive to the left [T]."""
        return self.drive.yaw_rate


class Scene:
    """A world of one of the scenario groups, fixed by its seed.

    Raises:
        ValueError: the scenario is unknown; the message lists the names.
    """

    def __init__(self, scenario: str, seed: int) -> None:
        self.scenario, self.seed = scenario, int(seed)
        self.layout: Layout = make_layout(scenario, self.seed)

    def start(self) -> EgoState:
        """Where every drive through this scene begins."""
        return self.layout.start()

    @property
    def sun(self) -> tuple[float, float, float]:
        """Unit vector towards the light."""
        angle = float(rng_of(self.seed, 13).uniform(0, 2 * np.pi))
        return 0.57 * float(np.cos(angle)), 0.57 * float(np.sin(angle)), 0.82

    def simulate(self, drive: Drive, frames: int | None = None) -> Episode:
        """Drive the ego for `frames` frames (all of the drive by default) among the traffic.

        Whatever the path runs into is left out of the world: a recorded drive need not stay on the road.

        Raises:
            DriveError: the drive has fewer rows than frames.
        """
        frames = len(drive) if frames is None else frames
        drive = drive.first(frames)
        state, traffic = self.start(), Traffic(self.layout)
        traffic.populate(state)
        poses, moving = np.empty((frames, 3)), []
        for i in range(frames):
            state = state.moved(float(drive.speed[i]), float(drive.yaw_rate[i]))
            traffic.step(state)
            poses[i] = state.x, state.y, state.yaw
            moving.append(traffic.boxes())
        chunks, parked = self._world(poses[:, :2])
        boxes = []
        for pose, agents in zip(poses, moving, strict=True):
            near = [b for b in parked if np.hypot(b.centre[0] - pose[0], b.centre[1] - pose[1]) < TRUTH_DISTANCE]
            boxes.append(tuple(agents + near))
        return Episode(
            self.scenario, self.seed, drive, poses, tuple(boxes), tuple(len(m) for m in moving), chunks, tuple(parked)
        )

    def _world(self, path: np.ndarray) -> tuple[tuple[Chunk, ...], list[Box]]:
        """The chunks within sight of the path [T, 2], and the boxes of all parked vehicles in them."""
        corridor = Corridor(path)
        chunks: list[Chunk] = []
        parked: list[Box] = []
        for key in self.layout.chunks_near(path[::4], view_distance(self.scenario) + 8.0):
            if isinstance(self.layout, GridLayout):
                mesh, cars = build_cell(self.layout, key, corridor, self.sun)
                for kind, pose, colour in cars:
                    for p, c in zip(pose, colour, strict=True):
                        size = SIZES[kind]
                        rgb = (float(c[0]), float(c[1]), float(c[2]))
                        parked.append(
                            Box(-1 - len(parked), kind, rgb, (float(p[0]), float(p[1]), size[2] / 2), size, float(p[2]))
                        )
            else:
                mesh = build_piece(self.layout, key, corridor, self.sun)
            chunks.append(Chunk(key, mesh, self.layout.chunk_box(key)))
        return tuple(chunks), parked


def make_episode(scenario: str, seed: int, frames: int) -> Episode:
    """The scripted drive of (scenario, seed) through the scene of the same seed."""
    return Scene(scenario, seed).simulate(scripted_drive(scenario, seed, frames), frames)
