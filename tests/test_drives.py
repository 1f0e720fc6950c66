"""Recorded, made-up and scripted drives."""

from pathlib import Path

import numpy as np
import pytest

from rollcache.street.drives import FPS, SCENARIOS, Drive, DriveError, constant, load_drive, scripted_drive

RECORDED = Path(__file__).resolve().parents[2] / "shared" / "data"
HEADER = "t_s,speed_mps,accel_mps2,yaw_rate_rps"


def write(path: Path, lines: list[str], header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def rows(n: int, speed: float = 10.0, yaw_rate: float = 0.1) -> list[str]:
    return [f"{i / FPS:.4f},{speed},0.0,{yaw_rate}" for i in range(n)]


def test_load_reads_the_named_columns_whatever_their_order(tmp_path):
    lines = [f"{0.01 * i},{5 + 0.1 * i},{i / FPS:.4f},x" for i in range(6)]
    drive = load_drive(write(tmp_path / "d.csv", lines, "yaw_rate_rps, speed_mps ,t_s,note"), require_frames=6)
    np.testing.assert_allclose(drive.speed, 5 + 0.1 * np.arange(6))
    np.testing.assert_allclose(drive.yaw_rate, 0.01 * np.arange(6))
    assert drive.name == "d"
    assert drive.source.endswith("d.csv")


def test_load_ignores_blank_lines_and_takes_sensor_noise_of_a_standing_car_for_standing(tmp_path):
    drive = load_drive(write(tmp_path / "d.csv", [*rows(2, -0.03), "", *rows(4, 0.0)[2:]]))
    assert drive.speed.tolist() == [0.0] * 4


BAD = {
    "no number": (1, "0.0833,ten,0,0", ["line 3", "column speed_mps", "'ten' is not a number"]),
    "empty cell": (1, "0.0833,,0,0", ["line 3", "column speed_mps", "'' is not a number"]),
    "nan": (2, "0.1667,10,0,nan", ["line 4", "column yaw_rate_rps", "nan is not a finite number"]),
    "inf": (2, "0.1667,inf,0,0", ["line 4", "column speed_mps", "inf is not a finite number"]),
    "time stands": (2, "0.0833,10,0,0", ["line 4", "column t_s", "does not come after"]),
    "time goes back": (2, "0.0100,10,0,0", ["line 4", "column t_s", "does not come after 0.0833"]),
    "time jumps": (2, "0.2500,10,0,0", ["line 4", "column t_s", "0.1667 s after the row before", "resample"]),
    "negative speed": (1, "0.0833,-3,0,0", ["line 3", "column speed_mps", "-3 m/s is outside 0 to 70"]),
    "absurd speed": (1, "0.0833,171,0,0", ["line 3", "column speed_mps", "171 m/s is outside"]),
    "absurd yaw rate": (1, "0.0833,10,0,-25", ["line 3", "column yaw_rate_rps", "-25 rad/s", "degrees"]),
    "speed jumps": (2, "0.1667,14,0,0", ["line 4", "column speed_mps", "from 10 to 14 m/s", "at most 3 g"]),
    "cell missing": (1, "0.0833,10,0", ["line 3", "3 cells where the header has 4"]),
}


@pytest.mark.parametrize("case", BAD)
def test_load_names_file_line_and_column_of_what_is_wrong(tmp_path, case):
    at, line, words = BAD[case]
    lines = rows(4)
    lines[at] = line
    path = write(tmp_path / "bad.csv", lines)
    with pytest.raises(DriveError) as caught:
        load_drive(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["line 1", "empty", "t_s, speed_mps, yaw_rate_rps"]),
        ("t_s,speed_mps\n0,1\n", ["line 1", "column yaw_rate_rps is missing", "the header has t_s, speed_mps"]),
        ("t_s,speed_mps,yaw_rate_rps,t_s\n", ["line 1", "column t_s appears twice"]),
        (HEADER + "\n", ["no rows after the header"]),
    ],
)
def test_load_checks_the_header_and_that_there_are_rows(tmp_path, text, words):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(DriveError) as caught:
        load_drive(path)
    assert all(word in str(caught.value) for word in words), caught.value


def test_load_says_how_many_rows_there_are_and_are_needed(tmp_path):
    path = write(tmp_path / "short.csv", rows(5))
    assert len(load_drive(path, require_frames=5)) == 5
    with pytest.raises(DriveError, match=r"5 rows, but 264 are needed \(22\.0 s at 12 FPS\)"):
        load_drive(path, require_frames=264)


