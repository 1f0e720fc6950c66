"""The things that stand or drive in the world, as batches of quads: vehicles, people, trees, lamps, buildings."""

from __future__ import annotations

import numpy as np

from rollcache.street.scene_mesh import DETAIL, MARK, SOLID, Colour, Mesh, pick

Array = np.ndarray

SIZES: dict[str, tuple[float, float, float]] = {  # length, width, height in metres
    "car": (4.5, 1.85, 1.48),
    "van": (5.3, 2.0, 2.2),
    "truck": (9.5, 2.5, 3.5),
    "bus": (11.0, 2.55, 3.1),
    "pedestrian": (0.5, 0.55, 1.75),
}
CAR_COLOURS: tuple[Colour, ...] = (
    (0.80, 0.20, 0.17),
    (0.20, 0.36, 0.66),
    (0.92, 0.92, 0.90),
    (0.24, 0.25, 0.28),
    (0.66, 0.68, 0.70),
    (0.93, 0.72, 0.20),
    (0.22, 0.52, 0.40),
    (0.55, 0.22, 0.36),
)
GLASS = (0.22, 0.28, 0.35)
TYRE = (0.12, 0.12, 0.13)


def _local(pose: Array, dx: float, dy: float, z: float) -> Array:
    """World points [N, 3] of a point given in the frames of poses [N, 3] = x, y, yaw."""
    c, s = np.cos(pose[:, 2]), np.sin(pose[:, 2])
    return np.stack([pose[:, 0] + c * dx - s * dy, pose[:, 1] + s * dx + c * dy, np.full(len(pose), z)], -1)


def shadow(mesh: Mesh, pose: Array, length: float, width: float, colour: Colour = (0.27, 0.28, 0.30)) -> None:
    """A dark patch on the ground under objects at poses [N, 3]."""
    ring = np.stack(
        [_local(pose, sx * length / 2, sy * width / 2, 0.0) for sx, sy in ((-1, -1), (1, -1), (1, 1), (-1, 1))], 1
    )
    mesh.quads(MARK, ring, colour)


def vehicles(mesh: Mesh, kind: str, pose: Array, colour: Array) -> None:
    """Vehicles of one kind at poses [N, 3] (x, y, yaw) with body colours [N, 3]."""
    pose = np.asarray(pose, np.float64).reshape(-1, 3)
    if len(pose) == 0:
        return
    length, width, height = SIZES[kind]
    yaw = pose[:, 2]
    shadow(mesh, pose, length + 0.3, width + 0.35)
    if kind == "car":
        mesh.frusta(
            _local(pose, 0, 0, 0.28), (length, width), (length * 0.97, width * 0.97), 0.58, yaw, colour, roof=colour
        )
        mesh.frusta(
            _local(pose, -0.25, 0, 0.86),
            (length * 0.66, width * 0.9),
            (length * 0.40, width * 0.76),
            height - 0.86,
            yaw,
            GLASS,
            roof=colour,
            shift=-0.05,
        )
    elif kind == "van":
        mesh.frusta(_local(pose, 0, 0, 0.3), (length, width), (length, width), 0.85, yaw, colour, roof=colour)
        mesh.frusta(
            _local(pose, -0.3, 0, 1.15),
            (length * 0.88, width * 0.98),
            (length * 0.70, width * 0.9),
            height - 1.15,
            yaw,
            colour,
            roof=colour,
            shift=-0.35,
        )
        mesh.frusta(_local(pose, 1.15, 0, 1.2), (1.9, width * 0.99), (0.9, width * 0.93), 0.6, yaw, GLASS, shift=-0.42)
    elif kind == "truck":
        white = np.clip(colour * 0.25 + 0.68, 0, 1)
        mesh.frusta(
            _local(pose, length / 2 - 1.1, 0, 0.45),
            (2.2, width * 0.96),
            (2.0, width * 0.94),
            2.3,
            yaw,
            colour,
            roof=colour,
        )
        mesh.frusta(
            _local(pose, length / 2 - 0.35, 0, 1.6), (0.78, width * 0.98), (0.66, width * 0.95), 0.8, yaw, GLASS
        )
        mesh.frusta(
            _local(pose, -1.25, 0, 0.95),
            (length - 2.6, width),
            (length - 2.6, width),
            height - 0.95,
            yaw,
            white,
            roof=white,
        )
        mesh.frusta(
            _local(pose, -1.25, 0, 0.45),
            (length - 2.8, width * 0.8),
            (length - 2.8, width * 0.8),
            0.5,
            yaw,
            (0.25, 0.25, 0.27),
        )
    else:  # bus
        mesh.frusta(_local(pose, 0, 0, 0.35), (length, width), (length, width), 1.0, yaw, colour)
        mesh.frusta(
            _local(pose, 0, 0, 1.35), (length * 0.995, width * 0.99), (length * 0.99, width * 0.97), 1.0, yaw, GLASS
        )
        mesh.frusta(
            _local(pose, 0, 0, 2.35),
            (length, width),
            (length * 0.98, width * 0.95),
            height - 2.35,
            yaw,
            colour,
            roof=colour,
        )
    z = 0.62 if kind == "car" else 0.75
    for end, tone in ((length / 2 + 0.02, (1.0, 0.97, 0.85)), (-length / 2 - 0.02, (0.85, 0.10, 0.08))):
        for dy in (-0.36 * width, 0.36 * width):
            half = 0.19 if end > 0 else -0.19
            low = [_local(pose, end, dy - half, z), _local(pose, end, dy + half, z)]
            high = [_local(pose, end, dy + half, z + 0.2), _local(pose, end, dy - half, z + 0.2)]
            mesh.quads(DETAIL, np.stack(low + high, 1), tone)
    for dx in (-0.31 * length, 0.31 * length):
        mesh.frusta(_local(pose, dx, 0, 0.0), (0.66, width * 1.0), (0.5, width * 1.0), 0.6, yaw, TYRE, layer=DETAIL)


