"""Replan: keep, amend or replan a window, by how far the conditions moved."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from dummies import Stack, doubling
from hypothesis import given, settings
from hypothesis import strategies as st
from street_doubles import random_world
from torch import Tensor

import rollcache
from rollcache import Action, Cell, Decision, Pass, Reason, Replan, RollcacheError, RollcacheWarning, Segment
from rollcache.conditions import Moved
from rollcache.policies.base import StackEvidence
from rollcache.street.data import extrapolate, hold
from rollcache.street.protocol import Protocol
from rollcache.street.rig import CELLS
from rollcache.street.world import Session, Start, World

GRID = (Segment.contiguous("all", 1, (4, 1, 2)),)
CELL = Cell("cond", 0, 0, 3)


def ask(config: Replan, distance: float, frame: int | None = 1, replays: int = 0, **where: bool) -> Decision:
    at = Pass(role=rollcache.Role.DENOISE, chunk=frame or 0, segments=GRID, frame=frame, **where)  # type: ignore[arg-type]
    evidence = StackEvidence(
        at, lambda name: torch.zeros(1, 8, 2), repairable=True, replays=replays, moved=lambda: Moved(distance, 1.0)
    )
    return config.build(3).decide(CELL, evidence)


def naive(
    config: Replan, distance: float, frame: int, replays: int, kv_update: bool, fresh: bool
) -> tuple[str, list[int]]:
    """What is run: a word and the latent frames."""
    exact = (kv_update and config.protect == "chunk") or fresh or not math.isfinite(distance)
    if exact or (config.max_kept is not None and replays >= config.max_kept):
        return "compute", [0, 1, 2, 3]
    if distance <= config.amend_above:
        return "keep", []
    if distance <= config.replan_above:
        return "amend", [frame]
    return "replan", [0, 1, 2, 3]


@given(
    limits=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    distance=st.one_of(st.floats(0, 2), st.sampled_from([math.inf, math.nan])),
    frame=st.integers(0, 3),
    replays=st.integers(0, 4),
    most=st.one_of(st.none(), st.integers(0, 3)),
    kv_update=st.booleans(),
    fresh=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_it_decides_as_a_table_written_by_hand(
    limits: tuple[float, float],
    distance: float,
    frame: int,
    replays: int,
    most: int | None,
    kv_update: bool,
    fresh: bool,
) -> None:
    config = Replan(amend_above=min(limits), replan_above=max(limits), max_kept=most)
    found = ask(config, distance, frame, replays, kv_update=kv_update, fresh_noise=fresh)
    word, frames = naive(config, distance, frame, replays, kv_update, fresh)
    assert (found.level or str(found.action)) == word
    if found.tokens is not None:
        assert list(found.tokens.frames) == frames and found.share == len(frames) / 4


@given(distance=st.floats(0, 2), frame=st.integers(0, 3), low=st.floats(0, 1), higher=st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_a_larger_tolerance_never_computes_more(distance: float, frame: int, low: float, higher: float) -> None:
    def share(tolerance: float) -> float:
        found = ask(Replan(amend_above=tolerance, replan_above=tolerance + 0.2), distance, frame)
        return {Action.COMPUTE: 1.0, Action.REPLAY: 0.0}.get(found.action, found.share)

    assert share(max(low, higher)) <= share(min(low, higher))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"amend_above": -1}, "amend_above must be at least 0"),
        ({"replan_above": math.nan}, "replan_above must be at least 0"),
        ({"amend_above": 0.4}, r"replan_above \(0.3\) lies below amend_above \(0.4\)"),
        ({"max_kept": -1}, "max_kept must be an integer"),
        ({"repairs": "dense"}, "repairs must be one of 'sparse', 'refresh'"),
        ({"protect": "never"}, "protect must be one of"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Replan(**settings)  # type: ignore[arg-type]


def test_without_protection_it_warns() -> None:
    with pytest.warns(RollcacheWarning, match="protect"):
        Replan(protect="off")


def test_a_loop_that_does_not_say_what_it_emits_is_told() -> None:
    with pytest.raises(RollcacheError, match=r"Pass\.frame"):
        ask(Replan(), 0.0, None)


def test_a_model_without_sparse_blocks_is_refused_with_the_way_out() -> None:
    model = doubling(2)
    with pytest.raises(RollcacheError, match="repairs='refresh'"):
        rollcache.enable(model, Replan(), blocks=list(model.blocks), kv_writes="commit_only")


def test_frames_are_computed_as_decided_and_a_replan_renews_the_plan() -> None:
    """Doubling blocks on a window of four frames; the input grows, so stale frames show in the output."""
    from rollcache import Condition
    from rollcache.adapters.spec import Adapter

    model = doubling(1)
    moved = [0.0, 0.1, 1.0, 1.0]

    def locate(model: Stack, args: tuple[Tensor, ...], kwargs: dict[str, object]) -> Pass:
        n = int(args[0].flatten()[0]) - 1
        condition = Condition("action", torch.tensor([moved[n]]), torch.tensor([1.0]))
        return Pass(
            role=rollcache.Role.DENOISE,
            chunk=n,
            segments=GRID,
            frame=n,
            conditions=(condition,),
            kv_update=n == 0,
            fresh_noise=n == 0,
        )

    adapter = Adapter(blocks=lambda m: list(m.blocks), locate=locate)
    handle = rollcache.enable(model, Replan(repairs="refresh"), adapter=adapter)
    with torch.no_grad():
        out = [model(torch.full((1, 8, 1), float(n + 1)))[0, ::2, 0].tolist() for n in range(4)]
    assert out[0] == [2, 2, 2, 2]
    assert out[1] == [3, 4, 3, 3]  # amended: frame 1 doubles, the others add the residual of 1
    assert out[2] == [6, 6, 6, 6]  # planned anew
    assert out[3] == [7, 7, 7, 7]  # kept: nothing moved since
    assert [r.level for r in handle.trace] == ["", "amend", "replan", "keep"]
    assert handle.stats().tokens == pytest.approx((0.25 + 1 + 0) / 3)
    assert "amend, the conditions moved (moved 0.1; amend above 0.03" in handle.explain(1, 0, 0)


def start(seed: int = 0) -> Start:
    generator = torch.Generator().manual_seed(seed)
    return Start(torch.randn(8, CELLS, 24, generator=generator), torch.full((8, 4), 5.0))


def drive(world: World, actions: Tensor, protocol: Protocol, policy: Replan | None, **options: object) -> list[Tensor]:
    handle = None if policy is None else rollcache.enable(world.model, policy)
    reuse = handle.skip_chunk if handle is not None and options.pop("no_pass", False) else None
    session = Session(world, start(), protocol, reuse=reuse)
    out = [session.step(a, *p) for a, *p in zip(actions, *options.values(), strict=True)]  # type: ignore[call-overload]
    if handle is not None:
        drive.stats = handle.stats()  # type: ignore[attr-defined]
        drive.trace = list(handle.trace)  # type: ignore[attr-defined]
        handle.disable()
    return [e.latents for e in out]


def actions(*yaw: float) -> Tensor:
    return torch.tensor([[[5.0, y], [5.0, y]] for y in yaw])


def test_amended_frames_follow_most_of_a_change_and_differ_through_the_stale_keys_of_the_others() -> None:
    world, protocol = random_world(), Protocol(steps=2)
    turning = actions(0, 0, 0, 0, 0, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.0)
    full = drive(world, turning, protocol, None)
    ours = drive(world, turning, protocol, Replan(amend_above=0, replan_above=9, repairs="refresh"))
    levels = [r.level or "compute" for r in drive.trace if r.step == 0]  # type: ignore[attr-defined]
    first, rest = ["compute", "keep", "keep", "keep"], ["compute", "amend", "amend", "amend"]
    assert levels == [*first, *rest, *first[:3], "amend"]
    frozen = drive(world, turning, protocol, Replan(amend_above=9, replan_above=9, repairs="refresh"))
    error = [float((a - b).norm() / b.norm()) for a, b in zip(ours, full, strict=True)]
    stale = [float((a - b).norm() / b.norm()) for a, b in zip(frozen, full, strict=True)]
    assert max(error[:5]) < 1e-5
    assert error[5] < 0.5 * stale[5] and error[11] < 0.5 * stale[11]


def test_replanning_at_every_movement_is_full_compute() -> None:
    world, protocol = random_world(), Protocol(steps=2)
    turning = actions(0, 0, 0, 0.1, 0, 0.4, 0.4, 0.2)
    full = drive(world, turning, protocol, None)
    ours = drive(world, turning, protocol, Replan(amend_above=0, replan_above=0))
    levels = [r.level for r in drive.trace if r.step == 0]  # type: ignore[attr-defined]
    assert levels == ["", "keep", "keep", "replan", "", "replan", "keep", "replan"]
    for a, b in zip(ours, full, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("repairs", ["sparse", "refresh"])
def test_kept_chunks_need_no_pass_and_commits_stay_exact(repairs: str) -> None:
    world, protocol = random_world(), Protocol(steps=2)
    policy = Replan(repairs=repairs)  # type: ignore[arg-type]
    turning = actions(0, 0, 0.02, 0.02, 0.02, 0.4, 0.4, 0.4)
    with_passes = drive(world, turning, protocol, policy)
    passes = drive.stats.passes  # type: ignore[attr-defined]
    without = drive(world, turning, protocol, policy, no_pass=True)
    assert passes["commit"] == 2 == drive.stats.passes["commit"]  # type: ignore[attr-defined]
    assert drive.stats.passes["denoise"] < passes["denoise"]  # type: ignore[attr-defined]
    for a, b in zip(with_passes, without, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)


def test_a_plan_that_comes_true_is_kept_to_its_end() -> None:
    world, protocol = random_world(), Protocol(steps=2)
    turning = actions(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    plans = [turning[n + 1 :].flatten(0, 1) for n in range(8)]
    drive(world, turning, protocol, Replan(repairs="refresh"), plan=plans)
    levels = [r.level for r in drive.trace if r.step == 0]  # type: ignore[attr-defined]
    assert levels == ["", "keep", "keep", "keep"] * 2
    drive(world, turning, protocol, Replan(repairs="refresh"))
    assert {r.level for r in drive.trace} == {"", "replan"}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"a plan must be finite numbers \[frames, 2\]"):
        Session(world, start(), protocol).step(turning[0], torch.zeros(3))
    given = Session(world, start(), protocol).step(turning[0], turning[1:].flatten(0, 1)).latents
    held = Session(world, start(), protocol).step(turning[0]).latents
    nothing = Session(world, start(), protocol).step(turning[0], torch.zeros(1, 2)).latents
    assert not torch.equal(given, held) and torch.equal(nothing, held)


def test_extrapolated_actions_go_on_as_they_changed_and_never_backwards() -> None:
    steady = torch.tensor([[5.0, 0.0, 5.0, 0.1], [0.0] * 4, [0.0] * 4])
    out = extrapolate(steady, 1)
    assert torch.equal(out[0], steady[0])
    assert out[1].tolist() == pytest.approx([5.0, 0.2, 5.0, 0.3])
    assert out[2].tolist() == pytest.approx([5.0, 0.35, 5.0, 0.4])
    braking = extrapolate(torch.tensor([[4.0, 0.0, 1.0, 0.0], [0.0] * 4]), 1)
    assert braking[1].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert torch.equal(extrapolate(steady, 3), steady) and torch.equal(hold(steady, 3), steady)
    world = random_world()
    first = torch.tensor([[5.0, 0.0], [5.0, 0.2]])
    ahead = Protocol(steps=2, ahead="extrapolate")
    assert "extrapolated" in ahead.describe() and "extrapolated" not in Protocol().describe()
    a = Session(world, start(), ahead).step(first).latents
    b = Session(world, start(), replace(ahead, ahead="hold")).step(first).latents
    assert not torch.equal(a, b)
    with pytest.raises(ValueError, match="unknown ahead"):
        Protocol(ahead="guess")  # type: ignore[arg-type]


def test_nothing_moves_and_the_reason_is_told() -> None:
    decision = ask(Replan(), 0.0)
    assert (decision.action, decision.reason, decision.level) == (Action.REPLAY, Reason.SIMILAR, "keep")
