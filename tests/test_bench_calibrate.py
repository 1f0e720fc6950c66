"""Calibration across the steps of a chunk: errors, influence, drift, proposals, files, and the command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from dummies import Stack, mixing
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from street_doubles import noise_frames, random_world
from torch import Tensor

import rollcache
from rollcache import StepReuse
from rollcache.adapters.spec import Adapter
from rollcache.bench.calibrate import run as running
from rollcache.bench.calibrate.association import auc, deciles, ranks, roc, spearman
from rollcache.bench.calibrate.blocks import BlockWatch, cells, low_band
from rollcache.bench.calibrate.checks import Check, Run, key
from rollcache.bench.calibrate.clips import Clip
from rollcache.bench.calibrate.drift import SHRINK, Drift, gaps, push_products
from rollcache.bench.calibrate.errors import predict_errors, replay_errors
from rollcache.bench.calibrate.influence import interpolated, spread, touch
from rollcache.bench.calibrate.measure import measure
from rollcache.bench.calibrate.oracle import Judged
from rollcache.bench.calibrate.proposals import moved, proposals, random_schedules, surrogate
from rollcache.bench.calibrate.report import headlines, write
from rollcache.bench.calibrate.result import Calibration, CalibrationError
from rollcache.bench.calibrate.run import Plan, calibrate
from rollcache.bench.calibrate.splice import Splice
from rollcache.bench.calibrate.summary import summarise
from rollcache.bench.calibrate.trajectory import Recorder, Seen, Trajectory
from rollcache.bench.calibrate.window import Window, record, replayed
from rollcache.bench.progress import Narrator
from rollcache.bench.takes import plan_take
from rollcache.passes import Pass, Role, Segment
from rollcache.policies.fsc import FSC
from rollcache.street.protocol import Protocol

STEPS = 6
LEVELS = tuple(Protocol.named("chunked", steps=STEPS).sigmas.tolist())


def stand(steps: int = STEPS) -> Window:
    """A session of the random world before its first window."""
    protocol = Protocol.named("chunked", steps=steps)
    world = random_world(depth=2)
    take = plan_take("urban", seed=200, chunks=2, protocol=protocol).make(world, noise_frames)
    window = Window(world, take.start, protocol, seed=take.seed)
    window.place(take.actions[0])
    return window


@pytest.fixture(scope="module")
def window() -> Window:
    return stand()


@pytest.fixture(scope="module")
def full(window: Window) -> Trajectory:
    return record(window)


def passes(residuals: list[Tensor], hidden: Tensor | None = None) -> tuple[Seen, ...]:
    """Passes with these residuals."""
    h = torch.ones_like(residuals[0]) if hidden is None else hidden
    return tuple(Seen(s, "cond", None, True, h, h + r, None) for s, r in enumerate(residuals))


def stepped(model: Stack, seen: list[Seen], method: Any, inputs: list[Tensor]) -> list[Tensor]:
    """One chunk of a dummy model under the recorder."""

    def locate(model: Any, args: Any, kwargs: Any) -> Pass:
        return Pass(role=Role.DENOISE, chunk=0, step=args[1])

    class Called(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = model

        def forward(self, h: Tensor, step: int) -> Tensor:
            return self.stack(h)

    adapter = Adapter(blocks=lambda m: list(m.stack.blocks), locate=locate)
    caller = Called()
    recorder = Recorder(hand=seen.append, method=method)
    with torch.no_grad(), rollcache.enable(caller, recorder, adapter=adapter):
        return [caller(x, s) for s, x in enumerate(inputs)]


# Recording


def test_the_recorder_hands_out_every_pass_and_changes_none_of_any_model_with_an_adapter() -> None:
    model, seen = mixing(depth=3), []
    inputs = [torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(s)) for s in range(4)]
    outputs = stepped(model, seen, None, inputs)
    assert [p.step for p in seen] == [0, 1, 2, 3] and all(p.computed for p in seen)
    for p, x, y in zip(seen, inputs, outputs, strict=True):
        assert torch.equal(p.hidden, x) and torch.equal(p.output, y)
        assert torch.equal(y, model(x))
        assert torch.equal(p.residual, y - x)


def test_the_recorder_follows_the_method_it_is_given_and_says_what_was_computed() -> None:
    model, seen = mixing(depth=3), []
    inputs = [torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(s)) for s in range(4)]
    outputs = stepped(model, seen, StepReuse(steps=4, anchors=(0, 2)), inputs)
    assert [p.computed for p in seen] == [True, False, True, False]
    torch.testing.assert_close(outputs[1], inputs[1] + (outputs[0] - inputs[0]))
    with pytest.raises(ValueError, match="XCache decides about blocks"):
        Recorder(hand=seen.append, method=rollcache.XCache()).build(3)


def test_a_recorded_window_is_that_of_the_street_session(window: Window, full: Trajectory) -> None:
    other = stand()
    made = other.step(
        plan_take("urban", seed=200, chunks=2, protocol=other.protocol).make(other.world, noise_frames).actions[0]
    )
    assert torch.equal(made.latents, full.latents[-1])
    assert full.steps == STEPS and full.sigmas == LEVELS
    for s in range(STEPS):
        torch.testing.assert_close(full.velocity(s), window.velocity(full.latents[s], s), rtol=1e-3, atol=1e-4)


def test_a_window_advances_as_the_session_does(full: Trajectory) -> None:
    take = plan_take("urban", seed=200, chunks=2, protocol=Protocol.named("chunked", steps=STEPS)).make(
        random_world(depth=2), noise_frames
    )
    ahead, session = stand(), stand()
    session.step(take.actions[0])
    ahead.advance(full.latents[-1])
    ahead.place(take.actions[1])
    assert torch.equal(ahead.follow(ahead.noise()), session.step(take.actions[1]).latents)


# Splicing


def test_a_splice_adds_what_it_is_told_and_leaves_the_model_bare(window: Window, full: Trajectory) -> None:
    model, x = window.world.model, full.latents[3]
    before = window.velocity(x, 3)
    with Splice(model) as splice:
        assert torch.equal(window.velocity(x, 3), before)
        assert splice.left is not None and torch.equal(splice.left, full.seen[3].output)
        with splice.adding(full.seen[3].residual):
            torch.testing.assert_close(window.velocity(x, 3), before, rtol=1e-4, atol=1e-4)
        with splice.adding(torch.zeros_like(full.seen[3].residual)):
            assert not torch.allclose(window.velocity(x, 3), before, atol=1e-3)
            assert splice.entered is not None and torch.equal(splice.left, splice.entered)
        assert torch.equal(window.velocity(x, 3), before)
    assert "forward" not in vars(model.blocks[0])
    assert torch.equal(window.velocity(x, 3), before)


# Local errors


def test_errors_equal_those_of_a_loop_over_plain_floats() -> None:
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, 2, 3, generator=g)
    residuals = [torch.randn(1, 2, 3, generator=g) for _ in range(5)]
    sigmas = (1.0, 0.9, 0.6, 0.4, 0.1)
    seen = passes(residuals, hidden)
    r = [x.flatten().tolist() for x in residuals]
    h = hidden.flatten().tolist()

    def relative(guess: list[float], s: int) -> float:
        wrong = sum((a - b) ** 2 for a, b in zip(guess, r[s], strict=True))
        return math.sqrt(wrong / sum((a + b) ** 2 for a, b in zip(h, r[s], strict=True)))

    replays, predictions = replay_errors(seen), predict_errors(seen, sigmas)
    for a in range(5):
        for s in range(5):
            if s <= a:
                assert replays[a][s] == predictions[a][s] == 0
                continue
            assert replays[a][s] == pytest.approx(relative(r[a], s), rel=1e-5)
            older = max(0, 2 * a - s)
            slope = (sigmas[s] - sigmas[a]) / (sigmas[a] - sigmas[older]) if older < a else 0.0
            line = [x + slope * (x - y) for x, y in zip(r[a], r[older], strict=True)]
            assert predictions[a][s] == pytest.approx(relative(line, s), rel=1e-4)


def test_a_residual_that_does_not_change_costs_nothing_and_a_line_over_sigma_is_predicted() -> None:
    still = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
    assert max(max(row) for row in replay_errors(passes([still] * 5))) == 0
    sigmas = (1.0, 0.8, 0.5, 0.4, 0.1)
    line = passes([still * s for s in sigmas])
    assert min(replay_errors(line)[s - 1][s] for s in range(1, 5)) > 0.01
    assert max(v for row in predict_errors(line, sigmas)[1:] for v in row) < 1e-6


# Influence


@pytest.mark.parametrize("step", [1, 3, STEPS - 1])
def test_one_replayed_step_gives_what_a_whole_run_under_the_library_gives(
    window: Window, full: Trajectory, step: int
) -> None:
    run = replayed(window, tuple(s for s in range(STEPS) if s != step))
    judged: list[Tensor] = []

    def judge(x: Tensor) -> float:
        judged.append(x)
        return 0.25

    with Splice(window.world.model) as splice:
        found = touch(full, step, splice, window.velocity, window.follow, judge, age=1)
    torch.testing.assert_close(judged[0], run, rtol=1e-5, atol=1e-5)
    clean = full.latents[-1]
    assert found.latent == pytest.approx(float((run - clean).norm() / clean.norm()), rel=1e-3)
    assert found.error == pytest.approx(replay_errors(full.seen)[step - 1][step], rel=1e-5)
    assert found.damage == 0.25 and found.step == step
    assert found.gain == pytest.approx(found.latent / found.local)
    if step == STEPS - 1:
        assert found.gain == pytest.approx(1, rel=1e-4)


def test_influence_is_interpolated_in_the_logarithm_and_flat_outside() -> None:
    row = interpolated((1, 3), (1.0, 100.0), 6)
    assert row == pytest.approx((1, 1, 10, 100, 100, 100))


def test_influence_is_measured_at_steps_that_are_spread_in_sigma() -> None:
    sigmas = Protocol.named("chunked", steps=50).sigmas.tolist()[:-1]
    steps = spread(sigmas, 12)
    assert len(steps) == 12 and steps[0] == 1 and steps[-1] == 49
    falls = [sigmas[a] - sigmas[b] for a, b in pairwise(steps)]
    assert max(falls) < 0.13 and min(falls) > 0.04  # the last steps alone fall by 0.05 each
    assert spread((1.0, 0.5), 12) == (1,)


# Drift


def vectors(steps: int, seed: int = 0) -> dict[tuple[int, int], Tensor]:
    """A push for every (anchor, step), in few dimensions, growing with age."""
    g = torch.Generator().manual_seed(seed)
    return {
        (a, s): torch.randn(6, generator=g, dtype=torch.float64) * (s - a)
        for a in range(steps)
        for s in range(a + 1, steps)
    }


GAIN = (1.0, 3.0, 2.5, 2.0, 1.5, 1.25, 1.0, 0.5)


def drift_of(pushes: dict[tuple[int, int], Tensor], steps: int) -> Drift:
    rows = torch.stack([pushes[a, b - 1] for a, b in gaps(steps)])
    return Drift(steps, rows @ rows.T, GAIN)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_predicted_error_is_the_length_of_the_sum_of_all_pushes(data: st.DataObject) -> None:
    steps = 8
    pushes = vectors(steps, data.draw(st.integers(0, 5)))
    anchors = (0, *sorted(data.draw(st.sets(st.integers(1, steps - 1)))))
    total, alone, last, gap = torch.zeros(6).double(), 0.0, 0, torch.zeros(6).double()
    for s in range(steps):
        if s in anchors:
            alone, last, gap = alone + float(gap @ gap), s, torch.zeros(6).double()
        else:
            total, gap = total + GAIN[s] * pushes[last, s], gap + GAIN[s] * pushes[last, s]
    alone += float(gap @ gap)
    drift = drift_of(pushes, steps)
    assert drift.error(anchors) == pytest.approx(float(total.norm()), abs=1e-6)
    assert drift.cost(anchors) == pytest.approx(math.sqrt(alone + SHRINK * (float(total @ total) - alone)), abs=1e-6)


def test_a_gap_past_the_reach_costs_infinitely_much_and_full_compute_nothing() -> None:
    drift = Drift(50, torch.eye(len(gaps(50))), [1.0] * 50)
    assert drift.error((0,)) == drift.cost((0,)) == math.inf
    assert drift.error(range(50)) == 0
    assert drift.error((0, 26)) == pytest.approx((25 + 23) ** 0.5)
    with pytest.raises(ValueError, match="50 steps"):
        Drift(50, torch.eye(3), [1.0] * 50)


def test_products_of_pushes_are_those_of_steps_replayed_by_the_library(window: Window, full: Trajectory) -> None:
    """One replayed step: the error right after it, as the engine makes it."""
    with Splice(window.world.model) as splice:
        products = push_products(full, splice, window.velocity)
    drift, doubled = (Drift(STEPS, products, [gain] * STEPS) for gain in (1.0, 2.0))
    for step in (1, 4):
        anchors = tuple(s for s in range(STEPS) if s != step)
        after = record(window, StepReuse(steps=STEPS, anchors=anchors)).latents[step + 1]
        local = (after - full.latents[step + 1]).norm() / full.latents[-1].norm()
        assert drift.error(anchors) == pytest.approx(float(local), rel=1e-3)
        assert doubled.error(anchors) == pytest.approx(2 * float(local), rel=1e-3)


# Proposals


def test_proposals_are_the_known_best_and_have_the_steps_they_promise() -> None:
    steps = 8
    g = torch.Generator().manual_seed(3)
    errors = [[float(torch.rand(1, generator=g)) if s > a else 0.0 for s in range(steps)] for a in range(steps)]
    weights = [float(torch.rand(1, generator=g)) for _ in range(steps)]
    drift = drift_of(vectors(steps), steps)
    sigmas = tuple(1 - s / steps for s in range(steps))
    found = proposals(sigmas, errors, weights, drift)
    heavy = [[e * w for e, w in zip(row, weights, strict=True)] for row in errors]
    for n in range(4, steps + 1):
        every = [(0, *rest) for rest in combinations(range(1, steps), n - 1)]
        assert found["replay"][n] == min(every, key=lambda a: surrogate(errors, a))
        assert found["weighted"][n] == min(every, key=lambda a: surrogate(heavy, a))
        for family in found.values():
            if n in family:
                assert len(family[n]) == n and family[n][0] == 0
                assert drift.cost(found["drift"][n]) <= drift.cost(family[n]) + 1e-12
    assert set(found["drift"]) == set(range(4, steps + 1))


def test_moving_anchors_ends_where_no_single_move_helps() -> None:
    steps = 8
    cost = drift_of(vectors(steps, 1), steps).cost
    end = moved((0, 1, 2, 3), cost, steps)
    assert cost(end) < cost((0, 1, 2, 3)) and end[0] == 0
    for i in range(1, 4):
        for s in set(range(1, steps)) - set(end):
            assert cost(tuple(sorted((*end[:i], s, *end[i + 1 :])))) >= cost(end)


def test_the_surrogate_sums_the_errors_of_replayed_steps() -> None:
    errors = [[10 * a + s if s > a else 0.0 for s in range(5)] for a in range(5)]
    assert surrogate(errors, (0, 2)) == 1 + 23 + 24
    assert surrogate(errors, range(5)) == 0


def test_random_schedules_are_schedules_and_repeat() -> None:
    drawn = random_schedules(20, 5, 30)
    assert drawn == random_schedules(20, 5, 30) and len(set(drawn)) > 20
    assert all(len(set(a)) == 5 and a[0] == 0 and list(a) == sorted(a) and a[-1] < 20 for a in drawn)


# Association

NUMBERS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=30)


def naive_rank(values: list[float], i: int) -> float:
    return sum(v < values[i] for v in values) + (sum(v == values[i] for v in values) + 1) / 2


@given(pairs=NUMBERS)
@settings(max_examples=200, deadline=None)
def test_spearman_is_that_of_ranks_counted_one_by_one(pairs: list[tuple[int, int]]) -> None:
    x, y = ([float(v) for v in column] for column in zip(*pairs, strict=True))
    a, b = ([naive_rank(v, i) for i in range(len(v))] for v in (x, y))
    assert ranks(x).tolist() == a
    ma, mb = sum(a) / len(a), sum(b) / len(b)
    va, vb = sum((v - ma) ** 2 for v in a), sum((v - mb) ** 2 for v in b)
    if not va or not vb:
        assert spearman(x, y) is None
    else:
        together = sum((p - ma) * (q - mb) for p, q in zip(a, b, strict=True))
        assert spearman(x, y) == pytest.approx(together / math.sqrt(va * vb), abs=1e-9)


@given(pairs=NUMBERS)
@settings(max_examples=200, deadline=None)
def test_auc_is_the_share_of_pairs_in_order_and_the_area_under_the_curve(pairs: list[tuple[int, int]]) -> None:
    score = [float(p) for p, _ in pairs]
    positive = [q > 3 for _, q in pairs]
    wins = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, p in zip(score, positive, strict=True)
        for b, q in zip(score, positive, strict=True)
        if p and not q
    ]
    if not wins:
        assert auc(score, positive) is None
        return
    assert auc(score, positive) == pytest.approx(sum(wins) / len(wins))
    false, true = roc(score, positive)
    area = sum((b - a) * (c + d) / 2 for (a, b), (c, d) in zip(pairwise(false), pairwise(true), strict=True))
    assert area == pytest.approx(sum(wins) / len(wins))
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)


def test_tenths_of_a_score() -> None:
    found = deciles([3, 1, 2, 4], [30.0, 10.0, 20.0, 40.0], parts=2)
    assert [(m, med) for m, med, _ in found] == [(15, 15), (35, 35)]


# Blocks and bands


def test_the_low_band_is_the_mean_of_each_cell_and_splits_the_energy() -> None:
    segments = (Segment.contiguous("a", 2, (2, 6, 9)), Segment.contiguous("b", 1, (2, 2, 3), start=216))
    length = 216 + 12 + 1  # one token of no segment
    cell = cells(segments, length)
    assert len(set(cell.tolist())) == 2 * 2 * 6 + 2 + 1
    g = torch.Generator().manual_seed(0)
    r = torch.randn(1, length, 3, generator=g, dtype=torch.float64)
    spread_out = torch.zeros_like(r)
    for token in range(length):
        same = [t for t in range(length) if cell[t] == cell[token]]
        spread_out[:, token] = r[:, same].mean(1)
    assert float(low_band(r, cell).square().sum()) == pytest.approx(float(spread_out.square().sum()))
    high = r - spread_out
    assert float(spread_out.flatten() @ high.flatten()) == pytest.approx(0, abs=1e-9)
    first = spread_out[0, :54].view(6, 9, 3)
    assert torch.equal(first[0, 0], first[3, 3]) and torch.equal(first[4, 4], first[5, 7])
    assert len({tuple(row) for row in first.flatten(0, 1).tolist()}) == 6


def test_block_errors_equal_those_of_recorded_residuals(window: Window) -> None:
    kept: list[list[Tensor]] = [[] for _ in window.world.model.blocks]
    hooks = [
        block.register_forward_hook(lambda m, args, out, i=i: kept[i].append((out - args[0]).double()))
        for i, block in enumerate(window.world.model.blocks)
    ]
    with BlockWatch(window.world.model) as watch:
        window.follow(window.noise())
    for hook in hooks:
        hook.remove()
    assert len(watch.reuse) == STEPS - 1
    for s in range(1, STEPS):
        for i, r in enumerate(kept):
            assert watch.reuse[s - 1][i] == pytest.approx(float((r[s] - r[s - 1]).norm() / r[s].norm()), rel=1e-4)
    cell = cells(tuple(Segment(*row) for row in window.world.model.layout), kept[0][0].shape[1])
    old, new = kept[1][1], kept[1][4]
    low = float(low_band(new - old, cell).norm() / low_band(new, cell).norm())
    assert any(v == pytest.approx(low, rel=1e-3) for v in watch.low[2])
    assert len(watch.low[2]) == len(watch.high[2]) == (STEPS - 3) * len(kept) and not watch.low[STEPS - 1]


# What a window gives, and what follows


@pytest.fixture(scope="module")
def clip(window: Window) -> Clip:
    return measure(window, "urban 200 0", 3)[0]


def test_a_measured_clip_has_everything_and_its_parts_agree(clip: Clip, window: Window) -> None:
    naive = replay_errors(record(window).seen)
    assert clip.replay == naive
    assert [t.step for t in clip.touches] == list(spread(clip.sigmas, 3))
    exact = set(FSC(steps=STEPS).exact)
    assert [j.step for j in clip.judged] == [s for s in range(STEPS) if s not in exact]
    first = clip.judged[0]  # up to here the run was exact
    anchor = max(a for a in exact if a < first.step)
    assert first.error == pytest.approx(clip.replay[anchor][first.step], rel=1e-3)
    assert clip.ratios[0] == 1 and len(clip.ratios) == STEPS
    assert all(t.damage >= 0 and t.latent > 0 for t in clip.touches)


def test_a_clip_survives_its_file_and_names_what_is_wrong_with_it(clip: Clip, tmp_path: Path) -> None:
    path = tmp_path / "clip.safetensors"
    assert Clip.load(path, {}) is None
    clip.save(path, {"touches": 3})
    back = Clip.load(path, {"touches": 3})
    assert back is not None and torch.equal(back.products, clip.products)
    assert replace(back, products=clip.products) == clip
    with pytest.raises(CalibrationError, match=r"clip\.safetensors was measured with touches 3, not 4"):
        Clip.load(path, {"touches": 4})
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CalibrationError, match=r"clip\.safetensors is no readable clip"):
        Clip.load(path, {"touches": 3})


def test_the_summary_means_over_clips(clip: Clip) -> None:
    twice = replace(
        clip,
        name="other",
        replay=[[3 * v for v in row] for row in clip.replay],
        judged=tuple(Judged(j.step, 2 * j.risk, j.error) for j in clip.judged),
        products=4 * clip.products,
    )
    findings = summarise(STEPS, [clip, twice])
    c = findings.calibration
    assert c.replay[0][3] == pytest.approx(2 * clip.replay[0][3], rel=1e-4)
    assert len(c.risks) == 2 * len(clip.judged) and c.clips == ("urban 200 0", "other")
    alone = Drift(STEPS, clip.products, c.influence["gain"]).error((0, 2, 4, 5))
    assert findings.drift.error((0, 2, 4, 5)) == pytest.approx(2.5**0.5 * alone, rel=1e-6)
    odd = replace(twice, touches=tuple(replace(t, latent=9 * t.latent) for t in clip.touches))
    c = summarise(STEPS, [clip, odd, clip]).calibration  # influence is a median
    i = clip.touches[1].step
    assert c.influence["gain"][i] == pytest.approx(clip.touches[1].gain)
    assert c.influence["latent"][i] == pytest.approx((clip.touches[1].latent / clip.touches[1].error) ** 2)


def test_the_family_is_the_one_that_fares_best_to_the_end(clip: Clip) -> None:
    findings = summarise(STEPS, [clip])
    wanted = {f: some[4] for f, some in findings.schedules.items() if 4 in some}
    runs = {key(a): Run(20.0, 0.9, 0.1) for a in wanted.values()} | {key(4): Run(50.0, 0.9, 0.1)}
    runs[key(wanted["uniform"])] = Run(30.0, 0.9, 0.1)
    checked = findings.checked({"a clip": runs}, (4,)).calibration
    assert checked.anchors(4) == wanted["uniform"]
    rows = {r["how"]: r for r in checked.diagnostics["checks"]}
    assert rows["fewer steps"]["psnr"] == 50 and rows["fewer steps"]["predicted"] is None
    assert rows["uniform"]["predicted"] == findings.drift.error(wanted["uniform"])
    costs = checked.diagnostics["surrogate"]["4"]["plain"]
    assert checked.diagnostics["surrogate"]["4"]["order"] == sorted(costs, key=costs.get)
    assert headlines(checked)[0].startswith("4 exact steps: fewer steps 50.00 dB, uniform 30.00 dB, ")


def test_agreement_is_the_rank_correlation_of_cost_and_real_error(clip: Clip) -> None:
    findings = summarise(STEPS, [clip])
    wanted = {some[4] for some in findings.schedules.values() if 4 in some}
    right = {key(a): Run(40.0, 0.9, findings.drift.error(a)) for a in wanted} | {key(4): Run(50.0, 0.9, 9.0)}
    wrong = {k: replace(r, latent=1 - r.latent) for k, r in right.items()}
    assert findings.checked({"x": right}, (4,)).calibration.diagnostics["agreement"]["predicted"] == pytest.approx(1)
    both = findings.checked({"x": right, "y": wrong}, (4,)).calibration.diagnostics["agreement"]["predicted"]
    assert both == pytest.approx(0, abs=1e-9)


# Files


@pytest.fixture(scope="module")
def calibration(clip: Clip) -> Calibration:
    return summarise(STEPS, [clip]).calibration


def test_a_calibration_survives_its_file(calibration: Calibration, tmp_path: Path) -> None:
    calibration.dump(tmp_path / "calibration.json")
    back = Calibration.load(tmp_path)
    assert back.schedules == calibration.schedules and back.steps == STEPS and back.family == "drift"
    assert back.replay == calibration.replay
    assert back.risks == pytest.approx(calibration.risks, rel=1e-6)
    assert StepReuse(steps=back.steps, anchors=back.anchors(4)).anchors == calibration.schedules["drift"][4]
    back.dump(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "calibration.json").read_text()


def test_a_calibration_says_what_it_does_not_have(calibration: Calibration) -> None:
    with pytest.raises(CalibrationError, match="no family 'luck'; there are drift, replay"):
        calibration.anchors(4, "luck")
    with pytest.raises(CalibrationError, match="with 3 exact steps; there are 4, 5, 6"):
        calibration.anchors(3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d.pop("sigmas"), "sigmas is missing"),
        (lambda d: d.update(steps="six"), "steps is a text"),
        (lambda d: d["replay"].pop(), "replay is not a matrix of 6 by 6"),
        (lambda d: d["influence"]["gain"].pop(), "influence.gain has 5 numbers for 6 steps"),
        (lambda d: d["schedules"]["drift"].update({"4": [0, 2, 2, 5]}), r"schedules.drift.4 is no schedule"),
        (lambda d: d["schedules"]["drift"].update({"4": [1, 2, 3, 5]}), r"schedules.drift.4 is no schedule"),
        (lambda d: d["schedules"]["drift"].update({"4": []}), "schedules.drift.4 is no schedule"),
        (lambda d: d["schedules"]["drift"].update({"4": [0, 2, 3, 6]}), "ends at 6, past step 5"),
        (lambda d: d.update(family="luck"), "family is 'luck'"),
        (lambda d: d.update(schema="else"), "schema is 'else'"),
    ],
)
def test_a_damaged_calibration_is_named(
    calibration: Calibration, tmp_path: Path, damage: Callable[[Any], Any], message: str
) -> None:
    path = tmp_path / "calibration.json"
    calibration.dump(path)
    document = json.loads(path.read_text())
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(CalibrationError, match=message) as caught:
        Calibration.load(path)
    assert str(path) in str(caught.value)


def test_a_calibration_that_is_not_there_or_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="make one with: rollcache calibrate"):
        Calibration.load(tmp_path)
    (tmp_path / "calibration.json").write_text("{")
    with pytest.raises(CalibrationError, match="no readable calibration"):
        Calibration.load(tmp_path)


def test_a_check_goes_on_after_its_last_run_and_refuses_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    done = Check.open(path, {"touches": 3})
    done.add(key((0, 2)), Run(40.0, 0.9, 0.1))
    assert Check.open(path, {"touches": 3}).runs == {"0 2": Run(40.0, 0.9, 0.1)}
    with pytest.raises(CalibrationError, match=r"check\.json was run with other settings"):
        Check.open(path, {"touches": 4})
    path.write_text(path.read_text()[:-20])
    with pytest.raises(CalibrationError, match=r"check\.json is no readable check"):
        Check.open(path, {"touches": 3})


# The whole


def quiet() -> Narrator:
    return Narrator(Console(quiet=True))


def test_an_interrupted_calibration_goes_on_and_its_folder_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, world, measured = Plan(steps=STEPS, clips=2, checks=1, touches=2), random_world(depth=2), []

    def once(window: Window, name: str, *rest: Any) -> Any:
        measured.append(name)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return measure(window, name, *rest)

    monkeypatch.setattr(running, "measure", once)
    with pytest.raises(KeyboardInterrupt), quiet() as narrator:
        calibrate(plan, world, tmp_path, narrator, {}, noise_frames)
    assert [p.name for p in tmp_path.iterdir()] == ["clip-urban-200-0.safetensors"]
    with quiet() as narrator:
        findings = calibrate(plan, world, tmp_path, narrator, {}, noise_frames)
    assert measured == ["urban 200 0", "highway 201 0", "highway 201 0"]
    check = Check.open(tmp_path / "check-u-turn-250.json", plan.made({}))
    assert key(4) in check.runs and key(findings.schedules["drift"][4]) in check.runs
    write(findings.calibration, tmp_path)
    assert Calibration.load(tmp_path).clips == ("urban 200 0", "highway 201 0")
    report = (tmp_path / "report.md").read_text()
    for image in tmp_path.glob("*.png"):
        assert f"({image.name})" in report
    assert len(list(tmp_path.glob("*.png"))) == 7 and "<<" not in report and "nan" not in report


def test_a_second_window_begins_after_the_first(tmp_path: Path) -> None:
    plan, world = Plan(steps=STEPS, clips=1, checks=0, windows=2, touches=2), random_world(depth=2)
    with quiet() as narrator:
        both = calibrate(plan, world, tmp_path, narrator, {}, noise_frames).calibration
    (tmp_path / "clip-urban-200-1.safetensors").unlink()
    with quiet() as narrator:
        again = calibrate(plan, world, tmp_path, narrator, {}, noise_frames).calibration
    assert both.clips == ("urban 200 0", "urban 200 1") and again.replay == both.replay
    one = Clip.load(tmp_path / "clip-urban-200-0.safetensors", plan.made({}))
    two = Clip.load(tmp_path / "clip-urban-200-1.safetensors", plan.made({}))
    assert one is not None and two is not None and one.replay != two.replay
    assert both.family == "drift" and "checks" in both.diagnostics


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 5}, "steps must be an integer of at least 6"),
        ({"clips": 0}, "clips"),
        ({"touches": 1}, "touches"),
        ({"budgets": (3,)}, "a budget must be an integer of at least 4"),
        ({"budgets": (51,)}, "a budget of 51 exact steps is more than the 50"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**wrong)


def test_the_budgets_that_are_checked_belong_to_the_number_of_steps() -> None:
    assert Plan().budgets == (10, 16, 20, 25)
    assert Plan(steps=8).budgets == (4,)


def test_the_command_keeps_what_is_finished_and_says_so(
    street_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rollcache.cli import main

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "_take", stop)
    words = ["calibrate", "--out", str(tmp_path), "--weights", str(street_weights), "--steps", "6", "--threads", "1"]
    assert main(words) == 130
    assert "run the same command to go on" in "".join(capsys.readouterr())
    assert main(["calibrate", "--out", str(tmp_path), "--steps", "3"]) == 2
    assert "steps must be an integer of at least 6" in capsys.readouterr().err
