"""The scripted driver: follows lanes by pure pursuit, turns at crossings, changes lanes, stops, makes u-turns.

It drives through the living scene, so it waits at red lights and behind other cars; what it did is then a Drive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rollcache.street import ego as ego_car
from rollcache.street.ego import EgoState, yaw_rate_of
from rollcache.street.rig import FPS
from rollcache.street.scene_layout import GridLayout, HighwayLayout, make_layout
from rollcache.street.scene_mesh import rng_of
from rollcache.street.scene_objects import SIZES
from rollcache.street.traffic import Agent, Traffic, ahead, idm

Array = np.ndarray
DT = 1.0 / FPS
STEER_LIMIT, STEER_RATE = 0.52, 0.75  # rad, rad/s
SIDEWAYS = 3.2  # m/s^2 of lateral acceleration a driver accepts in a turn
U_STEER, U_SPEED = 0.48, 4.0  # rad, m/s


@dataclass
class Route:
    """A path: points [N, 2] about a metre apart, `run` [N] metres along it, `cap` [N] m/s, and the lights to mind."""

    points: Array
    run: Array
    cap: Array
    lights: list[tuple[float, int, int, int]]  # metres along, crossing i, j, axis
    at: int = 0

    def advance(self, x: float, y: float) -> None:
        """Move to the point nearest to (x, y), looking ahead only."""
        window = self.points[self.at : self.at + 12]
        self.at += int(np.argmin((window[:, 0] - x) ** 2 + (window[:, 1] - y) ** 2))

    def target(self, reach: float) -> Array:
        """The point `reach` metres further along [2]."""
        i = int(np.searchsorted(self.run, self.run[self.at] + reach))
        return np.asarray(self.points[min(i, len(self.points) - 1)])

    def allowed(self, brake: float = 2.2) -> float:
        """The speed from which every slower stretch ahead can still be met."""
        part = slice(self.at, self.at + 60)
        return float(np.sqrt(self.cap[part] ** 2 + 2 * brake * (self.run[part] - self.run[self.at])).min())


def grid_route(
    layout: GridLayout, rng: np.random.Generator, start: EgoState, length: float, turns: bool = True
) -> Route:
    """A route along the streets from `start` (which lies on a lane), with turns and lane changes drawn from `rng`."""
    p = layout.pitch
    d = np.array([round(math.cos(start.yaw)), round(math.sin(start.yaw))])
    here = np.array([start.x, start.y])
    lateral = _offset_of(layout, here, d)
    pieces, caps, lights, total = [here[None]], [np.array([99.0])], [], 0.0
    while total < length:
        axis = int(d[0] == 0)
        way, s, road = int(d[axis]), float(here[axis]), round(here[1 - axis] / p)
        n = math.floor(s / p + way * 0.12) + 1 if way > 0 else math.ceil(s / p - 0.12) - 1
        centre = np.array([n, road] if axis == 0 else [road, n]) * p
        roll = rng.random() if turns else 0.0
        turn = 0 if roll < 0.3 else (1 if roll < 0.65 else -1)
        near = turn != 0 and turn == -layout.side  # the turn that does not cross oncoming traffic
        k = layout.lanes - 1 if near else (0 if turn else int(rng.integers(layout.lanes)))
        wish = layout.offset(k)
        right = np.array([d[1], -d[0]])
        radius = layout.half - abs(wish) + 2.6 if near else 9.5
        d2 = d if turn == 0 else turn * np.array([-d[1], d[0]])
        right2 = np.array([d2[1], -d2[0]])
        k2 = layout.lanes - 1 if near else int(rng.integers(layout.lanes))
        corner = centre + right * wish + right2 * layout.offset(k2) if turn else centre + right * wish
        end = corner - d * (radius if turn else 0.0)
        reach = float((end - here) @ d)
        # the straight, with a lane change eased in
        t = np.arange(1.0, max(reach, 1.0) + 1e-6, 1.0)
        blend = np.clip((t - 4.0) / min(26.0, max(reach - 6.0, 6.0)), 0, 1)
        off = lateral + (wish - lateral) * (0.5 - 0.5 * np.cos(np.pi * blend))
        base = centre + d * float((here - centre) @ d)
        straight = base + t[:, None] * d + off[:, None] * right
        i, j = (n, road) if axis == 0 else (road, n)
        lights.append((total + float((centre - here) @ d) - layout.half - 6.5, i, j, axis))
        pieces.append(straight)
        caps.append(np.full(len(t), 99.0))
        total += len(t)
        if turn:
            angle = np.linspace(0, math.pi / 2, max(int(radius * 1.6), 6))[1:, None]
            arc = end + d * radius * np.sin(angle) + d2 * radius * (1 - np.cos(angle))
            pieces.append(arc)
            caps.append(np.full(len(arc), math.sqrt(SIDEWAYS * radius)))
            total += radius * math.pi / 2
            here, lateral = corner + d2 * radius, layout.offset(k2)
        else:
            here, lateral = straight[-1], wish
        d = d2
    points = np.concatenate(pieces)
    run = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(points, axis=0).T))])
    return Route(points, run, np.concatenate(caps), lights)


def _offset_of(layout: GridLayout, here: Array, d: Array) -> float:
    """Signed metres to the right of the middle of the street that `here` lies on."""
    axis = int(d[0] == 0)
    across = float(here[1 - axis] - round(here[1 - axis] / layout.pitch) * layout.pitch)
    return -across * int(d[axis]) if axis == 0 else across * int(d[axis])


class Driver:
    """State of the scripted driver; `step` gives the next frame's speed and yaw rate."""

    def __init__(self, layout: GridLayout | HighwayLayout, frames: int) -> None:
        self.layout, self.frames = layout, frames
        self.rng = rng_of(layout.seed, 51)
        self.state = layout.start()
        self.steer, self.frame, self.redraw, self.wish, self.lane = 0.0, 0, 0, 0.0, 0
        self.u_sign, self.u_from, self.u_next = 0, 0.0, math.inf
        if isinstance(layout, GridLayout):
            self.route: Route | None = grid_route(
                layout, self.rng, self.state, 16.0 * frames / FPS + 120.0, layout.scenario == "urban"
            )
            if layout.scenario == "u-turn":
                self.u_next = float(self.rng.uniform(10, 45))
        else:
            self.route = None
            self.lane = round(
                (abs(float(self.state.y) - float(layout.middle(self.state.x))) - layout.inner) / layout.lane_width - 0.5
            )
            self.place = float(self.lane)
        self._new_wish()
        self.speed = 0.0 if self.rng.random() < 0.12 else self.wish * float(self.rng.uniform(0.6, 1.0))

    def _new_wish(self) -> None:
        """Redraw the speed wanted (and on the highway the lane) for the next 20 to 60 frames."""
        rng, roll = self.rng, float(self.rng.random())
        self.redraw = self.frame + int(rng.integers(20, 61))
        if isinstance(self.layout, HighwayLayout):
            self.wish = (
                float(rng.uniform(18, 34)) if roll < 0.84 else (float(rng.uniform(6, 14)) if roll < 0.94 else 0.0)
            )
            if rng.random() < 0.5:
                self.lane = int(np.clip(self.lane + rng.choice([-1, 1]), 0, self.layout.lanes - 1))
        else:
            self.wish = float(rng.uniform(5, 14)) if roll < 0.9 else 0.0

    def _room(self, traffic: Traffic) -> bool:
        """Whether no moving car is near enough in front or beside to be hit in a u-turn."""
        st = self.state
        for a in traffic.agents:
            dx, dy = a.pose[0] - st.x, a.pose[1] - st.y
            along = math.cos(st.yaw) * dx + math.sin(st.yaw) * dy
            if (
                a.speed > 1.0
                and a.kind != "pedestrian"
                and -6.0 < along < 42.0
                and math.hypot(dx, dy) < 45.0
                and math.cos(a.pose[2] - st.yaw) < 0.3
            ):
                return False
        return True

    def step(self, traffic: Traffic) -> tuple[float, float]:
        """Speed (m/s) and yaw rate (rad/s) into the next frame."""
        if self.frame >= self.redraw:
            self._new_wish()
        self.frame += 1
        turning = self.u_sign != 0
        self._u_turn(traffic)
        steer = self.u_sign * U_STEER if turning and self.u_sign else self._pursue()
        limit = min(STEER_LIMIT, math.atan(5.0 * ego_car.WHEELBASE / max(self.speed, 2.0) ** 2))
        steer = float(np.clip(steer, -limit, limit))
        self.steer += float(np.clip(steer - self.steer, -STEER_RATE * DT, STEER_RATE * DT))
        self.speed = max(0.0, self.speed + self._accelerate(traffic) * DT)
        if self.speed < 0.05:
            self.speed = 0.0
        return self.speed, yaw_rate_of(self.speed, self.steer)

    # -- steering ---------------------------------------------------------------------------------------------------

    def _pursue(self) -> float:
        """Steering angle towards the path's point ahead."""
        st = self.state
        if self.route is not None:
            self.route.advance(st.x, st.y)
            x, y = self.route.target(3.2 + 0.45 * self.speed)
        else:
            assert isinstance(self.layout, HighwayLayout)
            self.place += float(np.clip(self.lane - self.place, -DT / 3.0, DT / 3.0)) if self.speed > 4 else 0.0
            x, y, _ = self.layout.pose(1, self.place, st.x + 6.0 + 0.7 * self.speed)
        dx, dy = x - st.x, y - st.y
        alpha = math.atan2(dy, dx) - st.yaw
        return math.atan(2 * ego_car.WHEELBASE * math.sin(alpha) / max(math.hypot(dx, dy), 2.0))

    def _u_turn(self, traffic: Traffic) -> None:
        """Begin a u-turn when it is time and there is room, and take up the opposite lane when it is done."""
        layout, st = self.layout, self.state
        if not isinstance(layout, GridLayout):
            return
        if self.u_sign == 0:
            axis = int(abs(math.sin(st.yaw)) > 0.7)
            s = (st.x, st.y)[axis]
            clear = abs(s / layout.pitch - round(s / layout.pitch)) * layout.pitch > layout.half + 8
            if (
                self.frame > self.u_next
                and clear
                and self.speed < U_SPEED + 0.4
                and (self._room(traffic) or self.frame > self.u_next + 30)
            ):
                self.u_sign, self.u_from = layout.side, st.yaw
            return
        if abs(st.yaw - self.u_from) < math.radians(158):
            return
        heading = self.u_from + self.u_sign * math.pi
        quarter = round(heading / (math.pi / 2)) * (math.pi / 2)
        start = EgoState(st.x, st.y, quarter)
        self.route = grid_route(layout, self.rng, start, 16.0 * self.frames / FPS + 120.0, False)
        self.u_sign, self.u_next = 0, self.frame + float(self.rng.uniform(35, 90))
        self.wish = float(self.rng.uniform(6, 12))
        self.redraw = self.frame + int(self.rng.integers(20, 61))

    # -- speed ------------------------------------------------------------------------------------------------------

    def _accelerate(self, traffic: Traffic) -> float:
        """Acceleration (m/s^2) under the wish, the turns, the lights and the agents ahead."""
        wish = self.wish
        if self.u_sign or self.frame > self.u_next - 18:
            wish = (
                U_SPEED
                if self.u_sign
                else min(max(wish, U_SPEED), U_SPEED + max(0.0, (self.u_next - self.frame) * 0.2))
            )
        if self.route is not None and not self.u_sign:
            wish = min(wish, self.route.allowed())
        acc = float(np.clip(1.6 * (wish - self.speed), -4.2, 2.4))
        if self.route is not None and not self.u_sign:
            acc = min(acc, self._mind_lights(traffic))
        for agent in traffic.agents:
            gap = self._gap(agent)
            if gap is not None:
                lead = agent.speed * math.cos(agent.pose[2] - self.state.yaw) if agent.kind != "pedestrian" else 0.0
                acc = min(acc, idm(self.speed, max(wish, 1.0), gap, max(0.0, lead)))
        return acc

    def _gap(self, agent: Agent) -> float | None:
        """Metres of free way to an agent on the path ahead, else None."""
        room = (SIZES[agent.kind][0] + ego_car.LENGTH) / 2
        st = self.state
        if math.hypot(agent.pose[0] - st.x, agent.pose[1] - st.y) > 60:
            return None
        if self.route is None or self.u_sign:
            along = ahead((st.x, st.y, st.yaw), agent.pose[:2], 60.0, 1.9)
            return None if along is None else along - room
        part = slice(self.route.at, self.route.at + 45)
        far = np.hypot(self.route.points[part, 0] - agent.pose[0], self.route.points[part, 1] - agent.pose[1])
        i = int(np.argmin(far))
        return float(self.route.run[part][i] - self.route.run[self.route.at]) - room if far[i] < 1.7 and i > 0 else None

    def _mind_lights(self, traffic: Traffic) -> float:
        assert self.route is not None
        assert isinstance(self.layout, GridLayout)
        here = float(self.route.run[self.route.at])
        for at, i, j, axis in self.route.lights:
            gap = at - here - ego_car.LENGTH / 2
            if -1.0 <= gap < 40 and not self.layout.green(i, j, axis, traffic.time) and self.speed**2 / 9.0 < gap + 1.0:
                return idm(self.speed, 12.0, gap + 2.0, 0.0)
        return 9.0


def drive_scene(scenario: str, seed: int, frames: int) -> tuple[Array, Array]:
    """Speed [T] and yaw rate [T] of the scripted driver in the scene of (scenario, seed)."""
    layout = make_layout(scenario, seed)
    driver, traffic = Driver(layout, frames), Traffic(layout)
    traffic.populate(driver.state)
    rows = np.empty((frames, 2))
    for i in range(frames):
        rows[i] = driver.step(traffic)
        driver.state = driver.state.moved(*(float(v) for v in rows[i]))
        traffic.step(driver.state)
    return rows[:, 0], rows[:, 1]
