"""The best schedule for a measured cost of replaying."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcache.policies.schedules import best_schedule, sparse_to_dense


def total(cost: list[list[float]], anchors: tuple[int, ...], steps: int) -> float:
    """Every step that is no anchor replays the last one before it."""
    return sum(cost[max(a for a in anchors if a < s)][s] for s in range(steps) if s not in anchors)


@given(data=st.data(), steps=st.integers(1, 8))
@settings(max_examples=80, deadline=None)
def test_no_other_choice_of_anchors_costs_less(data: st.DataObject, steps: int) -> None:
    exact = data.draw(st.integers(1, steps))
    cost = [[data.draw(st.floats(0, 9)) for _ in range(steps)] for _ in range(steps)]
    found = best_schedule(cost, exact, steps)
    assert len(found) == exact and found[0] == 0 and all(b > a for a, b in pairwise(found))
    least = min(total(cost, (0, *rest), steps) for rest in combinations(range(1, steps), exact - 1))
    assert total(cost, found, steps) == pytest.approx(least)


def test_a_cost_that_grows_with_age_alone_spreads_anchors_evenly() -> None:
    cost = [[float(max(0, s - a)) for s in range(12)] for a in range(12)]
    assert best_schedule(cost, 4, 12) == (0, 3, 6, 9)


def test_where_errors_weigh_more_anchors_stand_closer() -> None:
    """An influence that decays along the trajectory, as FSC's figure 10 has it."""
    cost = [[(s - a) * (6.0 if s < 6 else 1.0) if s > a else 0.0 for s in range(24)] for a in range(24)]
    gaps = [b - a for a, b in pairwise(best_schedule(cost, 8, 24))]
    assert gaps[0] < gaps[-1]


@pytest.mark.parametrize(
    ("cost", "exact", "steps", "message"),
    [
        ([[0.0] * 3] * 2, 1, 3, "cost must have 3 rows of 3 entries"),
        ([[0.0] * 2] * 3, 1, 3, "cost must have 3 rows of 3 entries"),
        ([[0.0, float("nan")]] * 2, 1, 2, r"cost\[0\]\[1\] is nan"),
        ([[0.0, -1.0]] * 2, 1, 2, r"cost\[0\]\[1\] is -1.0; an error must be finite and not negative"),
        ([[0.0] * 2] * 2, 3, 2, "cannot place 3 exact steps"),
        ([[0.0] * 2] * 2, 0, 2, "cannot place 0 exact steps"),
    ],
)
def test_costs_that_cannot_be_are_refused(cost: list[list[float]], exact: int, steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        best_schedule(cost, exact, steps)


def test_what_lies_on_or_below_the_diagonal_is_not_read() -> None:
    nan = float("nan")
    cost = [[0.0 if s > a else nan for s in range(5)] for a in range(5)]
    assert best_schedule(cost, 5, 5) == (0, 1, 2, 3, 4)


def test_the_reversed_gaps_take_the_same_end_and_exponent() -> None:
    assert sparse_to_dense(50, 6, 10, end=0.6, exponent=1)[-1] == int(0.6 * 49)
