"""The SCOPE-style scheduler: cache, predict or recompute, by the drift of what the stack is fed."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

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
from torch import Tensor

from rollcache import Action, Reason, RollcacheError
from rollcache.decision import Record
from rollcache.policies.scope import Scope


class Naive(Rule):
    """The scheduler in the words of its description, on full tensors."""

    def __init__(self, config: Scope) -> None:
        super().__init__()
        self.config = config
        self.indicator: dict[tuple[int, str], Tensor] = {}
        self.drift: dict[tuple[int, str], float] = {}
        self.predicted: dict[tuple[int, str], int] = {}
        self.clipped = 0

    def weights(self, at: Place, modulated: Tensor, past: list[Kept]) -> list[float] | None:
        c, me = self.config, (at.chunk, at.branch)
        before = self.indicator.get(me)
        self.indicator[me] = modulated.clone()
        if before is not None:
            change = (modulated - before).abs().sum() / before.abs().sum()
            self.drift[me] = self.drift[me] + float(change)
        drift, count = self.drift.get(me, 0.0), self.predicted.get(me, 0)
        recompute = at.step < c.warmup or at.step > c.steps - 1 - c.tail or len(past) < 2
        recompute |= math.isnan(drift) or drift >= c.predict_below
        recompute |= drift >= c.cache_below and count >= c.max_predictions
        if recompute:
            self.drift[me], self.predicted[me] = 0.0, 0
            return None
        if drift < c.cache_below:
            return [1.0]
        self.predicted[me] = count + 1
        (p1, r1), (p2, r2) = past[:2]
        if abs(p1.time - p2.time) < 1e-4:
            return [1.0, 0.0]
        reach = (at.time - p1.time) / (p1.time - p2.time)
        step = c.damping * min(max(reach, 0.0), c.max_reach)
        change_ = step * (r1 - r2)
        if float(change_.norm()) > c.max_change * float(r1.norm()):
            step *= c.max_change * float(r1.norm()) / float(change_.norm())
            self.clipped += 1
        return [1 + step, -step]


def flipped(changes: list[int]) -> list[Tensor]:
    """A signal of 64 signs whose relative change from step to step is exactly `changes` / 32."""
    signs = torch.ones(64)
    out = [signs.view(1, 8, 8).clone()]
    for count in changes:
        signs[torch.randperm(64)[:count]] *= -1
        out.append(signs.view(1, 8, 8).clone())
    return out


configs = st.builds(
    lambda limits, **rest: Scope(cache_below=min(limits) / 32, predict_below=max(limits) / 32, **rest),
    limits=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    steps=st.just(14),
    warmup=st.integers(0, 4),
    tail=st.integers(0, 2),
    max_predictions=st.integers(0, 4),
    damping=st.sampled_from((0.0, 0.5, 0.8, 1.0)),
    max_reach=st.sampled_from((0.0, 1.0, 2.0, 9.0)),
    max_change=st.sampled_from((0.0, 0.1, 0.3, 10.0)),
)


@given(config=configs, changes=st.lists(st.integers(0, 12), min_size=13, max_size=13), seed=st.integers(0, 99))
@settings(deadline=None)
def test_decisions_and_weights_are_those_of_the_description(config: Scope, changes: list[int], seed: int) -> None:
    """Drifts are multiples of 1/32, as the limits are: on the limit counts as not below."""
    generator = torch.Generator().manual_seed(seed)
    residuals = list(torch.randn(14, 1, 2, 2, generator=generator))
    times = [0.9**t for t in range(14)]
    signal = flipped(changes)
    decisions = drive(config.build(4), signal, residuals, times)
    rule = Naive(config)
    for step, decision in enumerate(decisions):
        at = Place(0, step, "cond", times[step])
        weights = rule.weights(at, signal[step], rule.past(at))
        if weights is None:
            rule.kept.append(Kept(at, residuals[step]))
            assert decision.action is Action.COMPUTE
        else:
            assert decision.action is (Action.PREDICT if len(weights) > 1 else Action.REPLAY)
            assert decision.weights == pytest.approx(weights, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        Scope(steps=12, cache_below=0.15, predict_below=0.6, warmup=3),
        Scope(steps=12, cache_below=0.0, predict_below=2.0, warmup=2, tail=0, damping=1, max_change=0.05),
        Scope(steps=12, cache_below=0.1, predict_below=1.0, warmup=2, max_predictions=3, max_change=9, max_reach=0.7),
    ],
)
def test_in_closed_loop_it_equals_the_rule_by_hand(config: Scope) -> None:
    branches = ("cond", "uncond")
    rule = Naive(config)
    same(by_library(mixing(3, 8), config, branches=branches), by_hand(mixing(3, 8), rule, branches=branches))
    on_street, naive = street_by_library(config), Naive(config)
    same(on_street, street_by_hand(naive))
    assert {word for *_, word in on_street[1]} >= {"compute", "predict"}
    assert (config.max_change == 0.05) <= (rule.clipped > 0)


def test_the_three_modes_follow_the_drift() -> None:
    config = Scope(steps=9, cache_below=2 / 32, predict_below=9 / 32, warmup=2, max_predictions=2)
    decisions = drive(config.build(4), flipped([1, 1, 2, 3, 4, 1, 1, 1]), times=[1 - t / 10 for t in range(9)])
    assert [d.level or str(d.reason) for d in decisions] == [
        "nothing stored",
        "the schedule says so",
        "cache",
        "predict",
        "predict",
        "it drifted too far",
        "cache",
        "predict",
        "the schedule says so",
    ]
    assert [d.drift * 32 for d in decisions[2:8]] == [1, 3, 6, 10, 1, 2]


def test_predictions_in_a_row_are_limited() -> None:
    config = Scope(steps=9, cache_below=0, predict_below=9, warmup=2, max_predictions=2, tail=0)
    reasons = [d.reason for d in drive(config.build(4), flipped([1] * 8))]
    assert reasons[2:] == [Reason.STEADY, Reason.STEADY, Reason.STALE] * 2 + [Reason.STEADY]
    none = drive(
        Scope(steps=9, cache_below=4 / 32, predict_below=9, warmup=2, max_predictions=0).build(4), flipped([1] * 8)
    )
    assert [d.level for d in none[2:7]] == ["cache"] * 3 + [""] + ["cache"]


def test_a_residual_that_is_linear_in_noise_level_is_predicted_exactly() -> None:
    """Without damping and clips, whatever the gaps."""
    times = [1.0, 0.97, 0.9, 0.88, 0.8, 0.71, 0.5, 0.45, 0.2]
    residuals = [torch.tensor([[[3.0, 1.0]]]) + s * torch.tensor([[[-2.0, 5.0]]]) for s in times]
    free = {"damping": 1.0, "max_reach": 99.0, "max_change": 99.0}
    config = Scope(steps=9, cache_below=0, predict_below=9, warmup=2, max_predictions=3, **free)
    decisions = drive(config.build(4), flipped([1] * 8), residuals, times)
    predicted, past = 0, [1, 0]
    for t, decision in enumerate(decisions[2:], 2):
        if decision.action is Action.PREDICT:
            total = sum(w * residuals[p] for w, p in zip(decision.weights, past, strict=True))
            torch.testing.assert_close(total, residuals[t], rtol=1e-4, atol=1e-4)
            predicted += 1
        else:
            past = [t, past[0]]
    assert predicted == 5


def test_damping_and_both_clips_hold_a_prediction_back() -> None:
    """Residuals 10 and 9 in one direction: they lie a tenth of the newest apart. One gap ahead."""
    residuals = [torch.full((1, 1, 1), 9.0), torch.full((1, 1, 1), 10.0), torch.zeros(1, 1, 1)]

    def continued(times: list[float], **changes: float) -> float:
        free = {"damping": 1.0, "max_reach": 99.0, "max_change": 99.0, **changes}
        config = Scope(steps=3, cache_below=0, predict_below=9, warmup=2, tail=0, **free)
        decision = drive(config.build(4), flipped([1, 1]), residuals, times)[2]
        assert decision.action is Action.PREDICT and sum(decision.weights) == pytest.approx(1)
        return -decision.weights[1]

    even = [1.0, 0.9, 0.8]
    assert continued(even) == pytest.approx(1)
    assert continued(even, damping=0.8) == pytest.approx(0.8)
    assert continued(even, max_reach=0.3) == pytest.approx(0.3)
    assert continued(even, max_change=0.05) == pytest.approx(0.5)
    assert continued([1.0, 0.9, 0.6], max_reach=2) == pytest.approx(2)
    assert continued([1.0, 0.9, 0.95]) == 0
    assert continued([0.9, 0.9, 0.8]) == 0


@pytest.mark.parametrize("changes", [{}, {"predict_below": 9.0, "warmup": 11}])
def test_limits_of_0_or_warm_up_to_the_end_are_the_bare_model_bit_for_bit(changes: dict[str, Any]) -> None:
    config = Scope(**{"steps": 12, "cache_below": 0.0, "predict_below": 0.0, "warmup": 0, **changes})
    model = mixing(3, 8)
    bare = closed_loop(model, lambda at: None)
    assert all(torch.equal(a, b) for a, b in zip(bare, by_library(model, config)[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(street(), street_by_library(config)[0], strict=True))


def test_limits_of_0_compute_even_if_nothing_changes() -> None:
    config = Scope(steps=6, cache_below=0, predict_below=0, warmup=0, tail=0)
    assert computed(drive(config.build(4), flipped([0] * 5))) == 6


@given(
    changes=st.lists(st.integers(0, 9), min_size=19, max_size=19),
    limits=st.lists(st.integers(0, 60), min_size=3, max_size=3).map(sorted),
    predictions=st.lists(st.integers(0, 5), min_size=2, max_size=2).map(sorted),
)
@settings(deadline=None)
def test_larger_limits_never_compute_more(changes: list[int], limits: list[int], predictions: list[int]) -> None:
    signal = flipped(changes)
    low, middle, high = (x / 32 for x in limits)
    few, many = predictions

    def count(cache: float, predict: float, most: int) -> int:
        config = Scope(steps=20, cache_below=cache, predict_below=predict, max_predictions=most, warmup=2)
        return computed(drive(config.build(4), signal))

    assert count(low, high, few) <= count(low, middle, few)
    assert count(middle, high, few) <= count(low, high, few)
    assert count(low, high, many) <= count(low, high, few)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_evidence_that_is_not_finite_computes(bad: float) -> None:
    signal = flipped([1] * 8)
    signal[5] = signal[5] * bad
    config = Scope(steps=9, cache_below=1, predict_below=9, warmup=2, tail=0)
    reasons = [d.reason for d in drive(config.build(4), signal)]
    assert reasons[5:7] == [Reason.NOT_FINITE] * 2
    assert reasons[2:5] == [Reason.STEADY] * 3 and reasons[7:] == [Reason.STEADY] * 2


def test_branches_do_not_share_a_state_and_a_new_chunk_begins_anew() -> None:
    config = Scope(steps=9, cache_below=4 / 32, predict_below=9 / 32, warmup=2)
    calm, wild = flipped([1] * 8), flipped([8] * 8)
    policy = config.build(4)
    alone = {name: drive(config.build(4), x, branch=name) for name, x in (("cond", calm), ("uncond", wild))}
    assert [d.action for d in alone["cond"]] != [d.action for d in alone["uncond"]]
    for chunk in range(3):
        assert drive(policy, calm, chunk=chunk) == alone["cond"]
        assert drive(policy, wild, chunk=chunk, branch="uncond") == alone["uncond"]
    policy.reset()
    assert drive(policy, calm) == alone["cond"]


def test_branches_in_turn_decide_as_each_does_alone() -> None:
    config = Scope(steps=12, cache_below=0.15, predict_below=0.6, warmup=3)
    both = by_library(mixing(3, 8), config, branches=("cond", "uncond"))[1]
    rule = Naive(config)
    assert both == by_hand(mixing(3, 8), rule, branches=("cond", "uncond"))[1]
    cond, uncond = ([word for *_, b, word in both if b == branch] for branch in ("cond", "uncond"))
    assert cond != uncond, "branches that decide alike would not tell"


def test_what_the_caller_overwrites_is_not_compared_with() -> None:
    """A loop that keeps its latents in one buffer: the indicator of the step before must be a copy."""
    model, config = mixing(3, 8), Scope(steps=6, cache_below=0.05, predict_below=0.1, warmup=2, tail=0)
    inputs = list(accumulate([torch.randn(1, 5, 8) for _ in range(6)]))

    def drifts(buffer: Tensor | None) -> list[float]:
        with cached(model, config) as handle, torch.no_grad(), handle.rollout(), handle.chunk():
            for t, x in enumerate(inputs):
                handle.step(time=1 - t / 6)
                model(x if buffer is None else buffer.copy_(x))
            return [r.drift for r in handle.trace][2:]

    assert drifts(torch.zeros(1, 5, 8)) == drifts(None)
    assert min(drifts(None)) > 0


def test_a_rollout_can_be_forked_under_inference_mode() -> None:
    model, config = mixing(3, 8), Scope(steps=6, cache_below=9, predict_below=9, warmup=2, tail=0)
    with cached(model, config) as handle, torch.inference_mode(), handle.rollout("a"):
        with handle.chunk():
            for t in range(4):
                handle.step(time=1 - t / 6)
                model(torch.randn(1, 5, 8))
        handle.fork("a", "b")


def test_without_noise_levels_a_prediction_is_refused() -> None:
    model = mixing(3, 8)
    config = Scope(steps=6, cache_below=0, predict_below=99, warmup=2)
    with cached(model, config) as handle, torch.no_grad(), handle.rollout(), handle.chunk():
        for _ in range(2):
            handle.step()
            model(torch.randn(1, 5, 8))
        handle.step()
        with pytest.raises(RollcacheError, match="Scope needs the noise level of every pass"):
            model(torch.randn(1, 5, 8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "^steps must be"),
        ({"cache_below": -1}, "^cache_below must be"),
        ({"predict_below": math.nan}, "^predict_below must be"),
        ({"cache_below": 0.2, "predict_below": 0.1}, r"^cache_below \(0.2\) lies above predict_below \(0.1\)"),
        ({"warmup": -1}, "^warmup must be"),
        ({"tail": 1.5}, "^tail must be"),
        ({"warmup": 10, "tail": 3}, "^warmup=10 and tail=3 are more than the 12 steps"),
        ({"max_predictions": -1}, "^max_predictions must be"),
        ({"damping": 1.1}, "^damping must be"),
        ({"max_reach": -1}, "^max_reach must be"),
        ({"max_change": -1}, "^max_change must be"),
    ],
)
def test_a_setting_out_of_range_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scope(**{"steps": 12, **changes})


def test_explanations_carry_the_numbers() -> None:
    config = Scope(steps=9, cache_below=2 / 32, predict_below=9 / 32, warmup=2)
    found = drive(config.build(4), flipped([1, 1, 2, 3, 4, 1, 1, 1]))

    def explained(step: int) -> str:
        d = found[step]
        return config.explain(
            Record(
                0,
                step,
                0,
                4,
                "cond",
                "denoise",
                d.action,
                d.reason,
                *[math.nan] * 4,
                0,
                0,
                d.drift,
                d.limit,
                level=d.level,
            )
        )

    limits = "(cached below 0.0625, predicted below 0.28125 at most 2 times)."
    assert explained(1) == "Chunk 0, step 1, whole stack (cond): computed, the schedule says so."
    assert explained(2) == f"Chunk 0, step 2, whole stack (cond): replayed, it drifted little: drift 0.03125 {limits}"
    assert explained(3) == f"Chunk 0, step 3, whole stack (cond): predicted, it drifted little: drift 0.09375 {limits}"
    assert explained(5) == f"Chunk 0, step 5, whole stack (cond): computed, it drifted too far: drift 0.3125 {limits}"
