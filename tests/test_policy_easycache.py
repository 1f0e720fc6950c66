"""EasyCache: the rate at which the output follows the input, measured and taken to last."""

from __future__ import annotations

import pytest
import torch
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
    rollout,
    since_computed,
    spoiled,
    weights_of,
)
from torch import Tensor

from rollcache import Action, Decision, Pass, Reason, Role
from rollcache.policies.easycache import EasyCache


def gap(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().mean())


def naive(config: EasyCache) -> Rule:
    """EasyCache from its equations, with nothing remembered."""

    def rule(past: list[Seen], now: Seen) -> tuple[float, ...] | None:
        step, exact = len(past), [p for p in past if p.computed]
        if step < config.warmup or step >= STEPS - config.tail or config.max_drift == 0 or len(exact) < 2:
            return None
        older, last = exact[-2:]
        rate = gap(last.output, older.output) / gap(last.hidden, older.hidden)
        size = float(last.output.double().abs().mean())
        drift = sum(rate * gap(after.hidden, before.hidden) / size for before, after in since_computed(past, now))
        return (1.0,) if drift < config.max_drift else None

    return rule


CONFIGS = [
    EasyCache(max_drift=0.2, warmup=2),
    EasyCache(max_drift=0.35, warmup=3, tail=2),
    EasyCache(max_drift=0.15, warmup=1, tail=0),
    EasyCache(max_drift=1e9),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_rollout_equals_a_loop_written_by_hand(config: EasyCache) -> None:
    assert_as_by_hand(config, naive(config), 3)


class _Overwriting(Denoiser):
    """A head that writes over what left the stack."""

    def leave(self, h: Tensor, sigma: float) -> Tensor:
        out = super().leave(h, sigma)
        h.zero_()
        return out


def test_a_head_that_writes_over_the_output_does_not_change_a_decision() -> None:
    starts = {"cond": noises(1)}
    plain, _ = rollout(Denoiser(), starts, CONFIGS[0])
    found, handle = rollout(_Overwriting(), starts, CONFIGS[0])
    assert torch.equal(plain["cond"][0], found["cond"][0])
    assert 0 < handle.stats().skip_rate < 1


@pytest.mark.parametrize("config", CONFIGS)
def test_on_the_street_every_decision_is_what_the_equations_say(config: EasyCache) -> None:
    watch = Watch(config)
    on_the_street(watch)
    assert [weights_of(s.decision) for s in watch.seen] == judged(watch.seen, naive(config))
    assert any(not s.computed for s in watch.seen)


@pytest.mark.parametrize("config", CONFIGS)
def test_on_recorded_passes_every_decision_is_what_the_equations_say(config: EasyCache) -> None:
    found, wanted = on_recorded(config, EasyCache(max_drift=0), naive(config))
    assert found == wanted


def test_with_no_drift_allowed_nothing_changes_by_a_bit() -> None:
    starts = {"cond": noises(2)}
    plain, _ = rollout(Denoiser(), starts)
    cached, handle = rollout(Denoiser(), starts, EasyCache(max_drift=0, warmup=0, tail=0))
    assert all(torch.equal(a, b) for a, b in zip(plain["cond"], cached["cond"], strict=True))
    assert handle.stats().skip_rate == 0
    plain, _ = on_the_street(None)
    cached, _ = on_the_street(EasyCache(max_drift=0, warmup=0, tail=0))
    assert all(torch.equal(a, b) for a, b in zip(plain, cached, strict=True))


def steady(positions: list[float], rate: float) -> list[Seen]:
    """Passes whose output follows the input at one rate, at a constant size: x = (p, 9 - p), v = rate x."""
    out = []
    for t, p in enumerate(positions):
        x = torch.tensor([[[p, 9 - p]]])
        out.append(
            Seen(Pass(role=Role.DENOISE, chunk=0, step=t), x, x, x, x, rate * x, Decision(Action.COMPUTE, Reason.DRIFT))
        )
    return out


MOVES = st.lists(st.floats(0.01, 0.3), min_size=8, max_size=24)


@given(moves=MOVES, rate=st.floats(0.1, 20), a=st.floats(0, 0.5), b=st.floats(0, 0.5))
@settings(max_examples=60, deadline=None)
def test_a_larger_limit_never_computes_more_where_the_rate_lasts(
    moves: list[float], rate: float, a: float, b: float
) -> None:
    seen = steady([0.5 + sum(moves[:i]) for i in range(len(moves))], rate)
    low, high = (computed_steps(open_loop(EasyCache(max_drift=m, warmup=2), seen)) for m in sorted((a, b)))
    assert len(high) <= len(low)


def test_the_estimate_is_the_change_of_the_output_where_the_rate_lasts() -> None:
    """Relative to the output, whatever the rate: (p, 9 - p) moves by .1 of 4.5 a step."""
    for rate in (0.5, 7.0):
        decisions = open_loop(EasyCache(max_drift=1, warmup=2), steady([1 + 0.1 * t for t in range(6)], rate))
        assert [d.drift for d in decisions[2:]] == pytest.approx([k * 0.1 / 4.5 for k in (1, 2, 3, 4)], rel=1e-4)


RECORDED = recorded(EasyCache(max_drift=0))


def test_nothing_is_reused_before_the_rate_is_known() -> None:
    decisions = open_loop(EasyCache(max_drift=1e9, warmup=0, tail=0), RECORDED)
    assert computed_steps(decisions) == [0, 1, 12, 13]


def test_numbers_that_are_not_finite_are_computed() -> None:
    config = EasyCache(max_drift=1e9, warmup=2, tail=0)
    decisions = open_loop(config, spoiled(RECORDED, 4, "hidden"))
    assert computed_steps(decisions)[:4] == [0, 1, 4, 5]
    assert decisions[4].reason is Reason.NOT_FINITE
    still = [Seen(**{**vars(RECORDED[0]), "where": s.where}) for s in RECORDED[:STEPS]]
    assert computed_steps(open_loop(config, still)) == list(range(STEPS))  # 0 / 0


def test_branches_do_not_share_state() -> None:
    config = EasyCache(max_drift=0.2, warmup=2)
    starts = {"cond": noises(2, seed=1), "uncond": noises(2, seed=2, scale=0.1)}
    both, handle = rollout(Denoiser(), starts, config)
    for branch, noise in starts.items():
        alone, single = rollout(Denoiser(), {branch: noise}, config)
        assert all(torch.equal(a, b) for a, b in zip(alone[branch], both[branch], strict=True))
        assert [r.action for r in handle.trace if r.branch == branch] == [r.action for r in single.trace]
        assert 0 < single.stats().skip_rate < 1


def test_a_chunk_begins_anew() -> None:
    """Also the rate: it takes two computed steps of this chunk."""
    config = EasyCache(max_drift=0.2, warmup=1, tail=0)
    first, second = noises(1, seed=1)[0], noises(1, seed=2, scale=0.1)[0]
    together, handle = rollout(Denoiser(), {"cond": [first, second]}, config)
    alone, single = rollout(Denoiser(), {"cond": [second]}, config)
    assert torch.equal(together["cond"][1], alone["cond"][0])
    assert [r.drift for r in handle.trace][STEPS:] == pytest.approx([r.drift for r in single.trace], nan_ok=True)
    policy = config.build(3)
    open_loop(type("Same", (), {"build": lambda self, blocks: policy})(), RECORDED)
    policy.reset()
    assert not policy._computed


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_drift": -1}, "max_drift must be at least 0"),
        ({"warmup": -1}, "warmup must be an integer of at least 0"),
        ({"tail": -1}, "tail must be an integer of at least 0"),
        ({"steps": 10}, "warmup=10 and tail=1 are more than the 10 steps of a chunk"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EasyCache(**wrong)  # type: ignore[arg-type]


def test_every_decision_is_explained_with_its_numbers() -> None:
    config = EasyCache(max_drift=0.25, warmup=2)
    _, handle = rollout(Denoiser(), {"cond": noises(1)}, config)
    texts = [(r, config.explain(r)) for r in handle.trace if r.drift == r.drift]
    for r, text in texts:
        held = "below" if r.action is Action.REPLAY else "not below"
        assert text.endswith(
            f": the output should have changed by {r.drift:.4g} since the last computed step, {held} max_drift=0.25."
        )
    assert {r.action for r, _ in texts} == {Action.COMPUTE, Action.REPLAY}
