"""Motion energy: a frozen rollout scores 0, the same one 1, and chunks may come in any parts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcache.measure import FrameError, MotionMeter, compare, motion


def rollout(frames, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "front": torch.rand(frames, 2, 12, 16, 3, generator=generator),
        "rear": torch.rand(frames, 1, 12, 14, 3, generator=generator),
    }


def test_same_is_one_and_frozen_is_zero_even_when_its_psnr_is_high():
    still = torch.rand(1, 2, 12, 16, 3)
    reference = {"front": (still + 1e-3 * torch.randn(6, 2, 12, 16, 3)).clamp(0, 1)}
    frozen = {"front": reference["front"][:1].expand(6, -1, -1, -1, -1)}
    assert motion(reference, reference).ratio == 1.0
    assert motion(frozen, reference).ratio == 0.0
    assert compare(frozen, reference).psnr > 55


def test_half_the_movement_is_one_half():
    steps = torch.tensor([0.0, 1.0, 0.0, 1.0]).view(4, 1, 1, 1, 1).expand(4, 2, 12, 16, 3)
    found = motion({"front": 0.3 + 0.1 * steps}, {"front": 0.3 + 0.2 * steps})
    assert found.ratio == pytest.approx(0.5)
    assert (found.test, found.reference, found.steps) == (pytest.approx(0.1), pytest.approx(0.2), 3)


def test_cameras_are_told_apart():
    reference = rollout(4)
    test = {g: x.clone() for g, x in reference.items()}
    test["front"][:, 1] = test["front"][:1, 1]
    found = motion(test, reference)
    assert found.camera_ratios == {"front_0": 1.0, "front_1": 0.0, "rear": 1.0}
    assert found.ratio == pytest.approx(2 / 3, abs=0.02)
    assert found.to_dict()["camera_ratios"] == found.camera_ratios


def test_a_car_that_stands_still_in_both_counts_as_equal_motion():
    still = {"front": torch.rand(1, 1, 12, 12, 3).expand(3, -1, -1, -1, -1)}
    moving = {"front": torch.rand(3, 1, 12, 12, 3)}
    assert motion(still, still).ratio == 1.0
    assert motion(moving, still).ratio is None


@given(parts=st.lists(st.integers(1, 3), min_size=2, max_size=4))
@settings(max_examples=10, deadline=None)
def test_streaming_counts_the_steps_between_chunks(parts):
    test, reference = rollout(sum(parts), 1), rollout(sum(parts), 2)
    meter, start = MotionMeter(), 0
    for size in parts:
        meter.update(*({g: x[start : start + size] for g, x in side.items()} for side in (test, reference)))
        start += size
    whole = motion(test, reference)
    assert meter.result().steps == whole.steps == sum(parts) - 1
    assert meter.result().ratio == pytest.approx(whole.ratio, rel=1e-12)


def test_bad_input_is_named():
    one, other = rollout(1), {"front": torch.rand(1, 2, 12, 18, 3), "rear": torch.rand(1, 1, 12, 14, 3)}
    with pytest.raises(FrameError, match="motion needs at least two frames"):
        motion(one, one)
    meter = MotionMeter()
    meter.update(one, one)
    with pytest.raises(FrameError, match="other cameras or sizes"):
        meter.update(other, other)
    with pytest.raises(FrameError, match="test has shape"):
        motion(rollout(2), rollout(3))
