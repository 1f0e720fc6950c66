from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from street_doubles import noise_frames, random_world

from rollcache.bench.ablate import ablate, rows
from rollcache.bench.controls import control_plans, fewer_steps
from rollcache.bench.inject import follow, inject, plans
from rollcache.bench.lanes import FULL, open_lane, race
from rollcache.bench.profile import Profiler
from rollcache.bench.takes import Injection, make_take
from rollcache.cli import main
from rollcache.street.protocol import Protocol
from rollcache.street.world import World


@pytest.fixture(scope="module")
def world() -> World:
    return random_world()


def test_brake_in_the_middle_of_a_cycle(world: World) -> None:
    take = make_take(world, "highway", chunks=12, draw=noise_frames)
    variants = [plan for plan in plans() if plan.key in ("xcache", "blind", "frozen")]
    found = inject(world, take, Protocol(), Injection("brake", 6), variants=variants, reload=random_world)
    ours, blind, frozen = found["rows"]
    assert ours["follow_rest"] == pytest.approx(1, abs=0.05) and ours["follow_next"] == pytest.approx(1, abs=0.05)
    assert ours["recomputed"][2] == found["cells_per_chunk"]
    assert frozen["follow_rest"] == 0
    assert blind["recomputed"][2] < found["cells_per_chunk"]
    assert blind["follow_rest"] < 0.9
    assert found["effect"]["rest"] < 60


def test_a_car_that_cuts_in_is_followed_only_where_the_traffic_is_a_condition(world: World) -> None:
    take = make_take(world, "highway", chunks=12, draw=noise_frames)
    variants = [plan for plan in plans() if plan.key in ("xcache", "blind-9995", "frozen")]
    found = inject(world, take, Protocol(), Injection("cut-in", 6), variants=variants, reload=random_world)
    ours, blind, frozen = found["rows"]
    assert ours["follow_rest"] == pytest.approx(1, abs=0.05)
    assert ours["recomputed"][2] == found["cells_per_chunk"]
    assert frozen["follow_rest"] == pytest.approx(0, abs=0.01)
    assert blind["recomputed"][2] < found["cells_per_chunk"] and blind["follow_rest"] < 0.9


@pytest.mark.parametrize("chunk", [-2, 2, 8, 10, 11])
def test_injections_that_cannot_be_tested(world: World, chunk: int) -> None:
    take = make_take(world, "highway", chunks=12, draw=noise_frames)
    with pytest.raises(ValueError, match=f"chunk {chunk} cannot be tested"):
        inject(world, take, Protocol(), Injection("brake", chunk), reload=random_world)


def test_too_short_a_drive_has_a_structure_but_no_speed(
    street_weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--weights", str(street_weights), "--chunks", "2", "--dtype", "float32"]
    assert main(["profile", *common]) == 0
    assert main(["ablate", *common, "--only", "ours"]) == 0
    said = capsys.readouterr()
    assert "skipped, n/a faster" in said.out and "1 variant (" in said.err
    row = next(line for line in said.out.splitlines() if line.startswith(" our defaults"))
    assert row.split().count("n/a") == 2


def test_follow_is_a_projection() -> None:
    full = torch.tensor([3.0, 4.0])
    assert follow(full, full) == 1
    assert follow(0 * full, full) == 0
    assert follow(0.5 * full + torch.tensor([-4.0, 3.0]), full) == pytest.approx(0.5)
    assert follow(full, 0 * full) is None


def test_ablation_reads_like_the_papers_table(world: World) -> None:
    take = make_take(world, "highway", chunks=9, draw=noise_frames)
    wanted = ("default", "step0", "no-protect-open", "no-protect-one-noise", "no-anchor")
    chosen = [row for row in rows() if row.plan.key in wanted]
    found = {row["key"]: row for row in ablate(world, take, Protocol(), chosen, reload=random_world)["rows"]}
    default = found["default"]["skip_rate"]
    assert default == pytest.approx(0.75 * 0.75)
    assert found["step0"]["skip_rate"] == pytest.approx(0.75 * default)
    assert found["no-anchor"]["skip_rate"] > found["step0"]["skip_rate"]
    assert found["no-protect-open"]["skip_rate"] == pytest.approx(0.75 * 0.75)  # no protected chunk, step 0 exact
    assert found["no-protect-open"]["psnr"] < found["no-protect-one-noise"]["psnr"] - 3
    assert found["default"]["paper"] == {"psnr": 53.38, "skip_rate": 0.713, "speedup": 2.59}


def test_fresh_noise_leaves_nothing_to_reuse(world: World) -> None:
    protocol = Protocol(noise="fresh")
    take = make_take(world, "highway", chunks=5, draw=noise_frames)
    profiler = Profiler(world.model)
    with profiler:
        race([open_lane(world, take, protocol, FULL, reload=random_world)], take.actions)
    profile = profiler.result(protocol)
    assert profile.above["0.97"] < 0.2 and "will not help" in profile.verdict()
    assert not any(block._forward_hooks for block in world.model.blocks)


def test_profiling_changes_nothing(world: World) -> None:
    take = make_take(world, "highway", chunks=2, draw=noise_frames)
    bare = open_lane(world, take, Protocol(), FULL, reload=random_world)
    race([bare], take.actions)
    watched = open_lane(world, take, Protocol(), FULL, reload=random_world)
    with Profiler(world.model):
        race([watched], take.actions)
    assert torch.equal(torch.cat(bare.latents), torch.cat(watched.latents))


def test_study_commands(street_weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--weights", str(street_weights), "--chunks", "8", "--dtype", "float32"]
    assert main(["profile", *common, "--json", str(tmp_path / "profile.json")]) == 0
    assert main(["ablate", *common, "--only", "default", "ours", "--json", str(tmp_path / "ablate.json")]) == 0
    printed = capsys.readouterr().out
    assert "structural ceiling" in printed and "paper's defaults" in printed and "53.38" in printed
    profile = json.loads((tmp_path / "profile.json").read_text())["scenarios"]["u-turn"]
    assert len(profile["cosine"]) == 4 and profile["structural_speedup"] > 1
    table = json.loads((tmp_path / "ablate.json").read_text())["scenarios"]["u-turn"]
    assert [row["key"] for row in table["rows"]] == ["default", "ours"]
    assert main(["ablate", *common, "--only", "everything"]) == 2
    assert "there is no row 'everything'" in capsys.readouterr().err


def test_many_steps_have_few_controls() -> None:
    assert fewer_steps(4) == [3, 2, 1] and fewer_steps(1) == []
    assert fewer_steps(50) == [25, 12, 6]
    assert [p.steps for p in control_plans(Protocol.named("chunked", steps=50), "xcache") if p.steps] == [25, 12, 6]
