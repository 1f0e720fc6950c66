"""Fidelity: parity with scikit-image, the conventions that papers leave open, streaming, the mosaic, bad input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from rollcache.measure import FidelityMeter, FrameError, compare, mosaic, stitch
from rollcache.measure.fidelity import psnr, ssim_map

RIG = {"front": (2, 24, 40), "sides": (4, 24, 32), "rear": (1, 24, 40)}


def rollout(frames=3, seed=0, rig=RIG, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {g: torch.rand(frames, *shape, 3, generator=generator, dtype=dtype) for g, shape in rig.items()}


def noisy(reference, sd=0.02, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {g: (x + sd * torch.randn(x.shape, generator=generator)).clamp(0, 1) for g, x in reference.items()}


def skimage_psnr(x, y):
    return peak_signal_noise_ratio(y.double().numpy(), x.double().numpy(), data_range=1.0)


def skimage_ssim(x, y):
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1.0}
    return structural_similarity(x.double().numpy(), y.double().numpy(), channel_axis=-1, **options)


@pytest.mark.parametrize("sd", [0.002, 0.02, 0.2])
def test_psnr_and_ssim_equal_scikit_image(sd):
    reference = rollout()
    test = noisy(reference, sd)
    found = compare(test, reference)
    every_psnr, every_ssim = [], []
    for group, x in test.items():
        for t in range(x.shape[0]):
            for v in range(x.shape[1]):
                a, b = x[t, v], reference[group][t, v]
                every_psnr.append(skimage_psnr(a, b))
                every_ssim.append(skimage_ssim(a, b))
    assert found.psnr == pytest.approx(np.mean(every_psnr), abs=1e-10)
    assert found.ssim == pytest.approx(np.mean(every_ssim), abs=1e-10)
    rear = found.cameras["rear"]
    assert rear.psnr == pytest.approx(np.mean(every_psnr[-3:]), abs=1e-10)
    assert rear.ssim == pytest.approx(np.mean(every_ssim[-3:]), abs=1e-10)


def test_stitched_picture_without_background_equals_scikit_image():
    rig = {"front": (2, 24, 40)}  # one row, no background
    reference = rollout(rig=rig)
    test = noisy(reference)
    found = compare(test, reference).stitched
    ours, theirs = stitch(test), stitch(reference)
    assert ours.shape == (3, 24, 80, 3)
    pairs = list(zip(ours, theirs, strict=True))
    expected = np.mean(
        [peak_signal_noise_ratio(b.double().numpy(), a.double().numpy(), data_range=1.0) for a, b in pairs]
    )
    assert found.psnr == pytest.approx(expected, abs=1e-10)
    assert found.ssim == pytest.approx(np.mean([skimage_ssim(a, b) for a, b in pairs]), abs=1e-10)


def test_background_of_the_stitched_picture_does_not_count():
    reference = rollout(1, rig={"a": (2, 24, 40), "b": (1, 24, 40)})  # the second row is half empty
    test = noisy(reference, 0.2)
    layout, ours, theirs = mosaic(test), stitch(test)[0].double(), stitch(reference)[0].double()
    camera = layout.mask()
    assert camera.float().mean() == 0.75
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1.0, "full": True}
    _, similarity = structural_similarity(ours.numpy(), theirs.numpy(), channel_axis=-1, **options)
    inner = camera[5:-5, 5:-5].numpy()
    found = compare(test, reference).stitched
    assert found.ssim == pytest.approx(similarity[5:-5, 5:-5][inner].mean(), abs=1e-10)
    assert found.psnr == pytest.approx(-10 * math.log10((ours - theirs)[camera].square().mean()), abs=1e-10)


def test_ssim_map_equals_a_naive_one():
    x, y = torch.rand(2, 17, 14, dtype=torch.float64)
    taps = torch.tensor([math.exp(-((i - 5) ** 2) / 4.5) for i in range(11)], dtype=torch.float64)
    window = torch.outer(taps, taps) / taps.sum() ** 2
    for row in range(7):
        for column in range(4):
            a, b = (z[row : row + 11, column : column + 11] for z in (x, y))
            mean_a, mean_b = (window * a).sum(), (window * b).sum()
            var_a, var_b = (window * (a - mean_a) ** 2).sum(), (window * (b - mean_b) ** 2).sum()
            both = (window * (a - mean_a) * (b - mean_b)).sum()
            expected = (2 * mean_a * mean_b + 1e-4) * (2 * both + 9e-4)
            expected /= (mean_a**2 + mean_b**2 + 1e-4) * (var_a + var_b + 9e-4)
            assert ssim_map(x, y)[row, column] == pytest.approx(float(expected), abs=1e-12)


def test_identical_frames_are_capped_and_do_not_swallow_the_mean():
    reference = rollout(frames=4)
    test = noisy(reference)
    for group in test:
        test[group][1] = reference[group][1]
    found = compare(test, reference)
    assert found.overall.identical == 1
    assert found.overall.psnr_trace[1] == 100.0
    assert math.isfinite(found.psnr)
    assert found.psnr > np.mean([p for i, p in enumerate(found.overall.psnr_trace) if i != 1])
    same = compare(reference, reference)
    assert (same.psnr, same.overall.psnr_global, same.stitched.psnr, same.overall.psnr_uint8) == (100, 100, 100, 100)
    assert same.ssim == pytest.approx(1.0, abs=1e-12)
    assert same.overall.identical == same.overall.frames == 4


def test_pooled_and_mean_psnr_differ_as_defined():
    zero = {"front": torch.zeros(2, 1, 16, 16, 3)}
    test = {"front": zero["front"].clone()}
    test["front"][0] += 0.1
    test["front"][1] += 0.01
    found = compare(test, zero).overall
    assert found.psnr == pytest.approx((20 + 40) / 2, abs=1e-4)
    assert found.psnr_global == pytest.approx(-10 * math.log10((0.01 + 0.0001) / 2), abs=1e-4)


def test_byte_rounding_is_reported_beside_the_float_number():
    reference = rollout()
    found = compare(noisy(reference, 0.0022), reference).overall
    assert 52 < found.psnr < 55
    assert 0.5 < found.psnr - found.psnr_uint8 < 4
    below_a_byte = {g: (x * 255).round() / 255 for g, x in reference.items()}
    shifted = {g: (x + 0.001).clamp(0, 1) for g, x in below_a_byte.items()}
    assert compare(shifted, below_a_byte).overall.psnr_uint8 == 100.0


@given(parts=st.lists(st.integers(1, 3), min_size=1, max_size=4), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_streaming_in_any_parts_equals_one_call(parts, seed):
    rig = {"a": (2, 12, 13), "b": (1, 14, 11)}
    reference = rollout(sum(parts), seed, rig)
    test = noisy(reference, seed=seed + 1)
    meter, start = FidelityMeter(), 0
    for size in parts:
        meter.update(*({g: x[start : start + size] for g, x in side.items()} for side in (test, reference)))
        start += size
    assert meter.result() == compare(test, reference)


@given(sd=st.floats(0.001, 0.05), factor=st.floats(1.5, 4))
@settings(max_examples=10, deadline=None)
def test_more_noise_is_worse_in_every_figure(sd, factor):
    reference = {"a": torch.full((1, 1, 16, 16, 3), 0.5)}
    less, more = (compare(noisy(reference, s), reference).overall for s in (sd, sd * factor))
    assert less.psnr > more.psnr
    assert less.ssim > more.ssim


def test_values_outside_zero_to_one_are_clamped():
    reference = {"a": torch.ones(1, 1, 16, 16, 3)}
    assert compare({"a": reference["a"] + 0.2}, reference).psnr == 100.0


def test_mosaic_of_the_street_rig_puts_every_camera_once():
    rig = {"front": (2, 48, 96), "sides": (4, 48, 80), "rear": (1, 48, 96)}
    frames = {g: torch.zeros(1, *shape, 3) for g, shape in rig.items()}
    number = 0
    for x in frames.values():
        for v in range(x.shape[1]):
            number += 1
            x[:, v] = number / 10
    layout = mosaic(frames)
    picture = stitch(frames, background=1.0)
    assert picture.shape == (1, 96, 352, 3)
    for i, tile in enumerate(layout.tiles, start=1):
        part = picture[0, tile.top : tile.top + tile.height, tile.left : tile.left + tile.width]
        assert (part == torch.tensor(i / 10)).all(), tile.name
    assert int(layout.mask().sum()) == 48 * (3 * 96 + 4 * 80)
    assert (picture[0][~layout.mask()] == 1).all()
    assert {t.name: t.left for t in layout.tiles if t.top} == {"left_rear": 48, "rear": 128, "right_rear": 224}
    above = [t.name for t in sorted(layout.tiles, key=lambda t: (t.top, t.left)) if t.top == 0]
    assert above == ["left_front", "front_narrow", "front_wide", "right_front"]


@given(
    st.dictionaries(
        st.sampled_from("abcdef"), st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)), min_size=1
    )
)
@settings(deadline=None)
def test_mosaic_of_any_rig_overlaps_nowhere_and_has_even_sides(rig):
    layout = mosaic({g: torch.zeros(1, *shape, 3) for g, shape in rig.items()})
    assert layout.height % 2 == layout.width % 2 == 0
    assert int(layout.mask().sum()) == sum(v * h * w for v, h, w in rig.values())
    assert len({t.name for t in layout.tiles}) == len(layout.tiles) == sum(v for v, _, _ in rig.values())


GOOD = rollout(2)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ({}, "non-empty mapping"),
        ([GOOD["front"]], "non-empty mapping .* list"),
        ({**GOOD, "rear": GOOD["rear"].numpy()}, "'rear': expected a tensor, got ndarray"),
        ({**GOOD, "rear": GOOD["rear"][0]}, r"'rear': expected shape \[T, V, H, W, 3\] .* got \[1, 24, 40, 3\]"),
        ({**GOOD, "rear": GOOD["rear"].movedim(-1, 2)}, "'rear': expected shape"),
        ({**GOOD, "rear": GOOD["rear"][:0]}, "without empty axes"),
        ({**GOOD, "rear": (GOOD["rear"] * 255).byte()}, "divide bytes by 255"),
        ({**GOOD, "rear": GOOD["rear"] * 255}, r"'rear': values span \[.*\]; bring them to \[0, 1\]"),
        ({**GOOD, "rear": GOOD["rear"] * 2 - 1}, "bring them to"),
        ({**GOOD, "rear": GOOD["rear"][:1]}, "different numbers of frames"),
        ({g: x for g, x in GOOD.items() if g != "rear"}, "view groups differ: test has .*front.*sides"),
        ({**GOOD, "rear": torch.rand(2, 1, 24, 41, 3)}, r"'rear': test has shape \[2, 1, 24, 41, 3\]"),
    ],
)
def test_bad_frames_are_named(test, message):
    with pytest.raises(FrameError, match=message):
        compare(test, GOOD)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_frames_are_named_with_the_first_bad_frame(bad):
    test = {g: x.clone() for g, x in GOOD.items()}
    test["sides"][1, 2, 0, 0, 0] = bad
    with pytest.raises(FrameError, match="test frames, view group 'sides': NaN or infinite values, first in frame 1"):
        compare(test, GOOD)


def test_small_cameras_changed_rigs_and_empty_meters_are_refused():
    tiny = {"a": torch.rand(1, 1, 10, 30, 3)}
    with pytest.raises(FrameError, match="SSIM needs cameras of 11 x 11 pixels or more; too small: a"):
        compare(tiny, tiny)
    meter = FidelityMeter()
    with pytest.raises(FrameError, match="no frames were compared"):
        meter.result()
    meter.update(GOOD, GOOD)
    other = rollout(1, rig={**RIG, "rear": (1, 24, 48)})
    with pytest.raises(FrameError, match="other cameras or sizes"):
        meter.update(other, other)


def test_names_are_checked():
    frames = {"a": torch.rand(1, 2, 12, 12, 3)}
    assert list(compare(frames, frames, names={"a": ("left", "right")}).cameras) == ["left", "right"]
    assert list(compare(frames, frames).cameras) == ["a_0", "a_1"]
    with pytest.raises(FrameError, match="'a' has 2 cameras but 1 names"):
        compare(frames, frames, names={"a": ("left",)})
    with pytest.raises(FrameError, match="must be unique"):
        compare(frames, frames, names={"a": ("left", "left")})


def test_psnr_of_a_tensor_is_elementwise():
    assert psnr(torch.tensor([1.0, 0.01, 0.0])).tolist() == pytest.approx([0.0, 20.0, 100.0])
