"""Traffic that reacts: cars follow their lanes at their own speed and brake for the ego, the car ahead and red lights.

All of it is a fixed function of the seed and of the ego's motion; agents live near the ego and are re-used in the haze.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rollcache.street import ego as ego_car
from rollcache.street.ego import EgoState
from rollcache.street.rig import FPS
from rollcache.street.scene_layout import GridLane, GridLayout, HighwayLayout, Layout
from rollcache.street.scene_mesh import Colour, rng_of
from rollcache.street.scene_objects import CAR_COLOURS, SIZES

DT = 1.0 / FPS
ACCEL, BRAKE, HEADWAY, STANDOFF = 2.0, 3.0, 1.2, 2.5  # IDM: m/s^2, m/s^2, s, m


@dataclass(frozen=True)
class Box:
    """Truth about one agent in one frame: metres and radians in world axes, colour in 0..1."""

    agent: int
    kind: str
    colour: Colour
    centre: tuple[float, float, float]
    size: tuple[float, float, float]  # length, width, height
    yaw: float


@dataclass
class Agent:
    """A moving car (`lane` is a GridLane, or +1 / -1 for a highway carriageway) or a pedestrian."""

    number: int
    kind: str
    colour: Colour
    lane: GridLane | int
    s: float
    speed: float
    cruise: float
    k: float = 0.0  # highway: lane position, fractions while changing
    target: int = 0  # highway: lane wanted
    pose: tuple[float, float, float] = (0.0, 0.0, 0.0)
    hidden: bool = False

    def box(self) -> Box:
        """The agent's truth box."""
        size = SIZES[self.kind]
        return Box(self.number, self.kind, self.colour, (self.pose[0], self.pose[1], size[2] / 2), size, self.pose[2])


def idm(speed: float, cruise: float, gap: float, lead_speed: float) -> float:
    """Acceleration (m/s^2) of the intelligent driver model; `gap` metres, bumper to bumper."""
    wish = STANDOFF + max(0.0, speed * HEADWAY + speed * (speed - lead_speed) / (2 * math.sqrt(ACCEL * BRAKE)))
    free = 1.0 - (speed / max(cruise, 0.1)) ** 4
    return max(-7.0, ACCEL * (free - (wish / max(gap, 0.5)) ** 2))


def ahead(pose: tuple[float, float, float], other: tuple[float, float], reach: float, half: float) -> float | None:
    """Metres to `other` along the heading of `pose`, when it lies within `reach` ahead and `half` to either side."""
    dx, dy = other[0] - pose[0], other[1] - pose[1]
    c, s = math.cos(pose[2]), math.sin(pose[2])
    along, across = c * dx + s * dy, c * dy - s * dx
    return along if 0.0 < along < reach and abs(across) < half else None


