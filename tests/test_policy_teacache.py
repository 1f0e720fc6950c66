"""TeaCache, the rule that its relatives share, and the signals they measure."""

from __future__ import annotations

from math import isnan

import pytest
import torch
from dummies import Stack, mixing
from hypothesis import given, settings
from hypothesis import strategies as st
from step_doubles import (
    STEPS,
    Denoiser,
    Rule,
    Seen,
    Watch,
    assert_as_by_hand,
    computed_steps,
    judged,
    noises,
    on_recorded,
    on_the_street,
    open_loop,
    recorded,
    relative,
    rollout,
    since_computed,
    spoiled,
    weights_of,
)
from torch import Tensor, nn

import rollcache
from rollcache import Action, BlockIO, Cell, Decision, Pass, Reason, Role
from rollcache.policies.base import StackEvidence
from rollcache.policies.signals import polynomial, relative_change
from rollcache.policies.teacache import WAN_1_3B, WAN_14B, TeaCache

RISING = (3.0, 0.5, 0.0)  # 3 x^2 + x / 2
DIPPING = (4.0, -0.3)  # negative below .075


def naive(config: TeaCache) -> Rule:
    """TeaCache from its equations, with nothing remembered."""

    def rule(past: list[Seen], now: Seen) -> tuple[float, ...] | None:
        step = len(past)
        if step < config.warmup or step >= STEPS - config.tail:
            return None
        drift = 0.0
        for before, after in since_computed(past, now):
            x = relative(getattr(after, config.signal), getattr(before, config.signal))
            powers = [x**p for p in range(len(config.polynomial or ()))][::-1]
            y = x if config.polynomial is None else sum(c * p for c, p in zip(config.polynomial, powers, strict=True))
            drift += max(y, 0.0)
        return (1.0,) if config.max_drift > 0 and drift < config.max_drift else None

    return rule


CONFIGS = [
    TeaCache(max_drift=0.15, warmup=2),
    TeaCache(max_drift=0.31, warmup=1, tail=0),
    TeaCache(max_drift=0.12, warmup=3, polynomial=RISING),
    TeaCache(max_drift=0.3, warmup=2, polynomial=DIPPING),
    TeaCache(max_drift=0.9, warmup=2, tail=3, signal="embedding"),
    TeaCache(max_drift=1e9),
]


def test_a_relative_change_is_a_scalar_of_single_precision() -> None:
    now, then = torch.tensor([[1.0, -2.0], [4.0, 0.0]]), torch.tensor([[2.0, -2.0], [2.0, 2.0]])
    assert float(relative_change(now, then)) == 5 / 8
    half = relative_change(now.bfloat16(), then.bfloat16())
    assert half.dtype == torch.float32 and half.shape == () and float(half) == 5 / 8
    assert isnan(float(relative_change(torch.zeros(3), torch.zeros(3))))


def test_polynomials_begin_with_the_highest_power_and_the_published_one_is_negative_near_zero() -> None:
    assert polynomial((2, 0, -1), 3) == 17
    assert polynomial(WAN_1_3B, 0) == pytest.approx(-0.05, abs=1e-4)
    assert polynomial(WAN_1_3B, 0.0043) == pytest.approx(0, abs=5e-4)
    assert [polynomial(WAN_1_3B, x) for x in (0.01, 0.02, 0.05, 0.08)] == pytest.approx(
        [0.043, 0.078, 0.142, 0.253], abs=6e-4
    )
    assert polynomial(WAN_14B, 0.01) == pytest.approx(0.0523, abs=1e-4)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_rollout_equals_a_loop_written_by_hand(config: TeaCache) -> None:
    assert_as_by_hand(config, naive(config), 3)


@pytest.mark.parametrize("config", CONFIGS)
def test_on_the_street_every_decision_is_what_the_equations_say(config: TeaCache) -> None:
    watch = Watch(config)
    _, handle = on_the_street(watch)
    assert [weights_of(s.decision) for s in watch.seen] == judged(watch.seen, naive(config))
    assert {r.action for r in handle.trace} == {Action.COMPUTE, Action.REPLAY}
    assert handle.stats().passes["commit"] == 2


