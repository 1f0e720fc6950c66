"""Where the roads are: an endless grid of streets, and an endless gently winding highway.

A layout knows geometry only (lanes, kerbs, crossings); what stands beside the road and who drives on it is elsewhere.
Lane 0 is the innermost. `side` is +1 where traffic keeps right and -1 where it keeps left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rollcache.street.ego import EgoState
from rollcache.street.scene_mesh import rng_of

SCENARIOS = ("urban", "highway", "u-turn")


@dataclass(frozen=True)
class GridLane:
    """Lane `k` of street number `road` along `axis` (0 = x, 1 = y), towards `way` (+1 or -1)."""

    axis: int
    road: int
    way: int
    k: int


@dataclass(frozen=True)
class GridLayout:
    """Streets every `pitch` metres along both axes, all with the same cross-section."""

    scenario: str
    seed: int
    side: int
    pitch: float
    lanes: int  # per direction
    lane_width: float
    shoulder: float  # parking strip, metres
    walk: float = 3.4

    @property
    def half(self) -> float:
        """Metres from the road's middle to the kerb."""
        return self.lanes * self.lane_width + self.shoulder

    def offset(self, k: int) -> float:
        """Metres from the road's middle to lane k, to the right of travel (negative where traffic keeps left)."""
        return self.side * (k + 0.5) * self.lane_width

    def heading(self, lane: GridLane) -> float:
        """Direction of travel in radians."""
        return (0.0 if lane.way > 0 else math.pi) if lane.axis == 0 else lane.way * math.pi / 2

    def pose(self, lane: GridLane, s: float, shift: float = 0.0) -> tuple[float, float, float]:
        """x, y, heading at coordinate `s` (metres along the axis), `shift` metres to the right of the lane's middle."""
        across = self.offset(lane.k) + shift
        middle = lane.road * self.pitch
        if lane.axis == 0:
            return s, middle - lane.way * across, self.heading(lane)
        return middle + lane.way * across, s, self.heading(lane)

    def start(self) -> EgoState:
        """A lane of one of the four directions, somewhere before a crossing."""
        rng = rng_of(self.seed, 11)
        lane = GridLane(
            int(rng.integers(2)), int(rng.integers(-3, 4)), int(rng.choice([-1, 1])), int(rng.integers(self.lanes))
        )
        s = (int(rng.integers(-3, 4)) - lane.way * float(rng.uniform(0.25, 0.6))) * self.pitch
        return EgoState(*self.pose(lane, s))

    def green(self, i: int, j: int, axis: int, time: float) -> bool:
        """Whether traffic along `axis` may enter crossing (i, j) at `time` seconds; in between all lights are red."""
        phase = (time + 15.0 * float(rng_of(self.seed, i, j, 12).random())) % 15.0
        return phase < 6.5 if axis == 0 else 7.5 <= phase < 14.0

    def chunks_near(self, xy: np.ndarray, radius: float) -> list[tuple[int, int]]:
        """Cells [i, i+1] x [j, j+1] (times pitch) within `radius` of any of the points xy [N, 2]."""
        keys: set[tuple[int, int]] = set()
        for x, y in xy:
            i0, i1, j0, j1 = (math.floor(v / self.pitch) for v in (x - radius, x + radius, y - radius, y + radius))
            keys.update((i, j) for i in range(i0, i1 + 1) for j in range(j0, j1 + 1))
        return sorted(keys)

    def chunk_box(self, key: tuple[int, int]) -> tuple[float, float, float, float]:
        """x0, x1, y0, y1 of a cell."""
        i, j = key
        return i * self.pitch, (i + 1) * self.pitch, j * self.pitch, (j + 1) * self.pitch


