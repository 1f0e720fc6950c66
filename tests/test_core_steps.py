"""Reuse across the steps of a chunk: schedules, and what the engine makes of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from dummies import doubling, mixing
from hypothesis import given, settings
from hypothesis import strategies as st
from street_doubles import random_world
from torch import Tensor

import rollcache
from rollcache import Action, Reason, RollcacheError, StepReuse, XCache
from rollcache.policies import schedules
from rollcache.street.protocol import Protocol
from rollcache.street.rig import CELLS
from rollcache.street.world import Session, Start


def test_the_published_schedule_and_its_variants() -> None:
    """Positions that FSC's tables pin down."""
    assert schedules.dense_to_sparse(50, 6, 10) == (*range(6), 6, 7, 8, 10, 13, 17, 21, 27, 32, 39)
    gaps = [b - a for a, b in pairwise(schedules.dense_to_sparse(50, 6, 10)[6:])]
    assert gaps == [1, 1, 2, 3, 4, 4, 6, 5, 7]
    assert schedules.dense_to_sparse(50, 6, 13)[6:] == (6, 7, 8, 9, 10, 12, 15, 18, 21, 25, 29, 34, 39)
    assert schedules.dense_to_sparse(50, 5, 10)[5:] == (5, 6, 7, 9, 12, 16, 21, 26, 32, 39)
    even = [b - a for a, b in pairwise(schedules.dense_to_sparse(50, 6, 10, exponent=1)[6:])]
    assert even == [4, 3, 4, 4, 3, 4, 4, 3, 4]
    assert [b - a for a, b in pairwise(schedules.sparse_to_dense(50, 6, 10)[6:])] == gaps[::-1]
    assert schedules.dense_to_sparse(50, 5, 10, tail=(44, 47))[-3:] == (39, 44, 47)


@given(data=st.data(), steps=st.integers(1, 80))
@settings(max_examples=200, deadline=None)
def test_every_schedule_has_the_steps_it_promises(data: st.DataObject, steps: int) -> None:
    exact = data.draw(st.integers(1, steps))
    warmup = data.draw(st.integers(0, exact - 1))
    found = [
        (exact, schedules.uniform(steps, exact)),
        (exact, schedules.even_in_sigma([1 - i / steps for i in range(steps)], exact)),
        (exact, schedules.dense_to_sparse(steps, warmup, exact - warmup)),
    ]
    for count, anchors in found:
        assert len(anchors) == count and anchors[-1] < steps
        assert all(b > a for a, b in pairwise(anchors))
    assert found[0][1][0] == 0 and (exact == 1 or found[0][1][-1] == steps - 1)


def test_evenly_spread_noise_levels_are_denser_where_the_shift_thins_them() -> None:
    sigmas = Protocol(steps=50).sigmas[:-1].tolist()
    anchors = schedules.even_in_sigma(sigmas, 10)
    gaps = [b - a for a, b in pairwise(anchors)]
    assert gaps[0] > gaps[-1] and anchors[0] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 4, "anchors": (1, 2)}, "must be 0"),
        ({"steps": 4, "anchors": ()}, "must be 0"),
        ({"steps": 4, "anchors": (0, 2, 2)}, "rise strictly"),
        ({"steps": 4, "anchors": (0, 4)}, "anchor 4 lies past the last of 4 steps, 3"),
        ({"steps": 0, "anchors": (0,)}, "steps must be an integer of at least 1"),
        ({"steps": 4, "anchors": (0,), "order": 3}, "order must be 0, 1 or 2, got 3"),
        ({"steps": 4, "anchors": (0, 1.5)}, "an anchor must be an integer"),
    ],
)
def test_schedules_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepReuse(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes", [{"tail": (60,)}, {"tail": (-3,)}, {"end": 2.0}, {"exponent": -1.0}, {"end": float("nan")}]
)
def test_schedules_past_the_last_step_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"tail step|end must be"):
        StepReuse.dense_to_sparse(50, **changes)  # type: ignore[arg-type]


def test_more_exact_steps_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot place 16 exact steps"):
        StepReuse.dense_to_sparse(12, 6, 10)
    with pytest.raises(ValueError, match="cannot place 0 exact steps"):
        StepReuse.uniform(12, 0)


def run(policy: StepReuse | None, inputs: list[list[Tensor]], model: torch.nn.Module) -> list[Tensor]:
    """Chunks of steps through a model; returns every output."""
    out = []
    handle = (
        None if policy is None else rollcache.enable(model, policy, blocks=list(model.blocks), kv_writes="commit_only")
    )  # type: ignore[arg-type]
    with torch.no_grad():
        if handle is None:
            return [model(x) for chunk in inputs for x in chunk]
        with handle.rollout():
            for chunk in inputs:
                with handle.chunk():
                    for x in chunk:
                        handle.step()
                        out.append(model(x))
    rollcache.disable(model)
    return out


