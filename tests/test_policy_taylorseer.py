"""TaylorSeer: a fixed schedule, and polynomials through what was computed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from dummies import mixing
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
    computed,
    drive,
    same,
    street,
    street_by_hand,
    street_by_library,
)
from torch import Tensor, nn

from rollcache import Action, Cell, Pass, Reason, Role, RollcacheError
from rollcache.decision import Record
from rollcache.policies.base import StackEvidence, Stored
from rollcache.policies.extrapolation import distinct, extrapolation
from rollcache.policies.taylorseer import TaylorSeer


class Naive(Rule):
    """The schedule as a counter; the polynomial by solving for its coefficients, or the paper's recursion."""

    def __init__(self, config: TaylorSeer) -> None:
        super().__init__()
        self.config = config
        self.counter: dict[str, int] = {}

    def weights(self, at: Place, modulated: Tensor, past: list[Kept]) -> list[float] | None:
        c = self.config
        waited = self.counter.get(at.branch, 0) + 1
        if at.step < c.warmup or not past or waited == c.interval or at.step >= c.steps - c.tail:
            self.counter[at.branch] = 0
            return None
        self.counter[at.branch] = waited
        past = past[: c.order + 1]
        if c.order == 0 or len(past) == 1:
            return [1.0]
        where = [k.place.time if c.in_sigma else float(k.place.step) for k in past]
        now = at.time if c.in_sigma else float(at.step)
        # A prediction is linear in what it predicts from: its weights are what it makes of unit vectors.
        predict = published if c.form == "published" else fitted
        return [predict(now, where, list(unit)) for unit in np.eye(len(past))]


def fitted(now: float, where: list[float], values: list[float]) -> float:
    """The polynomial through all values, from its coefficients."""
    powers = [[(x - now) ** k for k in range(len(where))] for x in where]
    return float(np.linalg.solve(np.array(powers), np.array(values))[0])


def published(now: float, where: list[float], values: list[float]) -> float:
    """Factors that every computed step updates by a difference over the last gap, the oldest step first."""
    factors: list[float] = []
    before = math.nan
    for x, value in list(zip(where, values, strict=True))[::-1]:
        updated = [value]
        for old in factors:
            updated.append((updated[-1] - old) / (x - before))
        factors, before = updated, x
    ahead = now - where[0]
    return sum(ahead**k / math.factorial(k) * f for k, f in enumerate(factors))


gaps = st.lists(st.integers(1, 6), min_size=3, max_size=3)


@given(gaps=gaps, count=st.integers(1, 3))
def test_weights_are_those_of_a_polynomial_that_was_solved_for(gaps: list[int], count: int) -> None:
    at, *known = (20.0, 20.0 - gaps[0], 20.0 - gaps[0] - gaps[1], 20.0 - sum(gaps))
    known = known[:count]
    naive = [fitted(at, known, list(unit)) for unit in np.eye(count)]
    assert extrapolation(at, known) == pytest.approx(naive, abs=1e-9)
    paper = [published(at, known, list(unit)) for unit in np.eye(count)]
    assert extrapolation(at, known, "published") == pytest.approx(paper, abs=1e-9)
    assert sum(extrapolation(at, known)) == pytest.approx(1)
    assert sum(extrapolation(at, known, "published")) == pytest.approx(1)


@given(gaps=gaps, a=st.integers(-5, 5), b=st.integers(-5, 5), c=st.integers(-5, 5))
def test_a_line_is_met_by_order_1_and_a_parabola_by_order_2_whatever_the_gaps(
    gaps: list[int], a: int, b: int, c: int
) -> None:
    at, *known = (20.0, 20.0 - gaps[0], 20.0 - gaps[0] - gaps[1], 20.0 - sum(gaps))

    def predicted(order: int, values: list[float]) -> float:
        return sum(w * v for w, v in zip(extrapolation(at, known[: order + 1]), values, strict=False))

    assert predicted(0, [float(a)] * 3) == a
    assert predicted(1, [a + b * x for x in known]) == pytest.approx(a + b * at, abs=1e-6)
    assert predicted(2, [a + b * x + c * x * x for x in known]) == pytest.approx(a + b * at + c * at * at, abs=1e-6)


