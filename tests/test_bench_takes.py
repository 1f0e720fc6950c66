from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from street_doubles import noise_frames, random_world

from rollcache.bench.takes import MAX_SEED, Injection, make_take, plan_take
from rollcache.street.drives import DriveError
from rollcache.street.protocol import Protocol
from rollcache.street.world import Session


def _drive_csv(path: Path, rows: int, speed: float = 8.0) -> Path:
    lines = ["t_s,speed_mps,accel_mps2,yaw_rate_rps"]
    lines += [f"{i / 12:.4f},{speed + 0.01 * i:.3f},0.0,{0.2 if i >= rows // 2 else 0.0}" for i in range(rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rollout_follows_the_rows_after_the_start(tmp_path: Path) -> None:
    csv = _drive_csv(tmp_path / "drive.csv", 40)
    take = make_take(random_world(), "u-turn", chunks=4, actions=csv, draw=noise_frames)
    assert take.actions.shape == (4, 2, 2)
    assert torch.allclose(take.actions[0, :, 0], torch.tensor([8.16, 8.17]), atol=1e-3)
    assert len(take.start.latents) == 8
    assert take.turning.tolist() == [i + 16 >= 20 for i in range(8)]
    assert {group: len(x) for group, x in take.truth.items()} == {"front": 8, "sides": 8, "rear": 8}


def test_chunked_protocol_needs_four_times_the_frames(tmp_path: Path) -> None:
    take = make_take(random_world(), "urban", chunks=3, protocol=Protocol.named("chunked"), draw=noise_frames)
    assert take.actions.shape == (3, 8, 2)


def test_short_drive_says_what_fits(tmp_path: Path) -> None:
    csv = _drive_csv(tmp_path / "short.csv", 30)
    with pytest.raises(DriveError, match=r"short\.csv: 30 rows, but 33 chunks need 82 .* --chunks 7"):
        make_take(random_world(), "urban", chunks=33, actions=csv, draw=noise_frames)


def test_injection_changes_nothing_before_its_chunk() -> None:
    take = make_take(random_world(), "highway", chunks=8, draw=noise_frames)
    braked, steered = take.injected(Injection("brake", 5)), take.injected(Injection("steer", 5))
    for other in (braked, steered):
        assert torch.equal(other.actions[:5], take.actions[:5])
        assert other.start is take.start
    assert not braked.actions[5:, :, 0].any()
    assert torch.allclose(steered.actions[5:, :, 1], torch.tensor(0.67))
    assert torch.equal(steered.actions[5:, :, 0], take.actions[5:, :, 0])


def test_a_car_that_cuts_in_is_told_from_its_chunk_on_and_changes_no_action() -> None:
    take = make_take(random_world(), "highway", chunks=8, draw=noise_frames)
    other = take.injected(Injection("cut-in", 5))
    before, after = take.start.scenery, other.start.scenery
    assert before is not None and after is not None
    assert torch.equal(other.actions, take.actions) and other.drive is take.drive
    assert after.agent_there[:, -1].tolist() == [False] * 13 + [True] * 3
    gap = (after.agent_box[:, -1, :2] - after.pose[:, :2]).norm(dim=1)
    torch.testing.assert_close(gap, torch.full((16,), 9.0), atol=1e-3, rtol=1e-4)
    silent = replace(take, start=replace(take.start, scenery=None))
    with pytest.raises(ValueError, match="a car cannot cut in: this take tells the model nothing"):
        silent.injected(Injection("cut-in", 5))


@pytest.mark.parametrize("chunk", [-1, 8])
def test_injection_outside_the_rollout(chunk: int) -> None:
    take = make_take(random_world(), "highway", chunks=8, draw=noise_frames)
    with pytest.raises(ValueError, match=f"brake at chunk {chunk}: chunks are 0 to 7"):
        take.injected(Injection("brake", chunk))


@pytest.mark.parametrize(
    ("scenario", "chunks", "seed", "culprit"),
    [
        ("moon", 4, 0, "moon"),
        ("urban", 1, 0, "chunks is 1"),
        ("urban", 4, -1, "seed is -1"),
        ("urban", 4, 2**63, "seed is 9"),
    ],
)
def test_bad_arguments(scenario: str, chunks: int, seed: int, culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        plan_take(scenario, chunks=chunks, seed=seed)


def test_the_largest_seed_runs() -> None:
    take = make_take(random_world(), "urban", chunks=2, seed=MAX_SEED, draw=noise_frames)
    Session(random_world(), take.start, seed=take.seed).step(take.actions[0])
