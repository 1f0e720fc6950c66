"""One piece of the highway: carriageways, lines, barriers, gantries, bridges, and the land beside it."""

from __future__ import annotations

import numpy as np

from rollcache.street.scene_grid import ASPHALT, GRASS, PAINT, Corridor
from rollcache.street.scene_layout import HighwayLayout
from rollcache.street.scene_mesh import GROUND, MARK, SOLID, Mesh, rng_of, strip
from rollcache.street.scene_objects import buildings, lamps, quad_wall, trees

Array = np.ndarray
STEEL = (0.66, 0.68, 0.70)
CONCRETE = (0.80, 0.79, 0.75)
STEP = 10.0  # metres between the cross-sections of a piece


def _frame(layout: HighwayLayout, x: Array) -> Array:
    """Middle line points [N, 3] = x, y, heading."""
    return np.stack([x, layout.middle(x), layout.bearing(x)], -1)


def _at(layout: HighwayLayout, x: Array | float, left: Array | float) -> Array:
    """World [N, 2] of points `left` metres to the left of the middle line at x."""
    x, left = np.broadcast_arrays(np.atleast_1d(np.asarray(x, float)), np.asarray(left, float))
    b = layout.bearing(x)
    return np.stack([x - left * np.sin(b), layout.middle(x) + left * np.cos(b)], -1)


def _clear(corridor: Corridor, a: Array, b: Array) -> Array:
    """Bool [N]: True where the segments a -> b [N, 2] are nowhere near the path of the ego."""
    t = np.linspace(0, 1, 6)[:, None, None]
    points = a[None] * (1 - t) + b[None] * t
    return np.asarray(corridor.free(points.reshape(-1, 2), 2.4).reshape(len(t), -1).all(0))


def _note_along(
    mesh: Mesh,
    layout: HighwayLayout,
    kind: str,
    points: Array,
    left: float,
    width: float,
    z: tuple[float, float],
    corridor: Corridor | None = None,
) -> None:
    """Say that something runs along the road, `left` metres to the left of the middle line."""
    line = _at(layout, points[:, 0], left)
    a, b = line[:-1], line[1:]
    if corridor is not None:
        keep = _clear(corridor, a, b)
        a, b = a[keep], b[keep]
    mesh.note_line(kind, a, b, width, z, PAINT if kind == "line" else CONCRETE)


def _lines(mesh: Mesh, layout: HighwayLayout, points: Array, x0: float, x1: float) -> None:
    """Edge lines, and dashes that keep their rhythm from piece to piece."""
    dash = np.arange(np.ceil(x0 / 12.0) * 12.0, x1, 12.0)
    for sign in (-1, 1):
        for lat, half in ((layout.inner, 0.11), (layout.half - layout.shoulder, 0.14)):
            mesh.quads(MARK, strip(points, sign * lat + half, sign * lat - half), PAINT)
            _note_along(mesh, layout, "line", points, sign * lat, 2 * half, (0.0, 0.0))
        for k in range(1, layout.lanes):
            lat = sign * (layout.inner + k * layout.lane_width)
            ends = _at(layout, dash, lat), _at(layout, dash + 4.5, lat)
            mesh.note_line("line", *ends, 0.2, (0.0, 0.0), PAINT)
            for x in dash:
                mesh.quads(MARK, strip(_frame(layout, np.array([x, x + 4.5])), lat + 0.1, lat - 0.1), PAINT)