def test_the_published_sum_meets_lines_and_misses_parabolas_by_half_a_second_difference() -> None:
    """With even gaps g and s steps of g ahead: s^2/2 for s(s+1)/2 times the second difference, 2 g^2 for x^2."""
    known = (8.0, 4.0, 0.0)
    at, squares = 10.0, [64.0, 16.0, 0.0]
    exact = sum(w * v for w, v in zip(extrapolation(at, known), squares, strict=True))
    paper = sum(w * v for w, v in zip(extrapolation(at, known, "published"), squares, strict=True))
    s = 0.5
    assert exact == pytest.approx(100) and exact - paper == pytest.approx(s / 2 * 2 * 4**2)
    assert extrapolation(at, known[:2], "published") == extrapolation(at, known[:2])


class Polynomial(nn.Module):
    """A block that adds a polynomial in the number of its call, whatever comes in."""

    def __init__(self, coefficients: tuple[float, ...]) -> None:
        super().__init__()
        self.coefficients, self.at = coefficients, 0.0

    def forward(self, h: Tensor) -> Tensor:
        return h + sum(c * self.at**k for k, c in enumerate(self.coefficients))


class OneBlock(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, h: Tensor) -> Tensor:
        return self.blocks[0](h)


@pytest.mark.parametrize(("order", "coefficients"), [(0, (3.0,)), (1, (3.0, -2.0)), (2, (3.0, -2.0, 0.5))])
@pytest.mark.parametrize("in_sigma", [False, True])
def test_a_stack_that_adds_a_polynomial_is_predicted_exactly(
    order: int, coefficients: tuple[float, ...], in_sigma: bool
) -> None:
    """Irregular gaps too: the last warm-up steps lie closer together than the steps after them."""
    model = OneBlock(Polynomial(coefficients))
    config = TaylorSeer(steps=12, interval=4, warmup=3, order=order, in_sigma=in_sigma)
    levels = [1.0, 0.98, 0.95, 0.91, 0.86, 0.8, 0.73, 0.65, 0.5, 0.4, 0.3, 0.1]
    with cached(model, config) as handle, torch.no_grad(), handle.rollout(), handle.chunk():
        for t, level in enumerate(levels):
            model.blocks[0].at = level if in_sigma else float(t)
            handle.step(t, time=level)
            x = torch.full((1, 2, 3), float(t))
            bare = model.blocks[0].__class__.forward(model.blocks[0], x)
            torch.testing.assert_close(model(x), bare, rtol=1e-4, atol=1e-4)
        actions = [r.action for r in handle.trace]
    assert actions.count(Action.COMPUTE) == 5
    assert actions.count(Action.PREDICT if order else Action.REPLAY) == 7


configs = st.integers(3, 16).flatmap(
    lambda steps: st.builds(
        TaylorSeer,
        steps=st.just(steps),
        interval=st.integers(1, 6),
        warmup=st.integers(0, 2),
        order=st.integers(0, 2),
        in_sigma=st.booleans(),
        tail=st.integers(0, 1),
        form=st.sampled_from(("newton", "published")),
    )
)