@dataclass
class Traffic:
    """The moving agents around the ego. `step` advances them by one frame after the ego has moved."""

    layout: Layout
    agents: list[Agent] = field(default_factory=list)
    time: float = 0.0
    count: int = 0

    def __post_init__(self) -> None:
        self.rng = rng_of(self.layout.seed, 41)
        # draw the temper of the place once: how busy it is
        self.busy = float(self.rng.uniform(0.5, 1.0))

    # -- making agents ----------------------------------------------------------------------------------------------

    def populate(self, ego: EgoState) -> None:
        """Fill the surroundings of the ego at the start."""
        grid = isinstance(self.layout, GridLayout)
        for _ in range(int((20 if grid else 22) * self.busy)):
            self._spawn_car(ego, 14.0 if grid else 24.0, 130.0)
        for _ in range(int(14 * self.busy) if grid else 0):
            self._spawn_walker(ego, 5.0, 70.0)
        for a in self.agents:
            self._place(a)

    def _spawn_car(self, ego: EgoState, near: float, far: float) -> None:
        for _ in range(20):
            agent = (
                self._draw_grid(ego, near, far)
                if isinstance(self.layout, GridLayout)
                else self._draw_highway(ego, near, far)
            )
            self._place(agent)
            length = SIZES[agent.kind][0]
            distance = math.hypot(agent.pose[0] - ego.x, agent.pose[1] - ego.y)
            clash = any(
                math.hypot(agent.pose[0] - b.pose[0], agent.pose[1] - b.pose[1]) < (length + SIZES[b.kind][0]) / 2 + 3.0
                for b in self.agents
                if not b.hidden
            )
            if near <= distance <= far and not clash:
                self.agents.append(agent)
                return

    def _style(self) -> tuple[str, Colour]:
        roll = self.rng.random()
        limits = (0.78, 0.9, 0.95) if isinstance(self.layout, GridLayout) else (0.68, 0.8, 0.98)
        kind = ("car", "van", "truck", "bus")[sum(roll >= x for x in limits)]
        r, g, b = CAR_COLOURS[int(self.rng.integers(len(CAR_COLOURS)))]
        self.count += 1
        return kind, (r, g, b)

    def _draw_grid(self, ego: EgoState, near: float, far: float) -> Agent:
        assert isinstance(self.layout, GridLayout)
        rng, p = self.rng, self.layout.pitch
        kind, colour = self._style()
        here = (ego.x, ego.y)
        axis = int(rng.integers(2)) if rng.random() < 0.5 else int(abs(math.sin(ego.yaw)) > 0.7)
        road = round(here[1 - axis] / p)
        if rng.random() < 0.35:
            road += int(rng.integers(-1, 2))
        s = here[axis] + float(rng.choice([-1, 1])) * float(rng.uniform(0.0 if near < 20 else near * 0.8, far))
        cruise = float(rng.uniform(7, 13))
        lane = GridLane(axis, road, int(rng.choice([-1, 1])), int(rng.integers(self.layout.lanes)))
        return Agent(self.count, kind, colour, lane, s, cruise * 0.8, cruise)

    def _draw_highway(self, ego: EgoState, near: float, far: float) -> Agent:
        assert isinstance(self.layout, HighwayLayout)
        rng = self.rng
        kind, colour = self._style()
        k = int(rng.integers(self.layout.lanes))
        if kind in ("truck", "bus"):
            k = self.layout.lanes - 1
        way = 1 if rng.random() < 0.6 else -1
        cruise = (
            float(rng.uniform(21, 25) if kind in ("truck", "bus") else rng.uniform(23, 34))
            - 2.0 * k / self.layout.lanes
        )
        x = ego.x + float(rng.choice([-1, 1])) * float(rng.uniform(near, far))
        return Agent(self.count, kind, colour, way, x, cruise, cruise, float(k), k)

    def _spawn_walker(self, ego: EgoState, near: float, far: float) -> None:
        assert isinstance(self.layout, GridLayout)
        rng, p = self.rng, self.layout.pitch
        axis = int(rng.integers(2))
        here = (ego.x, ego.y)
        road = round(here[1 - axis] / p) + int(rng.integers(-1, 2)) * int(rng.random() < 0.2)
        coat = tuple(float(c) for c in np.clip(rng.uniform(0.15, 0.85, 3), 0, 1))
        self.count += 1
        lane = GridLane(axis, road, int(rng.choice([-1, 1])), 0)
        s = here[axis] + float(rng.choice([-1, 1])) * float(rng.uniform(near, far))
        cell = (s / p) % 1.0
        margin = (self.layout.half + 1.0) / p
        s = (math.floor(s / p) + min(max(cell, margin), 1 - margin)) * p
        agent = Agent(
            self.count,
            "pedestrian",
            (coat[0], coat[1], coat[2]),
            lane,
            s,
            float(rng.uniform(0.8, 1.7)),
            float(rng.uniform(1.8, 3.0)),
        )
        agent.target = int(rng.choice([-1, 1]))
        self._place(agent)
        self.agents.append(agent)

    def _place(self, a: Agent) -> None:
        if isinstance(self.layout, HighwayLayout):
            x, y, heading = self.layout.pose(int(a.lane), a.k, a.s)  # type: ignore[arg-type]
            a.pose = (x, y, heading - (a.target - a.k) * 0.06 if abs(a.target - a.k) > 0.02 else heading)
            return
        assert isinstance(a.lane, GridLane)
        if a.kind == "pedestrian":  # cruise holds the distance from the kerb, target the way walked
            across = a.lane.road * self.layout.pitch + a.lane.way * (self.layout.half + a.cruise)
            x, y = (a.s, across) if a.lane.axis == 0 else (across, a.s)
            a.pose = (x, y, (0.0 if a.target > 0 else math.pi) + (math.pi / 2 if a.lane.axis else 0.0))
            return
        a.pose = self.layout.pose(a.lane, a.s)

    # -- moving them ------------------------------------------------------------------------------------------------

    def step(self, ego: EgoState) -> None:
        """Advance by one frame (1/12 s); `ego` is where the ego is now."""
        self.time += DT
        cars = [a for a in self.agents if a.kind != "pedestrian"]
        push = [self._acceleration(a, cars, ego) for a in cars]
        for a, acc in zip(cars, push, strict=True):
            a.speed = max(0.0, a.speed + acc * DT)
            way = a.lane.way if isinstance(a.lane, GridLane) else a.lane
            a.s += way * a.speed * DT
            if isinstance(self.layout, HighwayLayout):
                self._change_lane(a, cars, ego)
                a.k += float(np.clip(a.target - a.k, -DT / 2.5, DT / 2.5))
            self._place(a)
        for a in self.agents:
            if a.kind == "pedestrian":
                self._walk(a)
        self._recycle(ego)

    def _acceleration(self, a: Agent, cars: list[Agent], ego: EgoState) -> float:
        length = SIZES[a.kind][0]
        acc = idm(a.speed, a.cruise, 1e3, a.speed)
        for b in cars:
            if b is a:
                continue
            same = a.lane == b.lane and (abs(a.k - b.k) < 0.7 or abs(a.target - b.k) < 0.5)
            if same:
                way = a.lane.way if isinstance(a.lane, GridLane) else a.lane
                gap = way * (b.s - a.s)
                if 0 < gap < 80:
                    acc = min(acc, idm(a.speed, a.cruise, gap - (length + SIZES[b.kind][0]) / 2, b.speed))
        turned = ego.yaw - a.pose[2]
        gap_ego = ahead(a.pose, (ego.x, ego.y), 60.0, 1.3 + 1.0 * abs(math.cos(turned)) + 2.4 * abs(math.sin(turned)))
        if gap_ego is not None:
            lead = max(0.0, ego.speed * math.cos(turned))
            acc = min(acc, idm(a.speed, a.cruise, gap_ego - (length + ego_car.LENGTH) / 2, lead))
        behind = ahead((ego.x, ego.y, ego.yaw), a.pose[:2], 9.0, 1.8)
        if behind is not None and math.cos(turned) > 0.8 and ego.speed > a.speed:
            acc = max(acc, 3.0)  # a driver pressed from behind clears the way
        elif isinstance(self.layout, GridLayout) and isinstance(a.lane, GridLane):
            stop = self._red_light(a.lane, a.s + a.lane.way * length / 2)
            if stop is not None and (a.speed**2 / 9.0 < stop):
                acc = min(acc, idm(a.speed, a.cruise, stop + STANDOFF - 0.5, 0.0))
        return acc

    def _red_light(self, lane: GridLane, front: float) -> float | None:
        """Metres from a car's front to the stop line of the next crossing when its light is red, else None."""
        layout = self.layout
        assert isinstance(layout, GridLayout)
        line = layout.half + 6.2
        n = math.ceil((front + line) / layout.pitch) if lane.way > 0 else math.floor((front - line) / layout.pitch)
        gap = lane.way * (n * layout.pitch - front) - line
        i, j = (n, lane.road) if lane.axis == 0 else (lane.road, n)
        return gap if 0.0 <= gap < 40.0 and not layout.green(i, j, lane.axis, self.time) else None

    def _change_lane(self, a: Agent, cars: list[Agent], ego: EgoState) -> None:
        assert isinstance(self.layout, HighwayLayout)
        if abs(a.target - a.k) > 0.01 or a.speed > 0.9 * a.cruise or a.kind in ("truck", "bus"):
            return
        for want in (a.target - 1, a.target + 1):
            if not 0 <= want < self.layout.lanes:
                continue
            x, y, _ = self.layout.pose(int(a.lane), want, a.s)  # type: ignore[arg-type]
            free = all(b is a or b.lane != a.lane or abs(b.target - want) > 0.5 or abs(b.s - a.s) > 18 for b in cars)
            if free and math.hypot(x - ego.x, y - ego.y) > 20:
                a.target = want
                return

    def _walk(self, a: Agent) -> None:
        assert isinstance(a.lane, GridLane)
        assert isinstance(self.layout, GridLayout)
        a.s += a.target * a.speed * DT
        p = self.layout.pitch
        inside = a.s - math.floor(a.s / p) * p
        if (inside < self.layout.half + 0.6 and a.target < 0) or (inside > p - self.layout.half - 0.6 and a.target > 0):
            a.target = -a.target
        self._place(a)

    def _recycle(self, ego: EgoState) -> None:
        """Take away agents that are far behind the haze or inside the ego, and make as many new ones in the haze."""
        grid = isinstance(self.layout, GridLayout)
        me = (ego.x, ego.y, ego.yaw)
        kept, cars, walkers = [], 0, 0
        for a in self.agents:
            distance = math.hypot(a.pose[0] - ego.x, a.pose[1] - ego.y)
            limit = 118.0 if a.kind == "pedestrian" else (150.0 if grid else 185.0)
            if distance > limit or touches(me, a.box(), 0.5):
                cars, walkers = cars + (a.kind != "pedestrian"), walkers + (a.kind == "pedestrian")
            else:
                kept.append(a)
        self.agents = kept
        for _ in range(cars):
            self._spawn_car(ego, *((116.0, 146.0) if grid else (142.0, 180.0)))
        for _ in range(walkers):
            self._spawn_walker(ego, 84.0, 112.0)

    def boxes(self) -> list[Box]:
        """Truth boxes of the moving agents."""
        return [a.box() for a in self.agents]


def touches(pose: tuple[float, float, float], box: Box, margin: float) -> bool:
    """Whether the ego's body at `pose`, grown by `margin` metres, meets the box (a circle test along its length)."""
    length, width, _ = box.size
    c, s = math.cos(box.yaw), math.sin(box.yaw)
    for shift in (-1.4, 0.0, 1.4):  # three circles cover the ego
        x, y = pose[0] + shift * math.cos(pose[2]) - box.centre[0], pose[1] + shift * math.sin(pose[2]) - box.centre[1]
        along, across = abs(c * x + s * y), abs(c * y - s * x)
        gap = math.hypot(max(0.0, along - length / 2), max(0.0, across - width / 2))
        if gap < ego_car.WIDTH / 2 + margin - 0.3:
            return True
    return False
