"""The scene, its traffic and the truth about both."""

import math
import subprocess
import sys

import numpy as np
import pytest

from rollcache.street.drives import FPS, DriveError, constant, scripted_drive
from rollcache.street.ego import EgoState, integrate, yaw_rate_of
from rollcache.street.scene import SCENARIOS, Scene, make_episode
from rollcache.street.scene_driver import Route, grid_route
from rollcache.street.scene_grid import Corridor, build_cell
from rollcache.street.scene_layout import GridLane, GridLayout, HighwayLayout, make_layout
from rollcache.street.scene_mesh import SOLID, Mesh, rng_of
from rollcache.street.traffic import Box, Traffic, ahead, idm, touches


def test_scene_needs_no_renderer():
    names = "scene, drives, ego, traffic"
    code = (
        f"import sys; import rollcache; from rollcache.street import {names}; "
        "sys.exit(any(m in sys.modules for m in ('panda3d', 'panda3d.core', 'av')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_scenario_lists_the_names():
    with pytest.raises(ValueError, match="'city'; choose one of urban, highway, u-turn"):
        Scene("city", 0)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_episodes_repeat_and_differ_by_seed(scenario):
    a, b, other = (make_episode(scenario, seed, 24) for seed in (3, 3, 4))
    np.testing.assert_array_equal(a.poses, b.poses)
    assert a.boxes == b.boxes
    assert [c.key for c in a.chunks] == [c.key for c in b.chunks]
    for mine, same in zip(a.chunks, b.chunks, strict=True):
        for one, two in zip(mine.mesh.merged().values(), same.mesh.merged().values(), strict=True):
            np.testing.assert_array_equal(one.corners, two.corners)
            np.testing.assert_array_equal(one.colour, two.colour)
    assert not np.array_equal(a.poses, other.poses)


def test_episode_needs_enough_rows():
    with pytest.raises(DriveError, match="has 10 rows but 11 are needed"):
        Scene("highway", 0).simulate(constant(20, 0, 10), 11)


# -- ego --------------------------------------------------------------------------------------------------------------


def test_positive_yaw_rate_turns_left_and_a_full_circle_closes():
    n = 96
    rate = 2 * math.pi / (n / FPS)
    poses = integrate(EgoState(3.0, -2.0, 0.5), np.full(n, 6.0), np.full(n, rate))
    np.testing.assert_allclose(poses[-1, :3], [3.0, -2.0, 0.5 + 2 * math.pi], atol=1e-9)
    quarter = integrate(EgoState(0.0, 0.0, 0.0), np.full(FPS, 6.0), np.full(FPS, math.pi / 2))[-1]
    np.testing.assert_allclose(quarter[:3], [12 / math.pi, 12 / math.pi, math.pi / 2], atol=1e-9)
    straight = EgoState(0.0, 0.0, 0.0).moved(12.0, 0.0)
    assert (straight.x, straight.y) == pytest.approx((1.0, 0.0))
    left = EgoState(0.0, 0.0, 0.0).moved(12.0, 0.6)
    assert left.y > 0
    assert left.yaw == pytest.approx(0.05)


def test_bicycle_turns_on_its_radius():
    assert 4.0 / yaw_rate_of(4.0, 0.48) == pytest.approx(2.8 / math.tan(0.48))


def test_frame_i_is_where_the_action_of_frame_i_led():
    scene = Scene("u-turn", 2)
    drive = constant(6.0, 0.3, 5)
    episode = scene.simulate(drive)
    first = scene.start().moved(6.0, 0.3)
    np.testing.assert_allclose(episode.poses[0], [first.x, first.y, first.yaw])
    np.testing.assert_allclose(episode.poses, integrate(scene.start(), drive.speed, drive.yaw_rate)[:, :3])


# -- roads and the scripted driver ------------------------------------------------------------------------------------


def poses_of(scenario, seed):
    """Positions [2, T] of the scripted driver."""
    drive = scripted_drive(scenario, seed, 120)
    return integrate(Scene(scenario, seed).start(), drive.speed, drive.yaw_rate)[:, :2].T


@pytest.mark.parametrize("seed", range(4))
def test_highway_script_keeps_to_its_carriageway(seed):
    layout = make_layout("highway", seed)
    x, y = poses_of("highway", seed)
    right = (layout.middle(x) - y) * np.cos(layout.bearing(x))  # metres to the right of the middle line
    assert right.min() > layout.offset(0) - 0.5 * layout.lane_width
    assert right.max() < layout.offset(layout.lanes - 1) + 0.5 * layout.lane_width


@pytest.mark.parametrize("seed", range(6))
def test_urban_script_stays_on_asphalt(seed):
    layout = make_layout("urban", seed)
    cell = poses_of("urban", seed) / layout.pitch
    off = np.abs(cell - np.round(cell)) * layout.pitch  # metres from the middle of the nearest street, per axis
    assert (off.min(0) < layout.half - 1.0).all()


def test_route_is_continuous_and_keeps_to_its_side():
    layout = make_layout("urban", 3)
    route = grid_route(layout, rng_of(1), layout.start(), 600.0)
    step = np.diff(route.points, axis=0)
    assert np.hypot(*step.T).max() < 2.0
    bend = np.abs(np.diff(np.unwrap(np.arctan2(step[:, 1], step[:, 0]))))
    assert bend.max() < 0.35  # no corners


def test_lanes_lie_to_the_right_of_travel_unless_traffic_keeps_left():
    for side in (1, -1):
        layout = GridLayout("urban", 0, side, 100.0, 2, 3.0, 2.0)
        for lane in (GridLane(0, 1, 1, 0), GridLane(0, 1, -1, 1), GridLane(1, 1, 1, 1), GridLane(1, 1, -1, 0)):
            x, y, heading = layout.pose(lane, 40.0)
            middle = (40.0, 100.0) if lane.axis == 0 else (100.0, 40.0)
            across = math.cos(heading) * (y - middle[1]) - math.sin(heading) * (x - middle[0])
            assert across == pytest.approx(-side * (lane.k + 0.5) * 3.0)


def test_lights_never_let_both_streets_go():
    layout = make_layout("urban", 1)
    for t in np.arange(0, 30, 0.25):
        assert not (layout.green(2, -3, 0, t) and layout.green(2, -3, 1, t))
    assert any(layout.green(2, -3, 0, t) for t in range(15))
    assert any(layout.green(2, -3, 1, t) for t in range(15))


def test_route_slows_down_in_time_for_what_comes():
    points = np.column_stack([np.arange(60.0), np.zeros(60)])
    route = Route(points, np.arange(60.0), np.where(np.arange(60) < 30, 99.0, 4.0), [])
    far = route.allowed()
    route.at = 28
    assert 4.0 < route.allowed() < far


# -- traffic ----------------------------------------------------------------------------------------------------------


def test_idm_brakes_for_a_near_standing_car_and_accelerates_on_a_free_road():
    assert idm(10.0, 15.0, 8.0, 0.0) < -3
    assert idm(5.0, 15.0, 1000.0, 5.0) > 1
    assert idm(15.0, 15.0, 1000.0, 15.0) == pytest.approx(0.0, abs=0.05)


def test_ahead_looks_forward_only():
    pose = (0.0, 0.0, math.pi / 2)
    assert ahead(pose, (0.5, 10.0), 20.0, 2.0) == pytest.approx(10.0)
    assert ahead(pose, (0.5, -10.0), 20.0, 2.0) is None
    assert ahead(pose, (3.0, 10.0), 20.0, 2.0) is None
    assert ahead(pose, (0.0, 30.0), 20.0, 2.0) is None


def test_touches_is_a_collision_test():
    box = Box(1, "car", (1, 0, 0), (6.0, 0.0, 0.7), (4.5, 1.8, 1.5), 0.0)
    assert not touches((0.0, 0.0, 0.0), box, 0.3)
    assert touches((2.5, 0.0, 0.0), box, 0.3)
    assert not touches((6.0, 3.0, 0.0), box, 0.3)
    assert touches((6.0, 1.2, 0.0), box, 0.3)


def test_a_car_behind_brakes_for_the_standing_ego():
    """A truck (they never change lanes), 60 m behind an ego that stands on its lane, comes to rest short of it."""
    layout = make_layout("highway", 0)
    assert isinstance(layout, HighwayLayout)
    ego = EgoState(*layout.pose(1, 0, 0.0))
    traffic = Traffic(layout)
    traffic.populate(ego)
    car = traffic.agents[0]
    car.kind, car.lane, car.k, car.target, car.s, car.speed = "truck", 1, 0.0, 0, -60.0, 20.0
    traffic.agents = [car]
    for _ in range(15 * FPS):
        traffic.step(ego)
        if not any(a is car for a in traffic.agents):
            pytest.fail("the car ran into the ego")
        traffic.agents = [car]
    assert car.speed < 0.3
    assert -16.0 < car.s < -7.0


def test_an_agent_that_the_ego_runs_into_makes_way():
    layout = make_layout("highway", 0)
    ego = EgoState(*layout.pose(1, 0, 0.0))
    traffic = Traffic(layout)
    traffic.populate(ego)
    count, hit = len(traffic.agents), traffic.agents[0]
    hit.lane, hit.k, hit.target, hit.s, hit.speed = 1, 0.0, 0, 2.0, 0.0
    traffic.step(ego)
    assert hit not in traffic.agents
    assert len(traffic.agents) == count  # another one came in its place


def test_braking_ego_changes_the_traffic_only_afterwards():
    scene, drive = Scene("highway", 1), scripted_drive("highway", 1, 72)
    plain, braked = scene.simulate(drive), scene.simulate(drive.with_brake(30))

    def moving(episode, i):
        return {b.agent: b.centre for b in episode.boxes[i][: episode.moving[i]]}

    assert all(moving(plain, i) == moving(braked, i) for i in range(30))
    assert moving(plain, 71) != moving(braked, 71)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_ever_overlaps_the_ego(scenario):
    """Not even when a drive is played in a scene that it was not made for."""
    drive = scripted_drive("u-turn", 1, 96)
    episode = Scene(scenario, 7).simulate(drive)
    for pose, boxes in zip(episode.poses, episode.boxes, strict=True):
        assert not any(touches((pose[0], pose[1], pose[2]), box, 0.0) for box in boxes)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_truth_boxes_are_complete_and_move_smoothly(scenario):
    episode = make_episode(scenario, 2, 48)
    assert len(episode) == len(episode.boxes) == len(episode.moving) == 48
    last: dict[int, Box] = {}
    for i, boxes in enumerate(episode.boxes):
        agents = [b.agent for b in boxes]
        assert len(set(agents)) == len(agents)
        assert all(b.agent > 0 for b in boxes[: episode.moving[i]])
        assert all(b.agent < 0 for b in boxes[episode.moving[i] :])  # parked
        now = {b.agent: b for b in boxes}
        for agent in now.keys() & last.keys():
            assert math.dist(now[agent].centre, last[agent].centre) < 40.0 / FPS
            assert now[agent].size == last[agent].size
            assert now[agent].centre[2] == pytest.approx(now[agent].size[2] / 2)
        last = now
    assert sum(episode.moving) > 48


# -- what stands beside the road --------------------------------------------------------------------------------------


def test_the_way_of_the_ego_is_kept_free():
    """A drive straight through a block meets no wall: all solid quads above the kerb stay off its path."""
    layout = make_layout("urban", 0)
    assert isinstance(layout, GridLayout)
    y = 0.5 * layout.pitch
    path = np.column_stack(
        [
            np.arange(0.0, layout.pitch, 0.5),
            np.full(int(2 * layout.pitch) + 1, y)[: len(np.arange(0.0, layout.pitch, 0.5))],
        ]
    )

    def blocked(corridor):
        mesh, _ = build_cell(layout, (0, 0), corridor, (0.0, 0.0, 1.0))
        walls = [b.corners for (layer, _), b in mesh.merged().items() if layer >= SOLID]
        count = 0
        for corners in walls:
            low, high = corners.min(1), corners.max(1)
            hit = (low[:, 1] < y + 0.9) & (high[:, 1] > y - 0.9) & (high[:, 2] > 0.3) & (low[:, 2] < 1.5)
            count += int((hit & (low[:, 0] > layout.half + 1)).sum())
        return count

    assert blocked(Corridor(np.zeros((0, 2)))) > 0
    assert blocked(Corridor(path)) == 0


def test_mesh_faces_point_outwards_and_the_sunny_side_is_lighter():
    mesh = Mesh((1.0, 0.0, 0.0))
    mesh.frusta(np.zeros(3), (2.0, 2.0), (2.0, 2.0), 2.0, 0.3, (0.5, 0.5, 0.5), roof=(0.5, 0.5, 0.5))
    (batch,) = mesh.merged().values()
    middle = batch.corners.mean(1)
    normal = np.cross(batch.corners[:, 2] - batch.corners[:, 0], batch.corners[:, 3] - batch.corners[:, 1])
    assert (((middle - [0, 0, 1.0]) * normal).sum(1) > 0).all()
    walls = batch.colour[:4, 0, 0]
    assert walls[np.argmax(normal[:4, 0])] == walls.max() > walls.min()


def test_tiles_hold_every_quad_once():
    episode = make_episode("highway", 0, 4)
    mesh = episode.chunks[0].mesh
    whole = sum(len(b.corners) for b in mesh.merged().values())
    assert sum(len(b.corners) for tile in mesh.tiles(25.0).values() for b in tile.values()) == whole
