from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from street_doubles import noise_frames, random_world

import rollcache
from rollcache.bench import tables
from rollcache.bench.compare import NEEDED, Outcome, compare
from rollcache.bench.controls import cached_plan, control_plans, floor_plans, policy_named
from rollcache.bench.fidelity import Perceptual
from rollcache.bench.lanes import FULL, Lane, Plan, open_lane, race, turn
from rollcache.bench.results import dump
from rollcache.bench.takes import Take, chunk_actions, make_take
from rollcache.street.drives import Drive
from rollcache.street.protocol import Protocol
from rollcache.street.world import Session, World, resolve_dtype

QUICK = Perceptual(frames=2)


@pytest.fixture(scope="module")
def world() -> World:
    return random_world()


@pytest.fixture(scope="module")
def take(world: World) -> Take:
    """Eight metres a second, drifting to the left, and a steer in the middle of the second cycle."""
    rows = 34
    drive = Drive("drift", np.full(rows, 8.0), 0.002 * np.arange(rows), "made up").with_steer(16 + 2 * 6, 0.5)
    planned = make_take(world, "u-turn", chunks=9, draw=noise_frames)
    return replace(planned, drive=drive, actions=chunk_actions(drive, 16, 2, 9))


@pytest.fixture(scope="module")
def outcome(world: World, take: Take) -> Outcome:
    """X-Cache with everything beside it."""
    return _run(
        world,
        take,
        cached_plan("xcache"),
        controls=control_plans(Protocol(), "xcache"),
        floors=floor_plans("float32", other=True),
        profile=True,
    )


def _run(world: World, take: Take, plan: Plan, protocol: Protocol | None = None, **settings: object) -> Outcome:
    chosen = {"perceptual": QUICK, "profile": False, "reload": random_world, **settings}
    return compare(world, take, protocol or Protocol(), plan, **chosen)  # type: ignore[arg-type]


def test_full_compute_against_itself_is_identical(world: World, take: Take) -> None:
    result = _run(world, take, cached_plan("none"), floors=floor_plans("float32", other=False)).result
    assert result["psnr"] == 100 and result["ssim"] == pytest.approx(1) and result["flip"] == pytest.approx(0, abs=1e-6)
    assert result["skip_rate"] == 0 and result["ceiling"] == 1 and result["motion_ratio"] == pytest.approx(1)
    assert result["floor"]["perturbed"]["psnr"] < 100


def test_xcache_recomputes_where_the_action_moves_and_nowhere_else(outcome: Outcome) -> None:
    result = outcome.result
    assert set(NEEDED) <= set(result)
    computed = [sum(w.count("C") for w in words) for words in result["decisions"]["chunks"]]
    full, reused = 16, 4
    assert computed == [full, reused, reused, reused, full, reused, full, reused, full]
    # Chunks 4 to 7 count: 2 of 4 are reused, 3 of 4 blocks each.
    assert result["skip_rate"] == pytest.approx(0.5 * 0.75)
    assert 1 < result["ceiling"] < 1.7
    assert result["efficiency"] == pytest.approx(result["speedup"] / result["ceiling"])
    assert 0 < result["gate_share"] < 1
    assert 20 < result["psnr"] < 100


def test_full_lane_runs_on_a_bare_model_and_equals_a_plain_session(world: World, take: Take) -> None:
    protocol = Protocol()
    lanes = [open_lane(world, take, protocol, plan, reload=random_world) for plan in (FULL, cached_plan("xcache"))]
    assert lanes[0].session.world.model is world.model
    assert lanes[1].session.world.model is not world.model
    race(lanes, take.actions)
    session = Session(world, take.start, protocol, seed=take.seed)
    alone = torch.cat([session.step(action).latents for action in take.actions])
    assert torch.equal(torch.cat(lanes[0].latents), alone)
    assert lanes[1].handle is not None and lanes[1].handle.stats().skipped > 0


def test_frozen_window_emits_the_first_window_of_its_cycle(world: World, take: Take) -> None:
    lane = open_lane(world, take, Protocol(), Plan(key="frozen", label="", frozen=True), reload=random_world)
    race([lane], take.actions)
    assert lane.passes == [4, 0, 0, 1, 4, 0, 0, 1, 4]


def test_action_gate_runs_passes_only_where_the_action_moved(world: World, take: Take) -> None:
    plan = Plan(key="gate", label="", policy=rollcache.WindowReuse(), no_pass=True)
    lane = open_lane(world, take, Protocol(), plan, reload=random_world)
    race([lane], take.actions)
    assert lane.passes == [4, 0, 0, 1, 4, 0, 4, 1, 4]


def test_the_ceilings_parts_add_up_to_the_full_run(outcome: Outcome) -> None:
    parts, timing = outcome.result["pass_seconds"], outcome.result["timing"]
    chunks, steps, commits = 4, 4, 1
    whole = chunks * steps * (sum(parts["blocks"]) + parts["outside"]) + commits * parts["commit"]
    assert whole == pytest.approx(chunks * timing["full_seconds_per_chunk"])
    assert len(parts["blocks"]) == 4 and min(*parts["blocks"], parts["commit"]) > 0


