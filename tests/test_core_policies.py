"""Policies are pure: evidence in, decision out, plain numbers only."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from rollcache import Action, Cell, Condition, Evidence, Pass, Reason, Role, Similarity, WindowReuse, XCache
from rollcache.conditions import Moved, Snapshot
from rollcache.decision import Decision, Record
from rollcache.passes import RollcacheError, RollcacheWarning

CELL = Cell("cond", 1, 3, 4)


def evidence(
    cosine: float = 1.0, deviation: float = 0.0, distance: float = 0.0, raw: float = 1.0, replays: int = 0, **where: Any
) -> Evidence:
    return Evidence(
        Pass(role=Role.DENOISE, chunk=5, step=1, **where),
        replays=replays,
        measure=lambda: Similarity(cosine, deviation),
        moved=lambda: Moved(distance, raw),
    )


def reason(config: XCache | WindowReuse, seen: Evidence, cell: Cell = CELL) -> Reason:
    decision = config.build(8).decide(cell, seen)
    assert (decision.action is Action.REPLAY) == (decision.reason is Reason.SIMILAR)
    return decision.reason


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_cosine", 1.5),
        ("min_cosine", -1.1),
        ("min_cosine", math.nan),
        ("min_cosine", "0.9"),
        ("strict_cosine", 2),
        ("margin", -0.1),
        ("ema_alpha", 1.1),
        ("max_deviation", -1),
        ("condition_tol", -1),
        ("front_blocks", -1),
        ("front_blocks", 1.5),
        ("front_blocks", True),
        ("back_blocks", -1),
        ("span_blocks", 0),
        ("warmup_chunks", -1),
        ("max_staleness", -1),
        ("fingerprint_tokens", 0),
        ("min_frames", 0),
        ("first_step", "maybe"),
        ("protect", "on"),
        ("deviation", "l2"),
        ("refresh", "never"),
    ],
)
def test_a_setting_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        XCache(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("condition_tol", -1), ("min_cosine", 2), ("warmup_chunks", -1), ("protect", "none")]
)
def test_a_setting_of_window_reuse_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        WindowReuse(**{field: value})


def test_paper_settings_are_those_of_table_1() -> None:
    paper = XCache.paper()
    assert (paper.front_blocks, paper.back_blocks, paper.warmup_chunks) == (1, 0, 1)
    assert (paper.min_cosine, paper.margin, paper.ema_alpha, paper.max_deviation) == (0.97, 0.02, 0.3, 2.0)
    assert (paper.max_staleness, paper.protect, paper.first_step, paper.fingerprint_tokens) == (
        None,
        "chunk",
        "off",
        32,
    )
    assert XCache.paper(min_cosine=0.9).min_cosine == 0.9


def test_settings_are_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        XCache().min_cosine = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        XCache(0.97)  # type: ignore[misc]


@pytest.mark.parametrize("config", [XCache, WindowReuse])
def test_turning_protection_off_warns(config: Any) -> None:
    with pytest.warns(RollcacheWarning, match="errors add up"):
        config(protect="off")


def test_anchors_must_leave_a_block() -> None:
    with pytest.raises(RollcacheError, match="front_blocks=4 and back_blocks=4"):
        XCache(front_blocks=4, back_blocks=4).build(8)
    assert len(XCache(front_blocks=4, back_blocks=3).build(8).spans) == 1


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (evidence(), Reason.SIMILAR),
        (evidence(cosine=0.9995), Reason.SIMILAR),
        (evidence(cosine=0.9994), Reason.COSINE),
        (evidence(deviation=2.0), Reason.DEVIATION),
        (evidence(deviation=1.9), Reason.SIMILAR),
        (evidence(distance=0.051), Reason.CONDITION),
        (evidence(distance=0.05), Reason.SIMILAR),
        (evidence(kv_update=True), Reason.PROTECTED),
        (evidence(kv_write=True), Reason.PROTECTED),
        (evidence(cosine=math.nan), Reason.NOT_FINITE),
        (evidence(deviation=math.nan), Reason.NOT_FINITE),
        (evidence(deviation=math.inf), Reason.NOT_FINITE),
        (evidence(distance=math.nan), Reason.NOT_FINITE),
        (evidence(distance=math.inf), Reason.CONDITION),
    ],
)
def test_xcache_decides_by_schedule_then_conditions_then_similarity(seen: Evidence, expected: Reason) -> None:
    assert reason(XCache(), seen) is expected


def test_spans_cover_what_is_no_anchor() -> None:
    def spans(**settings: int) -> list[tuple[int, int]]:
        return [(s.start, s.stop) for s in XCache(**settings).build(8).spans]

    assert spans(front_blocks=6) == [(6, 7), (7, 8)]
    assert spans(span_blocks=3) == [(1, 4), (4, 7), (7, 8)]
    assert spans(back_blocks=2, span_blocks=10) == [(1, 6)]


def test_deciding_changes_nothing() -> None:
    policy = XCache(min_cosine=0.5).build(8)
    policy.observe(CELL, policy.decide(CELL, evidence(cosine=0.9)))
    first = [policy.decide(CELL, evidence(cosine=c)) for c in (0.7, 0.95, 0.86)]
    assert first == [policy.decide(CELL, evidence(cosine=c)) for c in (0.7, 0.95, 0.86)]


def test_the_threshold_follows_the_running_mean_from_the_first_similarity_on() -> None:
    policy = XCache(min_cosine=0.5, margin=0.02, ema_alpha=0.3).build(8)
    seen = []
    for cosine in (0.9, 0.95, 0.8):
        decision = policy.decide(CELL, evidence(cosine=cosine))
        seen.append(decision.threshold)
        policy.observe(CELL, decision)
    assert seen == pytest.approx([0.5, 0.88, 0.3 * 0.95 + 0.7 * 0.9 - 0.02])
    policy.reset()
    assert policy.decide(CELL, evidence(cosine=0.9)).threshold == 0.5


def test_cells_learn_apart() -> None:
    policy = XCache(min_cosine=0.5).build(8)
    policy.observe(CELL, policy.decide(CELL, evidence(cosine=0.9)))
    for other in (CELL._replace(step=2), CELL._replace(branch="uncond"), CELL._replace(start=4, stop=5)):
        assert policy.decide(other, evidence(cosine=0.9)).threshold == 0.5


def test_not_finite_evidence_does_not_poison_the_running_mean() -> None:
    policy = XCache(min_cosine=0.5).build(8)
    policy.observe(CELL, policy.decide(CELL, evidence(cosine=math.nan)))
    assert policy.decide(CELL, evidence(cosine=0.9)).reason is Reason.SIMILAR


@pytest.mark.parametrize("literal", [False, True])
def test_forced_steps_enter_the_running_mean_only_in_the_literal_reading(literal: bool) -> None:
    policy = XCache(min_cosine=0.5, ema_on_forced=literal).build(8)
    forced = policy.decide(CELL, evidence(cosine=0.9, kv_update=True))
    assert forced.reason is Reason.PROTECTED
    policy.observe(CELL, forced)
    assert policy.decide(CELL, evidence(cosine=0.9)).threshold == (pytest.approx(0.88) if literal else 0.5)


def test_forced_cells_measure_nothing() -> None:
    def fail() -> Any:
        raise AssertionError("measured")

    seen = Evidence(Pass(role=Role.DENOISE, chunk=5, kv_update=True), measure=fail, moved=fail)
    assert reason(XCache(), seen) is Reason.PROTECTED
    moved = Evidence(Pass(role=Role.DENOISE, chunk=5), measure=fail, moved=lambda: Moved(9.0, 1.0))
    assert reason(XCache(), moved) is Reason.CONDITION


@pytest.mark.parametrize(
    ("mode", "fresh", "cosine", "expected"),
    [
        ("off", True, 0.9996, Reason.SIMILAR),
        ("on", False, 1.0, Reason.FIRST_STEP),
        ("auto", False, 0.9996, Reason.SIMILAR),
        ("auto", True, 1.0, Reason.FIRST_STEP),
        ("strict", True, 0.99, Reason.COSINE),
        ("strict", True, 0.9991, Reason.SIMILAR),
    ],
)
def test_first_step_modes(mode: Any, fresh: bool, cosine: float, expected: Reason) -> None:
    config = XCache(first_step=mode, min_cosine=0.97)
    assert reason(config, evidence(cosine=cosine, fresh_noise=fresh), CELL._replace(step=0)) is expected
    assert reason(config, evidence(cosine=0.98, fresh_noise=fresh), CELL) is Reason.SIMILAR


@pytest.mark.parametrize("config", [XCache, WindowReuse])
@pytest.mark.parametrize(
    ("protect", "where", "expected"),
    [
        ("chunk", {"kv_update": True}, Reason.PROTECTED),
        ("chunk", {"kv_write": True}, Reason.PROTECTED),
        ("pass", {"kv_update": True}, Reason.SIMILAR),
        ("pass", {"kv_write": True}, Reason.PROTECTED),
        ("off", {"kv_update": True}, Reason.SIMILAR),
        ("off", {"kv_write": True}, Reason.SIMILAR),
    ],
)
@pytest.mark.filterwarnings("ignore::rollcache.RollcacheWarning")
def test_protection_modes(config: Any, protect: str, where: dict[str, bool], expected: Reason) -> None:
    assert reason(config(protect=protect), evidence(**where)) is expected


@pytest.mark.parametrize("config", [XCache, WindowReuse])
def test_staleness_counts_replays_in_a_row(config: Any) -> None:
    assert reason(config(max_staleness=2), evidence(replays=1)) is Reason.SIMILAR
    assert reason(config(max_staleness=2), evidence(replays=2)) is Reason.STALE
    assert reason(config(max_staleness=0), evidence()) is Reason.STALE


def test_the_paper_takes_the_raw_cosine_of_the_action_into_the_minimum() -> None:
    assert reason(XCache.paper(), evidence(raw=0.96)) is Reason.COSINE
    assert reason(XCache.paper(), evidence(raw=0.98, distance=99.0)) is Reason.SIMILAR
    assert reason(XCache.paper(), evidence(raw=math.nan)) is Reason.NOT_FINITE


@pytest.mark.parametrize("config", [XCache(min_cosine=1), WindowReuse(min_cosine=1)])
def test_a_floor_of_1_never_replays(config: Any) -> None:
    assert reason(config, evidence(cosine=1.0)) is Reason.COSINE


def test_window_reuse_asks_for_conditions_then_for_the_fingerprint_if_wanted() -> None:
    assert reason(WindowReuse(), evidence(cosine=math.nan)) is Reason.SIMILAR
    assert reason(WindowReuse(), evidence(distance=0.2)) is Reason.CONDITION
    assert reason(WindowReuse(), evidence(distance=math.nan)) is Reason.NOT_FINITE
    assert reason(WindowReuse(), evidence(fresh_noise=True)) is Reason.FRESH_NOISE
    assert reason(WindowReuse(min_cosine=0.9), evidence(fresh_noise=True)) is Reason.SIMILAR
    assert reason(WindowReuse(min_cosine=0.9), evidence(cosine=0.8)) is Reason.COSINE
    assert reason(WindowReuse(min_cosine=0.9), evidence(cosine=math.nan)) is Reason.NOT_FINITE


def moved(now: list[float], then: list[float], scale: list[float] | None = None) -> Moved:
    s = None if scale is None else torch.tensor(scale)
    snapshot = Snapshot.of((Condition("action", torch.tensor(then), s),))
    return snapshot.moved((Condition("action", torch.tensor(now), s),))


def test_standing_still_is_similar_to_standing_still() -> None:
    assert moved([0.0, 0.0], [0.0, 0.0], [9.0, 0.3]) == Moved(0.0, 1.0)
    assert moved([0.0, 0.0], [0.0, 0.0]) == Moved(0.0, 1.0)


def test_the_scaled_test_sees_a_change_of_speed_and_of_curvature_where_the_cosine_sees_neither() -> None:
    faster = moved([20.0, 0.0], [10.0, 0.0], [9.0, 0.3])
    assert faster.cosine == pytest.approx(1.0)
    assert faster.distance == pytest.approx(10 / 9)
    steering = moved([10.0, 0.06], [10.0, 0.0], [9.0, 0.3])
    assert steering.cosine > 0.9999
    assert steering.distance == pytest.approx(0.2)


def test_without_a_scale_the_test_is_relative_to_the_whole_vector() -> None:
    assert moved([11.0, 0.0], [10.0, 0.0]).distance == pytest.approx(0.1)
    assert moved([1.0], [0.0]).distance == math.inf


def test_conditions_of_another_name_or_shape_are_infinitely_far() -> None:
    one = (Condition("action", torch.zeros(2)),)
    for other in ((), (Condition("action", torch.zeros(3)),), (Condition("pose", torch.zeros(2)),), (*one, *one)):
        assert Snapshot.of(one).moved(other).distance == math.inf


def test_a_condition_that_is_not_finite_never_passes() -> None:
    assert reason(XCache(), evidence(distance=moved([math.nan], [0.0]).distance)) is Reason.NOT_FINITE
    assert reason(WindowReuse(), evidence(distance=moved([math.inf], [math.inf]).distance)) is Reason.NOT_FINITE


def test_a_snapshot_is_not_changed_by_its_caller() -> None:
    action = torch.zeros(2)
    snapshot = Snapshot.of((Condition("action", action, torch.ones(2)),))
    action += 5
    assert snapshot.moved((Condition("action", action, torch.ones(2)),)).distance == 5.0


def test_an_explanation_is_a_sentence_with_the_numbers_and_their_limits() -> None:
    d = Decision(Action.COMPUTE, Reason.COSINE, 0.95, 0.97, 0.5, 0.03)
    record = Record(7, 2, 3, 1, "cond", "denoise", *d[:4], d.deviation, d.condition_distance, 6, 0)
    assert XCache().explain(record) == (
        "Chunk 7, step 2, block 3 (cond): computed, input is not similar enough: cosine 0.95000 < 0.97000, "
        "deviation 0.5 < 2, conditions moved by 0.03 <= 0.05, compared with chunk 6."
    )
    anchor = Record(7, 2, 0, 1, "cond", "denoise", Action.COMPUTE, Reason.ANCHOR, *[math.nan] * 4, None, 0)
    assert XCache().explain(anchor) == "Chunk 7, step 2, block 0 (cond): computed, anchor block."