def _rails(mesh: Mesh, layout: HighwayLayout, points: Array, x0: float, x1: float, corridor: Corridor) -> None:
    """Concrete barrier in the middle, guard rails on posts outside; gaps where the ego passes through."""
    for lat, z0, z1, colour, thick in (
        (0.0, 0.0, 0.7, CONCRETE, 0.56),
        (0.0, 0.7, 1.0, (1.0, 0.99, 0.93), 0.5),
        (layout.half, 0.45, 0.8, STEEL, 0.12),
        (-layout.half, 0.45, 0.8, STEEL, 0.12),
    ):
        for sign in (-1, 1):
            line = _at(layout, points[:, 0], lat + sign * thick / 2)
            a, b = (line[:-1], line[1:]) if sign < 0 else (line[1:], line[:-1])
            keep = _clear(corridor, a, b)
            quad_wall(mesh, a[keep], b[keep], z0, z1, colour)
        if z0 != 0.7:
            _note_along(mesh, layout, "wall", points, lat, thick, (0.0, max(z1, 0.8)), corridor)
        ring = strip(points, lat + thick / 2, lat - thick / 2, z1)
        line = _at(layout, points[:, 0], lat)
        keep = _clear(corridor, line[:-1], line[1:])
        mesh.quads(SOLID, ring[keep], colour)
        if lat:
            xy = _at(layout, np.arange(x0, x1, 4.0), lat)
            xy = xy[corridor.free(xy, 2.4)]
            mesh.frusta(
                np.column_stack([xy, np.zeros(len(xy))]), (0.14, 0.14), (0.14, 0.14), 0.8, 0.0, (0.5, 0.52, 0.54)
            )


def _gantry(mesh: Mesh, layout: HighwayLayout, x: float, rng: np.random.Generator, corridor: Corridor) -> None:
    """Posts, a beam over both carriageways, and signs that face the traffic of each."""
    bearing, h = float(layout.bearing(x)), layout.half + 0.8
    for lat in (-h, 0.0, h):
        foot = _at(layout, x, lat)
        if corridor.free(foot, 2.4).all():
            mesh.frusta(np.array([*foot[0], 0.0]), (0.5, 0.5), (0.5, 0.5), 7.2, bearing, STEEL)
    beam = np.array([*_at(layout, x, 0.0)[0], 6.9])
    mesh.note("sign", beam, (0.6, 2 * h, 0.7), bearing, STEEL)
    mesh.frusta(np.array([*_at(layout, x, 0.0)[0], 6.6]), (0.6, 2 * h), (0.6, 2 * h), 0.7, bearing, STEEL, roof=STEEL)
    for way in (1, -1):
        for k in range(layout.lanes):
            if rng.random() < 0.3:
                continue
            colour = ((0.12, 0.42, 0.30), (0.14, 0.32, 0.62))[int(rng.random() < 0.4)]
            foot = np.array([*_at(layout, x - way * 0.5, -way * layout.offset(k))[0], 5.4])
            mesh.frusta(foot, (0.2, 3.1), (0.2, 3.1), 2.2, bearing, colour)
            mesh.note("sign", foot + np.array([0, 0, 1.1]), (0.2, 3.1, 2.2), bearing, colour)
            mesh.frusta(
                foot + np.array([-way * 0.12, 0, 0.5]), (0.06, 2.0), (0.06, 2.0), 0.35, bearing, (0.92, 0.93, 0.92)
            )
            mesh.frusta(
                foot + np.array([-way * 0.12, 0, 1.25]), (0.06, 1.4), (0.06, 1.4), 0.35, bearing, (0.92, 0.93, 0.92)
            )


def _bridge(mesh: Mesh, layout: HighwayLayout, x: float, corridor: Corridor) -> None:
    """A road bridge over the highway with a pier in the middle and abutments beside it."""
    bearing = float(layout.bearing(x))
    grey = (0.70, 0.69, 0.66)
    middle = np.array([*_at(layout, x, 0.0)[0], 5.6])
    mesh.frusta(middle, (9.0, 130.0), (9.0, 130.0), 1.3, bearing, grey, roof=grey)
    mesh.note("bridge", middle + np.array([0, 0, 0.65]), (9.0, 130.0, 1.3), bearing, grey)
    mesh.quads(SOLID, strip(_frame(layout, np.array([x - 4.5, x + 4.5])), -65.0, 65.0, 5.6), (0.42, 0.42, 0.42))
    for lat in (-layout.half - 1.5, 0.0, layout.half + 1.5):
        foot = _at(layout, x, lat)
        if corridor.free(foot, 3.2).all():
            mesh.frusta(np.array([*foot[0], 0.0]), (3.0, 1.0), (3.0, 1.0), 5.6, bearing, grey)
    for sign in (-1, 1):
        foot = _at(layout, x, sign * (layout.half + 36.0))
        if not corridor.free_box(foot, np.array([[26.0, 62.0]]), 3.0).all():
            continue
        mesh.frusta(np.array([*foot[0], 0.0]), (26.0, 62.0), (10.0, 56.0), 5.6, bearing, GRASS, "grass", (6.0, 6.0))