@pytest.mark.parametrize("config", CONFIGS)
def test_on_recorded_passes_every_decision_is_what_the_equations_say(config: TeaCache) -> None:
    found, wanted = on_recorded(config, TeaCache(max_drift=0), naive(config))
    assert found == wanted


def test_with_no_drift_allowed_nothing_changes_by_a_bit() -> None:
    starts = {"cond": noises(2)}
    plain, _ = rollout(Denoiser(), starts)
    for config in (TeaCache(max_drift=0, warmup=0, tail=0), TeaCache(max_drift=0, warmup=0, polynomial=(0.0,))):
        cached, handle = rollout(Denoiser(), starts, config)
        assert all(torch.equal(a, b) for a, b in zip(plain["cond"], cached["cond"], strict=True))
        assert handle.stats().skip_rate == 0
    plain, _ = on_the_street(None)
    cached, _ = on_the_street(TeaCache(max_drift=0, warmup=0, tail=0))
    assert all(torch.equal(a, b) for a, b in zip(plain, cached, strict=True))


RECORDED = recorded(TeaCache(max_drift=0))
DRIFTS = st.floats(0, 3)


@given(a=DRIFTS, b=DRIFTS, warmup=st.integers(0, 4), shape=st.sampled_from([None, RISING, DIPPING]))
@settings(max_examples=60, deadline=None)
def test_a_larger_limit_never_computes_more_of_the_same_passes(
    a: float, b: float, warmup: int, shape: tuple[float, ...] | None
) -> None:
    low, high = (
        computed_steps(open_loop(TeaCache(max_drift=m, warmup=warmup, polynomial=shape), RECORDED))
        for m in sorted((a, b))
    )
    assert len(high) <= len(low)
    forced = {n * STEPS + t for n in range(2) for t in (*range(max(warmup, 1)), STEPS - 1)}
    assert forced <= set(high)


def test_numbers_that_are_not_finite_are_computed() -> None:
    config = TeaCache(max_drift=1e9, warmup=1, tail=0)
    decisions = open_loop(config, spoiled(RECORDED, 4, "modulated"))
    assert computed_steps(decisions) == [0, 4, 5, 12]
    assert decisions[4].reason is Reason.NOT_FINITE
    assert computed_steps(open_loop(TeaCache(max_drift=float("inf"), warmup=1, tail=0), RECORDED)) == [0, 12]


def test_branches_do_not_share_state() -> None:
    config = TeaCache(max_drift=0.2, warmup=2)
    starts = {"cond": noises(2, seed=1), "uncond": noises(2, seed=2, scale=0.2)}
    both, handle = rollout(Denoiser(), starts, config)
    actions = {}
    for branch, noise in starts.items():
        alone, single = rollout(Denoiser(), {branch: noise}, config)
        assert all(torch.equal(a, b) for a, b in zip(alone[branch], both[branch], strict=True))
        actions[branch] = [r.action for r in single.trace]
        assert [r.action for r in handle.trace if r.branch == branch] == actions[branch]
        assert Action.REPLAY in actions[branch]
    assert actions["cond"] != actions["uncond"]


def test_a_chunk_begins_anew() -> None:
    config = TeaCache(max_drift=0.2, warmup=2, tail=0)
    first, second = noises(1, seed=1)[0], noises(1, seed=2, scale=0.2)[0]
    together, handle = rollout(Denoiser(), {"cond": [first, second]}, config)
    alone, single = rollout(Denoiser(), {"cond": [second]}, config)
    assert torch.equal(together["cond"][1], alone["cond"][0])
    assert [r.drift for r in handle.trace][STEPS:] == pytest.approx([r.drift for r in single.trace], nan_ok=True)


def test_a_policy_that_saw_nothing_of_a_chunk_does_not_reuse_in_it() -> None:
    policy = TeaCache(max_drift=1e9, warmup=1).build(3)

    def evidence(chunk: int) -> StackEvidence:
        return StackEvidence(Pass(role=Role.DENOISE, chunk=chunk, step=3), lambda name: torch.ones(1, 2, 3))

    cell, computed = Cell("cond", 3, 0, 3), Decision(Action.COMPUTE, Reason.WARMUP)
    assert policy.decide(cell, evidence(0)).reason is Reason.NOTHING_STORED
    policy.conclude(cell, computed, evidence(0))
    assert policy.decide(cell, evidence(0)).action is Action.REPLAY
    assert policy.decide(cell, evidence(1)).reason is Reason.NOTHING_STORED
    policy.reset()
    assert policy.decide(cell, evidence(0)).reason is Reason.NOTHING_STORED


