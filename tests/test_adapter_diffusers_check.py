"""`check_adapter` on all model families, in the loops that `benchmarks/adapters.py` times, and what it makes of them.

Branches have no names in these loops, the first one called is the conditional one: so their order is never turned.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from street_doubles import random_codec
from test_benchmarks import script
from torch import Tensor

pytest.importorskip("transformers", reason="the pipelines of diffusers need it: pip install 'rollcache[diffusers]'")
pytest.importorskip("diffusers", reason="the real classes are needed: pip install 'rollcache[diffusers]'")

from diffusers.models.transformers import transformer_anyflow_far

from rollcache.adapters.check import check_adapter
from rollcache.adapters.rehearse import calls
from rollcache.street.protocol import Protocol, Where
from rollcache.street.rig import CELLS
from rollcache.street.world import Session, Start, World

FAMILIES: dict[str, dict[str, int]] = {
    "SkyReels-V2": {"branches": 2},
    "Helios": {"branches": 2},
    "FramePack": {},
    "AnyFlow-FAR": {},
    "SANA-WM refiner": {},
    "Self-Forcing": {},
    "LongLive 2": {},
    "Matrix-Game 2.0": {},
    "CausVid": {},
    "Krea Realtime": {},
    "street world": {},
}
OURS = list(FAMILIES)[5:]


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return script("adapters")


def test_every_family_is_checked(benchmark: Any) -> None:
    assert list(FAMILIES) == list(benchmark.FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_adapter_says_the_truth(benchmark: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_anyflow_far, "dispatch_attention_fn", benchmark.DenseAttention())
    scale = benchmark.Scale(depth=3, heads=2, head=16, frames=(2, 2, 3), cells=(2, 2), steps=2)
    family = benchmark.FAMILIES[name](scale, **FAMILIES[name])
    report = check_adapter(family.model, family.calls, adapter=family.adapter)
    report.raise_for_failures()
    skipped = {f.name for f in report.findings if f.status == "skipped"}
    one_shape = {"shapes that change"} if name == "street world" else set()
    assert skipped <= {"order of branches", "repair of all tokens", *one_shape}, str(report)


def test_a_small_run_is_measured_against_what_its_blocks_cost(benchmark: Any) -> None:
    scale = benchmark.Scale(depth=2, heads=2, head=16, frames=(1, 1), cells=(2, 2), steps=2)
    settings = benchmark.Settings(scale=scale, rounds=1, anchors=1)
    across_steps, across_chunks = (benchmark.measure(name, settings) for name in ("SkyReels-V2", "SANA-WM refiner"))
    assert across_steps["exact"] and across_chunks["exact"]
    assert (across_steps["calls"], across_steps["commits"], across_steps["skipped"]) == (4, 0, 0.5)
    assert (across_chunks["calls"], across_chunks["commits"]) == (7, 2)
    assert across_chunks["skipped"] == pytest.approx(2 * 0.5 / 7)  # block 1 of 2, in the 2 steps of the second chunk
    assert across_steps["ceiling"] > 1
    assert benchmark.table([across_steps, across_chunks], scale).row_count == 2


@pytest.mark.parametrize(
    ("name", "calls", "commits", "skipping"),
    [
        ("Self-Forcing", 6, 2, 2),  # both steps of the second chunk
        ("LongLive 2", 6, 2, 1),  # but the first
        ("Matrix-Game 2.0", 6, 2, 2),
        ("CausVid", 6, 2, 2),
        ("Krea Realtime", 5, 1, 2),  # committed before the second chunk
        ("street world", 11, 2, 4),  # given frames; the second chunk of both windows
    ],
)
def test_a_small_run_across_chunks(benchmark: Any, name: str, calls: int, commits: int, skipping: int) -> None:
    scale = benchmark.Scale(depth=2, heads=2, head=16, frames=(1, 1), cells=(2, 2), steps=2)
    row = benchmark.measure(name, benchmark.Settings(scale=scale, rounds=1))
    assert row["exact"] and row["method"] == "XCache"
    assert (row["calls"], row["commits"]) == (calls, commits)
    assert row["skipped"] == pytest.approx(0.5 * skipping / calls)  # block 1 of 2
    assert row["tokens"] == (2 * CELLS if name == "street world" else 4)


@pytest.mark.parametrize("name", OURS)
def test_every_lane_and_every_generation_has_kv_of_its_own(benchmark: Any, name: str) -> None:
    scale = benchmark.Scale(depth=3, heads=2, head=16, frames=(2, 2, 2), cells=(2, 2), steps=2)
    alone, bare, cached = (
        benchmark.Lane(benchmark.FAMILIES[name](scale), policy, benchmark.time.process_time)
        for policy in (None, None, benchmark.OPEN)
    )
    benchmark.race([alone], rounds=0)
    benchmark.race([bare, cached], rounds=1)  # two generations
    assert len(alone.outputs) == len(bare.outputs) == len(cached.outputs)
    assert all(map(torch.equal, alone.outputs, bare.outputs))
    assert not all(map(torch.equal, bare.outputs, cached.outputs))


def test_the_street_loop_makes_the_calls_of_a_session(benchmark: Any) -> None:
    scale = benchmark.Scale(depth=3, heads=2, head=16, frames=(1, 1, 1), steps=3)
    family = benchmark.FAMILIES["street world"](scale)
    seen: list[tuple[Where, Tensor]] = []
    family.model.register_forward_hook(
        lambda _, args, kwargs, out: seen.append((kwargs["where"], out)), with_kwargs=True
    )
    with torch.inference_mode():
        for args, kwargs, answer in calls(family.calls()):
            answer(family.model(*args, **kwargs))
    loop = seen.copy()
    seen.clear()
    window = family.model.config.window
    first = torch.randn(window, CELLS, 24, generator=torch.Generator().manual_seed(9))
    action = torch.tensor([[10.0, 0.0]])
    session = Session(
        World(family.model, random_codec(width=16, depth=1), dtype="float32"),
        Start(first, action.repeat(window, 2)),
        Protocol(window=window, kv_every=window, steps=scale.steps),
    )
    for _ in range(3 * window):
        session.step(action.repeat(session.frames_per_step, 1))
    assert len(loop) == len(seen) == 1 + 3 * (window * scale.steps + 1)
    for (ours, a), (where, b) in zip(loop, seen, strict=True):
        assert torch.equal(a, b) and torch.equal(ours.action, where.action)
        assert replace(ours, action=None) == replace(where, action=None, rollout=0)


def test_the_table_is_written_as_markdown_with_what_repeats_it(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/adapters.py", "--families", "CausVid", "Krea Realtime"])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    scale = benchmark.Scale(depth=2, heads=2, head=16, frames=(1, 1), cells=(2, 2), steps=2)
    path = tmp_path / "new" / "adapters.md"
    settings = benchmark.Settings(families=("CausVid", "Krea Realtime"), scale=scale, rounds=1, markdown=path)
    assert benchmark.main(settings) == 0
    assert "CausVid" in capsys.readouterr().out
    text = path.read_text("utf-8")
    assert "`OMP_NUM_THREADS=3 python benchmarks/adapters.py --families CausVid 'Krea Realtime'`" in text
    threads = torch.get_num_threads()
    said = (f"torch {torch.__version__}", "diffusers ", f"{threads} thread", "2 blocks, width 32, 2 steps a chunk")
    assert all(words in text for words in said)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines] == ["family", "---", "CausVid", "Krea Realtime"]
    assert {line.count("|") for line in lines} == {len(benchmark.HEADS) + 1}
    assert "bit for bit | 6 | 2 | 16.7%" in lines[2]


def test_the_spread_is_that_of_single_rounds(benchmark: Any) -> None:
    full, stack, cached = [[10.0, 20.0], [10.0, 20.0]], [[8.0, 10.0], [8.0, 10.0]], [[10.0, 20.0], [4.0, 10.0]]
    assert benchmark.by_round(full, stack, cached, skipped=[0.0, 1.0]) == pytest.approx([12 / 14, 1.0])


def test_ceiling_and_efficiency_by_hand(benchmark: Any) -> None:
    full, stack = [[10.0, 11.0, 10.0], [10.0] * 3], [[8.0] * 3, [8.0] * 3]
    found = benchmark.reached(full, stack, [[10.0] * 3, [4.0, 4.0, 99.0]], [0.0, 1.0])
    assert found == pytest.approx({"speedup": 20 / 14, "ceiling": 20 / 12, "efficiency": 12 / 14})


def test_unknown_families_are_named(benchmark: Any) -> None:
    with pytest.raises(ValueError, match="unknown families: Foo"):
        benchmark.Settings(families=("Foo",))
