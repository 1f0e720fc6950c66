"""One cell of the street grid: asphalt, markings, kerbs, buildings, trees, lamps and parked cars."""

from __future__ import annotations

import numpy as np

from rollcache.street.scene_layout import GridLayout
from rollcache.street.scene_mesh import GROUND, MARK, SOLID, Colour, Mesh, pick, rng_of
from rollcache.street.scene_objects import CAR_COLOURS, buildings, lamps, trees, vehicles

Array = np.ndarray
ASPHALT: Colour = (0.40, 0.41, 0.43)
PAVING: Colour = (0.70, 0.68, 0.64)
KERB: Colour = (0.80, 0.79, 0.76)
GRASS: Colour = (0.45, 0.58, 0.33)
PAINT: Colour = (0.90, 0.90, 0.88)
YELLOW: Colour = (0.90, 0.76, 0.32)
WALK_HEIGHT = 0.14
NOTE_LENGTH = 12.0  # metres of a kerb or line in one note
ZEBRA = (2.0, 5.0)  # metres beyond the kerb line of the crossing street


class Corridor:
    """Keeps the way of the ego free: tells which places lie within a distance of its path [N, 2]."""

    def __init__(self, path: Array) -> None:
        self.path = np.asarray(path, np.float64).reshape(-1, 2)

    def free(self, xy: Array, reach: Array | float) -> Array:
        """Bool [N]: True where xy [N, 2] is farther than `reach` metres from the path."""
        if len(self.path) == 0 or len(xy) == 0:
            return np.ones(len(xy), bool)
        gap = np.hypot(*(xy[:, None, :] - self.path[None]).transpose(2, 0, 1)).min(1)
        return np.asarray(gap > reach)

    def free_box(self, centre: Array, size: Array, margin: float) -> Array:
        """Bool [N]: True where axis-aligned rectangles (centre, size [N, 2]) stay `margin` metres off the path."""
        if len(self.path) == 0 or len(centre) == 0:
            return np.ones(len(centre), bool)
        out = np.maximum(np.abs(self.path[None] - centre[:, None]) - size[:, None] / 2, 0.0)
        return np.asarray(np.hypot(out[..., 0], out[..., 1]).min(1) > margin)


def _turned(axis: int, along: Array, across: Array) -> Array:
    """World [N, 2] of points on a street of `axis`: coordinate along it and across it."""
    along, across = np.broadcast_arrays(np.asarray(along, float), np.asarray(across, float))
    return np.stack([along, across] if axis == 0 else [across, along], -1)


def _rects(
    mesh: Mesh, axis: int, a0: Array | float, a1: Array | float, c0: Array | float, c1: Array | float, colour: Colour
) -> None:
    """Painted rectangles given along and across a street."""
    x0, x1, y0, y1 = (a0, a1, c0, c1) if axis == 0 else (c0, c1, a0, a1)
    mesh.flat(MARK, x0, x1, y0, y1, 0.0, colour)


def _markings(mesh: Mesh, layout: GridLayout, axis: int, road: int, cell: int) -> None:
    """Lines of the street piece between crossings `cell` and `cell + 1`, and the zebras at its ends."""
    p, h = layout.pitch, layout.half
    lo, hi, mid = cell * p + h, (cell + 1) * p - h, road * p
    stop0, stop1 = lo + ZEBRA[1] + 1.0, hi - ZEBRA[1] - 1.0
    for d in (-0.14, 0.14) if layout.lanes > 1 else (0.0,):
        _rects(mesh, axis, stop0, stop1, mid + d - 0.07, mid + d + 0.07, YELLOW if layout.lanes > 1 else PAINT)
    dash = np.arange(stop0 + 2.0, stop1 - 3.0, 6.0)
    for k in range(1, layout.lanes):
        for sign in (-1, 1):
            c = mid + sign * k * layout.lane_width
            _rects(mesh, axis, dash, dash + 2.6, c - 0.08, c + 0.08, PAINT)
    cuts = np.linspace(stop0, stop1, max(2, round((stop1 - stop0) / NOTE_LENGTH)) + 1)
    middle = YELLOW if layout.lanes > 1 else PAINT
    mesh.note_line("line", _turned(axis, cuts[:-1], mid), _turned(axis, cuts[1:], mid), 0.4, (0.0, 0.0), middle)
    for sign in (-1, 1):
        c = mid + sign * layout.lanes * layout.lane_width
        mesh.note_line("line", _turned(axis, cuts[:-1], c), _turned(axis, cuts[1:], c), 0.15, (0.0, 0.0), PAINT)
        _rects(mesh, axis, stop0, stop1, c - 0.06, c + 0.06, PAINT)
        edge = mid + sign * (h - 0.25)
        _rects(mesh, axis, lo, hi, edge - 0.22, edge + 0.22, (0.33, 0.34, 0.36))
    bars = mid - h + 0.7 + np.arange(0.0, 2 * h - 1.2, 1.1)
    for a0, a1 in ((lo + ZEBRA[0], lo + ZEBRA[1]), (hi - ZEBRA[1], hi - ZEBRA[0])):
        _rects(mesh, axis, a0, a1, bars, bars + 0.55, PAINT)
        where = (a0 + a1) / 2
        mesh.note_line("zebra", _turned(axis, where, mid - h), _turned(axis, where, mid + h), a1 - a0, (0, 0), PAINT)
    # stop lines lie across the lanes that arrive: on the right of travel, times `side`
    w = layout.side * layout.lanes * layout.lane_width
    right = -1 if axis == 0 else 1  # sign of "right of travel towards +" in the across coordinate
    for at, way in ((stop1, 1), (stop0, -1)):
        c0, c1 = sorted((mid, mid + right * way * w))
        _rects(mesh, axis, at - 0.2, at + 0.2, c0, c1, PAINT)


