"""Meshes as numpy arrays: batches of quads by draw layer and texture, with the shading baked into the colours.

The renderer only copies these arrays; everything that decides a shape or a colour is here and needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Draw layers, in order. Ground and marks lie at z = 0 and are painted without a depth test; details are drawn near
# the ego only.
GROUND, MARK, SOLID, DETAIL = 0, 1, 2, 3
SIGNS = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * 0.5  # corners of a rectangle of size 1
Colour = tuple[float, float, float]
Array = np.ndarray


@dataclass(frozen=True)
class Batch:
    """Quads of one layer and texture: corners [N, 4, 3] metres, uv [N, 4, 2] repeats, colour [N, 4, 3] in 0..1."""

    corners: Array
    uv: Array
    colour: Array


@dataclass(frozen=True)
class Note:
    """Boxes [N, 7] = x, y, z of the middle, length, width, height, yaw, that say what was drawn; colour [N, 3]."""

    kind: str
    box: Array
    colour: Array


class Mesh:
    """Collects quads by (layer, texture name); an empty name means untextured. `sun` is a unit vector to the light."""

    def __init__(self, sun: tuple[float, float, float] = (0.45, 0.35, 0.82)) -> None:
        self.sun = np.asarray(sun, np.float64)
        self.parts: dict[tuple[int, str], list[Batch]] = {}
        self.notes: list[Note] = []

    def note(self, kind: str, centre: Array, size: Array, yaw: Array | float, colour: Array | Colour) -> None:
        """Say what was drawn, for a model that is told: centre [N, 3] and size [N, 3] (broadcast), yaw, colour."""
        centre = np.asarray(centre, np.float64).reshape(-1, 3)
        n = len(centre)
        if n:
            size = np.broadcast_to(np.asarray(size, np.float64), (n, 3))
            turned = np.broadcast_to(np.asarray(yaw, np.float64).reshape(-1, 1), (n, 1))
            self.notes.append(Note(kind, np.hstack([centre, size, turned]), np.broadcast_to(colour, (n, 3))))

    def note_line(self, kind: str, a: Array, b: Array, width: float, z: tuple[float, float], colour: Colour) -> None:
        """Say that something runs from a to b [N, 2], `width` wide and from z[0] to z[1] metres high."""
        a, b = np.asarray(a, np.float64).reshape(-1, 2), np.asarray(b, np.float64).reshape(-1, 2)
        middle = np.column_stack([(a + b) / 2, np.full(len(a), (z[0] + z[1]) / 2)])
        length = np.hypot(*(b - a).T)
        size = np.column_stack([length, np.full(len(a), width), np.full(len(a), z[1] - z[0])])
        self.note(kind, middle, size, np.arctan2(b[:, 1] - a[:, 1], b[:, 0] - a[:, 0]), colour)

    def quads(
        self, layer: int, corners: Array, colour: Array | Colour, texture: str = "", uv: Array | None = None
    ) -> None:
        """Add quads: corners [N, 4, 3] anticlockwise from outside, colour [3], [N, 3] or [N, 4, 3], uv [N, 4, 2]."""
        corners = np.asarray(corners, np.float64).reshape(-1, 4, 3)
        n = len(corners)
        if n == 0:
            return
        tint = np.empty((n, 4, 3))
        colour = np.asarray(colour, np.float64)
        tint[:] = colour[:, None] if colour.ndim == 2 else colour
        self.parts.setdefault((layer, texture), []).append(
            Batch(corners, np.zeros((n, 4, 2)) if uv is None else uv, tint)
        )

    def flat(
        self,
        layer: int,
        x0: Array | float,
        x1: Array | float,
        y0: Array | float,
        y1: Array | float,
        z: float,
        colour: Array | Colour,
        texture: str = "",
        tile: float = 8.0,
    ) -> None:
        """Axis-aligned horizontal rectangles, all arguments broadcast to [N]; texture coordinates follow the world."""
        a0, a1, b0, b1 = np.broadcast_arrays(*(np.atleast_1d(np.asarray(a, np.float64)) for a in (x0, x1, y0, y1)))
        xy = np.stack([np.stack(c, -1) for c in ((a0, b0), (a1, b0), (a1, b1), (a0, b1))], 1)  # [N, 4, 2]
        corners = np.concatenate([xy, np.full((*xy.shape[:2], 1), z)], -1)
        anchor = np.floor(xy[:, :1] / tile)
        self.quads(layer, corners, colour, texture, xy / tile - anchor)

    def frusta(
        self,
        base: Array,
        bottom: Array | tuple[float, float],
        top: Array | tuple[float, float],
        height: Array | float,
        yaw: Array | float,
        colour: Array | Colour,
        texture: str = "",
        tile: tuple[float, float] = (1.0, 1.0),
        roof: Array | Colour | None = None,
        shift: Array | float = 0.0,
        layer: int = SOLID,
    ) -> None:
        """Upright frusta (boxes when bottom == top): four walls, and a lid coloured `roof` when given.

        base [N, 3] centre of the lower face; bottom, top [N, 2] length and width; height, yaw, shift [N] (shift moves
        the top along the length). Walls carry `texture` with `tile` metres a repeat along and up the wall.
        """
        base = np.asarray(base, np.float64).reshape(-1, 3)
        n = len(base)
        if n == 0:
            return
        bottom, top = (np.broadcast_to(np.asarray(a, np.float64), (n, 2)) for a in (bottom, top))
        height, yaw, shift = (np.broadcast_to(np.asarray(a, np.float64), (n,)) for a in (height, yaw, shift))
        cos, sin = np.cos(yaw)[:, None], np.sin(yaw)[:, None]

        def ring(size: Array, z: Array | float, along: Array | float) -> Array:
            u = SIGNS[:, 0] * size[:, :1] + np.reshape(along, (-1, 1))  # [N, 4]
            v = SIGNS[:, 1] * size[:, 1:]
            out = np.empty((n, 4, 3))
            out[..., 0] = base[:, :1] + cos * u - sin * v
            out[..., 1] = base[:, 1:2] + sin * u + cos * v
            out[..., 2] = (base[:, 2] + z)[:, None]
            return out

        low, high = ring(bottom, 0.0, 0.0), ring(top, height, shift)  # [N, 4, 3]
        following = [1, 2, 3, 0]
        walls = np.stack([low, low[:, following], high[:, following], high], 2)  # [N, wall, corner, 3]
        uv = np.zeros((n, 4, 4, 2))
        uv[:, :, 1:3, 0] = (bottom[:, [0, 1, 0, 1]] / tile[0])[:, :, None]
        uv[:, :, 2:, 1] = (height / tile[1])[:, None, None]
        colour = np.broadcast_to(np.asarray(colour, np.float64), (n, 3))
        self.quads(layer, walls, np.repeat(colour, 4, 0), texture, uv.reshape(-1, 4, 2))
        if roof is not None:
            self.quads(layer, high, np.broadcast_to(np.asarray(roof, np.float64), (n, 3)))

    def crowns(
        self, centre: Array, radius: Array, height: Array, colour: Array, texture: str = "", sides: int = 6
    ) -> None:
        """Tree crowns: low-poly spheroids, centre [N, 3], radius [N], height [N], colour [N, 3]."""
        centre = np.asarray(centre, np.float64).reshape(-1, 3)
        n = len(centre)
        if n == 0:
            return
        z, r = np.array([-0.5, -0.18, 0.22, 0.5]), np.array([0.4, 1.0, 0.85, 0.15])
        angle = 2 * np.pi * np.arange(sides + 1) / sides
        shape = np.empty((4, sides + 1, 3))  # rings of points of a crown of radius 1 and height 1
        shape[..., 0], shape[..., 1], shape[..., 2] = r[:, None] * np.cos(angle), r[:, None] * np.sin(angle), z[:, None]
        faces = np.stack([shape[:-1, :-1], shape[:-1, 1:], shape[1:, 1:], shape[1:, :-1]], 2)  # [3, sides, 4, 3]
        glow = np.repeat(0.86 + 0.28 * (z[:-1] + z[1:]), sides)  # darker below
        size = np.stack([radius, radius, height], -1)[:, None, None]
        corners = centre[:, None, None] + size * faces.reshape(1, -1, 4, 3)  # [N, 3 * sides, 4, 3]
        self.quads(SOLID, corners, (colour[:, None] * glow[:, None]).reshape(-1, 3), texture)

    def tiles(self, edge: float) -> dict[tuple[int, int], dict[tuple[int, str], Batch]]:
        """The merged batches cut into square tiles of `edge` metres by the middle of each quad."""
        out: dict[tuple[int, int], dict[tuple[int, str], Batch]] = {}
        for key, batch in self.merged().items():
            cell = np.floor(batch.corners[..., :2].mean(1) / edge).astype(int)
            cells, member = np.unique(cell, axis=0, return_inverse=True)
            for n, (i, j) in enumerate(cells):
                m = member.reshape(-1) == n
                out.setdefault((int(i), int(j)), {})[key] = Batch(batch.corners[m], batch.uv[m], batch.colour[m])
        return out

    def merged(self) -> dict[tuple[int, str], Batch]:
        """One batch per (layer, texture), in a fixed order; solids are shaded by the direction they face."""
        return {key: self._joined(key[0], self.parts[key]) for key in sorted(self.parts)}

    def _joined(self, layer: int, parts: list[Batch]) -> Batch:
        corners, uv, colour = (np.concatenate([getattr(b, f) for b in parts]) for f in ("corners", "uv", "colour"))
        if layer >= SOLID:
            normal = np.cross(corners[:, 2] - corners[:, 0], corners[:, 3] - corners[:, 1])
            normal /= np.linalg.norm(normal, axis=1, keepdims=True) + 1e-9
            light = 0.71 + 0.27 * np.clip(normal @ self.sun, -0.4, 1.0) + 0.07 * normal[:, 2]
            colour = colour * light[:, None, None]
        return Batch(corners, uv, np.clip(colour, 0, 1))


def strip(points: Array, left: Array | float, right: Array | float, z: float = 0.0) -> Array:
    """Quads [N-1, 4, 3] between two offsets (metres to the left) of a polyline, points [N, 3] = x, y, heading."""
    normal = np.stack([-np.sin(points[:, 2]), np.cos(points[:, 2])], -1)
    a, b = points[:, :2] + normal * np.reshape(right, (-1, 1)), points[:, :2] + normal * np.reshape(left, (-1, 1))
    ring = np.stack([a[:-1], a[1:], b[1:], b[:-1]], 1)
    return np.concatenate([ring, np.full((*ring.shape[:2], 1), z)], -1)


def rng_of(*key: int) -> np.random.Generator:
    """A generator seeded by whole numbers (negative ones allowed), the same on every machine."""
    return np.random.default_rng([k & 0xFFFFFFFF for k in key])


def pick(rng: np.random.Generator, palette: Sequence[Colour], n: int, jitter: float = 0.05) -> Array:
    """Draw n colours [n, 3] from a palette with a little brightness jitter."""
    base = np.asarray(palette)[rng.integers(len(palette), size=n)]
    return np.clip(base * (1 + jitter * rng.standard_normal((n, 1))), 0, 1)
