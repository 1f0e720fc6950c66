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


@pytest.fixture(scope="module")
def protocols() -> Any:
    path = Path(__file__).parent.parent / "benchmarks" / "protocols.py"
    spec = importlib.util.spec_from_file_location("protocols", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["protocols"] = module
    spec.loader.exec_module(module)
    return module


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
