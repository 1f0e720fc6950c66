"""Conditions that say nothing are refused where they are made, and what is not finite never leads to reuse."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isnan, nan
from typing import Any

import pytest
import torch
from dummies import doubling
from torch import Tensor

import rollcache
from rollcache import Condition, Reason, WindowReuse, XCache
from rollcache.conditions import Snapshot

POLICIES = [
    XCache(front_blocks=0),
    XCache(front_blocks=0, condition_tol=inf),
    XCache.paper(front_blocks=0),
    WindowReuse(),
    WindowReuse(condition_tol=inf),
]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def reasons(policy: Any, conditions: list[tuple[Condition, ...]], **settings: Any) -> list[Reason]:
    """Why the only block was computed or replayed in every chunk, whose hidden state is always the same."""
    model = doubling(1)
    with (
        rollcache.enable(model, policy, blocks=model.blocks, kv_writes="commit_only", **settings) as cache,
        cache.rollout(),
    ):
        for now in conditions:
            with cache.chunk(conditions=now):
                cache.step()
                model(torch.ones(1, 4, 2))
        return [r.reason for r in cache.trace]


def action(*numbers: float, scale: Tensor | None = None) -> tuple[Condition, ...]:
    return (Condition("action", torch.tensor(numbers), scale),)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scale", [None, torch.tensor([9.0, 0.3])])
@pytest.mark.parametrize("bad", [nan, inf])
def test_a_value_that_is_not_finite_is_never_unmoved(policy: Any, scale: Tensor | None, bad: float) -> None:
    """Not even from itself: a sensor that broke and stays broken is no reason to reuse anything."""
    fine, broken = action(1.0, 0.0, scale=scale), action(1.0, bad, scale=scale)
    seen = reasons(policy, [fine, fine, broken, broken, broken, fine, fine])
    assert seen == [Reason.WARMUP, Reason.SIMILAR, *[Reason.NOT_FINITE] * 4, Reason.SIMILAR]


@pytest.mark.parametrize("policy", POLICIES)
def test_nor_where_ranks_agree_on_the_worst(policy: Any) -> None:
    fine, broken = action(1.0, 0.0), action(1.0, nan)
    seen = reasons(policy, [fine, fine, broken, broken], reduce=lambda mine: mine)
    assert seen[1] is Reason.SIMILAR
    assert Reason.SIMILAR not in seen[2:]


@pytest.mark.parametrize("policy", [XCache(front_blocks=0, condition_tol=inf), WindowReuse(condition_tol=inf)])
def test_no_tolerance_lets_conditions_of_another_shape_pass(policy: Any) -> None:
    assert reasons(policy, [action(1.0), action(5.0), action(1.0, 0.0)])[1:] == [Reason.SIMILAR, Reason.CONDITION]


@pytest.mark.parametrize("bad", [0.0, -1.0, nan, inf])
def test_a_scale_that_measures_nothing_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"scale of condition 'action' must be positive and finite, got \[9\.0, "):
        action(0.0, 0.0, scale=torch.tensor([9.0, bad]))


@pytest.mark.parametrize("bad", [0.0, -1.0, nan, inf])
def test_a_scale_that_could_not_be_looked_at_does_not_pass_either(bad: float) -> None:
    """It is not-a-number even where the change, divided by it, would be nothing."""
    scale = torch.tensor([9.0, 0.3])
    then, now = action(0.0, 0.0, scale=scale), action(0.0, 0.001, scale=scale)
    snapshot = Snapshot.of(then)
    scale[1] = bad  # stands for a scale on an accelerator, which is not waited for
    assert isnan(snapshot.moved(now).distance)


def test_an_accelerator_is_not_waited_for() -> None:
    """A tensor without data stands for one whose values are not there yet: reading them raises."""
    Condition("action", torch.zeros(2, device="meta"), torch.zeros(2, device="meta"))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("action", 3.0), TypeError, "value of condition 'action' must be a tensor, got float"),
        (("action", torch.zeros(2), 0.3), TypeError, "scale of condition 'action' must be a tensor, got float"),
        (("action", torch.zeros(2), (9.0, 0.3)), TypeError, "must be a tensor, got tuple"),
        (("action", torch.zeros(2, dtype=torch.complex64)), TypeError, r"must be real, got torch\.complex64"),
        (("action", torch.zeros(0)), ValueError, "value of condition 'action' is empty"),
        (("action", torch.zeros(2), torch.ones(3)), ValueError, r"shape \[3\], .* that of its value, \[2\]"),
        (("action", torch.zeros(2), torch.ones(4, 2)), ValueError, r"shape \[4, 2\], which does not broadcast"),
        (("action", torch.zeros(1), torch.ones(2)), ValueError, r"shape \[2\], which does not broadcast"),
        ((torch.zeros(2), "action"), TypeError, "name of a condition must be a string, got Tensor"),
    ],
)
def test_what_cannot_be_compared_is_refused_at_once(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Condition(*arguments)


def test_a_scale_may_have_any_shape_that_broadcasts_to_its_value() -> None:
    for shape in ((), (1,), (3,), (2, 1), (2, 3)):
        Condition("action", torch.zeros(2, 3), torch.ones(shape))
