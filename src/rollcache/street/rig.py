"""The camera rig: seven cameras in three view groups, their optics and their pixel and latent grids.

Everything that must agree about cameras (renderer, codec, transformer, report) reads it here.
"""

from __future__ import annotations

from dataclasses import dataclass

FPS = 12
PATCH = 8  # pixels per latent cell and axis
FRAMES_PER_LATENT = 2


@dataclass(frozen=True)
class Camera:
    """One pinhole camera: `yaw` degrees to the left of forward, horizontal `fov` degrees."""

    name: str
    yaw: float
    fov: float


@dataclass(frozen=True)
class ViewGroup:
    """Cameras that share a grid shape. `height` and `width` are pixels."""

    name: str
    height: int
    width: int
    cameras: tuple[Camera, ...]

    @property
    def grid(self) -> tuple[int, int]:
        """Latent grid (rows, columns) of one camera."""
        return self.height // PATCH, self.width // PATCH

    @property
    def cells(self) -> int:
        """Latent cells of one camera and latent frame."""
        return self.grid[0] * self.grid[1]


RIG: tuple[ViewGroup, ...] = (
    ViewGroup("front", 48, 96, (Camera("front_narrow", 0.0, 60.0), Camera("front_wide", 0.0, 110.0))),
    ViewGroup(
        "sides",
        48,
        80,
        (
            Camera("left_front", 60.0, 90.0),
            Camera("right_front", -60.0, 90.0),
            Camera("left_rear", 125.0, 90.0),
            Camera("right_rear", -125.0, 90.0),
        ),
    ),
    ViewGroup("rear", 48, 96, (Camera("rear", 180.0, 80.0),)),
)

CELLS = sum(len(g.cameras) * g.cells for g in RIG)  # tokens per latent frame over the whole rig
CAMERAS: tuple[str, ...] = tuple(c.name for g in RIG for c in g.cameras)