def test_between_anchors_the_stack_adds_what_it_added_at_the_last_anchor() -> None:
    """Four doubling blocks add 15 times their input."""
    model = doubling(4)
    inputs = [[torch.full((1, 2, 3), float(x)) for x in chunk] for chunk in ([1, 2, 4, 8, 16], [32, 64, 1, 1, 1])]
    out = [float(y[0, 0, 0]) for y in run(StepReuse(steps=5, anchors=(0, 3)), inputs, model)]
    assert out == [16, 2 + 15, 4 + 15, 128, 16 + 120, 512, 64 + 480, 1 + 480, 16, 1 + 15]
    assert model.calls == [4] * 4


@given(data=st.data(), steps=st.integers(1, 9), chunks=st.integers(1, 3), seed=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_step_reuse_equals_a_loop_written_by_hand(data: st.DataObject, steps: int, chunks: int, seed: int) -> None:
    anchors = (0, *sorted(data.draw(st.sets(st.integers(1, steps - 1)) if steps > 1 else st.just(set()))))
    generator = torch.Generator().manual_seed(seed)
    inputs = [[torch.randn(1, 5, 8, generator=generator) for _ in range(steps)] for _ in range(chunks)]
    model = mixing(3, 8, seed)
    naive = []
    with torch.no_grad():
        for chunk in inputs:
            residual = torch.zeros(())
            for t, x in enumerate(chunk):
                if t in anchors:
                    residual = model(x) - x
                naive.append(x + residual)
    for a, b in zip(run(StepReuse(steps=steps, anchors=anchors), inputs, model), naive, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("order", [1, 2])
def test_residuals_on_a_line_or_parabola_over_noise_levels_are_predicted_exactly(order: int) -> None:
    """A doubling block adds its input, so the input over the noise level is the residual over it."""
    sigmas = [1.0, 0.9, 0.75, 0.5, 0.2, 0.05]
    curve = [3 + 2 * s + (order - 1) * 5 * s * s for s in sigmas]
    model = doubling(1)
    policy = StepReuse(steps=6, anchors=(0, 1, 2), order=order)
    handle = rollcache.enable(model, policy, blocks=list(model.blocks), kv_writes="commit_only")
    with torch.no_grad(), handle.rollout(), handle.chunk():
        for sigma, value in zip(sigmas, curve, strict=True):
            handle.step(time=sigma)
            assert float(model(torch.full((1, 1, 1), value))) == pytest.approx(2 * value, rel=1e-4)
    assert [str(r.action) for r in handle.trace] == ["compute"] * 3 + ["predict"] * 3
    assert f"predicted, the schedule says so, from step 2 (order {order})" in handle.explain(0, 4, 0)
    assert handle.stats().bytes_actual == 4 * (order + 1)


def test_prediction_needs_noise_levels_and_replays_while_one_residual_is_known() -> None:
    model = doubling(1)
    handle = rollcache.enable(
        model, StepReuse(steps=3, anchors=(0, 2), order=1), blocks=list(model.blocks), kv_writes="commit_only"
    )
    with torch.no_grad(), handle.rollout(), handle.chunk():
        for x in (1.0, 2.0, 3.0):
            handle.step()
            model(torch.full((1, 1, 1), x))
    assert [r.action for r in handle.trace] == [Action.COMPUTE, Action.REPLAY, Action.COMPUTE]
    rollcache.disable(model)
    with pytest.raises(RollcacheError, match=r"StepReuse\(order=1\) needs the noise level"):
        run(StepReuse(steps=3, anchors=(0, 1), order=1), [[torch.ones(1, 1, 1)] * 3], model)


def test_with_every_step_an_anchor_nothing_changes_by_a_bit() -> None:
    model = mixing(3, 8)
    inputs = [[torch.randn(1, 5, 8) for _ in range(6)] for _ in range(3)]
    plain = run(None, inputs, model)
    cached = run(StepReuse.uniform(6, 6), inputs, model)
    assert all(torch.equal(a, b) for a, b in zip(plain, cached, strict=True))


def test_a_loop_with_other_steps_than_the_schedule_is_told() -> None:
    model = mixing(2, 8)
    with pytest.raises(
        RollcacheError, match=r"StepReuse is set up for 3 denoising steps a chunk, but chunk 0 is at step 3"
    ):
        run(StepReuse.uniform(3, 1), [[torch.randn(1, 5, 8) for _ in range(4)]], model)


def test_branches_keep_residuals_of_their_own_and_kv_writes_are_exact() -> None:
    model = doubling(1)
    handle = rollcache.enable(
        model, StepReuse(steps=3, anchors=(0,)), blocks=list(model.blocks), kv_writes="commit_only"
    )
    out = []
    with torch.no_grad(), handle.rollout(), handle.chunk():
        for t, (cond, uncond) in enumerate(((1.0, 10.0), (2.0, 20.0), (3.0, 30.0))):
            for branch, x in (("cond", cond), ("uncond", uncond)):
                handle.step(t, branch=branch, kv_write=t == 2)
                out.append(float(model(torch.full((1, 1, 1), x))))
    assert out == [2, 20, 3, 30, 6, 60]
    reasons = [r.reason for r in handle.trace]
    assert reasons == [Reason.NOTHING_STORED] * 2 + [Reason.SCHEDULE] * 2 + [Reason.PROTECTED] * 2
    assert "whole stack (uncond): replayed, the schedule says so, from step 0" in handle.explain(0, 1, 0, "uncond")


def test_one_residual_per_branch_is_held_whatever_the_number_of_steps() -> None:
    model = mixing(4, 8)
    handle = rollcache.enable(model, StepReuse.uniform(8, 3), blocks=list(model.blocks), kv_writes="commit_only")
    with torch.no_grad(), handle.rollout():
        for _ in range(2):
            with handle.chunk():
                for _ in range(8):
                    handle.step()
                    model(torch.randn(1, 5, 8))
    assert handle.stats().bytes_actual == 5 * 8 * 4
    assert handle.stats().skip_rate == 5 / 8
    assert "1 rollout\n" in handle.summary()


def test_a_chunk_is_never_emitted_without_its_steps() -> None:
    """Whole-chunk reuse belongs to policies across chunks."""
    model = mixing(2, 8)
    handle = rollcache.enable(model, StepReuse.uniform(2, 1), blocks=list(model.blocks), kv_writes="commit_only")
    with torch.no_grad(), handle.rollout():
        for _ in range(3):
            with handle.chunk() as where:
                assert not handle.replays_chunk(where)
                for _ in range(2):
                    handle.step()
                    model(torch.randn(1, 5, 8))


def test_on_the_street_model_commits_stay_exact_and_steps_are_skipped() -> None:
    world = random_world()
    start = Start(torch.randn(8, CELLS, 24, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 4))
    protocol = Protocol.named("chunked", steps=6)

    def rollout() -> list[Tensor]:
        session = Session(world, start, protocol)
        return [session.step(torch.zeros(8, 2)).latents for _ in range(3)]

    plain = rollout()
    handle = rollcache.enable(world.model, StepReuse.uniform(6, 3))
    cached = rollout()
    assert handle.stats().skip_rate == 0.5
    assert {r.role for r in handle.trace} == {"denoise"}
    assert handle.stats().passes["commit"] == 3
    assert {r.step for r in handle.trace if r.action is Action.REPLAY} == {1, 3, 4}
    assert all(not torch.equal(a, b) and a.isfinite().all() for a, b in zip(plain, cached, strict=True))
    rollcache.disable(world.model)
    assert all(torch.equal(a, b) for a, b in zip(plain, rollout(), strict=True))
    assert XCache().build(4).across == "chunks"


def test_the_multistep_solver_is_exact_where_the_velocity_is_linear_in_time() -> None:
    """x' = t from t = 1 to 0: the first step is Euler's, the others have no error."""
    world = random_world()
    start = Start(torch.randn(8, CELLS, 24, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 4))
    ends = {}
    for solver in ("euler", "multistep"):
        session = Session(world, start, Protocol.named("chunked", steps=4, shift=1.0, solver=solver))
        session._pass = lambda x, t, *rest, **more: torch.full_like(x, t)  # type: ignore[method-assign]
        ends[solver] = session._noise() - session._denoise(
            torch.zeros(4, 4), None, session._where(torch.zeros(4, 4), None)
        )
    assert float(ends["euler"].mean()) == pytest.approx(0.25 * (1 + 0.75 + 0.5 + 0.25), abs=1e-5)
    first, rest = 0.25 * 1, (0.75**2) / 2
    assert float(ends["multistep"].mean()) == pytest.approx(first + rest, abs=1e-5)
    assert "multistep" in Protocol(solver="multistep").describe()
    with pytest.raises(ValueError, match="unknown solver"):
        Protocol(solver="heun")  # type: ignore[arg-type]
