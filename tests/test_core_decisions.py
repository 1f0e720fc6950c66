"""The library decides as the naive sequential reference does, and produces what it produces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from dummies import Stack, mixing
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import NaiveXCache, Outcome
from torch import Tensor

import rollcache
from rollcache import Action, Condition, Decision, Reason, Segment, XCache
from rollcache.fingerprint import allocate

DEPTH, WIDTH = 5, 8
CAMERAS = (
    Segment("front", 2, (2, 3, 4), start=0, view_stride=12, frame_stride=32),
    Segment("side", 1, (2, 2, 4), start=24, view_stride=8, frame_stride=32),
)  # frame-interleaved: 32 tokens a frame


def drive(
    config: XCache,
    *,
    seed: int,
    changes: list[float],
    steps: int = 2,
    batch: int = 1,
    kv_every: int = 4,
    turns: list[float] | None = None,
    lookahead: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[tuple[Any, ...]], float]:
    """Run both over a rollout whose input moves by `changes` from chunk to chunk.

    Returns:
        The first disagreement with what led to it, if there is one, and the largest difference of the outputs before.
    """
    g = torch.Generator().manual_seed(seed)
    model = mixing(DEPTH, WIDTH, seed, strength=0.3).to(dtype)
    start = torch.randn(batch, 64, WIDTH, generator=g)
    drift = torch.randn(steps, len(changes), batch, 64, WIDTH, generator=g)
    conditions = [torch.zeros(3) for _ in changes]
    for n, turn in enumerate(turns or []):
        conditions[n][1] = turn
    scale = torch.tensor([9.0, 0.3, 1.0])

    naive = NaiveXCache(
        config, DEPTH, CAMERAS, lambda s: allocate(s.grid, config.fingerprint_tokens, config.min_frames)
    )
    handle = rollcache.enable(model, config, blocks=list(model.blocks), kv_writes="commit_only", lookahead=lookahead)
    bare = [block.__class__.forward.__get__(block) for block in model.blocks]
    wrapped = [lambda hs, *extra, f=f: [f(hs[0], *extra)] for f in bare]

    differences, error = [], 0.0
    with torch.no_grad(), handle.rollout():
        for n, change in enumerate(changes):
            condition = (Condition("action", conditions[n], scale),)
            with handle.chunk(conditions=condition, segments=CAMERAS, kv_update=n % kv_every == 0):
                for t in range(steps):
                    start = start + change * drift[t, n]
                    x = start.to(dtype)
                    handle.step()
                    ours = model(x)
                    theirs, outcomes = naive.run(
                        wrapped, [x], chunk=n, step=t, conditions=condition, kv_update=n % kv_every == 0
                    )
                    records = list(handle.trace)[-DEPTH:]
                    assert [r.block for r in records] == list(range(DEPTH))
                    wrong = [
                        (n, t, r, o)
                        for r, o in zip(records, outcomes, strict=True)
                        if (r.action is Action.REPLAY) != o.skipped
                    ]
                    if wrong:  # the blocks after the first one that differs saw another hidden state
                        return [*differences, wrong[0]], error
                    if dtype is torch.float32:
                        same_evidence(records, outcomes)
                    error = max(error, float((ours - theirs[0]).abs().max()))
    handle.disable()
    return differences, error


def same_evidence(records: list[rollcache.Record], outcomes: list[Outcome]) -> None:
    """What was measured in look-ahead is what the reference measured on the inputs themselves."""
    for r, o in zip(records, outcomes, strict=True):
        assert (o.cosine is None) == (r.cosine != r.cosine), (r, o)
        if o.cosine is not None:
            assert r.cosine == pytest.approx(o.cosine, abs=1e-5), (r, o)
            assert r.threshold == pytest.approx(o.threshold, abs=1e-5) or r.threshold > 1
            assert r.deviation == pytest.approx(o.deviation, rel=1e-3, abs=1e-4), (r, o)


CONFIGS = st.builds(
    XCache,
    min_cosine=st.sampled_from([-1.0, 0.9, 0.97, 0.995, 0.9995, 1.0]),
    margin=st.sampled_from([0.0, 0.02]),
    ema_alpha=st.sampled_from([0.0, 0.3, 1.0]),
    max_deviation=st.sampled_from([None, 0.3, 2.0]),
    front_blocks=st.integers(0, 2),
    back_blocks=st.integers(0, 2),
    warmup_chunks=st.integers(0, 2),
    max_staleness=st.sampled_from([None, 0, 1, 2]),
    first_step=st.sampled_from(["off", "on", "strict", "auto"]),
    protect=st.sampled_from(["chunk", "pass"]),
    fingerprint_tokens=st.sampled_from([4, 32]),
    min_frames=st.integers(1, 2),
    deviation=st.sampled_from(["element", "token"]),
    refresh=st.sampled_from(["on_compute", "always"]),
    ema_on_forced=st.booleans(),
    condition_cosine=st.booleans(),
    condition_tol=st.sampled_from([None, 0.1]),
)
CHANGES = st.lists(st.sampled_from([0.0, 1e-3, 1e-2, 3e-2, 0.1, 0.3]), min_size=3, max_size=7)
TURNS = st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.2]), max_size=3)


def near_miss(difference: tuple[Any, ...], config: XCache, margin: float) -> bool:
    """Whether a disagreement lies within `margin` of a threshold: relative for the cosine's distance from 1."""
    _, _, record, outcome = difference
    if outcome.cosine is None or record.cosine != record.cosine:
        return False
    close = abs(outcome.cosine - outcome.threshold) < margin
    limit = config.max_deviation
    return close or (limit is not None and abs(outcome.deviation - limit) < 100 * margin * limit)