def test_controls_and_floors(outcome: Outcome) -> None:
    result = outcome.result
    rows = {c["key"]: c for c in result["controls"]}
    reuse = ["xcache-paper", "window-reuse", "action-gate", "replan", "frozen"]
    assert list(rows) == [*reuse, "steps-3", "steps-2", "steps-1"]
    assert rows["frozen"]["skip_rate"] == pytest.approx(0.75)
    assert rows["steps-2"]["skip_rate"] is None
    assert rows["steps-1"]["ceiling"] > rows["steps-2"]["ceiling"] > rows["steps-3"]["ceiling"] > 1
    assert rows["frozen"]["psnr"] < result["psnr"]
    emulated = resolve_dtype("auto", torch.device("cpu")) is torch.float32
    assert set(result["floor"]) == {"perturbed"} | (set() if emulated else {"bfloat16"})
    assert result["floor"]["perturbed"]["psnr"] > rows["frozen"]["psnr"]
    assert json.loads(dump(result)) is not None


def test_profile_tells_new_noise_from_the_same_noise(outcome: Outcome) -> None:
    phases = outcome.result["profile"]["phase_cosine"]
    assert phases[0] < 0.9 < min(phases[1:])


def test_turning_frames_are_told_apart(outcome: Outcome) -> None:
    close = outcome.result["fidelity"]
    assert close["turning"]["frames"] == 6 and close["straight"]["frames"] == 4
    assert [row["cycle"] for row in close["by_cycle"]] == [1, 2]
    assert len(close["by_phase"]) == 4 and len(close["trace"]) == 18


@pytest.mark.parametrize("kind", ["chunked", "shared"])
def test_other_protocols(world: World, kind: str) -> None:
    protocol = Protocol.named(kind)
    take = make_take(world, "urban", chunks=3, protocol=protocol, draw=noise_frames)
    plans = control_plans(protocol, "xcache")
    assert {"frozen", "action-gate"}.isdisjoint(plan.key for plan in plans)
    result = _run(world, take, cached_plan("xcache"), protocol, controls=plans[-1:]).result
    assert result["protocol"]["kind"] == kind
    assert [len(words) for words in result["decisions"]["chunks"]] == [4, 4, 4]


def test_frozen_window_needs_the_receding_protocol(world: World, take: Take) -> None:
    with pytest.raises(ValueError, match="emits from an earlier window"):
        open_lane(
            world, take, Protocol.named("chunked"), Plan(key="f", label="frozen", frozen=True), reload=random_world
        )


def test_ctrl_c_keeps_the_chunks_that_all_lanes_finished(world: World, take: Take) -> None:
    def stop(n: int, lanes: Sequence[Lane]) -> None:
        if n == 4:
            raise KeyboardInterrupt

    outcome = _run(world, take, cached_plan("xcache"), on_chunk=stop)
    assert outcome.interrupted and outcome.result["interrupted"]
    assert len(outcome.result["decisions"]["chunks"]) == 5
    assert len(outcome.full["front"]) == len(outcome.cached["front"]) == len(outcome.truth["front"]) == 10


def test_time_budget_ends_a_rollout_after_whole_cycles(world: World) -> None:
    take = make_take(world, "highway", chunks=12, draw=noise_frames)
    outcome = _run(world, take, cached_plan("xcache"), seconds=0.0)
    assert not outcome.interrupted
    assert len(outcome.result["decisions"]["chunks"]) == 9
    assert len(outcome.result["fidelity"]["trace"]) == len(outcome.truth["rear"]) == 18


@pytest.mark.parametrize("chunks", [2, 7])
def test_no_whole_cycle_after_the_warm_up_gives_no_speedup(world: World, chunks: int) -> None:
    take = make_take(world, "highway", chunks=chunks, draw=noise_frames)
    result = _run(world, take, cached_plan("xcache"), controls=control_plans(Protocol(), "xcache")[-1:]).result
    for row in (result, result["timing"], *result["controls"]):
        assert row["speedup"] is None and row["ceiling"] is None and row["efficiency"] is None
    assert result["psnr"] > 0 and result["timing"]["seconds_per_chunk"] > 0
    page = tables.notes({"highway": result})
    assert any(line.startswith(f"highway: speedup and ceiling n/a. {chunks} chunks hold no whole") for line in page)


def test_ctrl_c_before_anything_was_measured(world: World, take: Take) -> None:
    def stop(n: int, lanes: Sequence[Lane]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(world, take, cached_plan("xcache"), on_chunk=stop)


def test_lanes_take_turns_and_the_pair_stays_together() -> None:
    lanes = [object() for _ in range(4)]
    assert turn(lanes, 0) == lanes  # type: ignore[arg-type, comparison-overlap]
    assert turn(lanes, 1) == lanes[::-1]  # type: ignore[arg-type, comparison-overlap]


def test_policies_by_name() -> None:
    assert policy_named("xcache", {"min_cosine": 0.9}) == rollcache.XCache(min_cosine=0.9)
    assert policy_named("xcache-paper") == rollcache.XCache.paper()
    assert policy_named("none") is None
    with pytest.raises(ValueError, match="no setting 'floor'"):
        policy_named("xcache", {"floor": 0.9})
    with pytest.raises(ValueError, match="unknown policy 'teacache'"):
        policy_named("teacache")