def test_load_of_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"\x00\xff\xfe\xba" * 20)
    with pytest.raises(DriveError, match=r"clip\.mp4: not a"):
        load_drive(path)


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recorded drives are not at hand")
def test_recorded_drives_load():
    left = load_drive(RECORDED / "argoverse2_left62_12fps.csv")
    assert len(left) == 192
    assert np.degrees(left.yaw_rate.sum() / FPS) == pytest.approx(62, abs=6)
    road = load_drive(RECORDED / "comma2k19_drive_12fps.csv", require_frames=720)
    assert 7 < road.speed.min() < road.speed.max() < 20


def test_drive_refuses_unequal_lengths_and_numbers_that_are_none():
    with pytest.raises(DriveError, match="equally long"):
        Drive("d", np.zeros(3), np.zeros(4), "test")
    with pytest.raises(DriveError, match="yaw_rate of row 1"):
        Drive("d", np.zeros(3), np.array([0, np.nan, 0]), "test")


def test_first_rows():
    drive = constant(8.0, 0.2, 5)
    assert len(drive.first(3)) == 3
    with pytest.raises(DriveError, match="has 5 rows but 6 are needed"):
        drive.first(6)
    with pytest.raises(DriveError, match="at least 1"):
        drive.first(0)


def test_brake_keeps_what_was_before_and_the_curvature_of_the_path():
    drive = constant(10.0, 0.5, 40)
    braked = drive.with_brake(10, decel=6.0)
    np.testing.assert_array_equal(braked.speed[:10], 10.0)
    assert braked.speed[10] == pytest.approx(9.5)
    assert np.diff(braked.speed).min() == pytest.approx(-0.5)
    assert braked.speed[-1] == 0.0
    moving = braked.speed > 0
    np.testing.assert_allclose(braked.yaw_rate[moving] / braked.speed[moving], 0.05)
    assert (braked.yaw_rate[~moving] == 0).all()
    assert drive.with_brake(10, to=4.0).speed[-1] == 4.0
    np.testing.assert_array_equal(drive.speed, 10.0)  # the drive itself is untouched


def test_brake_never_speeds_up_a_slower_drive():
    speed = np.concatenate([np.full(10, 12.0), np.full(30, 2.0)])
    braked = Drive("d", speed, np.zeros(40), "test").with_brake(5, to=6.0)
    assert (braked.speed <= speed).all()
    assert braked.speed[20] == 2.0


def test_steer_changes_the_yaw_rate_from_its_row_on():
    steered = constant(10.0, 0.0, 20).with_steer(8, -0.3)
    assert steered.yaw_rate.tolist() == [0.0] * 8 + [-0.3] * 12
    with pytest.raises(DriveError, match="row 20 does not exist"):
        steered.with_steer(20, 0.1)


def test_unknown_scenario_lists_the_names():
    with pytest.raises(ValueError, match="'rural'; choose one of urban, highway, u-turn"):
        scripted_drive("rural", 0, 10)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scripted_drives_repeat_and_are_physically_plausible(scenario):
    for seed in range(4):
        drive = scripted_drive(scenario, seed, 96)
        again = scripted_drive(scenario, seed, 96)
        np.testing.assert_array_equal(drive.speed, again.speed)
        np.testing.assert_array_equal(drive.yaw_rate, again.yaw_rate)
        assert len(drive) == 96
        assert drive.speed.min() >= 0
        assert drive.speed.max() < 40
        assert np.abs(np.diff(drive.speed)).max() * FPS < 9.0
        assert np.abs(drive.yaw_rate).max() < 1.2
        assert np.abs(np.diff(drive.yaw_rate)).max() < 0.25
    assert not np.array_equal(drive.speed, scripted_drive(scenario, 5, 96).speed)


def test_a_longer_script_begins_like_a_shorter_one_on_the_highway():
    short, long = scripted_drive("highway", 1, 40), scripted_drive("highway", 1, 80)
    np.testing.assert_array_equal(short.speed, long.speed[:40])


def test_u_turns_go_to_both_sides():
    turned = [np.degrees(scripted_drive("u-turn", seed, 128).yaw_rate.sum() / FPS) for seed in range(6)]
    assert all(abs(angle) > 150 for angle in turned), turned
    assert min(turned) < 0 < max(turned)


def test_urban_drives_turn_left_and_right_and_stop():
    drives = [scripted_drive("urban", seed, 128) for seed in range(8)]
    turned = [np.degrees(d.yaw_rate.sum() / FPS) for d in drives]
    assert max(turned) > 80
    assert min(turned) < -80
    assert any((d.speed == 0).any() for d in drives)
