"""FlowCache: a drift per chunk, in a safe reading and as released."""

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
    relative,
    rollout,
    since_computed,
    spoiled,
    weights_of,
)

from rollcache import Reason
from rollcache.policies.flowcache import FlowCache

WAN = [-5.21862437e4, 9.23041404e3, -5.28275948e2, 1.36987616e1, -4.99875664e-2]
DIPPING = (1.0, -0.12)  # negative below .12, as the early changes of the denoiser are


def naive(config: FlowCache) -> Rule:
    """FlowCache from its equations, with nothing remembered."""

    def distance(before: Seen, after: Seen) -> float:
        if config.faithful:
            x = relative(after.embedding, before.embedding)
            a, b, c, d, e = config.polynomial or WAN
            return a * x**4 + b * x**3 + c * x**2 + d * x + e
        x = relative(getattr(after, config.signal), getattr(before, config.signal))
        if config.polynomial is None:
            return x
        slope, offset = config.polynomial
        return max(slope * x + offset, 0.0)

    def rule(past: list[Seen], now: Seen) -> tuple[float, ...] | None:
        step = len(past)
        if step < config.warmup or step >= STEPS - config.tail or config.max_drift == 0:
            return None
        pairs = since_computed(past, now)
        if not config.faithful and config.max_age is not None and len(pairs) > config.max_age:
            return None
        return (1.0,) if sum(distance(*pair) for pair in pairs) < config.max_drift else None

    return rule


