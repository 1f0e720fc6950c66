"""Noise banks: every draw is standard normal by itself, chunks share what the bank says, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollcache import noise

SIZE = 20_000  # a mean is then within 0.03 of its value, four times its standard deviation


def correlation(a: Tensor, b: Tensor) -> float:
    return float((a * b).mean())


BANKS = [noise.fresh(), noise.per_cycle(3), noise.per_cycle(None), noise.correlated(0.8, 3), noise.correlated(0.25)]


@pytest.mark.parametrize("bank", BANKS)
def test_every_draw_is_standard_normal_by_itself(bank: noise.Bank) -> None:
    for chunk, step in ((0, 0), (4, 0), (4, 2)):
        x = bank.at(chunk, step)(SIZE)
        assert abs(float(x.mean())) < 0.03
        assert float(x.var()) == pytest.approx(1, abs=0.04)
        assert float((x**4).mean()) == pytest.approx(3, abs=0.3)  # normal, not just of that variance


@given(rho=st.floats(0, 1), every=st.integers(1, 5), a=st.integers(0, 9), b=st.integers(0, 9), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_chunks_of_a_cycle_are_correlated_by_rho_and_others_are_independent(
    rho: float, every: int, a: int, b: int, seed: int
) -> None:
    bank = noise.correlated(rho, every, seed=seed)
    x, y = bank.at(a)(SIZE), bank.at(b)(SIZE)
    expected = 1.0 if a == b else rho if a // every == b // every else 0.0
    assert correlation(x, y) == pytest.approx(expected, abs=0.05)


def test_the_ends_of_rho_are_fresh_and_per_cycle() -> None:
    for chunk in range(5):
        assert torch.equal(noise.correlated(0, 2).at(chunk)(6), noise.fresh().at(chunk)(6))
        assert torch.equal(noise.correlated(1, 2).at(chunk)(6), noise.per_cycle(2).at(chunk)(6))


@pytest.mark.parametrize("bank", BANKS)
def test_steps_draws_and_seeds_are_independent(bank: noise.Bank) -> None:
    randn = bank.at(4, 1)
    other = noise.Bank(rho=bank.rho, every=bank.every, seed=1)
    first = randn(SIZE)
    for another in (randn(SIZE), bank.at(4, 2)(SIZE), other.at(4, 1)(SIZE)):
        assert abs(correlation(first, another)) < 0.05


@pytest.mark.parametrize("bank", BANKS)
def test_a_draw_depends_on_nothing_but_its_place(bank: noise.Bank) -> None:
    forwards = [bank.at(n, t)(3) for n in range(4) for t in range(2)]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    backwards = [bank.at(n, t)(3) for n in reversed(range(4)) for t in reversed(range(2))]
    assert all(torch.equal(a, b) for a, b in zip(forwards, reversed(backwards), strict=True))
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is left alone


def test_it_stands_in_for_randn_and_randn_like() -> None:
    bank = noise.fresh(seed=3)
    as_numbers, as_shape = bank.at(1)(2, 3), bank.at(1)((2, 3))
    assert torch.equal(as_numbers, as_shape)
    assert torch.equal(bank.at(1)(torch.Size([2, 3]), dtype=torch.float64).float(), as_numbers)
    assert bank.at(0)().shape == ()
    like = bank.at(1).like(torch.empty(2, 3, dtype=torch.bfloat16))
    assert like.dtype is torch.bfloat16
    assert torch.equal(like, as_numbers.bfloat16())
    assert bank.at(1)(2, 3, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert bank.at(1)(2, 3).device.type == "meta"


def test_a_loop_can_tell_the_cache_which_chunks_start_from_new_noise() -> None:
    assert [noise.fresh().is_fresh(n) for n in range(4)] == [True] * 4
    assert [noise.per_cycle(2).is_fresh(n) for n in range(4)] == [True, False, True, False]
    assert [noise.per_cycle(None).is_fresh(n) for n in range(3)] == [True, False, False]
    assert [noise.correlated(0.9, 2).is_fresh(n) for n in range(3)] == [True] * 3


def test_a_bank_says_in_one_line_what_it_does() -> None:
    assert noise.fresh(seed=2).describe() == "noise: fresh for every chunk, seed 2"
    assert noise.per_cycle(None).describe() == "noise: one for the whole rollout, seed 0"
    assert noise.correlated(0.5, 4).describe() == (
        "noise: correlated between chunks with rho=0.5, one shared part per cycle of 4 chunks, seed 0"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: noise.correlated(1.5), r"rho must be in \[0, 1\]"),
        (lambda: noise.per_cycle(0), "every must be an integer of at least 1"),
        (lambda: noise.fresh(seed=-1), "seed must be"),
        (lambda: noise.fresh().at(-1), "chunk must be"),
        (lambda: noise.fresh().at(0, 0.5), "step must be"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
