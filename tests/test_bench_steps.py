"""Methods across steps at matched speed: matching, prices, resuming, tables."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from street_doubles import noise_frames, random_world

from rollcache import StepReuse
from rollcache.bench.calibrate.result import Calibration
from rollcache.bench.lanes import FULL, Plan
from rollcache.bench.progress import Narrator
from rollcache.bench.steps import ablations, measure, pricing, tables, work
from rollcache.bench.steps import methods as table
from rollcache.bench.steps import study as study_module
from rollcache.bench.steps.clips import Clip, all_clips, chosen
from rollcache.bench.steps.figures import frontier, spread
from rollcache.bench.steps.folder import Folder, StudyError
from rollcache.bench.steps.match import MOST, Knob, Search
from rollcache.bench.steps.measure import generate
from rollcache.bench.steps.pricing import Cost, Price, measure_price
from rollcache.bench.steps.report import report
from rollcache.bench.steps.study import Job, Study, jobs, match_all, needed_matches
from rollcache.bench.steps.tally import Tally
from rollcache.bench.steps.work import Worker
from rollcache.cli import main
from rollcache.decision import Action, Reason, Record
from rollcache.street.protocol import Protocol
from rollcache.street.world import World

STEPS = 8
PROTOCOL = Protocol.named("chunked", steps=STEPS)
SETUP = table.Setup(tuple(PROTOCOL.sigmas[:-1].tolist()))
SECONDS = Cost(compute=1.0, outside=0.1, replay=0.1, commit=1.0, repair=((0.1, 0.2), (0.2, 0.3), (0.5, 0.6)))
OPERATIONS = Cost(compute=100.0, outside=1.0, replay=1.0, commit=90.0, repair=((0.1, 11.0), (0.5, 51.0)))
PRICE = Price(SECONDS, OPERATIONS)
CLIP = Clip("urban", 0)


@pytest.fixture(scope="module")
def world() -> World:
    return random_world(depth=2, width=16)


@pytest.fixture
def study(world: World, tmp_path: Path) -> Study:
    """One tiny window; the price is given, so that nothing is timed."""
    found = [*table.methods(SETUP), *ablations.methods(SETUP), *ablations.ablations(SETUP)]
    made = Study(
        world,
        PROTOCOL,
        Folder(tmp_path),
        {m.key: m for m in found},
        (Clip("urban", 100),),
        windows=1,
        draw=noise_frames,
    )
    made.__dict__["price"] = PRICE
    return made


def _run(study: Study, keys: tuple[str, ...], targets: tuple[float, ...] = (2.0,)) -> int:
    wanted = jobs([study.methods[k] for k in keys], targets, ablate_at=targets[0])
    with Narrator(Console(quiet=True)) as narrator:
        matches = match_all(study, needed_matches(study.methods, wanted), narrator)
        return Worker(study, matches, narrator).run([(CLIP, wanted)])


# --- matching -------------------------------------------------------------------------------------------------------


def _counted(speed: Callable[[float], float]) -> tuple[Callable[[float], float], list[float]]:
    asked: list[float] = []

    def evaluate(value: float) -> float:
        asked.append(value)
        return speed(value)

    return evaluate, asked


@given(st.floats(1.3, 2.9), st.floats(0.02, 3.0))
def test_a_smooth_knob_is_found_within_two_percent(target: float, half: float) -> None:
    evaluate, asked = _counted(lambda x: 1 + 2 * x / (x + half))
    found = Search(Knob("drift", 1e-3, 1e3), evaluate).match(target)
    assert found.note == ""
    assert found.speedup == pytest.approx(target, rel=0.02)
    assert len(asked) <= MOST


@given(st.floats(1.0, 60.0))
def test_of_whole_numbers_the_nearest_is_found_and_said_to_be(target: float) -> None:
    evaluate, asked = _counted(lambda left_out: 50 / (50 - left_out))
    found = Search(Knob.whole("steps left out", range(50)), evaluate).match(target)
    best = min(range(50), key=lambda v: abs(50 / (50 - v) / target - 1))
    assert found.speedup == 50 / (50 - best)
    assert bool(found.note) == (abs(found.speedup / target - 1) > 0.02)
    assert len(asked) <= math.ceil(math.log2(50)) + 1


def test_a_target_beyond_the_range_takes_the_end_and_says_so() -> None:
    search = Search(Knob("drift", 1e-3, 10.0), lambda x: 1 + x / 10)
    found = search.match(4.0)
    assert (found.knob, found.speedup) == (10.0, 2.0)
    assert found.note == "cannot be reached: at most 2.00x"
    slowest = Search(Knob("drift", 1e-3, 10.0), lambda x: 3 + x).match(2.0)
    assert slowest.speedup < 3.01 and slowest.note.startswith("cannot be reached: at least 3.0")


def test_speeds_that_come_in_steps_end_the_search_at_the_nearest() -> None:
    evaluate, asked = _counted(lambda x: 8 / (8 - min(7, int(x))))
    found = Search(Knob("drift", 1e-3, 30.0), evaluate).match(2.3)
    assert found.speedup == pytest.approx(8 / 4) or found.speedup == pytest.approx(8 / 3)
    assert found.note.startswith("nearest, speeds come in steps")
    assert len(asked) <= MOST


def test_what_was_tried_for_one_target_serves_the_next() -> None:
    evaluate, asked = _counted(lambda x: 1 + 2 * x / (x + 1))
    search = Search(Knob("drift", 1e-3, 30.0), evaluate)
    search.match(2.0)
    before = len(asked)
    search.match(2.01)
    assert len(asked) == before
    again, none = _counted(lambda x: pytest.fail("evaluated again"))
    assert Search(Knob("drift", 1e-3, 30.0), again, search.found).match(2.0).speedup == pytest.approx(2.0, rel=0.02)
    assert none == []


# --- prices ---------------------------------------------------------------------------------------------------------


def test_a_repair_is_priced_between_its_neighbours_and_never_beyond_a_pass() -> None:
    assert SECONDS.repaired(0.2) == pytest.approx(0.3)
    assert SECONDS.repaired(0.35) == pytest.approx(0.45)
    assert SECONDS.repaired(0.05) == pytest.approx(0.15)
    assert SECONDS.repaired(1.0) == 1.0
    assert SECONDS.repaired(0.001) == pytest.approx(0.101)
    assert Cost(compute=1.0, outside=0.1, replay=0.1, commit=1.0).repaired(0.1) == 1.0


def _record(step: int, action: Action, share: float = math.nan, level: str = "", chunk: int = 0) -> Record:
    nan = math.nan
    place = (chunk, step, 0, 2, "cond", "denoise", action, Reason.SCHEDULE)
    return Record(*place, nan, nan, nan, nan, None, 0, share=share, level=level)


def test_a_run_costs_what_its_decisions_cost() -> None:
    records = [
        _record(0, Action.COMPUTE),
        _record(1, Action.REPLAY, level="C0"),
        _record(2, Action.REPAIR, 0.2, "C2"),
        _record(3, Action.COMPUTE, level="Full"),
        _record(4, Action.PREDICT),
    ]
    tally = Tally.read(records, chunks=1, commits=1, steps=5)
    assert tally.words == ("C-2Fp",)
    assert (tally.computed, tally.skipped, tally.repairs) == (2, 2, (0.2,))
    assert tally.exact == pytest.approx(2.2)
    assert PRICE.seconds.total(tally) == pytest.approx(2 + 0.2 + 0.3 + 1)
    assert PRICE.speedup(tally, 5) == pytest.approx(6 / 3.5)
    assert PRICE.flops.total(tally) == pytest.approx(200 + 2 + 21 + 90)
    assert PRICE.ceiling(tally, 5) == pytest.approx(6 / (5 * 0.1 + 2.2 * 0.9 + 1))
    dense = Tally.read(records, chunks=1, commits=1, steps=5, dense=True)
    assert PRICE.seconds.total(dense) == pytest.approx(2 + 0.2 + 1 + 1)
    assert dense.exact == 3


def test_the_tally_of_a_run_is_that_of_its_schedule(world: World) -> None:
    take = CLIP.take(world, PROTOCOL, 2, noise_frames)
    run = generate(world, take, PROTOCOL, Plan(key="x", label="x", policy=StepReuse(steps=STEPS, anchors=(0, 1, 5))))
    assert run.tally.words == ("CC---C--",) * 2
    assert (run.tally.commits, run.tally.chunks) == (2, 2)
    assert run.cache_bytes > 0
    full = generate(world, take, PROTOCOL, FULL)
    assert full.tally.computed == 2 * STEPS
    assert PRICE.speedup(full.tally, STEPS) == 1
    fewer = generate(world, take, PROTOCOL, Plan(key="f", label="f", steps=3)).tally
    assert PRICE.speedup(fewer, STEPS) == pytest.approx(9 / 4)


def test_prices_are_measured_in_an_order_that_makes_sense(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pricing, "ROUNDS", 2)
    price = measure_price(world, CLIP.take(world, PROTOCOL, 1, noise_frames), PROTOCOL)
    assert price.flops.replay < price.flops.compute
    assert price.flops.commit == price.flops.compute  # the same blocks on the same tokens
    costs = [c for _, c in price.flops.repair]
    assert costs == sorted(costs) and all(price.flops.replay < c < price.flops.compute for c in costs)
    assert [round(q, 1) for q, _ in price.flops.repair] == [0.1, 0.2, 0.2, 0.3, 0.5]
    assert price.seconds.replay > 0 and 0 < price.seconds.outside < price.seconds.compute
    assert Price.of(json.loads(json.dumps(_plain(price)))) == price


def _plain(price: Price) -> dict[str, Any]:
    return {"seconds": vars(price.seconds), "flops": vars(price.flops)}


# --- running --------------------------------------------------------------------------------------------------------


def test_results_are_made_once_and_a_second_call_makes_none(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("fewer", "fewer-2", "uniform", "sigma-2", "teacache", "fsc", "collapsed")
    assert _run(study, keys) == len(keys)
    results = {r["method"]: r for r in study.folder.results()}
    assert set(results) == set(keys)
    assert results["fewer"]["settings"] == {"steps": 4, "solver": None, "policy": None}
    assert results["fewer-2"]["settings"] == {"steps": 4, "solver": "multistep", "policy": None}
    assert results["fewer-2"]["fidelity"]["psnr"] != results["fewer"]["fidelity"]["psnr"]
    assert "p" in results["sigma-2"]["decisions"]["words"][0]
    assert results["uniform"]["decisions"]["words"] == ["C---C--C"]
    assert results["uniform"]["speed"]["predicted"] == pytest.approx(2.0)
    assert results["collapsed"]["settings"]["policy"]["risk_scale"] == results["fsc"]["knob"]["value"]
    assert results["fewer"]["speed"]["cache_bytes"] == 0 < results["uniform"]["speed"]["cache_bytes"]
    monkeypatch.setattr(work, "evaluate", lambda *_: pytest.fail("ran again"))
    monkeypatch.setattr(Study, "_evaluator", lambda *_: lambda _: pytest.fail("matched again"))
    assert _run(study, keys) == 0


def test_a_result_with_other_settings_is_made_again(study: Study) -> None:
    assert _run(study, ("uniform",)) == 1
    path = study.folder.path / "runs" / str(CLIP) / "uniform@2.00.json"
    damaged = json.loads(path.read_text())
    damaged["settings"]["policy"]["anchors"] = [0]
    path.write_text(json.dumps(damaged))
    assert _run(study, ("uniform",)) == 1


def test_two_targets_with_one_nearest_setting_are_run_once(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = measure.evaluate
    monkeypatch.setattr(work, "evaluate", lambda *a: asked.append(a[3]) or real(*a))
    assert _run(study, ("taylorseer",), (2.0, 2.02)) == 2
    assert len(asked) == 1
    assert {r["target"] for r in study.folder.results()} == {2.0, 2.02}


def test_ctrl_c_keeps_what_is_finished_and_the_next_call_does_the_rest(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = measure.evaluate, 0

    def stop_at_second(*args: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(work, "evaluate", stop_at_second)
    with pytest.raises(KeyboardInterrupt):
        _run(study, ("fewer", "uniform", "sigma"))
    assert [r["method"] for r in study.folder.results()] == ["fewer"]
    monkeypatch.setattr(work, "evaluate", real)
    assert _run(study, ("fewer", "uniform", "sigma")) == 2


def test_ctrl_c_while_matching_keeps_what_was_tried(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    method = study.methods["teacache"]
    speeds = iter([3.0, 1.5])

    def stop(value: float) -> float:
        try:
            return next(speeds)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(Study, "_evaluator", lambda *_: stop)
    with pytest.raises(KeyboardInterrupt):
        study.match(method, [2.0])
    kept = study.folder.matches()["teacache"]
    assert kept["targets"] == [] and sorted(s for _, s in kept["tried"]) == [1.5, 3.0]


def test_what_another_process_is_at_is_left_to_it(study: Study) -> None:
    with study.folder.lock(f"{CLIP}-fewer@2.00"):
        assert _run(study, ("fewer", "uniform")) == 1
    assert [r["method"] for r in study.folder.results()] == ["uniform"]
    assert _run(study, ("fewer", "uniform")) == 1


def test_a_schedule_decides_the_same_on_the_small_model(study: Study) -> None:
    take = study.dev_takes["urban-100"]
    for key in ("uniform", "taylorseer", "anchors", "table"):
        method = study.methods[key]
        assert method.dry and method.knob is not None
        plan = method.plan(float(method.knob.values[-2]) if method.knob.values else 1.0)
        words = [generate(w, take, PROTOCOL, plan).tally.words for w in (study.world, study.small)]
        assert words[0] == words[1]


def test_taylorseer_computes_as_many_steps_as_it_is_given(world: World) -> None:
    take = CLIP.take(world, PROTOCOL, 1, noise_frames)
    for exact in range(1, STEPS + 1):
        policy = table.taylorseer(STEPS, exact, 1)
        run = generate(world, take, PROTOCOL, Plan(key="t", label="t", policy=policy))
        assert run.tally.computed == exact
    assert table.taylorseer(50, 26, 3).interval == 2 and table.taylorseer(50, 18, 3).interval == 3


def test_every_method_and_ablation_runs_at_any_number_of_steps(world: World) -> None:
    for steps in (6, 12, 50):
        protocol = Protocol.named("chunked", steps=steps)
        setup = table.Setup(tuple(protocol.sigmas[:-1].tolist()), _calibration(steps, protocol))
        made = [*table.methods(setup), *ablations.methods(setup), *ablations.ablations(setup)]
        assert len({m.key for m in made}) == len(made)
        assert {"measured", "magcache", "replay-repair", "published"} <= {m.key for m in made}
        for method in made:
            ends = (1.0,) if method.knob is None else (method.knob.low, method.knob.high)
            for value in ends:
                plan = method.plan(value)
                if plan.policy is not None:
                    plan.policy.build(2)
    assert table.missing(table.Setup(SETUP.sigmas)) == {
        "measured": "needs --calibration",
        "measured-2": "needs --calibration",
        "magcache": "needs --calibration",
    }


def test_the_largest_knob_is_faster_than_the_smallest(study: Study) -> None:
    take = study.dev_takes["urban-100"]
    for method in study.methods.values():
        if method.knob is None or method.across:
            continue
        slow, fast = (
            PRICE.speedup(generate(study.world, take, PROTOCOL, method.plan(v), 1).tally, STEPS)
            for v in (method.knob.low, method.knob.high)
        )
        assert slow < fast, method.key


def _calibration(steps: int, protocol: Protocol) -> Calibration:
    def schedules_of() -> dict[int, tuple[int, ...]]:
        return {k: tuple(round(i * (steps - 1) / max(k - 1, 1)) for i in range(k)) for k in range(1, steps + 1)}

    square = tuple((0.0,) * steps for _ in range(steps))
    return Calibration(
        steps=steps,
        sigmas=tuple(protocol.sigmas[:-1].tolist()),
        clips=("urban 7 0",),
        family="replay",
        schedules={"replay": schedules_of()},
        replay=square,
        predict=square,
        influence={},
        risks=tuple(0.01 * i for i in range(30)),
        magnitude_ratios=(1.0, *[0.9] * (steps - 1)),
    )


# --- tables ---------------------------------------------------------------------------------------------------------


def _result(method: str, clip: str, psnr: float, *, target: float = 2.0, group: str = "methods", **more: Any) -> Any:
    fidelity = {"psnr": psnr, "ssim": psnr / 100, "flip": 1 / psnr, "lpips": None, "motion": 1.0, "psnr_truth": 20.0}
    speed = {
        "predicted": more.get("predicted", target),
        "measured": target,
        "ceiling": 3.0,
        "tflops_per_window": 0.5,
        "flops_share": 0.45,
        "cache_bytes": 2**20,
    }
    return {
        "job": f"{method}@{target:.2f}",
        "method": method,
        "label": method.upper(),
        "group": group,
        "target": target,
        "match": {"speedup": target, "note": more.get("note", "")},
        "clip": clip,
        "decisions": {"shares": {"C0": 0.75, "Full": 0.25}, "exact_steps_per_window": 10.0, "words": ["C-F-"]},
        "speed": speed,
        "fidelity": fidelity,
    }


def test_rows_are_means_over_clips_with_wins_of_the_reference() -> None:
    results = [
        _result("fsc", "urban-0", 30.0),
        _result("fsc", "urban-1", 40.0),
        _result("tea", "urban-0", 20.0, predicted=2.0),
        _result("tea", "urban-1", 50.0, predicted=3.0, note="nearest"),
    ]
    rows = {r.key: r for r in tables.rows(results, "methods", "fsc")}
    assert rows["tea"].psnr == 35 and rows["tea"].wins == (1, 1, 1, 2)
    assert rows["fsc"].wins is None
    assert rows["tea"].predicted == pytest.approx(2.4)  # the same work in all: a mean of times, not of speeds
    assert rows["tea"].means["lpips"] is None and rows["tea"].means["flip"] == pytest.approx((1 / 20 + 1 / 50) / 2)
    low, high = rows["tea"].interval
    assert 20 <= low < 35 < high <= 50
    assert tables.routing(rows["tea"]) == "C0 75%, Full 25%"


def test_means_are_of_clips_that_all_rows_have() -> None:
    results = [_result(m, f"urban-{i}", 30.0 + 10 * i) for m in ("fsc", "tea") for i in range(3)]
    unfinished = [r for r in results if (r["method"], r["clip"]) != ("tea", "urban-2")]
    assert {r.clips for r in tables.rows(unfinished, "methods", "fsc")} == {("urban-0", "urban-1")}
    few = [r for r in results if r["method"] == "fsc" or r["clip"] == "urban-0"]
    assert {len(r.clips) for r in tables.rows(few, "methods", "fsc")} == {1, 3}


def test_ablations_are_held_against_the_reference_at_the_nearest_target() -> None:
    results = [_result("fsc", "urban-0", psnr, target=t) for t, psnr in ((2.0, 40.0), (2.6, 30.0))]
    results.append(_result("reactive", "urban-0", 35.0, target=2.035, group="ablations"))
    (row,) = tables.rows(results, "ablations", "fsc")
    assert row.wins == (1, 1, 1, 1)


def test_the_bootstrap_is_seeded_and_covers_a_known_mean() -> None:
    values = torch.randn(40, generator=torch.Generator().manual_seed(3)).tolist()
    assert tables.bootstrap(values) == tables.bootstrap(values)
    low, high = tables.bootstrap(values)
    spread = torch.tensor(values).std(correction=0).item() / 40**0.5
    assert high - low == pytest.approx(2 * 1.96 * spread, rel=0.1)
    assert tables.bootstrap([5.0, 5.0, 5.0]) == (5.0, 5.0)


def test_the_report_is_made_of_the_folder_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Folder(tmp_path)
    with pytest.raises(StudyError, match="holds no results yet"):
        report(folder, Console())
    for target in (2.0, 2.6):
        for clip in ("urban-0", "urban-1"):
            for method, psnr in (("fsc", 40.0), ("measured", 60.0), ("fewer", 30.0), ("teacache", 29.0)):
                result = _result(method, clip, psnr - target, target=target)
                folder.write(f"runs/{clip}/{result['job']}.json", result)
    folder.write("runs/urban-0/tail@2.00.json", _result("tail", "urban-0", 33.0, group="ablations", note="nearest: 2x"))
    folder.write("runs/urban-1/fsc@2.00.json", _result("fsc", "urban-1", 58.0))  # no ablation ran there
    assert main(["steps", "--out", str(tmp_path), "--report-only"]) == 0
    page = (tmp_path / "report.md").read_text()
    assert page.index("| MEASURED |") < page.index("| FSC |") < page.index("| FEWER |")
    beside = page[page.index("## Ablations") :]
    assert "| 38.00 [38.00, 38.00] |" in beside and "| 48.00" not in beside
    assert "`C-F-`" in page
    assert "TAIL: nearest: 2x." in page and "## At 2.60x" in page
    assert {p.name for p in tmp_path.glob("*.png")} == {"psnr-speed.png", "ssim-speed.png"}
    assert "TEACACHE" in capsys.readouterr().out


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_labels_are_pushed_apart_in_their_order_and_no_further_than_needed(heights: list[float]) -> None:
    places = sorted(heights, reverse=True)
    found = spread(places, 0.05, 0.0, 1.0)
    assert all(a - b >= 0.05 - 1e-9 for a, b in itertools.pairwise(found))
    assert all(-1e-9 <= y <= 1 + 1e-9 for y in found)
    if all(a - b >= 0.05 for a, b in itertools.pairwise(places)):
        assert found == pytest.approx(places)


def test_a_method_far_below_all_others_is_named_and_not_drawn() -> None:
    results = [_result(f"m{i}", "urban-0", 40.0 + i) for i in range(4)] + [_result("wild", "urban-0", 12.0)]
    figure = frontier(tables.rows(results, "methods", "fsc"), "psnr")
    (axes,) = figure.axes
    assert len(axes.lines) == 4
    assert "not drawn: WILD (12.0 to 12.0 dB)" in axes.get_xlabel()


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        ("--only fsc nothing", "there is no 'nothing'; choose methods, ablations, fewer"),
        ("--only magcache", "magcache: needs --calibration"),
        ("--targets 2 2", "none twice"),
        ("--targets 0.5", "holds 0.5"),
        ("--ablate-at 99", "--ablate-at holds 99"),
        ("--targets 3 --only tail", "--ablate-at 2.3 must be one of --targets"),
        ("--clips 5", "write a range A:B"),
        ("--clips 40:50", "holds none of the 12 clips"),
        ("--dev urban-0", "urban-0 is a test clip"),
        ("--dev city-0", "'city-0' is no clip"),
        ("--seeds -1", "--seeds holds -1"),
        ("--seeds 0 0", "none twice"),
        ("--windows 0", "--windows (0)"),
        ("--steps 2", "--steps is 2"),
        ("--calibration /nowhere.json", "no calibration at /nowhere.json"),
        ("--weights /nowhere", "nowhere"),
    ],
)
def test_bad_input_is_named_before_any_work(
    words: str, culprit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Study, "price", property(lambda _: pytest.fail("began to work")))
    assert main(["steps", "--out", str(tmp_path / "study"), *words.split()]) == 2
    assert culprit in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def test_a_calibration_of_other_steps_and_a_folder_of_another_study_are_refused(
    street_weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _calibration(12, Protocol.named("chunked", steps=12)).dump(tmp_path / "calibration.json")
    words = ["steps", "--out", str(tmp_path), "--weights", str(street_weights), "--stage", "student", "--steps", "6"]
    assert main([*words, "--calibration", str(tmp_path)]) == 2
    assert "was measured with 12 steps, not 6" in capsys.readouterr().err
    Folder(tmp_path).claim_study({"steps": 50})
    assert main(words) == 2
    assert re.search(r"holds a study with \w+ ", capsys.readouterr().err)


def test_the_command_runs_resumes_and_reports(
    street_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        f"steps --out {tmp_path} --weights {street_weights} --stage student --steps 6 --windows 1 --seeds 0 "
        "--scenarios highway --dev urban-100 --targets 1.5 --ablate-at 1.5 --only fewer sigma tail --dtype float32"
    ).split()
    monkeypatch.setattr(study_module, "measure_price", lambda *_: PRICE)
    assert main(words) == 0
    results = {r["method"]: r for r in Folder(tmp_path).results()}
    assert set(results) == {"fewer", "sigma", "tail"}
    assert results["tail"]["knob"] is None  # that of FSC, which was matched and is not asked for
    printed = capsys.readouterr().out
    assert "fewer steps" in printed and (tmp_path / "report.md").is_file()
    monkeypatch.setattr(work, "evaluate", lambda *_: pytest.fail("ran again"))
    assert main(words) == 0


def test_clips_go_seed_by_seed_and_are_cut_as_asked() -> None:
    clips = all_clips(("urban", "highway", "u-turn"), (0, 1))
    assert [str(c) for c in clips[:4]] == ["urban-0", "highway-0", "u-turn-0", "urban-1"]
    assert chosen(clips, "4:") == clips[4:]
    assert Clip.parse("u-turn-12") == Clip("u-turn", 12)


def test_jobs_are_methods_at_all_targets_and_ablations_around_one() -> None:
    found = [*ablations.methods(SETUP), *ablations.ablations(SETUP)]
    by_key = {m.key: m for m in found}
    made = jobs([by_key["fsc"], by_key["reactive"], by_key["tail"]], (2.0, 2.6), 2.3)
    assert [j.name for j in made] == [
        "fsc@2.00",
        "fsc@2.60",
        "reactive@2.30",
        "reactive@2.04",
        "reactive@1.76",
        "tail@2.30",
    ]
    assert needed_matches(by_key, made) == {"fsc": [2.0, 2.6, 2.3], "reactive": [2.3, 2.0354, 1.7557]}
    assert Job(by_key["fsc"], 2.0).name == "fsc@2.00"