def person(mesh: Mesh, pose: Array, colour: Array) -> None:
    """Pedestrians at poses [N, 3] with coat colours [N, 3]."""
    pose = np.asarray(pose, np.float64).reshape(-1, 3)
    yaw = pose[:, 2]
    shadow(mesh, pose, 0.6, 0.6)
    mesh.frusta(_local(pose, 0, 0, 0.12), (0.30, 0.36), (0.34, 0.42), 0.75, yaw, (0.22, 0.23, 0.30))
    mesh.frusta(_local(pose, 0, 0, 0.87), (0.36, 0.50), (0.28, 0.44), 0.62, yaw, colour, roof=colour)
    mesh.frusta(
        _local(pose, 0, 0, 1.50), (0.24, 0.24), (0.20, 0.20), 0.27, yaw, (0.80, 0.62, 0.50), roof=(0.25, 0.18, 0.13)
    )


def agent_mesh(kind: str, colour: Colour) -> Mesh:
    """One agent at the origin, facing +x. Its shading is that of a car facing +x, whatever way it turns later."""
    mesh = Mesh((0.25, 0.0, 0.95))
    pose, rgb = np.zeros((1, 3)), np.asarray([colour])
    if kind == "pedestrian":
        person(mesh, pose, rgb)
    else:
        vehicles(mesh, kind, pose, rgb)
    return mesh


LEAVES: tuple[Colour, ...] = (
    (0.33, 0.52, 0.25),
    (0.42, 0.58, 0.27),
    (0.27, 0.46, 0.28),
    (0.52, 0.58, 0.26),
    (0.62, 0.50, 0.22),
)


def trees(mesh: Mesh, xy: Array, rng: np.random.Generator, scale: float = 1.0) -> None:
    """Trees at xy [N, 2] with sizes and leaf colours drawn from `rng`."""
    n = len(xy)
    if n == 0:
        return
    size = rng.uniform(0.8, 1.25, n) * scale
    base = np.concatenate([xy, np.zeros((n, 1))], 1)
    mesh.frusta(base, (0.42, 0.42), (0.3, 0.3), 2.6 * size, 0.0, (0.36, 0.27, 0.20))
    crown = base + np.stack([np.zeros(n), np.zeros(n), 4.3 * size], -1)
    leaves = pick(rng, LEAVES, n, 0.08)
    mesh.crowns(crown, 1.9 * size, 4.4 * size, leaves)
    mesh.note("tree", crown, np.stack([3.8 * size, 3.8 * size, 4.4 * size], -1), 0.0, leaves)