def _parked(
    layout: GridLayout, rng: np.random.Generator, axis: int, road: int, cell: int, corridor: Corridor
) -> list[tuple[str, Array, Array]]:
    """Parked vehicles of a street piece: (class, poses [N, 3], colours [N, 3])."""
    p, h = layout.pitch, layout.half
    density = 0.25 if layout.scenario == "u-turn" else float(rng.uniform(0.25, 0.75))
    out = []
    for sign in (-1, 1):
        along = np.arange(cell * p + h + 10.0, (cell + 1) * p - h - 10.0, 6.6)
        n = len(along)
        keep, kinds = rng.random(n) < density, rng.random(n)
        colours = pick(rng, CAR_COLOURS, n)
        jitter = rng.normal(0, 0.25, n)
        xy = _turned(axis, along + jitter, np.full(n, road * p + sign * (h - 1.15)))
        travel = layout.side * (-sign if axis == 0 else sign)  # the way of the lanes on this side
        heading = (0.0 if travel > 0 else np.pi) if axis == 0 else travel * np.pi / 2
        keep &= corridor.free(xy, 3.4)
        for kind, chosen in (("car", kinds < 0.85), ("van", kinds >= 0.85)):
            m = keep & chosen
            if m.any():
                out.append((kind, np.column_stack([xy[m], heading + rng.normal(0, 0.02, m.sum())]), colours[m]))
    return out