@given(
    config=CONFIGS, seed=st.integers(0, 9), changes=CHANGES, turns=TURNS, batch=st.integers(1, 2), ahead=st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_decisions_and_outputs_equal_the_naive_sequential_reference(
    config: XCache, seed: int, changes: list[float], turns: list[float], batch: int, ahead: bool
) -> None:
    differences, error = drive(config, seed=seed, changes=changes, turns=turns, batch=batch, lookahead=ahead)
    assert all(near_miss(d, config, 2e-6) for d in differences), differences
    assert error < 1e-4


@given(config=CONFIGS, seed=st.integers(0, 9), changes=CHANGES)
@settings(max_examples=20, deadline=None)
def test_in_bfloat16_decisions_differ_at_most_within_a_margin_of_the_threshold(
    config: XCache, seed: int, changes: list[float]
) -> None:
    differences, _ = drive(config, seed=seed, changes=changes, dtype=torch.bfloat16)
    assert all(near_miss(d, config, 1e-3) for d in differences), differences


@pytest.mark.parametrize("config", [XCache(), XCache.paper(), XCache(min_cosine=0.9, front_blocks=0)])
def test_look_ahead_and_block_by_block_gating_take_the_same_decisions(config: XCache) -> None:
    for changes in ([0, 0, 0.01, 0, 0.02, 0], [0, 0.03, 0.001, 0.1, 0, 0]):
        ahead = drive(config, seed=3, changes=changes)
        behind = drive(config, seed=3, changes=changes, lookahead=False)
        assert ahead[0] == behind[0] == []


SHUT: list[set[int]] = [set(), {0}, {2}, {1, 2}, set(), {0, 4}, {3}, set()]
"""Blocks that are computed whatever the gate says, per chunk."""
OPEN = XCache(min_cosine=-1, margin=2, max_deviation=None, front_blocks=0, condition_tol=None)


@pytest.fixture(params=["unseen", "seen"])
def holes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Compute the blocks in `SHUT`, after a look at their input or without one.

    Runs get holes, and neighbours stem from different passes.
    """
    policy_of = type(OPEN.build(DEPTH))
    decide = policy_of.decide

    def but_not_shut(self: Any, cell: Any, evidence: Any) -> Any:
        closed = cell.start in SHUT[evidence.where.chunk]
        if closed and request.param == "unseen":
            return Decision(Action.COMPUTE, Reason.STALE)
        decision = decide(self, cell, evidence)
        return decision._replace(action=Action.COMPUTE) if closed else decision

    monkeypatch.setattr(policy_of, "decide", but_not_shut)


@pytest.mark.usefixtures("holes")
def test_a_run_with_holes_is_replayed_around_them_and_as_one_when_they_close() -> None:
    """Sums over runs are always those of the residuals stored last."""
    model, x = mixing(DEPTH, WIDTH), torch.randn(1, 64, WIDTH)
    handle = rollcache.enable(model, OPEN, blocks=list(model.blocks), kv_writes="commit_only")
    kept = residuals(model, x)
    model.forget_calls()
    with torch.no_grad(), handle.rollout():
        for n, shut in enumerate(SHUT):
            with handle.chunk():
                handle.step()
                y = model(x + 0.1 * n)
                assert model.calls == [int(n == 0 or b in shut) for b in range(DEPTH)]
                h = x + 0.1 * n
                for b, block in enumerate(model.blocks):
                    if b in shut:
                        kept[b] = type(block).forward(block, h) - h
                    h = h + kept[b]
                torch.testing.assert_close(y, h)
                model.forget_calls()


@pytest.mark.usefixtures("holes")
@pytest.mark.parametrize("refresh", ["on_compute", "always"])
@pytest.mark.parametrize("batch", [1, 2])
def test_look_ahead_over_holes_sees_what_the_inputs_themselves_show(refresh: Any, batch: int) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 64, WIDTH, generator=g)
    inputs = [x + 0.3 * n * torch.randn(batch, 64, WIDTH, generator=g) for n in range(len(SHUT))]

    def evidence(lookahead: bool) -> list[tuple[float, float]]:
        model = mixing(DEPTH, WIDTH)
        config = replace(OPEN, refresh=refresh)
        handle = rollcache.enable(
            model, config, blocks=list(model.blocks), kv_writes="commit_only", lookahead=lookahead
        )
        with torch.no_grad(), handle.rollout():
            for y in inputs:
                with handle.chunk(segments=CAMERAS):
                    handle.step()
                    model(y)
        return [(r.cosine, r.deviation) for r in handle.trace if r.chunk]

    for (cosine, deviation), (expected, largest) in zip(evidence(True), evidence(False), strict=True):
        assert cosine == pytest.approx(expected, abs=1e-5, nan_ok=True)
        assert deviation == pytest.approx(largest, rel=1e-3, nan_ok=True)


def test_a_fingerprint_that_was_never_taken_is_never_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block 0 is computed and block 1 replayed without a look: what block 1 was stored with is then unknown."""
    policy_of = type(OPEN.build(3))
    decide = policy_of.decide

    def blindly_in_chunk_1(self: Any, cell: Any, evidence: Any) -> Any:
        if evidence.where.chunk == 1:
            return Decision(Action.COMPUTE if cell.start == 0 else Action.REPLAY, Reason.STALE)
        return decide(self, cell, evidence)

    monkeypatch.setattr(policy_of, "decide", blindly_in_chunk_1)
    model = mixing(3, WIDTH)
    handle = rollcache.enable(model, OPEN, blocks=list(model.blocks), kv_writes="commit_only")
    with torch.no_grad(), handle.rollout():
        for _ in range(3):
            with handle.chunk():
                handle.step()
                model(torch.randn(1, 64, WIDTH))
    last = [(r.action, r.reason) for r in handle.trace if r.chunk == 2]
    assert last[0][0] is Action.REPLAY
    assert last[1:] == [(Action.COMPUTE, Reason.NOT_FINITE)] * 2


def residuals(model: Stack, x: Tensor) -> list[Tensor]:
    """What every block adds when all are computed."""
    out = []
    for block in model.blocks:
        y = type(block).forward(block, x)
        out.append(y - x)
        x = y
    return out