@dataclass(frozen=True)
class HighwayLayout:
    """A dual carriageway along x whose middle line is a sum of two sines; traffic keeps right."""

    scenario: str
    seed: int
    lanes: int
    amplitude: tuple[float, float]
    wavelength: tuple[float, float]
    phase: tuple[float, float]
    lane_width: float = 3.6
    inner: float = 1.6  # metres from the middle to the innermost lane
    shoulder: float = 2.9
    side: int = 1
    piece: float = 60.0  # metres of road in a chunk

    @property
    def half(self) -> float:
        """Metres from the middle to the guard rail."""
        return self.inner + self.lanes * self.lane_width + self.shoulder

    def middle(self, x: np.ndarray | float) -> np.ndarray:
        """Coordinate y of the middle line at x."""
        return sum(
            (
                a * np.sin(2 * math.pi * np.asarray(x) / w + p)
                for a, w, p in zip(self.amplitude, self.wavelength, self.phase, strict=True)
            ),
            start=np.zeros(()),
        )

    def bearing(self, x: np.ndarray | float) -> np.ndarray:
        """Heading (rad) of the middle line at x."""
        slope = sum(
            (
                a * 2 * math.pi / w * np.cos(2 * math.pi * np.asarray(x) / w + p)
                for a, w, p in zip(self.amplitude, self.wavelength, self.phase, strict=True)
            ),
            start=np.zeros(()),
        )
        return np.arctan(slope)

    def offset(self, k: float) -> float:
        """Metres from the middle line to the middle of lane k, to the right of travel."""
        return self.inner + (k + 0.5) * self.lane_width

    def pose(self, way: int, k: float, x: float) -> tuple[float, float, float]:
        """x, y, heading on lane k (fractions lie between lanes) of the carriageway that goes `way` along x."""
        bearing = float(self.bearing(x))
        across = -way * self.offset(k)
        heading = bearing if way > 0 else bearing + math.pi
        return x - across * math.sin(bearing), float(self.middle(x)) + across * math.cos(bearing), heading

    def start(self) -> EgoState:
        """A lane of the +x carriageway."""
        rng = rng_of(self.seed, 11)
        return EgoState(*self.pose(1, int(rng.integers(self.lanes)), float(rng.uniform(-1000, 1000))))

    def chunks_near(self, xy: np.ndarray, radius: float) -> list[tuple[int, int]]:
        """Pieces of road within `radius` along x of any of the points xy [N, 2]."""
        keys: set[tuple[int, int]] = set()
        for x in xy[:, 0]:
            keys.update(
                (i, 0) for i in range(math.floor((x - radius) / self.piece), math.floor((x + radius) / self.piece) + 1)
            )
        return sorted(keys)

    def chunk_box(self, key: tuple[int, int]) -> tuple[float, float, float, float]:
        """x0, x1, y0, y1 of a piece, verges left out."""
        x0 = key[0] * self.piece
        y = float(self.middle(x0 + self.piece / 2))
        return x0, x0 + self.piece, y - self.half, y + self.half


Layout = GridLayout | HighwayLayout


def make_layout(scenario: str, seed: int) -> Layout:
    """The road layout of a scenario; raises ValueError that lists the names when `scenario` is unknown."""
    if scenario not in SCENARIOS:
        raise ValueError(f"unknown scenario {scenario!r}; choose one of {', '.join(SCENARIOS)}")
    rng = rng_of(seed, 10, SCENARIOS.index(scenario))
    if scenario == "urban":
        return GridLayout(scenario, seed, 1, float(rng.uniform(84, 104)), int(rng.integers(1, 3)), 3.3, 2.4)
    if scenario == "u-turn":
        return GridLayout(scenario, seed, int(rng.choice([-1, 1])), float(rng.uniform(150, 180)), 2, 3.5, 3.6, 4.0)
    amplitude = (float(rng.uniform(4, 14)), float(rng.uniform(0, 3)))
    return HighwayLayout(
        scenario,
        seed,
        int(rng.choice([2, 3, 3])),
        amplitude,
        (float(rng.uniform(550, 900)), float(rng.uniform(260, 400))),
        (float(rng.uniform(0, 6)), float(rng.uniform(0, 6))),
    )
