"""Ceilings: what skipped work is worth at most, with its denominator spelled out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rollcache.measure import PassTimes, ceiling, count_flops, structural_ceiling, structural_skip, time_passes

TIMES = PassTimes(blocks=(1.0, 2.0, 3.0), outside=4.0, commit=5.0)


def test_nothing_skipped_is_a_ceiling_of_one():
    found = ceiling(TIMES, chunks=4, steps=2, commits=1)
    assert (found.skip_rate, found.speedup) == (0.0, 1.0)
    assert found.full == found.left == 4 * 2 * 10 + 5
    assert found.efficiency(0.9) == 0.9


def test_blocks_count_with_their_own_cost():
    cheap = ceiling(TIMES, chunks=2, steps=1, skipped=[(1, 0, 0)])
    dear = ceiling(TIMES, chunks=2, steps=1, skipped=[(1, 0, 2)])
    assert cheap.skip_rate == dear.skip_rate == pytest.approx(1 / 6)
    assert (cheap.left, dear.left) == (19.0, 17.0)
    assert dear.speedup == pytest.approx(20 / 17)


def test_warmup_chunks_count_neither_above_nor_below():
    found = ceiling(TIMES, chunks=3, steps=1, warmup=1, skipped=[(0, 0, 2), (1, 0, 2), (2, 0, 2)], commits=0)
    assert found.skip_rate == pytest.approx(2 / 6)
    assert (found.full, found.left) == (20.0, 14.0)


def test_a_chunk_without_any_pass_saves_what_lies_outside_the_blocks_too():
    all_cells = [(1, t, b) for t in range(2) for b in range(3)]
    skipped = ceiling(TIMES, chunks=2, steps=2, skipped=all_cells)
    empty = ceiling(TIMES, chunks=2, steps=2, empty_chunks=[1])
    both = ceiling(TIMES, chunks=2, steps=2, skipped=all_cells, empty_chunks=[1])
    assert skipped.skip_rate == empty.skip_rate == both.skip_rate == 0.5
    assert (skipped.left, empty.left, both.left) == (28.0, 20.0, 20.0)


def test_guidance_branches_are_passes_of_their_own():
    one = ceiling(TIMES, chunks=2, steps=1, branches=2, skipped=[(1, 0, 1)])
    two = ceiling(TIMES, chunks=2, steps=1, branches=2, skipped=[(1, 0, 1), (1, 0, 1)])
    assert (one.full, one.left, two.left) == (40.0, 38.0, 36.0)
    assert two.skip_rate == 2 * one.skip_rate == pytest.approx(1 / 6)


def test_structural_skip_is_the_papers():
    assert structural_skip(27, exact_every=4) == pytest.approx(0.7222, abs=1e-4)
    assert structural_skip(12, exact_every=4) == pytest.approx(0.6875)
    assert structural_skip(12, exact_every=4, front=0) == pytest.approx(0.75)
    step0 = structural_skip(12, exact_every=4, steps=4, exact_steps=1)
    assert step0 == pytest.approx(0.75 * structural_skip(12, exact_every=4))
    assert structural_skip(30, exact_every=None, back=2) == pytest.approx(0.9)


@given(
    blocks=st.lists(st.floats(0.01, 10), min_size=2, max_size=6),
    chunks=st.integers(2, 6),
    steps=st.integers(1, 4),
    front=st.integers(0, 1),
)
@settings(deadline=None)
def test_structural_ceiling_agrees_with_structural_skip(blocks, chunks, steps, front):
    times = PassTimes(tuple(blocks), outside=0.5, commit=1.0)
    found = structural_ceiling(times, chunks=chunks, steps=steps, front=front)
    assert found.skip_rate == pytest.approx(structural_skip(len(blocks), exact_every=chunks, front=front))
    assert 1 <= found.speedup < chunks


def test_equal_blocks_without_anything_else_follow_amdahl():
    times = PassTimes((1.0,) * 12, outside=0.0)
    found = structural_ceiling(times, chunks=4, steps=4)
    assert found.speedup == pytest.approx(1 / (1 - 0.6875))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"skipped": [(4, 0, 0)]}, r"cell \(4, 0, 0\) lies outside 4 chunks x 2 steps x 3 blocks"),
        ({"skipped": [(0, 2, 0)]}, r"cell \(0, 2, 0\) lies outside"),
        ({"skipped": [(0, 0, 3)]}, r"cell \(0, 0, 3\) lies outside"),
        ({"skipped": [(1, 0, 1), (1, 0, 1)]}, r"cell \(1, 0, 1\) is given 2 times, but there are 1 branches"),
        ({"empty_chunks": [9]}, "chunk 9 lies outside the rollout of 4 chunks"),
        ({"warmup": 4}, "fewer warm-up chunks than chunks"),
        ({"steps": 0}, "steps=0"),
        ({"commits": -1}, "commits=-1"),
    ],
)
def test_impossible_accounts_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ceiling(TIMES, **{"chunks": 4, "steps": 2, **change})


@pytest.mark.parametrize(
    "costs",
    [((), 1.0, 0.0), ((-1.0,), 1.0, 0.0), ((0.0,), 1.0, 0.0), ((1.0,), float("nan"), 0.0), ((1.0,), float("inf"), 0.0)],
)
def test_costs_must_make_sense(costs):
    with pytest.raises(ValueError, match="costs must be finite and not negative"):
        PassTimes(*costs)


@pytest.mark.parametrize(
    "change", [{"blocks": 0}, {"front": 13}, {"front": -1}, {"exact_steps": 5}, {"exact_every": 0}, {"steps": 0}]
)
def test_structural_skip_checks_its_numbers(change):
    with pytest.raises(ValueError, match="must"):
        structural_skip(**{"blocks": 12, "exact_every": 4, "steps": 4, **change})


class FakeTime:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Sleeper(nn.Module):
    """Takes these seconds, one call after the other; the last ones from then on."""

    def __init__(self, clock, *seconds):
        super().__init__()
        self.clock, self.seconds = clock, list(seconds)

    def forward(self, x):
        self.clock.sleep(self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0])
        return x


def test_passes_are_measured_block_by_block_and_hooks_removed(monkeypatch):
    clock = FakeTime()
    monkeypatch.setattr("rollcache.measure.clock.time", clock)
    blocks = nn.ModuleList([Sleeper(clock, 1.0), Sleeper(clock, 70.0, 80.0, 4.0)])
    embed, commit = Sleeper(clock, 50.0, 60.0, 2.0), Sleeper(clock, 90.0, 90.0, 3.0)

    def denoise():
        embed(0)
        for block in blocks:
            block(0)

    found = time_passes(denoise, blocks, lambda: commit(0), repeats=1, warmup=2)
    assert found == PassTimes(blocks=(1.0, 4.0), outside=2.0, commit=3.0)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in blocks)


def test_a_block_that_does_not_run_once_is_named_and_hooks_removed():
    blocks = nn.ModuleList([nn.Identity(), nn.Identity()])
    with pytest.raises(ValueError, match="block 1 ran 0 times in 3 passes, not once in each"):
        time_passes(lambda: blocks[0](0), blocks, repeats=2)
    with pytest.raises(ZeroDivisionError):
        time_passes(lambda: blocks[0](1 / 0), blocks)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in blocks)


def test_flops_of_a_matrix_product():
    a, b = torch.rand(3, 4), torch.rand(4, 5)
    assert count_flops(lambda: a @ b) == 2 * 3 * 4 * 5