def lamps(mesh: Mesh, xy: Array, yaw: Array | float, height: float = 7.0, reach: float = 2.2) -> None:
    """Street lamps at xy [N, 2]; the arm reaches along `yaw`."""
    n = len(xy)
    if n == 0:
        return
    pose = np.concatenate([xy, np.broadcast_to(np.asarray(yaw, np.float64).reshape(-1, 1), (n, 1))], 1)
    grey = (0.42, 0.44, 0.46)
    mesh.note("lamp", _local(pose, 0, 0, height / 2), (0.3, 0.3, height), pose[:, 2], grey)
    mesh.frusta(_local(pose, 0, 0, 0), (0.22, 0.22), (0.14, 0.14), height, pose[:, 2], grey)
    mesh.frusta(
        _local(pose, reach / 2, 0, height - 0.12), (reach, 0.12), (reach, 0.12), 0.12, pose[:, 2], grey, layer=DETAIL
    )
    mesh.frusta(_local(pose, reach, 0, height - 0.22), (0.9, 0.34), (0.9, 0.34), 0.16, pose[:, 2], (0.92, 0.90, 0.80))


WALLS: tuple[Colour, ...] = (
    (0.82, 0.70, 0.55),
    (0.72, 0.42, 0.33),
    (0.86, 0.82, 0.74),
    (0.62, 0.66, 0.70),
    (0.90, 0.78, 0.52),
    (0.70, 0.76, 0.70),
    (0.80, 0.60, 0.52),
    (0.56, 0.58, 0.62),
)


def buildings(mesh: Mesh, centre: Array, size: Array, height: Array, rng: np.random.Generator, shops: Array) -> None:
    """Axis-aligned buildings: centre [N, 2], size [N, 2] along x and y, height [N], shops [N] bool for a shop floor."""
    n = len(centre)
    if n == 0:
        return
    colour = pick(rng, WALLS, n)
    kind = rng.integers(4, size=n)
    base = np.concatenate([centre, np.full((n, 1), 0.1)], 1)
    ground = np.where(shops, 3.9, 0.0)
    mesh.frusta(base[shops], size[shops], size[shops], 3.9, 0.0, colour[shops], "shop", (9.0, 3.9))
    for k in range(4):
        m = kind == k
        up = base[m] + np.stack([np.zeros(m.sum()), np.zeros(m.sum()), ground[m]], -1)
        mesh.frusta(up, size[m], size[m], (height - ground)[m], 0.0, colour[m], f"facade{k}", (12.0, 12.8))
    rim = base + np.stack([np.zeros(n), np.zeros(n), height], -1)
    mesh.frusta(rim, size + 0.5, size + 0.5, 0.6, 0.0, colour * 0.7)
    middle = np.column_stack([centre, height / 2])
    mesh.note("building", middle, np.column_stack([size, height]), 0.0, colour)


def quad_wall(
    mesh: Mesh, a: Array, b: Array, z0: float, z1: float, colour: Array | Colour, texture: str = "", tile: float = 8.0
) -> None:
    """Vertical wall quads over segments a -> b [N, 2]; the visible face is to the right of the direction of travel."""
    n = len(a)
    corners = np.stack([np.column_stack([p, np.full(n, z)]) for p, z in ((a, z0), (b, z0), (b, z1), (a, z1))], 1)
    u = np.linalg.norm(b - a, axis=1) / tile
    zero = np.zeros(n)
    rise = np.full(n, (z1 - z0) / tile)
    uv = np.stack([np.stack(p, -1) for p in ((zero, zero), (u, zero), (u, rise), (zero, rise))], 1)
    mesh.quads(SOLID, corners, colour, texture, uv)
