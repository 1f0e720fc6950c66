"""Meshes as numpy arrays: batches of quads by draw layer and texture, with the shading baked into the colours.

The renderer only copies these arrays; everything that decides a shape or a colour is here and needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Draw layers, in order: ground and marks lie at z = 0 and are painted without a depth test; details are drawn near the ego only.
GROUND, MARK, SOLID, DETAIL = 0, 1, 2, 3
Colour = tuple[float, float, float]
Array = np.ndarray


@dataclass(frozen=True)
class Batch:
    """Quads that share a layer and a texture: corners [N, 4, 3] metres, uv [N, 4, 2] tiles, colour [N, 4, 3] in 0..1."""

    corners: Array
    uv: Array
    colour: Array


class Mesh:
    """Collects quads under (layer, texture name); an empty name means untextured. `sun` is a unit vector towards the light."""

    def __init__(self, sun: tuple[float, float, float] = (0.45, 0.35, 0.82)) -> None:
        self.sun = np.asarray(sun, np.float64)
        self.parts: dict[tuple[int, str], list[Batch]] = {}

    def quads(
        self, layer: int, corners: Array, colour: Array | Colour, texture: str = "", uv: Array | None = None, shade: bool | None = None
    ) -> None:
        """Add quads, corners [N, 4, 3] counter-clockwise seen from outside. Solid quads are shaded by their normal."""
        corners = np.asarray(corners, np.float64).reshape(-1, 4, 3)
        n = len(corners)
        if n == 0:
            return
        colour = np.asarray(colour, np.float64)
        colour = np.broadcast_to(colour.reshape(-1, 1, 3) if colour.ndim < 3 else colour, (n, 4, 3))
        if shade if shade is not None else layer >= SOLID:
            normal = np.cross(corners[:, 2] - corners[:, 0], corners[:, 3] - corners[:, 1])
            normal /= np.linalg.norm(normal, axis=1, keepdims=True) + 1e-9
            light = 0.71 + 0.27 * np.clip(normal @ self.sun, -0.4, 1.0) + 0.07 * normal[:, 2]
            colour = colour * light[:, None, None]
        if uv is None:
            uv = np.zeros((n, 4, 2))
        self.parts.setdefault((layer, texture), []).append(Batch(corners, np.asarray(uv, np.float64), np.clip(colour, 0, 1)))

    def flat(self, layer: int, x0: Array, x1: Array, y0: Array, y1: Array, z: float, colour: Array | Colour, texture: str = "", tile: float = 8.0) -> None:
        """Axis-aligned horizontal rectangles, all arguments broadcast to [N]; texture coordinates follow the world."""
        x0, x1, y0, y1 = np.broadcast_arrays(*(np.atleast_1d(np.asarray(a, np.float64)) for a in (x0, x1, y0, y1)))
        xy = np.stack([np.stack(c, -1) for c in ((x0, y0), (x1, y0), (x1, y1), (x0, y1))], 1)  # [N, 4, 2]
        corners = np.concatenate([xy, np.full((*xy.shape[:2], 1), z)], -1)
        anchor = np.floor(xy[:, :1] / tile)
        self.quads(layer, corners, colour, texture, xy / tile - anchor)

    def frusta(
        self,
        base: Array,
        bottom: Array,
        top: Array,
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
        signs = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * 0.5
        cos, sin = np.cos(yaw)[:, None], np.sin(yaw)[:, None]

        def ring(size: Array, z: Array, along: Array) -> Array:
            local = signs * size[:, None]  # [N, 4, 2]
            u, v = local[..., 0] + along[:, None], local[..., 1]
            return np.stack([base[:, :1] + cos * u - sin * v, base[:, 1:2] + sin * u + cos * v, np.broadcast_to((base[:, 2] + z)[:, None], u.shape)], -1)

        low, high = ring(bottom, np.zeros(n), np.zeros(n)), ring(top, height, shift)  # [N, 4, 3]
        colour = np.broadcast_to(np.asarray(colour, np.float64), (n, 3))
        for i in range(4):
            j = (i + 1) % 4
            length = bottom[:, i % 2] / tile[0]
            rise = height / tile[1]
            zero = np.zeros(n)
            uv = np.stack([np.stack(p, -1) for p in ((zero, zero), (length, zero), (length, rise), (zero, rise))], 1)
            self.quads(layer, np.stack([low[:, i], low[:, j], high[:, j], high[:, i]], 1), colour, texture, uv)
        if roof is not None:
            self.quads(layer, high, np.broadcast_to(np.asarray(roof, np.float64), (n, 3)))

    def crowns(self, centre: Array, radius: Array, height: Array, colour: Array, texture: str = "", sides: int = 6) -> None:
        """Tree crowns: low-poly spheroids, centre [N, 3], radius [N], height [N], colour [N, 3]."""
        centre = np.asarray(centre, np.float64).reshape(-1, 3)
        n = len(centre)
        if n == 0:
            return
        levels = ((-0.5, 0.4), (-0.18, 1.0), (0.22, 0.85), (0.5, 0.15))
        angle = 2 * np.pi * np.arange(sides + 1) / sides
        for (z0, r0), (z1, r1) in zip(levels, levels[1:], strict=False):
            for k in range(sides):
                a, b = angle[k], angle[k + 1]
                pts = []
                for z, r, t in ((z0, r0, a), (z0, r0, b), (z1, r1, b), (z1, r1, a)):
                    pts.append(np.stack([centre[:, 0] + radius * r * np.cos(t), centre[:, 1] + radius * r * np.sin(t), centre[:, 2] + height * z], -1))
                glow = 0.86 + 0.28 * (z0 + z1)  # darker below
                uv = np.broadcast_to(np.array([[k / 2, z0 + 0.5], [k / 2 + 0.5, z0 + 0.5], [k / 2 + 0.5, z1 + 0.5], [k / 2, z1 + 0.5]]), (n, 4, 2))
                self.quads(SOLID, np.stack(pts, 1), colour * glow, texture, uv)

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
        """One batch per (layer, texture), in a fixed order."""
        return {
            key: Batch(*(np.concatenate([getattr(b, f) for b in self.parts[key]]) for f in ("corners", "uv", "colour")))
            for key in sorted(self.parts)
        }


def strip(points: Array, left: Array, right: Array, z: float = 0.0) -> Array:
    """Quads [N-1, 4, 3] between two lateral offsets (metres to the left) of a polyline, points [N, 3] = x, y, heading."""
    normal = np.stack([-np.sin(points[:, 2]), np.cos(points[:, 2])], -1)
    a, b = points[:, :2] + normal * np.reshape(right, (-1, 1)), points[:, :2] + normal * np.reshape(left, (-1, 1))
    ring = np.stack([a[:-1], a[1:], b[1:], b[:-1]], 1)
    return np.concatenate([ring, np.full((*ring.shape[:2], 1), z)], -1)


def rng_of(*key: int) -> np.random.Generator:
    """A generator seeded by whole numbers (negative ones allowed), the same on every machine."""
    return np.random.default_rng([k & 0xFFFFFFFF for k in key])


def pick(rng: np.random.Generator, palette: Sequence[Colour], n: int, jitter: float = 0.05) -> Array:
    """n colours [n, 3] drawn from a palette with a little brightness jitter."""
    base = np.asarray(palette)[rng.integers(len(palette), size=n)]
    return np.clip(base * (1 + jitter * rng.standard_normal((n, 1))), 0, 1)