def _lots(rng: np.random.Generator, length: float) -> Array:
    """Cuts [0, length] into building fronts of 9 to 20 m: edges [N + 1]."""
    cuts = np.cumsum(rng.uniform(9.0, 20.0, int(length // 9) + 2))
    cuts = cuts[cuts < length - 7.0]
    return np.concatenate([[0.0], cuts, [length]])


def _houses(
    mesh: Mesh, layout: GridLayout, rng: np.random.Generator, box: tuple[float, float, float, float], corridor: Corridor
) -> None:
    """Rows of buildings along the four fronts of a block's inner rectangle."""
    x0, x1, y0, y1 = box
    tall = float(rng.uniform(7.5, 17.0))
    centre, size = [], []
    for side in range(4):
        horizontal = side % 2 == 0
        depth = 12.0
        lo, hi = (x0, x1) if horizontal else (y0 + depth, y1 - depth)
        edges = lo + _lots(rng, hi - lo)
        gap, back = rng.uniform(0.0, 1.0, len(edges) - 1) < 0.12, rng.uniform(0.0, 1.2, len(edges) - 1)
        for a, b, skip, inset in zip(edges, edges[1:], gap, back, strict=False):
            if skip:
                continue
            d = depth - inset
            across = {0: y0 + inset + d / 2, 1: x1 - inset - d / 2, 2: y1 - inset - d / 2, 3: x0 + inset + d / 2}[side]
            centre.append(((a + b) / 2, across) if horizontal else (across, (a + b) / 2))
            size.append((b - a, d) if horizontal else (d, b - a))
    c, s = np.array(centre), np.array(size)
    height = 3.9 + 3.2 * np.clip(np.round((tall * rng.uniform(0.55, 1.5, len(c)) - 3.9) / 3.2), 1, 8)
    shops = rng.random(len(c)) < 0.45
    keep = corridor.free_box(c, s, 4.0)
    buildings(mesh, c[keep], s[keep], height[keep], rng, shops[keep])


def _note_kerbs(mesh: Mesh, box: tuple[float, float, float, float]) -> None:
    """Say where the kerbs around a block are."""
    x0, x1, y0, y1 = box
    for axis, lo, hi, sides in ((0, x0, x1, (y0, y1)), (1, y0, y1, (x0, x1))):
        cuts = np.linspace(lo, hi, max(2, round((hi - lo) / NOTE_LENGTH)) + 1)
        for c in sides:
            a, b = _turned(axis, cuts[:-1], c), _turned(axis, cuts[1:], c)
            mesh.note_line("kerb", a, b, 0.3, (0.0, WALK_HEIGHT), KERB)


def build_cell(
    layout: GridLayout, key: tuple[int, int], corridor: Corridor, sun: tuple[float, float, float]
) -> tuple[Mesh, list[tuple[str, Array, Array]]]:
    """Mesh and parked vehicles of cell (i, j): its block, its west and south streets and its south-west crossing."""
    i, j = key
    rng = rng_of(layout.seed, i, j, 21)
    mesh, h = Mesh(sun), layout.half
    x0, x1, y0, y1 = layout.chunk_box(key)
    mesh.flat(GROUND, x0 - h, x1 - h, y0 - h, y1 - h, 0.0, ASPHALT, "asphalt", 6.0)
    _markings(mesh, layout, 0, j, i)
    _markings(mesh, layout, 1, i, j)
    parked = _parked(layout, rng, 0, j, i, corridor) + _parked(layout, rng, 1, i, j, corridor)
    for kind, pose, colour in parked:
        vehicles(mesh, kind, pose, colour)

    bx0, bx1, by0, by1 = x0 + h, x1 - h, y0 + h, y1 - h
    centre, size = np.array([(bx0 + bx1) / 2, (by0 + by1) / 2, 0.0]), np.array([bx1 - bx0, by1 - by0])
    mesh.frusta(centre, size, size, WALK_HEIGHT, 0.0, KERB)
    _note_kerbs(mesh, (bx0, bx1, by0, by1))
    w, k = layout.walk, 0.3
    for a0, a1, c0, c1 in (
        (bx0, bx1, by0, by0 + w),
        (bx0, bx1, by1 - w, by1),
        (bx0, bx0 + w, by0 + w, by1 - w),
        (bx1 - w, bx1, by0 + w, by1 - w),
    ):
        mesh.flat(SOLID, a0, a1, c0, c1, WALK_HEIGHT, PAVING, "paving", 4.0)
    for a0, a1, c0, c1 in (
        (bx0, bx1, by0, by0 + k),
        (bx0, bx1, by1 - k, by1),
        (bx0, bx0 + k, by0, by1),
        (bx1 - k, bx1, by0, by1),
    ):
        mesh.flat(SOLID, a0, a1, c0, c1, WALK_HEIGHT + 0.01, KERB)
    inner = (bx0 + w, bx1 - w, by0 + w, by1 - w)
    use = rng.random()
    park = use < 0.16
    mesh.flat(
        SOLID,
        *inner,
        z=WALK_HEIGHT,
        colour=GRASS if park or use < 0.4 else PAVING,
        texture="grass" if park or use < 0.4 else "paving",
        tile=5.0,
    )
    if park:
        n = int((inner[1] - inner[0]) * (inner[3] - inner[2]) / 170)
        xy = np.column_stack([rng.uniform(inner[0] + 2, inner[1] - 2, n), rng.uniform(inner[2] + 2, inner[3] - 2, n)])
        trees(mesh, xy[corridor.free(xy, 5.0)], rng, 1.15)
    else:
        _houses(mesh, layout, rng, inner, corridor)

    leafy = float(rng.uniform(0.3, 0.95))
    step = float(rng.uniform(9.0, 13.0))
    for axis, lo, hi, c, face in (
        (0, bx0, bx1, by0 + 1.0, -1),
        (0, bx0, bx1, by1 - 1.0, 1),
        (1, by0, by1, bx0 + 1.0, -1),
        (1, by0, by1, bx1 - 1.0, 1),
    ):
        along = np.arange(lo + 7.0, hi - 6.0, step)
        xy = _turned(axis, along, np.full(len(along), c))
        keep = (rng.random(len(along)) < leafy) & corridor.free(xy, 3.0)
        trees(mesh, xy[keep], rng, 0.85)
        posts = _turned(axis, along[::2] + step / 2, np.full(len(along[::2]), c - 0.3 * -face))
        lamps(mesh, posts[corridor.free(posts, 2.5)], face * np.pi / 2 if axis == 0 else (0.0 if face > 0 else np.pi))
    return mesh, parked
