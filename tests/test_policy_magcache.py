"""MagCache: a table says how long a residual may be reused; a probe measures the table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dummies import doubling, mixing
from hypothesis import given, settings
from hypothesis import strategies as st
from stack_by_hand import (
    Kept,
    Place,
    Rule,
    by_hand,
    by_library,
    cached,
    closed_loop,
    computed,
    drive,
    same,
    street,
    street_by_hand,
    street_by_library,
)
from street_doubles import random_world
from torch import Tensor

import rollcache
from rollcache import Action, Cell, Decision, Pass, Reason, Role, RollcacheError
from rollcache.decision import Record
from rollcache.policies.base import StackEvidence, Stored
from rollcache.policies.magcache import MagCache, MagnitudeProbe

RATIOS = (1.0, 1.02, 0.99, 1.0, 0.97, 0.95, 0.96, 0.93, 0.98, 0.9, 0.85, 0.8)


class Naive(Rule):
    """Three running sums a branch, set back by every step that is computed for their sake."""

    def __init__(self, config: MagCache) -> None:
        super().__init__()
        self.config = config
        self.sums: dict[str, tuple[float, float, int]] = {}

    def weights(self, at: Place, modulated: Tensor, past: list[Kept]) -> list[float] | None:
        c = self.config
        if at.step < math.floor(c.retention * c.steps + 0.5) or not past or at.step + c.tail >= c.steps:
            self.sums[at.branch] = (1.0, 0.0, 0)
            return None
        ratio, error, skipped = self.sums[at.branch]
        ratio *= c.ratios[at.step]
        error += abs(1.0 - ratio)
        skipped += 1
        if c.max_error == 0 or error > c.max_error or skipped > c.max_skips:
            self.sums[at.branch] = (1.0, 0.0, 0)
            return None
        self.sums[at.branch] = (ratio, error, skipped)
        return [1.0]


def naively(config: MagCache) -> list[str]:
    rule = Naive(config)
    for step in range(config.steps):
        at = Place(0, step, "cond", 0.0)
        if rule.choose(at, torch.zeros(1)) is None:
            rule.kept.append(Kept(at, torch.zeros(1)))
    return [word for *_, word in rule.did]


configs = st.integers(1, 20).flatmap(
    lambda steps: st.builds(
        MagCache,
        steps=st.just(steps),
        ratios=st.lists(st.floats(0.5, 1.5), min_size=steps - 1, max_size=steps - 1).map(lambda r: (1.0, *r)),
        max_error=st.floats(0, 2),
        max_skips=st.integers(0, 6),
        retention=st.floats(0, 1),
        tail=st.integers(0, 1),
    )
)


@given(config=configs)
@settings(deadline=None)
def test_decisions_are_those_of_running_sums(config: MagCache) -> None:
    decisions = drive(config.build(4), [torch.zeros(1, 2, 2)] * config.steps)
    assert [str(d.action) for d in decisions] == naively(config)


@pytest.mark.parametrize(
    "config",
    [
        MagCache(steps=12, ratios=RATIOS),
        MagCache(steps=12, ratios=RATIOS, max_error=0.4, max_skips=9, tail=1),
        MagCache(steps=12, ratios=RATIOS, max_error=5, max_skips=2, retention=0),
    ],
)
def test_in_closed_loop_it_equals_the_rule_by_hand(config: MagCache) -> None:
    branches = ("cond", "uncond")
    cached_loop = by_library(mixing(3, 8), config, branches=branches)
    same(cached_loop, by_hand(mixing(3, 8), Naive(config), branches=branches))
    on_street = street_by_library(config)
    same(on_street, street_by_hand(Naive(config)))
    assert {word for *_, word in on_street[1]} == {"compute", "replay"}


@pytest.mark.parametrize("changes", [{"max_error": 0}, {"max_skips": 0}, {"retention": 1}])
def test_a_knob_at_its_end_is_the_bare_model_bit_for_bit(changes: dict[str, Any]) -> None:
    """Even where the table says that nothing ever changes."""
    config = MagCache(**{"steps": 12, "ratios": (1.0,) * 12, "retention": 0.0, **changes})
    model = mixing(3, 8)
    bare = closed_loop(model, lambda at: None)
    assert all(torch.equal(a, b) for a, b in zip(bare, by_library(model, config)[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(street(), street_by_library(config)[0], strict=True))


@given(
    steps=st.integers(2, 30),
    shrinks=st.booleans(),
    data=st.data(),
    errors=st.tuples(st.floats(0, 2), st.floats(0, 2)),
    skips=st.tuples(st.integers(0, 8), st.integers(0, 8)),
)
@settings(deadline=None)
def test_larger_limits_never_compute_more(
    steps: int, shrinks: bool, data: st.DataObject, errors: tuple[float, float], skips: tuple[int, int]
) -> None:
    """Tables on one side of 1, as the docstring says; multiples of 1/8, whose products are exact up to a point."""
    one = st.sampled_from((0.5, 0.75, 0.875, 1.0) if shrinks else (1.0, 1.125, 1.25, 1.5))
    ratios = (1.0, *(data.draw(one) for _ in range(steps - 1)))
    counts = [
        computed(
            drive(
                MagCache(steps=steps, ratios=ratios, max_error=e, max_skips=k).build(4),
                [torch.zeros(1, 2, 2)] * steps,
            )
        )
        for e, k in ((min(errors), min(skips)), (max(errors), min(skips)), (max(errors), max(skips)))
    ]
    assert counts == sorted(counts, reverse=True)


def test_a_new_chunk_begins_anew() -> None:
    _, did = by_library(mixing(3, 8), MagCache(steps=12, ratios=RATIOS, retention=0), chunks=3)
    chunks = [[word for chunk, _, _, word in did if chunk == n] for n in range(3)]
    assert chunks[0] == chunks[1] == chunks[2] and chunks[0][0] == "compute" and "replay" in chunks[0]


def test_branches_do_not_share_what_they_stored() -> None:
    """A branch whose last computed step lies further back is charged for more."""
    policy = MagCache(steps=12, ratios=(1.0,) * 2 + (0.9,) * 10, max_error=0.3, retention=0).build(4)

    def decision(branch: str, computed_at: int) -> Decision:
        where = Pass(role=Role.DENOISE, chunk=0, step=5, branch=branch)
        stored = (Stored(0, computed_at, None, torch.ones(1)),)
        return policy.decide(Cell(branch, 5, 0, 4), StackEvidence(where, lambda _: torch.ones(1), stored=stored))

    assert decision("cond", 4).drift == pytest.approx(0.1)
    assert decision("uncond", 2).drift == pytest.approx(0.1 + 0.19 + 0.271)
    assert decision("cond", 4).action is Action.REPLAY
    assert decision("uncond", 2).reason is Reason.DRIFT


def test_a_residual_that_is_not_finite_is_computed_again() -> None:
    model = mixing(3, 8)
    with cached(model, MagCache(steps=3, ratios=(1.0, 1.0, 1.0), retention=0)) as handle, torch.no_grad():
        with handle.rollout(), handle.chunk():
            for x in (math.nan, 1.0, 1.0):
                handle.step()
                out = model(torch.full((1, 5, 8), x))
        assert out.isfinite().all()
        assert [r.reason for r in handle.trace] == [Reason.NOTHING_STORED, Reason.NOT_FINITE, Reason.STEADY]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "^steps must be"),
        ({"ratios": (1.0, 1.0)}, "^ratios has 2 entries for 3 steps"),
        ({"ratios": (0.9, 1.0, 1.0)}, r"^ratios\[0\] must be 1"),
        ({"ratios": (1.0, 0.0, 1.0)}, r"^ratios\[1\] must be positive"),
        ({"ratios": (1.0, 1.0, math.nan)}, r"^ratios\[2\] must be positive"),
        ({"ratios": (1.0, 1.0, math.inf)}, r"^ratios\[2\] must be positive"),
        ({"ratios": (1.0, 1.0, "1")}, r"^ratios\[2\] must be positive"),
        ({"max_error": -0.1}, "^max_error must be"),
        ({"max_error": math.nan}, "^max_error must be"),
        ({"max_skips": -1}, "^max_skips must be"),
        ({"max_skips": 1.5}, "^max_skips must be"),
        ({"retention": 1.1}, "^retention must be"),
        ({"tail": -1}, "^tail must be"),
        ({"tail": 4}, r"^tail \(4\) is more than"),
    ],
)
def test_a_setting_out_of_range_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MagCache(**{"steps": 3, "ratios": (1.0, 1.0, 1.0), **changes})


def test_a_table_is_stretched_by_its_nearest_entries() -> None:
    table = (1.0, 0.9, 0.8, 0.7, 0.6)
    assert MagCache.interpolated(table, 5).ratios == table
    assert MagCache.interpolated(table, 3).ratios == (1.0, 0.8, 0.6)
    assert MagCache.interpolated(table, 9).ratios == (1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6)
    assert MagCache.interpolated(table, 1).ratios == (1.0,)
    assert MagCache.interpolated(list(table), 4, max_error=0.3).max_error == 0.3
    with pytest.raises(ValueError, match=r"^ratios are empty"):
        MagCache.interpolated((), 3)


def test_explanations_carry_the_numbers() -> None:
    model = mixing(3, 8)
    config = MagCache(steps=5, ratios=(1.0, 1.0, 0.9, 0.9, 0.9), max_error=0.2, max_skips=1, retention=0.2)
    with cached(model, config) as handle:
        with handle.rollout():
            closed_loop(model, lambda at: handle.step(at.step), handle.chunk, chunks=1, steps=5)
        assert handle.explain(0, 1, 0) == (
            "Chunk 0, step 1, whole stack (cond): replayed, it drifted little: summed error of the magnitude 0 <= 0.2, "
            "at most 1 steps in a row."
        )
        assert "computed, replayed too often in a row: summed error of the magnitude 0.1 <= 0.2" in handle.explain(
            0, 2, 0
        )
    exact = Record(0, 0, 0, 3, "cond", "denoise", Action.COMPUTE, Reason.SCHEDULE, *[math.nan] * 4, None, 0)
    assert config.explain(exact) == "Chunk 0, step 0, whole stack (cond): computed, the schedule says so."


def test_the_probe_changes_nothing_and_measures_what_the_definition_says() -> None:
    model, probe = mixing(3, 8), MagnitudeProbe(steps=6)
    loop = {"steps": 6, "chunks": 2, "branches": ("cond", "uncond")}
    bare = closed_loop(model, lambda at: None, **loop)  # type: ignore[arg-type]
    out, did = by_library(model, probe, **loop)
    assert all(torch.equal(a, b) for a, b in zip(bare, out, strict=True))
    assert {word for *_, word in did} == {"compute"}

    class Watch(Rule):
        def weights(self, at: Place, modulated: Tensor, past: list[Kept]) -> None:
            return None

    watch = Watch()
    by_hand(model, watch, **loop)
    expected = [1.0]
    for t in range(1, 6):
        found = []
        for at, residual in watch.kept:
            if at.step == t:
                before = watch.past(at)[-t].residual
                found += [(residual.norm(dim=-1) / before.norm(dim=-1)).mean()]
        assert len(found) == 4
        expected.append(float(torch.stack(found).mean()))
    assert probe.ratios() == pytest.approx(expected, rel=1e-5)


def test_what_a_probe_measured_sets_up_magcache_on_the_street_model() -> None:
    world, probe = random_world(depth=2), MagnitudeProbe(steps=12)
    rollcache.enable(world.model, probe)
    probed = street(world)
    assert all(torch.equal(a, b) for a, b in zip(probed, street(), strict=True))
    assert {len(found) for found in probe.records.values()} == {3} and len(probe.records) == 11
    config = MagCache(steps=12, ratios=probe.ratios(), max_error=0.5)
    assert "replay" in {word for *_, word in street_by_library(config)[1]}


def test_a_probe_that_saw_too_little_says_so() -> None:
    with pytest.raises(RollcacheError, match="step 1 was never measured"):
        MagnitudeProbe(steps=3).ratios()
    with pytest.raises(ValueError, match=r"^steps must be"):
        MagnitudeProbe(steps=0)
    assert MagnitudeProbe(steps=1).ratios() == (1.0,)
    probe = MagnitudeProbe(steps=2)
    probe.records["cond", 1] = [torch.tensor(math.nan)]
    with pytest.raises(RollcacheError, match="the ratio of step 1 came out as nan"):
        probe.ratios()


def test_a_probe_begins_anew_with_every_chunk_and_explains_itself() -> None:
    """Doubling blocks add 15 times their input: the ratio of two steps is that of their inputs."""
    model, probe = doubling(4), MagnitudeProbe(steps=2)
    with cached(model, probe) as handle:
        with torch.no_grad(), handle.rollout():
            for pair in ((1.0, 2.0), (8.0, 4.0)):
                with handle.chunk():
                    for x in pair:
                        handle.step()
                        model(torch.full((1, 2, 3), x))
        assert handle.explain(1, 1, 0) == (
            "Chunk 1, step 1, whole stack (cond): computed, the schedule says so; ratio of magnitudes 0.5 in the "
            "latest of 2 chunks."
        )
    assert probe.ratios() == pytest.approx((1.0, 1.25))
