"""SeaCache: its filter, its decisions, and the line through two residuals."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_doubles import (
    SEGMENTS,
    SIGMAS,
    STEPS,
    TOKENS,
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
    spoiled,
    weights_of,
)
from torch import Tensor

import rollcache
from rollcache import Action, Pass, Reason, Role, RollcacheError, Segment
from rollcache.policies.seacache import SeaCache
from rollcache.policies.signals import sea_filter


def naive_gain(grid: tuple[int, int, int], sigma: float) -> np.ndarray:
    """Frequency by frequency, in double precision."""
    s = min(max(sigma, 1e-6), 1 - 1e-6)
    gain = np.empty(grid)
    for at in np.ndindex(*grid):
        value = 1.0
        for k, n in zip(at, grid, strict=True):
            f = min(k, n - k) / n
            prior = 1 / (f**3 + 1e-16)
            value *= (1 - s) * prior / ((1 - s) ** 2 * prior + s**2)
        gain[at] = value
    return gain / gain.mean()


def naive_filter(x: np.ndarray, sigma: float, segments: tuple[Segment, ...]) -> np.ndarray:
    """[B, L, Z] sample by sample, camera by camera and channel by channel; tokens are found one by one."""
    out = np.zeros(x.shape)
    for s in segments or (Segment("all", 1, (1, 1, x.shape[1]), 0, 0, 0),):
        frames, height, width = s.grid
        gain = naive_gain(s.grid, sigma)
        for view in range(s.views):
            place = np.empty(s.grid, dtype=int)
            for f, h, w in np.ndindex(frames, height, width):
                place[f, h, w] = s.start + view * s.view_stride + f * s.frame_stride + h * width + w
            for b in range(x.shape[0]):
                for z in range(x.shape[2]):
                    out[b, place, z] = np.fft.ifftn(np.fft.fftn(x[b, place, z]) * gain).real
    return out


def naive(config: SeaCache) -> Rule:
    """SeaCache from its equations, with nothing remembered."""

    def seen(p: Seen) -> np.ndarray:
        return naive_filter(getattr(p, config.signal).double().numpy(), p.where.time, p.where.segments)

    def rule(past: list[Seen], now: Seen) -> tuple[float, ...] | None:
        step = len(past)
        if step < config.warmup or step >= STEPS - config.tail or config.max_drift == 0:
            return None
        chain = [*past, now]
        exact = [i for i, p in enumerate(past) if p.computed]
        since = chain[exact[-1] :]
        if config.max_age is not None and len(since) - 1 > config.max_age:
            return None
        filtered = [seen(p) for p in since]
        steps = pairwise(filtered)
        if not sum(np.abs(b - a).mean() / np.abs(a).mean() for a, b in steps) < config.max_drift:
            return None
        if config.order == 0 or len(exact) < 2:
            return (1.0,)
        last, older = past[exact[-1]].where.time, past[exact[-2]].where.time
        return (1 + (now.where.time - last) / (last - older), -(now.where.time - last) / (last - older))

    return rule


CONFIGS = [
    SeaCache(),
    SeaCache(max_drift=0.6, warmup=2),
    SeaCache(max_drift=0.5, order=0, max_age=None),
    SeaCache(max_drift=0.3, signal="modulated", warmup=3, tail=2, max_age=3),
    SeaCache(max_drift=1e9, max_age=1, warmup=2, tail=0),
]

RAGGED = (
    Segment("wide", 2, (2, 2, 3), 0, 6, 16),  # frame by frame: both cameras, then the other group
    Segment("tele", 1, (2, 1, 4), 12, 4, 16),
)


@pytest.mark.parametrize("segments", [(), SEGMENTS, RAGGED])
@pytest.mark.parametrize("sigma", [0.0, 0.3, 0.9, 1.0])
def test_the_filter_equals_one_written_by_hand(segments: tuple[Segment, ...], sigma: float) -> None:
    x = torch.randn(2, TOKENS, 3, generator=torch.Generator().manual_seed(1))
    found = sea_filter(x, sigma, segments)
    expected = torch.from_numpy(naive_filter(x.double().numpy(), sigma, segments)).float()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert found.dtype == sea_filter(x.bfloat16(), sigma, segments).dtype == torch.float32


def test_a_clean_latent_passes_and_of_pure_noise_only_the_mean_is_left() -> None:
    x = torch.randn(1, TOKENS, 3, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(sea_filter(x, 0.0, SEGMENTS), x)
    front = x[0, :12].mean(0)
    torch.testing.assert_close(sea_filter(x, 1.0, SEGMENTS)[0, :12] / 12, front.expand(12, -1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("sigma", "bins"), [(0.9375, 1073), (0.8333, 9099), (0.625, 15756)])
def test_how_many_frequencies_pass_at_the_levels_of_a_four_step_sampler(sigma: float, bins: int) -> None:
    """Those that carry 90 % of the power of filtered white noise, of 18720 on a 3x60x104 grid."""
    impulse = torch.zeros(1, 3 * 60 * 104, 1)
    impulse[0, 0] = 1
    grid = (Segment.contiguous("all", 1, (3, 60, 104)),)
    power = torch.fft.fftn(sea_filter(impulse, sigma, grid).reshape(3, 60, 104).double()).abs() ** 2
    share = power.flatten().sort(descending=True).values.cumsum(0) / power.sum()
    assert int((share < 0.9).sum()) + 1 == pytest.approx(bins, rel=0.01)


@given(seed=st.integers(0, 99), batch=st.integers(1, 4), sigma=st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_samples_cameras_and_channels_are_filtered_each_by_itself(seed: int, batch: int, sigma: float) -> None:
    x = torch.randn(batch, TOKENS, 3, generator=torch.Generator().manual_seed(seed))
    whole = sea_filter(x, sigma, SEGMENTS)
    torch.testing.assert_close(whole, torch.cat([sea_filter(x[i : i + 1], sigma, SEGMENTS) for i in range(batch)]))
    other = x.clone()
    other[:, 12:24] = 0  # the second camera
    torch.testing.assert_close(sea_filter(other, sigma, SEGMENTS)[:, :12], whole[:, :12])
    torch.testing.assert_close(sea_filter(x[..., :1], sigma, SEGMENTS), whole[..., :1])


def test_a_list_of_hidden_states_is_refused() -> None:
    with pytest.raises(RollcacheError, match="one tensor"):
        sea_filter(torch.ones(1, 4, 2), 0.5, (Segment.contiguous("b", 1, (1, 2, 2), tensor=1),))


@pytest.mark.parametrize("config", CONFIGS)
def test_a_rollout_equals_a_loop_written_by_hand(config: SeaCache) -> None:
    assert_as_by_hand(config, naive(config), 2, 1e-4)


@pytest.mark.parametrize("config", CONFIGS)
def test_on_the_street_every_decision_is_what_the_equations_say(config: SeaCache) -> None:
    watch = Watch(config)
    on_the_street(watch, chunks=1)
    for s, expected in zip(watch.seen, judged(watch.seen, naive(config)), strict=True):
        assert weights_of(s.decision) == (None if expected is None else pytest.approx(expected))
    assert any(not s.computed for s in watch.seen)


@pytest.mark.parametrize("config", CONFIGS)
def test_on_recorded_passes_every_decision_is_what_the_equations_say(config: SeaCache) -> None:
    found, wanted = on_recorded(config, SeaCache(max_drift=0), naive(config))
    assert len(found) == len(wanted)
    for ours, expected in zip(found, wanted, strict=True):
        assert ours == (None if expected is None else pytest.approx(expected))


def test_the_second_order_is_exact_where_the_residual_is_a_line_in_the_noise_level() -> None:
    """h gains sigma in the stack: on a shifted grid a line in the step index would miss it."""

    class Shift(torch.nn.Module):
        def forward(self, h: Tensor, sigma: float) -> Tensor:
            return h + 3 * sigma - 1

    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([Shift()])

        def forward(self, h: Tensor, sigma: float, where: Pass) -> Tensor:
            return self.blocks[0](h, sigma)

    adapter = rollcache.Adapter(
        blocks=lambda m: list(m.blocks), locate=lambda m, a, k: k["where"], latent=lambda m, a, k: a[0]
    )
    x = torch.randn(1, 6, 2)
    for order, right in ((1, True), (0, False)):
        model = One()
        config = SeaCache(max_drift=1e9, order=order, warmup=2, max_age=3)
        handle = rollcache.enable(model, config, adapter=adapter)
        for t, sigma in enumerate(SIGMAS[:-1]):
            where = Pass(role=Role.DENOISE, chunk=0, step=t, time=sigma, steps=STEPS)
            with torch.no_grad():
                out = model(x, sigma, where=where)
            skipped = list(handle.trace)[-1].action is not Action.COMPUTE
            assert torch.allclose(out, x + 3 * sigma - 1, atol=1e-5) is (right or not skipped)
        assert handle.stats().skip_rate > 0.4


def test_where_two_noise_levels_are_one_the_newest_residual_is_reused() -> None:
    seen = recorded(SeaCache(max_drift=0), chunks=1)
    same = [
        Seen(**{**vars(s), "where": Pass(role=Role.DENOISE, chunk=0, step=i, time=0.5)}) for i, s in enumerate(seen)
    ]
    decisions = open_loop(SeaCache(max_drift=1e9, warmup=2), same)
    assert {d.action for d in decisions} == {Action.COMPUTE, Action.REPLAY}
    assert open_loop(SeaCache(max_drift=1e9, warmup=1), seen)[1].action is Action.REPLAY  # only one is stored
    assert open_loop(SeaCache(max_drift=1e9, warmup=2), seen)[2].action is Action.PREDICT


def test_with_no_drift_allowed_nothing_changes_by_a_bit() -> None:
    starts = {"cond": noises(2)}
    plain, _ = rollout(Denoiser(), starts)
    for config in (SeaCache(max_drift=0, warmup=0, tail=0), SeaCache(max_drift=1e9, warmup=0, tail=0, max_age=0)):
        cached, handle = rollout(Denoiser(), starts, config)
        assert all(torch.equal(a, b) for a, b in zip(plain["cond"], cached["cond"], strict=True))
        assert handle.stats().skip_rate == 0
    plain, _ = on_the_street(None)
    cached, _ = on_the_street(SeaCache(max_drift=0, warmup=0, tail=0))
    assert all(torch.equal(a, b) for a, b in zip(plain, cached, strict=True))


RECORDED = recorded(SeaCache(max_drift=0))


@given(
    a=st.floats(0, 3),
    b=st.floats(0, 3),
    max_age=st.none() | st.integers(0, 4),
    signal=st.sampled_from(["latent", "modulated"]),
)
@settings(max_examples=40, deadline=None)
def test_a_larger_limit_never_computes_more_of_the_same_passes(
    a: float, b: float, max_age: int | None, signal: str
) -> None:
    low, high = (
        computed_steps(open_loop(SeaCache(max_drift=m, max_age=max_age, signal=signal), RECORDED))  # type: ignore[arg-type]
        for m in sorted((a, b))
    )
    assert len(high) <= len(low)


def test_numbers_that_are_not_finite_are_computed() -> None:
    decisions = open_loop(SeaCache(max_drift=1e9, tail=0, max_age=None), spoiled(RECORDED, 4, "latent"))
    assert computed_steps(decisions) == [0, 4, 5, 12]
    assert decisions[4].reason is Reason.NOT_FINITE


def test_branches_do_not_share_state() -> None:
    config = SeaCache(max_drift=0.4)
    starts = {"cond": noises(2, seed=1), "uncond": noises(2, seed=2, scale=3)}
    both, handle = rollout(Denoiser(), starts, config)
    for branch, noise in starts.items():
        alone, single = rollout(Denoiser(), {branch: noise}, config)
        assert all(torch.equal(a, b) for a, b in zip(alone[branch], both[branch], strict=True))
        assert [r.action for r in handle.trace if r.branch == branch] == [r.action for r in single.trace]
        assert 0 < single.stats().skip_rate < 1


def test_a_chunk_begins_anew() -> None:
    config = SeaCache(max_drift=0.4, tail=0)
    first, second = noises(1, seed=1)[0], noises(1, seed=2, scale=3)[0]
    together, handle = rollout(Denoiser(), {"cond": [first, second]}, config)
    alone, single = rollout(Denoiser(), {"cond": [second]}, config)
    assert torch.equal(together["cond"][1], alone["cond"][0])
    assert [r.drift for r in handle.trace][STEPS:] == pytest.approx([r.drift for r in single.trace], nan_ok=True)


@pytest.mark.parametrize("time", [None, 750.0, -0.1])
def test_a_loop_that_does_not_tell_the_noise_level_is_told(time: float | None) -> None:
    model = Denoiser()
    handle = rollcache.enable(model, SeaCache(signal="modulated"), blocks=list(model.blocks), kv_writes="commit_only")
    with torch.no_grad(), handle.rollout(), handle.chunk():
        handle.step(time=time)
        with pytest.raises(RollcacheError, match=f"SeaCache needs the noise level of every pass.*time={time}"):
            model(noises(1)[0], 1.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_drift": -1}, "max_drift must be at least 0"),
        ({"order": 2}, "order must be 0 or 1, got 2"),
        ({"order": -1}, "order must be an integer of at least 0"),
        ({"max_age": -1}, "max_age must be an integer of at least 0"),
        ({"warmup": -1}, "warmup must be an integer of at least 0"),
        ({"steps": 3, "warmup": 2, "tail": 2}, "warmup=2 and tail=2 are more than the 3 steps of a chunk"),
        ({"signal": "embedding"}, "signal must be one of 'latent', 'modulated'"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SeaCache(**wrong)  # type: ignore[arg-type]


def test_every_decision_is_explained_with_its_numbers() -> None:
    config = SeaCache(max_drift=2, warmup=2)
    _, handle = rollout(Denoiser(), {"cond": noises(1)}, config)
    records = list(handle.trace)
    assert config.explain(records[2]) == (
        "Chunk 0, step 2, whole stack (cond): predicted from two residuals, it drifted little: the filtered latent "
        f"changed by {records[2].drift:.4g} since the last computed step, below max_drift=2."
    )
    assert config.explain(records[4]).endswith("computed, replayed too often in a row (max_age=2).")