CONFIGS = [
    FlowCache(max_drift=0.25),
    FlowCache(max_drift=0.3, signal="hidden", warmup=1, max_age=None),
    FlowCache(max_drift=1.2, signal="embedding", warmup=2, tail=0),
    FlowCache(max_drift=0.1, polynomial=DIPPING, warmup=1, max_age=None),
    FlowCache(max_drift=1e9, max_age=2, warmup=1),
    FlowCache(max_drift=0.1, faithful=True, warmup=2),
    FlowCache(max_drift=0.2, faithful=True, polynomial=(0.0, 0.0, 0.0, 1.0, -0.22), warmup=1),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_rollout_equals_a_loop_written_by_hand(config: FlowCache) -> None:
    assert_as_by_hand(config, naive(config), 2)


@pytest.mark.parametrize("config", CONFIGS)
def test_on_the_street_every_decision_is_what_the_equations_say(config: FlowCache) -> None:
    watch = Watch(config)
    on_the_street(watch)
    assert [weights_of(s.decision) for s in watch.seen] == judged(watch.seen, naive(config))
    assert any(not s.computed for s in watch.seen)


@pytest.mark.parametrize("config", CONFIGS)
def test_on_recorded_passes_every_decision_is_what_the_equations_say(config: FlowCache) -> None:
    found, wanted = on_recorded(config, FlowCache(max_drift=0), naive(config))
    assert found == wanted


def test_with_no_drift_allowed_nothing_changes_by_a_bit() -> None:
    """As released too, although its distances may be negative."""
    starts = {"cond": noises(2)}
    plain, _ = rollout(Denoiser(), starts)
    for config in (
        FlowCache(max_drift=0, warmup=0, tail=0, max_age=None),
        FlowCache(max_drift=0, warmup=0, tail=0, faithful=True, polynomial=(-1.0,)),
        FlowCache(max_drift=1e9, warmup=0, tail=0, max_age=0),
    ):
        cached, handle = rollout(Denoiser(), starts, config)
        assert all(torch.equal(a, b) for a, b in zip(plain["cond"], cached["cond"], strict=True))
        assert handle.stats().skip_rate == 0
    plain, _ = on_the_street(None)
    cached, _ = on_the_street(FlowCache(max_drift=0, warmup=0, tail=0))
    assert all(torch.equal(a, b) for a, b in zip(plain, cached, strict=True))


def drifts(config: FlowCache, seed: int, scale: float) -> list[float]:
    """Decisions on the street, as the drift at every step (negative where it computed)."""
    watch = Watch(config)
    on_the_street(watch, noise=seed, scale=scale)
    return [s.decision.drift * (-1 if s.computed else 1) for s in watch.seen]


def test_as_released_the_schedule_does_not_depend_on_content() -> None:
    """The same steps and distances for other noise and another start; the default reading sees the difference."""
    released = FlowCache(max_drift=0.1, faithful=True, polynomial=(0.0, 0.0, 0.0, 0.1, -0.02), warmup=2)
    one, other = drifts(released, 0, 1.0), drifts(released, 1, 5.0)
    assert any(d > 0 for d in one) and any(d < 0 for d in one)
    assert one == pytest.approx(other, nan_ok=True)
    assert drifts(FlowCache(), 0, 1.0) != pytest.approx(drifts(FlowCache(), 1, 5.0), nan_ok=True)


def test_as_released_every_chunk_has_the_same_schedule() -> None:
    config = FlowCache(max_drift=0.1, faithful=True, warmup=2)
    _, handle = rollout(Denoiser(), {"cond": noises(3)}, config)
    actions = [r.action for r in handle.trace]
    assert actions[:STEPS] == actions[STEPS : 2 * STEPS] == actions[2 * STEPS :]


RECORDED = recorded(FlowCache(max_drift=0))


@given(
    a=st.floats(0, 3),
    b=st.floats(0, 3),
    warmup=st.integers(0, 4),
    max_age=st.none() | st.integers(0, 5),
    shape=st.sampled_from([None, DIPPING]),
)
@settings(max_examples=60, deadline=None)
def test_a_larger_limit_never_computes_more_of_the_same_passes(
    a: float, b: float, warmup: int, max_age: int | None, shape: tuple[float, ...] | None
) -> None:
    made = [
        computed_steps(open_loop(FlowCache(max_drift=m, warmup=warmup, max_age=max_age, polynomial=shape), RECORDED))
        for m in sorted((a, b))
    ]
    assert len(made[1]) <= len(made[0])


@given(a=st.integers(0, 6), b=st.integers(0, 6), drift=st.floats(0, 3))
@settings(max_examples=40, deadline=None)
def test_residuals_are_never_older_than_allowed(a: int, b: int, drift: float) -> None:
    young, old = sorted((a, b))
    made = [
        computed_steps(open_loop(FlowCache(max_drift=drift, warmup=1, tail=0, max_age=m), RECORDED))
        for m in (young, old)
    ]
    assert len(made[1]) <= len(made[0])
    for found, age in zip(made, (young, old), strict=True):
        assert all(j - i <= age + 1 for i, j in zip(found, [*found[1:], len(RECORDED)], strict=True))


def test_numbers_that_are_not_finite_are_computed() -> None:
    for config, name in (
        (FlowCache(max_drift=1e9, warmup=1, tail=0, max_age=None), "modulated"),
        (FlowCache(max_drift=1e9, warmup=1, tail=0, max_age=None, polynomial=DIPPING), "modulated"),
        (FlowCache(max_drift=1e9, warmup=1, tail=0, faithful=True), "embedding"),
    ):
        decisions = open_loop(config, spoiled(RECORDED, 4, name))
        assert computed_steps(decisions) == [0, 4, 5, 12]
        assert decisions[5].reason is Reason.NOT_FINITE


def test_branches_do_not_share_state() -> None:
    config = FlowCache(max_drift=0.25, warmup=2)
    starts = {"cond": noises(2, seed=1), "uncond": noises(2, seed=2, scale=0.2)}
    both, handle = rollout(Denoiser(), starts, config)
    for branch, noise in starts.items():
        alone, single = rollout(Denoiser(), {branch: noise}, config)
        assert all(torch.equal(a, b) for a, b in zip(alone[branch], both[branch], strict=True))
        assert [r.action for r in handle.trace if r.branch == branch] == [r.action for r in single.trace]
        assert 0 < single.stats().skip_rate < 1


def test_a_chunk_begins_anew() -> None:
    config = FlowCache(max_drift=0.25, warmup=2, tail=0)
    first, second = noises(1, seed=1)[0], noises(1, seed=2, scale=0.2)[0]
    together, handle = rollout(Denoiser(), {"cond": [first, second]}, config)
    alone, single = rollout(Denoiser(), {"cond": [second]}, config)
    assert torch.equal(together["cond"][1], alone["cond"][0])
    assert [r.drift for r in handle.trace][STEPS:] == pytest.approx([r.drift for r in single.trace], nan_ok=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_drift": -0.1}, "max_drift must be at least 0"),
        ({"warmup": -1}, "warmup must be an integer of at least 0"),
        ({"tail": -1}, "tail must be an integer of at least 0"),
        ({"max_age": -1}, "max_age must be an integer of at least 0"),
        ({"steps": 5}, "warmup=5 and tail=1 are more than the 5 steps of a chunk"),
        ({"signal": "latent"}, "signal must be one of 'modulated', 'hidden', 'embedding'"),
        ({"polynomial": ()}, "polynomial must be finite coefficients"),
        ({"faithful": True, "signal": "hidden"}, "signal='hidden' has no effect with faithful=True"),
        ({"faithful": True, "max_age": None}, "max_age=None has no effect with faithful=True"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlowCache(**wrong)  # type: ignore[arg-type]


def test_every_decision_is_explained_with_its_numbers() -> None:
    config = FlowCache(max_drift=1e9, warmup=1, max_age=2)
    _, handle = rollout(Denoiser(), {"cond": noises(1)}, config)
    told = [config.explain(r) for r in handle.trace]
    drift = list(handle.trace)[2].drift
    assert told[2] == (
        "Chunk 0, step 2, whole stack (cond): replayed, it drifted little: the modulated input of this chunk changed "
        f"by {drift:.4g} since the last computed step, below max_drift=1e+09."
    )
    assert told[3] == "Chunk 0, step 3, whole stack (cond): computed, replayed too often in a row (max_age=2)."
    released = FlowCache(faithful=True, warmup=1)
    _, handle = rollout(Denoiser(), {"cond": noises(1)}, released)
    assert "the embedding of this chunk, rescaled, changed by" in released.explain(list(handle.trace)[1])
