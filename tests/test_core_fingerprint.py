"""The fingerprint: token budget, layouts, linearity, and similarity at the edges of arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import all_tokens, tokens_of
from torch import Tensor

from rollcache import RollcacheError, Segment
from rollcache.fingerprint import Sampler, Sampling, _cameras, allocate, compare, measure, sample, uniform

GRID = (2, 4, 6)


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        ((2, 16, 32), (1, 4, 8)),
        ((2, 13, 16), (1, 5, 6)),
        ((2, 14, 28), (1, 4, 8)),
        ((3, 30, 52), (1, 4, 7)),
        ((5, 34, 60), (1, 4, 8)),
        ((4, 4, 4), (3, 3, 3)),
        ((4, 6, 10), (2, 3, 5)),
        ((1, 1, 100), (1, 1, 32)),
        ((2, 4, 4), (2, 4, 4)),
    ],
)
def test_budget_is_split_in_proportion_to_the_grid(grid: tuple[int, int, int], expected: tuple[int, int, int]) -> None:
    assert allocate(grid, 32) == expected


AXIS = st.integers(1, 64)


@given(grid=st.tuples(AXIS, AXIS, AXIS), tokens=st.integers(1, 64), frames=st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_budget_is_never_exceeded_and_no_axis_is_lost(grid: tuple[int, int, int], tokens: int, frames: int) -> None:
    counts = allocate(grid, tokens, frames)
    assert math.prod(counts) <= tokens or counts == grid
    assert all(1 <= k <= n for k, n in zip(counts, grid, strict=True))
    assert counts[0] >= min(frames, grid[0], tokens)
    if math.prod(grid) <= tokens:
        assert counts == grid
    for n, k in zip(grid, counts, strict=True):
        indices = uniform(n, k)
        assert len(set(indices)) == k
        assert indices == sorted(indices)
        assert k == 1 or (indices[0], indices[-1]) == (0, n - 1)


def test_two_frames_are_seen_where_strict_proportion_sees_one() -> None:
    assert allocate((2, 16, 32), 32) == (1, 4, 8)
    assert allocate((2, 16, 32), 32, min_frames=2) == (2, 3, 5)


def test_without_a_grid_the_tokens_are_a_linspace() -> None:
    sampler = Sampler((torch.zeros(1, 100, 4),), (), Sampling(tokens=4))
    assert sampler.index[0].tolist() == [0, 33, 66, 99]


def layouts() -> dict[str, tuple[Segment, Segment]]:
    """Two groups of one and two cameras, contiguous and frame-interleaved."""
    f, h, w = GRID
    per_frame = 3 * h * w
    return {
        "contiguous": (Segment.contiguous("a", 1, GRID), Segment.contiguous("b", 2, GRID, start=f * h * w)),
        "interleaved": (
            Segment("a", 1, GRID, 0, h * w, per_frame),
            Segment("b", 2, GRID, h * w, h * w, per_frame),
        ),
    }


def content(views: int, seed: int = 0) -> Tensor:
    """Random content of `views` cameras, [1, V, F, H*W, C]."""
    f, h, w = GRID
    return torch.randn(1, views, f, h * w, 5, generator=torch.Generator().manual_seed(seed))


def test_layouts_of_the_same_content_have_the_same_fingerprint() -> None:
    cameras = content(3)
    contiguous = cameras.flatten(1, 3)
    interleaved = cameras.transpose(1, 2).flatten(1, 3)
    as_list = (cameras[:, :1].flatten(2, 3), cameras[:, 1:].flatten(2, 3))  # [1, V, L, C] per view group
    segments = layouts()
    a = Sampler((contiguous,), segments["contiguous"], Sampling())((contiguous,))
    b = Sampler((interleaved,), segments["interleaved"], Sampling())((interleaved,))
    listed = (Segment.contiguous("a", 1, GRID, tensor=0), Segment.contiguous("b", 2, GRID, tensor=1))
    c = Sampler(as_list, listed, Sampling())(as_list)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(a, c)


@pytest.mark.parametrize("layout", ["contiguous", "interleaved"])
def test_rows_are_the_sampled_tokens_then_the_mean_of_every_camera(layout: str) -> None:
    segments = layouts()[layout]
    hidden = torch.randn(2, 3 * math.prod(GRID), 5)
    sampler = Sampler((hidden,), segments, Sampling(tokens=8, min_frames=2))
    rows = [i for s in segments for v in range(s.views) for i in tokens_of(s, v, allocate(s.grid, 8, 2))]
    means = [hidden[:, all_tokens(s, v)].mean(1, keepdim=True) for s in segments for v in range(s.views)]
    torch.testing.assert_close(sampler((hidden,)), torch.cat([hidden[:, rows], *means], 1))
    assert [b - a for a, b in sampler.entries] == [len(rows) // 3, 2 * len(rows) // 3, 1, 2]


@pytest.mark.parametrize("layout", ["contiguous", "interleaved"])
def test_the_two_ways_to_take_means_agree(layout: str) -> None:
    segments = layouts()[layout]
    hidden = torch.randn(2, 3 * math.prod(GRID), 5)
    by_product = torch.cat(Sampler((hidden,), segments, Sampling())._means((hidden,)), 1)
    by_reduction = torch.cat([_cameras(hidden, s).mean((2, 3), dtype=torch.float32) for s in segments], 1)
    torch.testing.assert_close(by_product, by_reduction)


def test_a_grid_that_was_never_flattened_is_looked_at_like_one_that_was() -> None:
    grid = torch.randn(2, *GRID, 5)
    flat = grid.flatten(1, 3)
    segment = (Segment.contiguous("a", 1, GRID),)
    assert torch.equal(Sampler((grid,), segment, Sampling())((grid,)), Sampler((flat,), segment, Sampling())((flat,)))


def test_fingerprints_add_up() -> None:
    h, r = torch.randn(1, 48, 8), torch.randn(1, 48, 8)
    sampler = Sampler((h,), (Segment.contiguous("a", 1, GRID),), Sampling())
    torch.testing.assert_close(sampler((h,)) + sampler((r,)), sampler((h + r,)))


def test_low_precision_and_autocast_do_not_blur_it() -> None:
    h = torch.randn(1, 48, 8, dtype=torch.bfloat16)
    sampler = Sampler((h,), (Segment.contiguous("a", 1, GRID),), Sampling())
    assert sampler((h,)).dtype is torch.float32
    torch.testing.assert_close(sampler((h,))[:, -1], h.float().mean(1))


def test_a_segment_beyond_the_tokens_is_refused_by_name() -> None:
    with pytest.raises(RollcacheError, match="'front' needs 48 tokens"):
        Sampler((torch.zeros(1, 40, 4),), (Segment.contiguous("front", 1, GRID),), Sampling())


def test_tensors_of_a_list_must_agree_in_channels() -> None:
    with pytest.raises(RollcacheError, match="agree in batch and channels"):
        Sampler((torch.zeros(1, 4, 4), torch.zeros(1, 4, 5)), (), Sampling())


def similarity(now: Tensor, then: Tensor, sampling: Sampling | None = None) -> tuple[float, float]:
    """Cosine and deviation of two hidden states [Bt, 48, C]."""
    sampler = Sampler((now,), (Segment.contiguous("a", 1, GRID),), sampling or Sampling())
    stored = sampler((then,))[None]
    cosine, deviation = compare(stored, measure(stored, sampler), sampler((now,)) - stored[0], sampler)[0]
    return cosine, deviation


@given(seed=st.integers(0, 1000), size=st.sampled_from([1e-3, 0.1, 1.0, 10.0]), scale=st.sampled_from([1e-3, 1.0, 1e3]))
@settings(max_examples=60, deadline=None)
def test_cosine_and_deviation_are_those_of_the_definition(seed: int, size: float, scale: float) -> None:
    g = torch.Generator().manual_seed(seed)
    then = scale * torch.randn(2, 48, 6, generator=g)
    now = then + size * scale * torch.randn(2, 48, 6, generator=g)
    tokens = sample(Segment.contiguous("a", 1, GRID), Sampling())
    cosines, deviations = [], []
    for a, b in zip(now.double(), then.double(), strict=True):
        cosines += [
            torch.cosine_similarity(x.flatten(), y.flatten(), 0)
            for x, y in ((a[tokens], b[tokens]), (a.mean(0), b.mean(0)))
        ]
        deviations.append((a[tokens] - b[tokens]).abs().max() / b[tokens].abs().mean())
    cosine, deviation = similarity(now, then)
    assert cosine == pytest.approx(float(min(cosines)), abs=2e-6)
    assert deviation == pytest.approx(float(max(deviations)), rel=1e-2)


def test_one_view_group_that_changes_is_enough() -> None:
    segments = layouts()["contiguous"]
    then = torch.randn(1, 3 * math.prod(GRID), 5)
    now = then.clone()
    now[:, : math.prod(GRID)] *= -1  # the single camera of group a
    sampler = Sampler((then,), segments, Sampling())
    stored = sampler((then,))[None]
    cosine, _ = compare(stored, measure(stored, sampler), sampler((now,)) - stored[0], sampler)[0]
    assert cosine == pytest.approx(-1)


def test_deviation_looks_at_sampled_tokens_only_and_token_mode_at_their_mean() -> None:
    then = torch.ones(1, 48, 10)
    now = then.clone()
    now[0, 0, 0] += 5.0  # one number of a sampled corner
    assert similarity(now, then)[1] == pytest.approx(5.0, rel=1e-5)
    assert similarity(now, then, Sampling(deviation="token"))[1] == pytest.approx(0.5, rel=1e-5)


def test_zero_resembles_zero_and_nothing_else() -> None:
    zero, one = torch.zeros(1, 48, 4), torch.ones(1, 48, 4)
    assert similarity(zero, zero) == (1.0, 0.0)
    assert similarity(one, zero)[0] == 0.0
    assert similarity(zero, one)[0] == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_is_similar_to_nothing_not_even_to_itself(bad: float) -> None:
    good, broken = torch.randn(1, 48, 4), torch.randn(1, 48, 4)
    broken[0, 17, 2] = bad  # not a sampled token: only the mean sees it
    for now, then in ((broken, good), (good, broken), (broken, broken)):
        cosine, _ = similarity(now, then)
        assert not cosine >= -1
