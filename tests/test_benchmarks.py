"""The scripts in benchmarks/ that have arithmetic of their own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from street_doubles import noise_frames, random_world

from rollcache.bench.options import Machine
from rollcache.bench.takes import Injection, plan_take
from rollcache.street.evaluate.probe import Probe


def script(name: str) -> Any:
    """A module of benchmarks/."""
    path = Path(__file__).parent.parent / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def protocols() -> Any:
    return script("protocols")


@pytest.fixture(scope="module")
def replan() -> Any:
    return script("replan")


def test_a_loop_hears_the_first_actions_of_its_chunk_and_holds_them(protocols: Any) -> None:
    rows = torch.arange(16).float().reshape(8, 2)
    assert torch.equal(protocols.heard(rows[:2]), rows[:2])
    assert torch.equal(protocols.heard(rows), torch.cat((rows[:2], rows[1:2].expand(6, 2))))


def test_reaction_is_the_time_until_half_of_the_steer_shows(protocols: Any) -> None:
    plain = torch.full((8,), 0.1)
    steered = plain.clone()
    steered[5:] += 0.3
    assert protocols.reaction(steered, plain, 3) == pytest.approx(2.5 * 2 / 12)
    assert protocols.reaction(steered, plain, 5) == pytest.approx(0.5 * 2 / 12)
    assert protocols.reaction(plain + 0.2, plain, 3) is None


def test_every_loop_runs_and_is_measured(protocols: Any) -> None:
    world, probe = random_world(depth=2), Probe()
    take = plan_take("urban", chunks=16).make(world, noise_frames)
    steered = take.injected(Injection("steer", protocols.STEER_AT, protocols.STEER))
    names = {"receding", "receding, X-Cache", "chunked", "sliding", "shared, rho 0.8"}
    everything = [loop for loop in protocols.loops() if loop.name in names]
    found = [protocols.measure(world, probe, take, steered, loop, Machine()) for loop in everything]
    by_name = {r["loop"]: r for r in found}
    assert by_name["receding"]["passes_per_second"] == pytest.approx(17 / 4 / (2 / 12))
    assert by_name["chunked"]["passes_per_second"] == pytest.approx(5 / (8 / 12))
    assert by_name["sliding"]["skip"] is None and by_name["receding, X-Cache"]["skip"] > 0
    assert all(6 < r["psnr"] < 40 for r in found)
    assert by_name["chunked"]["seconds_per_second"] > 0
    assert protocols.table(found, everything).row_count == len(names)


def test_plans_are_the_next_rows_of_the_drive_and_the_further_the_less_exact(replan: Any) -> None:
    take = plan_take("u-turn", chunks=8).make(random_world(depth=2), noise_frames)
    rows = take.actions.flatten(0, 1)
    exact, vague = replan.plans(take, "plan", 0.0), replan.plans(take, "plan", 0.1)
    assert all(p is None for p in replan.plans(take, "hold", 0.0)) and len(exact) == 8
    assert torch.equal(exact[2], rows[6:12]) and len(exact[7]) == 0
    error = [(v - e).abs()[:, 0] for v, e in zip(vague[:4], exact[:4], strict=True)]
    assert all((e[1:] >= e[:-1]).all() and e[-1] > 0 for e in error)


def test_the_fastest_limits_that_reach_the_target_everywhere_are_proposed(replan: Any) -> None:
    def run(low: float, speedup: float, pooled: float) -> dict[str, Any]:
        return {"plan": f"replan {low:g} 0.3", "label": f"amend above {low:g}", "speedup": speedup, "pooled": pooled}

    found = [run(0.03, 1.5, 60), run(0.03, 2.0, 56), run(0.05, 1.8, 58), run(0.05, 2.5, 55.5), run(0.1, 3.0, 60)]
    found += [run(0.1, 3.2, 45), {"plan": "xcache", "label": "X-Cache", "speedup": 9, "pooled": 90}]
    assert replan.proposal(found, 55).endswith("amend above 0.05")
    assert "no limits reach 70 dB" in replan.proposal(found, 70)


def test_every_variant_of_the_receding_loop_is_measured(replan: Any) -> None:
    from rollcache.bench.costs import PassClock
    from rollcache.bench.lanes import FULL, open_lane, race
    from rollcache.street.protocol import Protocol

    world, protocol = random_world(depth=2), Protocol(steps=2)
    take = plan_take("u-turn", chunks=12).make(world, noise_frames)
    lanes = [
        open_lane(world, take, protocol, plan, reload=lambda dtype: world)
        for plan in (FULL, *replan.variants((0.05, 0.5), (0.3,)))
    ]
    with PassClock(world) as clock:
        assert race(lanes, take.actions, plans=replan.plans(take, "plan", 0.03))
    frames = [world.decode(torch.cat(lane.latents)) for lane in lanes]
    rows = [replan.row(lane, lanes[0], f, frames[0], clock) for lane, f in zip(lanes[1:], frames[1:], strict=True)]
    by_key = {r["plan"]: {"scenario": "u-turn", "ahead": "plan", **r} for r in rows}
    assert list(by_key) == ["xcache", "paper", "reuse", "frozen", "floor", "replan 0.05 0.3"]
    levels = by_key["replan 0.05 0.3"]["levels"]
    assert levels["compute"] == 3 and sum(levels.values()) == 12
    assert by_key["replan 0.05 0.3"]["pooled"] > by_key["frozen"]["pooled"] - 1
    assert len(replan.tables(list(by_key.values()))) == 1
