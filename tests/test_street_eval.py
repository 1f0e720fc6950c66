"""The evaluation of the street world: every measure against a known answer, and the whole with random weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from street_doubles import noise_frames, random_codec, random_model, random_weights, random_world
from torch import Tensor

from rollcache.bench.report.world_page import render, write_page
from rollcache.cli import main
from rollcache.street.data import LatentClip
from rollcache.street.drives import DriveError, constant
from rollcache.street.evaluate import run as running
from rollcache.street.evaluate.actions import STEER, errors, following, moments, otherwise, response
from rollcache.street.evaluate.agents import Place, _contrast, _covered, _elsewhere, evidence, places
from rollcache.street.evaluate.fidelity import over_horizon
from rollcache.street.evaluate.flow import block_flow
from rollcache.street.evaluate.probe import HISTORY, Probe, per_latent, read
from rollcache.street.evaluate.probe_training import probe_loss, triples, worn
from rollcache.street.evaluate.result import PARTS, Evaluation
from rollcache.street.evaluate.rollout import cost, generate
from rollcache.street.evaluate.run import Watch, Worlds, evaluate, work
from rollcache.street.evaluate.stability import compare_flow, gradient_energy, stability
from rollcache.street.evaluate.strips import write_strip
from rollcache.street.evaluate.table import ROWS, table
from rollcache.street.evaluate.truth import Plan, plan
from rollcache.street.protocol import Protocol
from rollcache.street.rig import CELLS, FPS, RIG
from rollcache.street.scenery import ATTRIBUTES, KINDS, Scenery
from rollcache.street.weights import NoProbeError, WeightsError, load, load_probe, pack

CAR = (4.5, 1.9, 1.6)


def a_scenery(latents: int, at: tuple[float, float] = (9.0, 1.0)) -> Scenery:
    """An ego that stands still with one red car driving ahead of it at the same place."""
    box = torch.tensor([*at, CAR[2] / 2, *CAR, 0.0])
    return Scenery(
        box=torch.zeros(0, 7),
        kind=torch.zeros(0, dtype=torch.int64),
        colour=torch.zeros(0, 3),
        agent_box=box.expand(latents, 1, 7).clone(),
        agent_there=torch.ones(latents, 1, dtype=torch.bool),
        agent_kind=torch.tensor([KINDS.index("car")]),
        agent_colour=torch.tensor([[0.9, 0.1, 0.1]]),
        pose=torch.zeros(latents, 3),
        attributes=torch.zeros(ATTRIBUTES),
    )


def draw(scenario: str, seed: int, drive: object) -> tuple[Mapping[str, Tensor], Scenery]:
    frames = noise_frames(scenario, seed, drive)  # type: ignore[arg-type]
    return frames, a_scenery(len(drive) // 2)  # type: ignore[arg-type]


def a_plan(chunks: int = 4, name: str = "urban") -> Plan:
    drive = replace(constant(8.0, 0.2, 16 + 2 * chunks), source="scripted")
    return Plan(name, 0, drive, chunks, 2, 16)


def an_evaluation(path: Path | None, *plans: Plan) -> Evaluation:
    settings = {"protocol": Protocol().describe(), "weights": {"file": "none", "sha256": "0"}}
    from rollcache.measure import provenance

    return Evaluation(tuple(p.name for p in plans), provenance({}), settings, path)


def pictures(t: int, seed: int = 0) -> dict[str, Tensor]:
    drive = constant(1.0, 0.0, t)
    return {g: x.float() / 255 for g, x in noise_frames("urban", seed, drive).items()}


def last_of(frames: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {g: x[:1] for g, x in frames.items()}


# Fidelity over the horizon


def test_perfect_frames_reach_the_cap_in_every_window_and_camera() -> None:
    frames = pictures(12)
    found = over_horizon(frames, frames, last_of(frames), perceptual=False)
    assert found.psnr == (100.0, 100.0)
    assert found.ssim == pytest.approx((1.0, 1.0))
    assert found.seconds == (8 / FPS, 12 / FPS)
    assert len(found.cameras["psnr"]) == 7


def test_psnr_of_a_window_is_that_of_a_naive_loop_and_does_not_see_other_windows() -> None:
    truth, noise = pictures(16), torch.Generator().manual_seed(0)
    ours = {g: (x + 0.1 * torch.randn(x.shape, generator=noise)).clamp(0, 1) for g, x in truth.items()}
    ours = {g: torch.cat((truth[g][:8], x[8:])) for g, x in ours.items()}
    found = over_horizon(ours, truth, last_of(truth), perceptual=False)
    assert found.psnr[0] == 100.0
    naive = []
    for group, x in truth.items():
        for t in range(8, 16):
            for v in range(x.shape[1]):
                mse = float((ours[group][t, v].double() - x[t, v].double()).square().mean())
                naive.append(-10 * math.log10(mse))
    assert found.psnr[1] == pytest.approx(sum(naive) / len(naive), abs=1e-6)


def test_a_held_picture_is_compared_with_every_later_frame() -> None:
    truth = pictures(8)
    still = {g: x[:1].expand_as(x) for g, x in truth.items()}
    found = over_horizon(still, truth, last_of(truth), perceptual=False)
    assert found.held == pytest.approx(found.psnr)


# Flow and stability


@pytest.mark.parametrize(("dx", "dy"), [(0, 0), (3, 0), (-2, 1), (0, -4)])
def test_shifted_frames_give_the_shift_as_flow(dx: int, dy: int) -> None:
    wide = torch.nn.functional.interpolate(torch.rand(2, 1, 24, 40), scale_factor=3, mode="bicubic")[:, 0].clamp(0, 1)
    first, second = wide[:, 10:58, 10:106], wide[:, 10 - dy : 58 - dy, 10 - dx : 106 - dx]
    flow, told = block_flow(first, second)
    inner = flow[:, 1:-1, 1:-1]
    assert told[:, 1:-1, 1:-1].all()
    assert (inner - torch.tensor([float(dx), float(dy)])).abs().max() < 0.3


def test_a_shift_of_half_a_pixel_is_found_to_a_fraction() -> None:
    torch.manual_seed(0)
    x = torch.linspace(0, 40, 96)
    waves = torch.sin(x) + torch.sin(0.37 * x + 1)
    step = float(x[1] - x[0])
    moved = torch.sin(x - 0.5 * step) + torch.sin(0.37 * (x - 0.5 * step) + 1)
    rows = torch.linspace(0.5, 1, 48)[:, None]
    flow, _ = block_flow(((waves * rows) / 4 + 0.5)[None], ((moved * rows) / 4 + 0.5)[None])
    assert flow[0, 1, 1:-1, 0].mean() == pytest.approx(0.5, abs=0.2)


def test_nothing_can_be_told_of_a_picture_without_texture_and_it_stands_still() -> None:
    flow, told = block_flow(torch.full((1, 48, 80), 0.4), torch.full((1, 48, 80), 0.4))
    assert not told.any()
    assert not flow.any()


def test_block_matching_agrees_with_a_naive_search() -> None:
    torch.manual_seed(1)
    first, second = torch.rand(1, 12, 16), torch.rand(1, 12, 16)
    flow, _ = block_flow(first, second, block=4, reach=2)
    for i in range(3):
        for j in range(4):
            costs = {}
            for dy in range(-2, 3):
                for dx in range(-2, 3):
                    y, x = 4 * i + dy, 4 * j + dx
                    if 0 <= y <= 8 and 0 <= x <= 12:
                        patch = first[0, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
                        costs[dx, dy] = float((patch - second[0, y : y + 4, x : x + 4]).abs().mean())
            best = min(costs, key=lambda k: costs[k])
            assert (flow[0, i, j] - torch.tensor([float(v) for v in best])).abs().max() <= 0.5


def moving(t: int, step: int) -> dict[str, Tensor]:
    """Smooth pictures that move `step` pixels to the right in every frame."""
    out = {}
    for g in RIG:
        torch.manual_seed(len(g.name))
        coarse = torch.rand(len(g.cameras) * 3, 1, 20, 60)
        wide = torch.nn.functional.interpolate(coarse, scale_factor=3, mode="bicubic")[:, 0].clamp(0, 1)
        wide = wide.unflatten(0, (len(g.cameras), 3)).movedim(1, -1)  # [V, 60, 180, 3]
        frames = [wide[:, : g.height, 60 - step * i : 60 - step * i + g.width] for i in range(t)]
        out[g.name] = torch.stack(frames)
    return out


def test_flow_follows_the_renderers_fully_half_or_not_at_all() -> None:
    truth, half = moving(4, 4), moving(4, 2)
    still = {g: x[:1].expand_as(x) for g, x in truth.items()}
    assert compare_flow(truth, truth)[0] == pytest.approx(1.0)
    assert compare_flow(half, truth)[0] == pytest.approx(0.5, abs=0.1)
    along, error, length = compare_flow(still, truth)
    assert along == pytest.approx(0.0, abs=0.02)
    assert error == pytest.approx(length, rel=0.02)


def test_gradient_energy_is_that_of_a_naive_loop() -> None:
    torch.manual_seed(0)
    frame = torch.rand(5, 6, 3)
    grey = 0.299 * frame[..., 0] + 0.587 * frame[..., 1] + 0.114 * frame[..., 2]
    right = np.mean([(float(grey[i, j + 1]) - float(grey[i, j])) ** 2 for i in range(5) for j in range(5)])
    down = np.mean([(float(grey[i + 1, j]) - float(grey[i, j])) ** 2 for i in range(4) for j in range(6)])
    assert float(gradient_energy(frame)) == pytest.approx(right + down, rel=1e-5)


def test_a_perfect_rollout_is_stable_and_blur_and_tint_are_seen() -> None:
    truth = moving(8, 1)
    same = stability(truth, truth)
    assert same.sharpness == (1.0,)
    assert same.contrast == (1.0,)
    assert same.colour_shift == (0.0,)
    assert same.flow == pytest.approx((1.0,))
    faded = stability({g: 0.5 * x + 0.25 for g, x in truth.items()}, truth)
    assert faded.sharpness[0] == pytest.approx(0.25, rel=1e-3)
    assert faded.contrast[0] == pytest.approx(0.5, rel=1e-3)
    tinted = stability({g: x + x.new_tensor([0.3, 0.0, 0.0]) for g, x in truth.items()}, truth)
    assert tinted.colour_shift[0] == pytest.approx(0.3 / 3**0.5, rel=1e-3)


# Agents


def with_car(frames: Mapping[str, Tensor], found: list[Place], paint: bool = True) -> dict[str, Tensor]:
    """Grey frames, with red painted into every place of the agents."""
    out = {g: torch.full_like(x, 0.45) for g, x in frames.items()}
    names = {c.name: (g.name, v) for g in RIG for v, c in enumerate(g.cameras)}
    for p in found if paint else []:
        group, v = names[p.camera]
        left, right, top, bottom = p.box
        out[group][p.frame, v, top:bottom, left:right] = torch.tensor([0.9, 0.1, 0.1])
    return out


def test_an_agent_in_its_place_has_contrast_one_and_one_that_is_missing_none() -> None:
    scenery = a_scenery(8)
    found = places(scenery, 8, 8)["moving"]
    assert {p.camera for p in found} == {"front_narrow", "front_wide"}
    assert {p.frame for p in found} == {1, 3, 5, 7}
    blank = pictures(8)
    truth, missing = with_car(blank, found), with_car(blank, found, paint=False)
    there = evidence(truth, truth, scenery, 8, truth)
    assert there.contrast == pytest.approx(1.0)
    assert there.reference == pytest.approx(1.0)
    assert there.agents == len(found)
    assert there.parked is None
    gone = evidence(missing, truth, scenery, 8, truth)
    assert gone.contrast == pytest.approx(0.0, abs=1e-6)
    assert gone.by_window == (gone.contrast,)
    half = {g: (truth[g] + missing[g]) / 2 for g in truth}
    assert 0.3 < evidence(half, truth, scenery, 8, truth).contrast < 0.7


def test_an_agent_that_the_renderer_does_not_show_says_nothing() -> None:
    scenery = a_scenery(4)
    grey = {g: torch.full_like(x, 0.45) for g, x in pictures(8).items()}
    assert evidence(grey, grey, scenery, 0, grey).contrast is None
    assert _contrast([]) is None


def test_covered_and_far_agents_are_left_out() -> None:
    assert places(a_scenery(2, at=(60.0, 0.0)), 0, 4)["moving"] == []
    scenery = a_scenery(2)
    wall = torch.tensor([[5.0, 1.0, 3.0, 1.0, 8.0, 6.0, 0.0]])
    building = torch.tensor([KINDS.index("building")])
    hidden = replace(scenery, box=wall, kind=building, colour=torch.full((1, 3), 0.5))
    assert places(hidden, 0, 4)["moving"] == []


def test_the_control_lies_in_the_same_rows_inside_the_picture_and_touches_no_agent() -> None:
    box, agents = (10, 20, 5, 15), [(10, 20, 5, 15), (22, 40, 0, 30)]
    control = _elsewhere(box, agents, 96)
    assert control is not None
    assert control[2:] == box[2:]
    assert control[0] >= 0 and control[1] <= 96 and control[1] - control[0] == 10
    assert all(_covered(control, a) == 0 for a in agents)
    assert _elsewhere((0, 40, 0, 10), [(0, 80, 0, 10)], 80) is None


# Actions and the probe


def test_errors_of_actions_are_those_of_known_numbers() -> None:
    told = torch.tensor([[10.0, 0.0], [10.0, 0.2], [8.0, 0.4], [8.0, 0.0]])
    turn, brake = moments(told)
    assert turn.tolist() == [False, True, True, False]
    assert brake.tolist() == [False, False, True, False]
    found = errors(told + torch.tensor([1.0, 0.03]), told)
    assert found.speed == pytest.approx(1.0)
    assert found.turn_percent == pytest.approx(10.0)
    assert found.brake_percent == pytest.approx(12.5)
    assert errors(told * torch.tensor([1.0, 0.5]), told).turn_gain == pytest.approx(0.5)
    straight = errors(told[:1], told[:1])
    assert straight.turn_percent is None and straight.brake_percent is None and straight.turn_gain is None


def test_the_probe_is_small_and_reads_every_latent_with_the_two_before_it() -> None:
    torch.manual_seed(0)
    probe = Probe().eval()
    assert sum(p.numel() for p in probe.parameters()) <= 100_000
    latents = torch.randn(7, CELLS, 24)
    found = read(probe, latents[2:], latents[:2])
    assert found.shape == (5, 2)
    with torch.no_grad():
        for i in range(5):
            torch.testing.assert_close(found[i], probe(latents[None, i : i + HISTORY])[0])
    with pytest.raises(ValueError, match="expected"):
        probe(latents[None])


def toy_clips(count: int, generator: torch.Generator) -> list[LatentClip]:
    """Clips whose first channel says the speed and whose second the yaw rate."""
    clips = []
    for _ in range(count):
        action = torch.rand((6, 2), generator=generator) * torch.tensor([20.0, 0.6]) - torch.tensor([0.0, 0.3])
        z = 0.1 * torch.randn((6, CELLS, 24), generator=generator)
        z[..., 0] += action[:, :1] / 10
        z[..., 1] += action[:, 1:] * 3
        clips.append(LatentClip(z.half(), action.repeat(1, 2), a_scenery(6)))
    return clips


def test_the_probe_learns_a_toy_relation() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    clips, probe = toy_clips(16, generator), Probe()
    optimizer = torch.optim.AdamW(probe.parameters(), lr=5e-3)
    for _ in range(40):
        z, action = triples(clips, 8, generator)
        loss = probe_loss(probe, worn(z, 0.1, 0.2, generator), action)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    z, action = triples(toy_clips(4, generator), 32, generator)
    with torch.no_grad():
        off = (probe(z) - action).abs().mean(0)
    guess = (action - action.mean(0)).abs().mean(0)
    assert (off < 0.5 * guess).all()


def test_wear_leaves_the_coarsest_channel_and_takes_from_the_finest() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.ones(4, HISTORY, CELLS, 24)
    out = worn(z, 0.0, 0.7, generator)
    assert (out[..., 0] == 1).all()
    assert (out[..., -1] < 1).all() and (out[..., -1] >= 0.3).all()


def test_following_compares_with_the_mean_of_the_frames_of_a_latent() -> None:
    torch.manual_seed(0)
    latents, action = torch.randn(4, CELLS, 24), torch.tensor([[8.0, 0.2], [6.0, 0.4]]).repeat(4, 1)
    found = following(Probe().eval(), latents, latents, torch.randn(2, CELLS, 24), action)
    assert per_latent(action)[0].tolist() == pytest.approx([7.0, 0.3])
    assert found.generated == found.floor
    assert found.turns == 4
    assert len(found.recovered) == len(found.commanded) == 4


def test_other_actions_start_after_the_real_frames_and_turn_away_from_the_drive() -> None:
    found = otherwise(constant(10.0, 0.2, 24), 16)
    column, stopped = found["stopped"]
    assert column == 0 and len(stopped) == 8
    assert stopped[0, 0] == pytest.approx(10 - 7 / FPS)
    assert (stopped[:, 0].diff() < 0).all()
    column, steered = found["steered"]
    assert column == 1
    assert steered.tolist() == [pytest.approx([10.0, -STEER])] * 8


def test_the_response_is_the_share_of_the_commanded_change_that_is_found() -> None:
    torch.manual_seed(0)
    usual, told = torch.rand(6, 2), torch.rand(6, 2)
    other = told + torch.tensor([-3.0, 0.4])
    bias = torch.tensor([0.7, -0.1])  # the probe's own, in both rollouts
    assert response(usual + bias, usual + bias, other, told, 1) == pytest.approx(0.0)
    half = usual + bias + 0.5 * (other - told)
    assert response(half, usual + bias, other, told, 0) == pytest.approx(0.5)
    assert response(half, usual, told, told, 0) is None


# Weights


def test_a_probe_is_packed_beside_the_rest_and_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    probe, path = Probe(), tmp_path / "w.safetensors"
    pack(path, random_model(), random_codec(), {}, probe=probe.state_dict())
    back = load_probe(path).state_dict()
    for key, value in probe.state_dict().items():
        torch.testing.assert_close(back[key], value.half().float())
    load(path)


def test_a_file_without_a_probe_says_so_and_one_of_other_sizes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoProbeError, match="has no probe; train one"):
        load_probe(random_weights(tmp_path))
    state = Probe().state_dict()
    path = tmp_path / "bad.safetensors"
    pack(path, random_model(), random_codec(), {}, probe={**state, "head.weight": torch.zeros(3, 3)})
    with pytest.raises(WeightsError, match="does not fit Probe"):
        load_probe(path)


# The whole


def test_cost_leaves_out_the_first_cycle() -> None:
    world, truth = random_world(depth=2, width=16), a_plan(8).make(draw)
    ticks: list[int] = []
    rollout = generate(world, truth, Protocol(), tick=lambda: ticks.append(1))
    assert len(ticks) == 8
    assert rollout.latents.shape == (8, CELLS, 24)
    rollout = replace(rollout, seconds=(9.0,) * 4 + (0.1, 0.1, 0.1, 0.3))
    found = cost(rollout, Protocol(), 2)
    assert found.seconds == pytest.approx(0.1)
    assert found.mean == pytest.approx(0.15)
    assert found.passes == pytest.approx(17 / 4)
    assert found.share == pytest.approx(0.15 * FPS / 2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Evaluation, Path]:
    """An evaluation of one scene with random weights, teacher and probe."""
    folder = tmp_path_factory.mktemp("eval")
    torch.manual_seed(0)
    world, plans = random_world(depth=2, width=16), [a_plan()]
    evaluation = an_evaluation(folder / "results.json", *plans)
    watch = Watch(strip=lambda scene, frames, truth: write_strip(folder, scene, frames, truth))
    steps = running.TEACHER_STEPS
    running.TEACHER_STEPS = (5, 4)
    try:
        worlds = Worlds(world, world, Probe().eval())
        evaluate(plans, worlds, evaluation, draw=draw, short_chunks=4, perceptual=False, watch=watch)
    finally:
        running.TEACHER_STEPS = steps
    return evaluation, folder


def test_a_whole_evaluation_measures_every_part_and_its_file_is_complete(whole: tuple[Evaluation, Path]) -> None:
    evaluation, folder = whole
    document = json.loads((folder / "results.json").read_text())
    assert evaluation.status == document["status"] == "complete"
    (scene,) = document["scenes"]
    assert set(scene["parts"]) == set(PARTS)
    assert len(scene["parts"]["horizon"]["psnr"]) == 1
    assert 0 < scene["parts"]["codec"]["psnr"] < 100
    teacher = scene["parts"]["teacher"]
    assert teacher["teacher"]["4"]["student_lead"] == pytest.approx(0.0, abs=1e-4)  # the same world, the same noise
    assert teacher["teacher"]["5"]["student_lead"] != 0


def test_the_page_is_one_file_with_the_table_and_every_figure(whole: tuple[Evaluation, Path]) -> None:
    _, folder = whole
    document = json.loads((folder / "results.json").read_text())
    document["scenes"][0]["parts"]["teacher"]["teacher"]["50"] = {"psnr": 1.0, "student_lead": 0.25}
    text = write_page(document, folder).read_text()
    assert text.count("data:image/png;base64,") == 6
    assert "0.25" in text
    assert "partial results" not in text
    assert not {part for part in ("http://", "https://", "src='", 'src="/') if part in text}
    with pytest.raises(ValueError, match="no finished scene"):
        render({**document, "scenes": []})


def test_the_table_averages_the_scenes_of_a_scenario_and_keeps_recorded_drives_apart() -> None:
    def scene(psnr: float, source: str = "scripted") -> dict[str, object]:
        part = {"psnr": psnr, "sharpness": 0.9, "flow": None}
        return {
            "scenario": "urban",
            "source": source,
            "drive": "commute",
            "parts": {"codec": part},
            "skipped": {"actions": "no probe in this weights file"},
        }

    titles, rows = table([scene(20.0), scene(30.0), scene(11.0, "commute.csv")])
    assert titles == ["urban (2 scenes)", "urban, commute"]
    assert dict(rows)["codec alone: PSNR, dB"] == ["25.00", "11.00"]
    label = next(r.label for r in ROWS if r.part == "actions")
    assert dict(rows)[label] == ["n/a (no probe in this weights file)"] * 2


def test_ctrl_c_keeps_what_was_finished_and_says_what_is_missing(tmp_path: Path) -> None:
    plans = [a_plan(), a_plan(name="highway")]
    evaluation = an_evaluation(tmp_path / "results.json", *plans)
    passes = 0

    def tick(n: int) -> None:
        nonlocal passes
        passes += 1
        if passes == 6:  # in the middle of the second rollout
            raise KeyboardInterrupt

    evaluate(
        plans, Worlds(random_world(depth=2, width=16)), evaluation, draw=draw, perceptual=False, watch=Watch(tick=tick)
    )
    document = json.loads((tmp_path / "results.json").read_text())
    first, second = document["scenes"]
    assert first["missing"] == []
    lacking = {"actions": running.NO_PROBE, "response": running.NO_PROBE, "teacher": running.NO_TEACHER}
    assert first["skipped"] == lacking
    assert set(second["parts"]) == {"codec"}
    assert document["status"].startswith("interrupted; missing: highway 0: horizon, ")
    assert "partial results: interrupted" in render(document)


def test_work_counts_the_denoising_passes() -> None:
    plans, world = [a_plan(4), a_plan(12)], random_world(depth=1, width=16)
    assert work(plans, Protocol(), 8, Worlds(world)) == 64
    assert work(plans, Protocol(), 8, Worlds(world, world)) == 64 + 54 * 12
    assert work(plans, Protocol(), 8, Worlds(world, None, Probe())) == 64 + 2 * 4 * 12


def test_a_recorded_drive_must_be_long_enough_and_the_message_says_for_how_much_it_is(tmp_path: Path) -> None:
    path = tmp_path / "short.csv"
    rows = [f"{i / FPS:.4f},8.0,0.0,0.01" for i in range(40)]
    path.write_text("\n".join(["t_s,speed_mps,accel_mps2,yaw_rate_rps", *rows]))
    made = plan("urban", chunks=12, actions=path)
    assert made.name == "urban 0, short"
    assert len(made.drive) == 40
    with pytest.raises(DriveError, match="long enough for --chunks 12"):
        plan("urban", chunks=13, actions=path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chunks", "3"], "at least 4"),
        (["--seeds", "0"], "--seeds (0)"),
        (["--scenario", "urban", "urban"], "twice"),
        (["--scenario", "moon"], "moon"),
        (["--steps", "0"], "steps (0)"),
        (["--actions", "nowhere.csv"], "nowhere.csv"),
        (["--weights", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--device", "nope"], "--device nope"),
        (["--threads", "0"], "--threads is 0"),
    ],
)
def test_bad_input_is_one_line_before_any_work(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["street", "eval", "--out", "out", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said and "\n" not in said
    assert not Path("out").exists()


def test_the_command_evaluates_a_weights_file_and_stops_politely(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = random_weights(tmp_path, depth=2, width=16)
    monkeypatch.setattr(running, "rendered", draw)
    monkeypatch.setattr(evaluate, "__kwdefaults__", {**evaluate.__kwdefaults__, "draw": draw})
    words = ["street", "eval", "--weights", str(weights), "--scenario", "urban", "--chunks", "4", "--no-teacher"]
    out = tmp_path / "out"
    assert main([*words, "--no-perceptual", "--out", str(out)]) == 0
    assert "n/a (no probe in this weights file)" in capsys.readouterr().out
    assert (out / "report.html").is_file()

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "generate", stop)
    assert main([*words, "--out", str(out)]) == 130
    assert "kept: interrupted; missing: urban 0: " in capsys.readouterr().err