def build_piece(
    layout: HighwayLayout, key: tuple[int, int], corridor: Corridor, sun: tuple[float, float, float]
) -> Mesh:
    """Mesh of piece `key[0]`: 60 m of road and the land to 110 m on both sides."""
    i = key[0]
    rng = rng_of(layout.seed, i, 31)
    mesh = Mesh(sun)
    x0, x1 = i * layout.piece, (i + 1) * layout.piece
    points = _frame(layout, np.linspace(x0, x1, int(layout.piece / STEP) + 1))
    far = layout.half + 110.0
    for left, right, colour, texture, tile in (
        (far, layout.half + 1.2, GRASS, "grass", 7.0),
        (layout.half + 1.2, -layout.half - 1.2, ASPHALT, "asphalt", 6.0),
        (-layout.half - 1.2, -far, GRASS, "grass", 7.0),
    ):
        ring = strip(points, left, right)
        anchor = np.floor(ring[:, :1, :2] / tile)
        mesh.quads(GROUND, ring, colour, texture, ring[..., :2] / tile - anchor)
    mesh.quads(MARK, strip(points, 0.9, -0.9), (0.52, 0.55, 0.44))
    _lines(mesh, layout, points, x0, x1)
    _rails(mesh, layout, points, x0, x1, corridor)
    post = _at(layout, np.array([x0 + 22.0]), 0.0)
    post = post[corridor.free(post, 2.4)]
    lamps(mesh, post, float(points[2, 2]) + np.pi / 2, 9.0, 2.6)
    lamps(mesh, post, float(points[2, 2]) - np.pi / 2, 9.0, 2.6)

    land = rng_of(layout.seed, i // 4, 32)  # the same kind of land for four pieces
    wood, village, wall = float(land.uniform(4, 26)), bool(land.random() < 0.35), bool(land.random() < 0.25)
    for sign in (-1, 1):
        n = int(wood)
        near = layout.half + (9.0 if wall else 6.0)
        lat = near + 70.0 * rng.random(n) ** 1.6
        xy = _at(layout, rng.uniform(x0, x1, n), sign * lat)
        trees(mesh, xy[corridor.free(xy, 6.0)], rng, 1.35)
        if village:
            centre = _at(layout, x0 + rng.uniform(5, 55, 2), sign * rng.uniform(layout.half + 26, layout.half + 60, 2))
            size = rng.uniform(9, 18, (2, 2))
            keep = corridor.free_box(centre, size, 5.0)
            buildings(
                mesh,
                centre[keep],
                size[keep],
                np.full(keep.sum(), 3.9 + 3.2 * rng.integers(1, 4)),
                rng,
                np.zeros(keep.sum(), bool),
            )
        if wall:
            line = _at(layout, points[:, 0], sign * (layout.half + 4.0))
            _note_along(mesh, layout, "wall", points, sign * (layout.half + 4.0), 0.2, (0.0, 3.2), corridor)
            a, b = (line[:-1], line[1:]) if sign < 0 else (line[1:], line[:-1])
            for p, q in ((a, b), (b, a)):  # seen from both sides
                keep = _clear(corridor, p, q)
                quad_wall(mesh, p[keep], q[keep], 0.0, 3.2, (0.66, 0.64, 0.56))
    if i % 3 == int(rng_of(layout.seed, 33).integers(3)):
        _gantry(mesh, layout, x0 + 40.0, rng, corridor)
    if i % 9 == int(rng_of(layout.seed, 34).integers(9)):
        _bridge(mesh, layout, x0 + 12.0, corridor)
    return mesh