@given(config=configs)
@settings(deadline=None)
def test_decisions_and_weights_are_those_of_a_counter_and_a_solved_polynomial(config: TaylorSeer) -> None:
    times = [0.9**t for t in range(config.steps)]
    decisions = drive(config.build(4), [torch.zeros(1, 2, 2)] * config.steps, times=times)
    rule = Naive(config)
    for step, decision in enumerate(decisions):
        at = Place(0, step, "cond", times[step])
        weights = rule.weights(at, torch.zeros(1), rule.past(at))
        if weights is None:
            rule.kept.append(Kept(at, torch.zeros(1)))
            assert decision.action is Action.COMPUTE
        else:
            assert decision.action is (Action.PREDICT if len(weights) > 1 else Action.REPLAY)
            assert decision.weights == pytest.approx(weights, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        TaylorSeer(steps=12, interval=3),
        TaylorSeer(steps=12, interval=3, order=2, tail=1),
        TaylorSeer(steps=12, interval=2, order=2, in_sigma=True, warmup=1),
        TaylorSeer(steps=12, interval=4, order=2, form="published"),
        TaylorSeer(steps=12, interval=4, order=0),
    ],
)
def test_in_closed_loop_it_equals_the_rule_by_hand(config: TaylorSeer) -> None:
    branches = ("cond", "uncond")
    same(
        by_library(mixing(3, 8), config, branches=branches),
        by_hand(mixing(3, 8), Naive(config), branches=branches),
    )
    on_street = street_by_library(config)
    same(on_street, street_by_hand(Naive(config)))
    assert {word for *_, word in on_street[1]} >= {"compute", "predict" if config.order else "replay"}