def test_the_last_steps_are_exact_where_their_number_is_known() -> None:
    starts = {"cond": noises(1)}

    def last(config: TeaCache, told: int | None) -> Action:
        _, handle = rollout(Denoiser(), starts, config, told=told)
        return list(handle.trace)[-1].action

    assert last(TeaCache(max_drift=1e9), STEPS) is Action.COMPUTE
    assert last(TeaCache(max_drift=1e9, steps=STEPS), None) is Action.COMPUTE
    assert last(TeaCache(max_drift=1e9), None) is Action.REPLAY
    assert last(TeaCache(max_drift=1e9, tail=0), STEPS) is Action.REPLAY
    with pytest.raises(rollcache.RollcacheError, match="TeaCache is set up for 9 denoising steps a chunk"):
        last(TeaCache(steps=9), STEPS)


class _Adding(nn.Module):
    """A block that writes its result into its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        return h.copy_(self.inner(h))


def test_blocks_that_write_into_their_input_do_not_change_a_decision() -> None:
    """The signal is what came in, also after the blocks have written over it."""
    blocks = list(mixing(3, 8).blocks)
    inputs = [torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0)) * (1 + 0.03 * t) for t in range(10)]
    traces = []
    for made in (blocks, [_Adding(b) for b in blocks]):
        model = Stack(made)
        config, io = TeaCache(max_drift=0.08, warmup=2), BlockIO(hidden=(0, "h"), in_place=made is not blocks)
        handle = rollcache.enable(model, config, blocks=list(model.blocks), kv_writes="commit_only", io=io)
        with torch.no_grad(), handle.rollout(), handle.chunk():
            for x in inputs:
                handle.step()
                model(x.clone())
        traces.append([(r.action, round(r.drift, 6)) for r in handle.trace])
    assert str(traces[0]) == str(traces[1])
    assert {action for action, _ in traces[0]} == {Action.COMPUTE, Action.REPLAY}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_drift": -0.1}, "max_drift must be at least 0"),
        ({"max_drift": float("nan")}, "max_drift must be at least 0"),
        ({"warmup": -1}, "warmup must be an integer of at least 0"),
        ({"tail": 1.5}, "tail must be an integer"),
        ({"steps": 0}, "steps must be an integer of at least 1"),
        ({"steps": 5, "warmup": 5}, "warmup=5 and tail=1 are more than the 5 steps of a chunk"),
        ({"signal": "pixels"}, "signal must be one of 'modulated', 'embedding'"),
        ({"polynomial": ()}, "polynomial must be finite coefficients"),
        ({"polynomial": (1.0, float("inf"))}, "polynomial must be finite coefficients"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TeaCache(**wrong)  # type: ignore[arg-type]


def test_every_decision_is_explained_with_its_numbers() -> None:
    config = TeaCache(max_drift=0.2, warmup=2, polynomial=RISING)
    _, handle = rollout(Denoiser(), {"cond": noises(1)}, config)
    told = [config.explain(r) for r in handle.trace]
    assert told[0] == "Chunk 0, step 0, whole stack (cond): computed, nothing stored."
    assert told[1] == "Chunk 0, step 1, whole stack (cond): computed, the schedule says so (warmup=2)."
    assert told[-1] == f"Chunk 0, step {STEPS - 1}, whole stack (cond): computed, the schedule says so (tail=1)."
    for r, text in zip(handle.trace, told, strict=True):
        if r.drift == r.drift:
            held = "below" if r.action is Action.REPLAY else "not below"
            assert f"the modulated input, rescaled, changed by {r.drift:.4g} since the last computed step" in text
            assert text.endswith(f", {held} max_drift=0.2.")
    assert any("replayed, it drifted little" in t for t in told)
    assert any("computed, it drifted too far" in t for t in told)
