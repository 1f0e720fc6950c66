"""C3ache: at every step what the stack added at that step of the last refreshed chunk."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dummies import doubling, mixing
from hypothesis import given, settings
from hypothesis import strategies as st
from stack_by_hand import (
    Kept,
    Place,
    Rule,
    by_hand,
    by_library,
    cached,
    closed_loop,
    same,
    street,
    street_by_hand,
    street_by_library,
)
from torch import Tensor

from rollcache import Action, Cell, Pass, Reason, Role
from rollcache.decision import Record
from rollcache.policies.base import StackEvidence, Stored
from rollcache.policies.c3ache import C3ache


class Naive(Rule):
    """One residual for every branch and step, with the chunk that it came from."""

    def __init__(self, config: C3ache) -> None:
        super().__init__()
        self.config = config

    def past(self, at: Place) -> list[Kept]:
        mine = [k for k in self.kept if (k.place.step, k.place.branch) == (at.step, at.branch)]
        return mine[-1:]

    def weights(self, at: Place, modulated: Tensor, past: list[Kept]) -> list[float] | None:
        c = self.config
        inside = c.first <= at.step <= (math.inf if c.last is None else c.last)
        if at.chunk < c.warmup_chunks or not inside or not past:
            return None
        return [1.0] if at.chunk - past[0].place.chunk < c.period else None


configs = st.builds(
    lambda width, **rest: C3ache(last=None if width is None else rest["first"] + width, **rest),
    width=st.none() | st.integers(0, 4),
    period=st.integers(1, 4),
    first=st.integers(0, 4),
    warmup_chunks=st.integers(0, 2),
)


@given(config=configs, seed=st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_in_closed_loop_it_equals_the_rule_by_hand(config: C3ache, seed: int) -> None:
    loop = {"chunks": 6, "steps": 5, "branches": ("cond", "uncond"), "seed": seed}
    same(by_library(mixing(3, 8), config, **loop), by_hand(mixing(3, 8), Naive(config), **loop))


@pytest.mark.parametrize(
    "config", [C3ache(), C3ache(period=3, first=2, last=8), C3ache(period=2, first=0, last=4, warmup_chunks=2)]
)
def test_on_the_street_model_it_equals_the_rule_by_hand(config: C3ache) -> None:
    on_street = street_by_library(config, chunks=4)
    same(on_street, street_by_hand(Naive(config), chunks=4))
    replayed = {(chunk, step) for chunk, step, _, word in on_street[1] if word == "replay"}
    assert replayed and {step for _, step in replayed} == {s for s in range(12) if config.caches(s)}


def test_a_refresh_is_due_every_period_and_steps_outside_of_the_window_are_computed() -> None:
    """Doubling blocks add 15 times their input; the input says which chunk it belongs to."""
    model = doubling(4)
    with cached(model, C3ache(period=3, first=1, last=1)) as handle, torch.no_grad(), handle.rollout():
        out = []
        for n in range(6):
            with handle.chunk():
                for _ in range(3):
                    handle.step()
                    out.append(float(model(torch.full((1, 2, 3), float(n + 1)))[0, 0, 0]))
    computed = [16.0 * (n + 1) for n in range(6)]
    assert out[0::3] == computed and out[2::3] == computed
    assert out[1::3] == [16, 2 + 15, 3 + 15, 64, 5 + 60, 6 + 60]
    assert "3 chunks, 2 since chunk 0" in handle.explain(2, 1, 0)


def test_a_period_of_1_is_the_bare_model_bit_for_bit() -> None:
    config = C3ache(period=1, first=0, warmup_chunks=0)
    model = mixing(3, 8)
    bare = closed_loop(model, lambda at: None)
    assert all(torch.equal(a, b) for a, b in zip(bare, by_library(model, config)[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(street(), street_by_library(config)[0], strict=True))


@given(periods=st.tuples(st.integers(1, 8), st.integers(1, 8)), chunks=st.integers(1, 12))
@settings(max_examples=20, deadline=None)
def test_a_longer_period_or_a_wider_window_never_computes_more(periods: tuple[int, int], chunks: int) -> None:
    def computed(**changes: int | None) -> int:
        _, did = by_library(mixing(1, 4), C3ache(**changes), chunks=chunks, steps=3, shape=(1, 2, 4))  # type: ignore[arg-type]
        return sum(word == "compute" for *_, word in did)

    short, long = sorted(periods)
    assert computed(period=long) <= computed(period=short)
    assert computed(period=long, first=0) <= computed(period=long, first=1) <= computed(period=long, first=1, last=1)


def test_branches_have_residuals_of_their_own() -> None:
    model = doubling(1)
    out = []
    with cached(model, C3ache(first=0)) as handle, torch.no_grad(), handle.rollout():
        for pair in ((1.0, 10.0), (2.0, 20.0)):
            with handle.chunk():
                for branch, x in zip(("cond", "uncond"), pair, strict=True):
                    handle.step(0, branch=branch)
                    out.append(float(model(torch.full((1, 1, 1), x))))
    assert out == [2, 20, 3, 30]


def test_after_a_reset_everything_is_computed_anew() -> None:
    model = mixing(2, 8)
    with cached(model, C3ache(first=0)) as handle, torch.no_grad():
        for _ in range(2):
            with handle.rollout():
                for _ in range(2):
                    with handle.chunk():
                        handle.step()
                        model(torch.randn(1, 5, 8))
            handle.reset()
        assert [str(r.action) for r in handle.trace] == ["compute", "replay"] * 2


def test_at_another_noise_level_and_from_a_residual_that_is_not_finite_nothing_is_reused() -> None:
    model = mixing(2, 8)
    with cached(model, C3ache(first=0)) as handle, torch.no_grad():
        with handle.rollout():
            for level, x in ((1.0, 1.0), (0.9, math.nan), (0.9, 1.0), (0.9, 1.0)):
                with handle.chunk():
                    handle.step(0, time=level)
                    out = model(torch.full((1, 5, 8), x))
        assert out.isfinite().all()
        actions = [(str(r.action), r.reason) for r in handle.trace]
    assert [a for a, _ in actions] == ["compute", "compute", "compute", "replay"]
    assert actions[1][1] is Reason.NOTHING_STORED and actions[2][1] is Reason.NOT_FINITE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"period": 0}, "^period must be"),
        ({"period": 1.5}, "^period must be"),
        ({"first": -1}, "^first must be"),
        ({"last": -1}, "^last must be"),
        ({"first": 3, "last": 2}, r"^last \(2\) lies before first \(3\)"),
        ({"warmup_chunks": -1}, "^warmup_chunks must be"),
    ],
)
def test_a_setting_out_of_range_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        C3ache(**changes)


def test_explanations_carry_the_numbers() -> None:
    config = C3ache(period=4, first=1, last=6)

    def explained(step: int, age: int) -> str:
        where = Pass(role=Role.DENOISE, chunk=9, step=step)
        stored = (Stored(9 - age, step, None, torch.ones(1)),)
        seen = StackEvidence(where, lambda _: torch.ones(1), stored=stored, age=age)
        d = config.build(4).decide(Cell("cond", step, 0, 4), seen)
        return config.explain(Record(9, step, 0, 4, "cond", "denoise", d.action, d.reason, *[math.nan] * 4, 9 - age, 0))

    assert explained(3, 2) == (
        "Chunk 9, step 3, whole stack (cond): replayed, the schedule says so: refreshed every 4 chunks, 2 since "
        "chunk 7."
    )
    assert "computed, the schedule says so: refreshed every 4 chunks, 4 since chunk 5" in explained(3, 4)
    assert explained(7, 1) == (
        "Chunk 9, step 7, whole stack (cond): computed, the schedule says so: only steps 1 to 6 are cacheable."
    )
    first = Record(0, 3, 0, 4, "cond", "denoise", Action.COMPUTE, Reason.WARMUP, *[math.nan] * 4, None, 0)
    assert config.explain(first) == "Chunk 0, step 3, whole stack (cond): computed, warm-up."