def test_predicting_every_module_is_predicting_their_sum() -> None:
    """The paper's form, block by block on each block's own residuals, where a pass is predicted from end to end."""
    config = TaylorSeer(steps=12, interval=4, order=2)
    model, kept = mixing(3, 8), [list[tuple[int, Tensor]]() for _ in range(3)]
    out, did = by_library(model, config, chunks=1)
    step = 0

    def by_module(i: int, forward: Any, h: Tensor) -> Tensor:
        if did[step][3] == "compute":
            after = forward(h)
            kept[i].append((step, after - h))
            return after
        newest = kept[i][-3:]
        where = [float(t) for t, _ in newest]
        weights = [fitted(step, where, list(unit)) for unit in np.eye(len(newest))]
        return h + sum(w * r for w, (_, r) in zip(weights, newest, strict=True))

    for i, block in enumerate(model.blocks):
        block.forward = lambda h, i=i, forward=block.forward: by_module(i, forward, h)

    def mark(at: Place) -> None:
        nonlocal step
        step = at.step

    for a, b in zip(out, closed_loop(model, mark, chunks=1), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_an_interval_of_1_is_the_bare_model_bit_for_bit() -> None:
    config = TaylorSeer(steps=12, interval=1, warmup=0, order=2)
    model = mixing(3, 8)
    bare = closed_loop(model, lambda at: None)
    assert all(torch.equal(a, b) for a, b in zip(bare, by_library(model, config)[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(street(), street_by_library(config)[0], strict=True))


@given(steps=st.integers(3, 40), warmup=st.integers(0, 2), tail=st.integers(0, 1))
def test_a_larger_interval_never_computes_more(steps: int, warmup: int, tail: int) -> None:
    counts = [
        computed(
            drive(
                TaylorSeer(steps=steps, interval=n, warmup=warmup, tail=tail).build(4), [torch.zeros(1, 1, 1)] * steps
            )
        )
        for n in range(1, 12)
    ]
    assert counts == sorted(counts, reverse=True) and counts[0] == steps


def test_a_new_chunk_begins_anew() -> None:
    _, did = by_library(mixing(3, 8), TaylorSeer(steps=12, interval=5), chunks=2)
    first, second = ([word for chunk, _, _, word in did if chunk == n] for n in range(2))
    assert first == second == ["compute"] * 3 + ["predict"] * 4 + ["compute"] + ["predict"] * 4


def evidence(branch: str, step: int, time: float | None, *past: tuple[int, float | None]) -> tuple[Cell, StackEvidence]:
    where = Pass(role=Role.DENOISE, chunk=0, step=step, branch=branch, time=time)
    stored = tuple(Stored(0, at, level, torch.ones(1)) for at, level in past)
    return Cell(branch, step, 0, 4), StackEvidence(where, lambda _: torch.ones(1), stored=stored)


def test_branches_do_not_share_what_they_stored() -> None:
    policy = TaylorSeer(steps=12, interval=5, order=1).build(4)
    assert policy.decide(*evidence("cond", 6, None, (5, None), (4, None))).weights == (2.0, -1.0)
    assert policy.decide(*evidence("uncond", 6, None, (4, None), (2, None))).weights == (2.0, -1.0)
    assert policy.decide(*evidence("cond", 7, None, (5, None), (4, None))).weights == (3.0, -2.0)


def test_with_too_few_residuals_the_order_is_lower_and_equal_levels_are_not_divided_by() -> None:
    policy = TaylorSeer(steps=12, interval=9, order=2, in_sigma=True, warmup=1).build(4)
    assert policy.decide(*evidence("cond", 6, 0.5, (5, 0.6))).action is Action.REPLAY
    assert len(policy.decide(*evidence("cond", 6, 0.5, (5, 0.6), (4, 0.7))).weights) == 2
    assert policy.decide(*evidence("cond", 6, 0.5, (5, 0.6), (4, 0.6), (3, 0.7))).action is Action.REPLAY
    assert len(policy.decide(*evidence("cond", 6, 0.5, (5, 0.6), (4, 0.7), (3, 0.7))).weights) == 2
    assert distinct((0.3, 0.2, 0.1)) == (0.3, 0.2, 0.1)


def test_without_noise_levels_in_sigma_is_refused() -> None:
    policy = TaylorSeer(steps=12, in_sigma=True).build(4)
    for time, past in ((None, 0.6), (0.5, None)):
        with pytest.raises(RollcacheError, match=r"TaylorSeer\(in_sigma=True\) needs the noise level"):
            policy.decide(*evidence("cond", 6, time, (5, past)))


def test_a_residual_that_is_not_finite_is_not_predicted_from() -> None:
    model = mixing(3, 8)
    with cached(model, TaylorSeer(steps=4, warmup=2, interval=3)) as handle, torch.no_grad():
        with handle.rollout(), handle.chunk():
            for x in (math.nan, 1.0, 1.0, 1.0):
                handle.step()
                out = model(torch.full((1, 5, 8), x))
        assert out.isfinite().all()
        reasons = [r.reason for r in handle.trace]
        assert reasons == [Reason.NOTHING_STORED, Reason.SCHEDULE, Reason.NOT_FINITE, Reason.SCHEDULE]
        assert [r.action for r in handle.trace][-1] is Action.PREDICT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "^steps must be"),
        ({"interval": 0}, "^interval must be"),
        ({"interval": 2.5}, "^interval must be"),
        ({"warmup": -1}, "^warmup must be"),
        ({"tail": -1}, "^tail must be"),
        ({"warmup": 10, "tail": 3}, "^warmup=10 and tail=3 are more than the 12 steps"),
        ({"order": -1}, "^order must be"),
        ({"order": 3}, "^order must be 0, 1 or 2, got 3"),
        ({"form": "taylor"}, "^form must be one of 'newton', 'published'"),
    ],
)
def test_a_setting_out_of_range_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaylorSeer(**{"steps": 12, **changes})


def test_explanations_carry_the_numbers() -> None:
    config = TaylorSeer(steps=12)
    decision = config.build(4).decide(*evidence("cond", 6, None, (5, None), (4, None)))
    record = Record(
        0, 6, 0, 4, "cond", "denoise", decision.action, decision.reason, *[math.nan] * 4, 0, 0, level=decision.level
    )
    assert config.explain(record) == (
        "Chunk 0, step 6, whole stack (cond): predicted to order 1, the schedule says so: the first 3 of 12 steps are "
        "computed, then one in 5."
    )
    exact = record._replace(action=Action.COMPUTE, level="")
    assert "whole stack (cond): computed, the schedule says so: the first 3" in config.explain(exact)
