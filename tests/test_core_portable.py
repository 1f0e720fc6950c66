"""A rollout that is exported in one process and restored in another goes on as if nothing had happened."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from step_doubles import ADAPTER, SEGMENTS, SIGMAS, STEPS, Denoiser, noises
from torch import Tensor

import rollcache
from rollcache import (
    FSC,
    C3ache,
    Cache,
    EasyCache,
    FlowCache,
    MagCache,
    MotionCache,
    Pass,
    Role,
    RollcacheError,
    Scope,
    SeaCache,
    Stacked,
    StepReuse,
    TaylorSeer,
    TeaCache,
    WindowReuse,
    XCache,
)

EAGER = XCache(min_cosine=0.9, margin=0.1, max_deviation=None)
METHODS = [
    EAGER,
    WindowReuse(),
    C3ache(),
    FSC(steps=STEPS, repairs="refresh"),
    MotionCache(repairs="refresh", warmup=1, chunk_updates=1),
    TeaCache(max_drift=0.3, warmup=1),
    FlowCache(max_drift=0.3, warmup=1),
    SeaCache(max_drift=0.5),
    EasyCache(max_drift=0.3, warmup=1),
    MagCache(steps=STEPS, ratios=(1.0,) * STEPS),
    TaylorSeer(steps=STEPS, interval=3, warmup=2, order=2),
    Scope(steps=STEPS, cache_below=0.3, predict_below=0.6, warmup=2),
    StepReuse(steps=STEPS, anchors=(0, 3, 6), order=2),
    Stacked(passes=StepReuse(steps=STEPS, anchors=(0, 3, 6)), blocks=EAGER),
]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def passes(chunks: int = 4) -> list[tuple[Pass, float]]:
    """Positions of a rollout, and how far the latent moves there."""
    return [
        (Pass(role=Role.DENOISE, rollout="a", chunk=n, step=t, time=s, steps=STEPS, segments=SEGMENTS), s - after)
        for n in range(chunks)
        for t, (s, after) in enumerate(pairwise(SIGMAS))
    ]


def run(model: Denoiser, where: list[tuple[Pass, float]], z: Tensor) -> list[Tensor]:
    """Every latent on the way; each chunk begins with the same noise, but a little of its own."""
    out = []
    for at, step in where:
        if at.step == 0:
            z = noises(1)[0] + 0.02 * noises(1, seed=at.chunk)[0]
        z = z - step * model(z, at.time, where=at)
        out.append(z)
    return out


def told(cache: Cache) -> list[str]:
    return [record.line() for record in cache.trace]


@pytest.mark.parametrize("cut", [2 * STEPS, 2 * STEPS + 5], ids=["between chunks", "inside a chunk"])
@pytest.mark.parametrize("policy", METHODS, ids=lambda p: type(p).__name__)
def test_the_rest_of_a_rollout_is_the_same_on_another_copy_of_the_model(policy: Any, cut: int) -> None:
    model = Denoiser()
    with rollcache.enable(model, policy, adapter=ADAPTER) as whole:
        wanted = run(model, passes(), noises(1)[0])
        skipped = whole.stats().skip_rate
    assert 0 < skipped < 1 or isinstance(policy, WindowReuse)
    with rollcache.enable(model, policy, adapter=ADAPTER) as first:
        run(model, passes()[:cut], noises(1)[0])
        state = first.export_state("a")
        before = told(first)
    other = Denoiser()
    with rollcache.enable(other, policy, adapter=ADAPTER) as second:
        second.restore_state("a", state)
        got = run(other, passes()[cut:], wanted[cut - 1])
        assert all(torch.equal(a, b) for a, b in zip(got, wanted[cut:], strict=True))
        assert before + told(second) == told(whole)


def test_another_process_reads_it(tmp_path: Path) -> None:
    model = Denoiser()
    with rollcache.enable(model, EAGER, adapter=ADAPTER) as cache:
        wanted = run(model, passes(4), noises(1)[0])
    with rollcache.enable(model, EAGER, adapter=ADAPTER) as cache:
        run(model, passes(3), noises(1)[0])
        (tmp_path / "state").write_bytes(cache.export_state("a"))
    code = """
import sys, torch
from pathlib import Path
import test_core_portable as t
model = t.Denoiser()
with torch.no_grad(), t.rollcache.enable(model, t.EAGER, adapter=t.ADAPTER) as cache:
    cache.restore_state("a", Path(sys.argv[1], "state").read_bytes())
    torch.save(t.run(model, t.passes(4)[3 * t.STEPS :], t.noises(1)[0]), Path(sys.argv[1], "latents"))
"""
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=Path(__file__).parent, check=True, timeout=120)
    got = torch.load(tmp_path / "latents")
    assert all(torch.equal(a, b) for a, b in zip(got, wanted[3 * STEPS :], strict=True))


def test_marks_go_on_where_the_exported_rollout_was() -> None:
    model = Denoiser()
    made, held = [], b""
    for moves in (False, True):
        z = noises(1)[0]
        cache = rollcache.enable(model, EAGER, blocks=list(model.blocks), kv_writes="commit_only")
        for n in range(4):
            if moves and n == 2:
                held = cache.export_state("a")
                cache.disable()
                cache = rollcache.enable(model, EAGER, blocks=list(model.blocks), kv_writes="commit_only")
                cache.restore_state("a", held)
            with cache.rollout("a", resume=n > 0), cache.chunk() as where:
                assert where.chunk == n
                cache.step()
                made.append(model(z, 0.5))
        assert cache.stats().skip_rate > 0
        cache.disable()
    assert all(torch.equal(a, b) for a, b in zip(made[:4], made[4:], strict=True))


def exported(policy: Any = EAGER, model: Denoiser | None = None, storage_dtype: Any = None, **facts: Any) -> bytes:
    model, adapter = model or Denoiser(), replace(ADAPTER, **facts)
    with rollcache.enable(model, policy, adapter=adapter, storage_dtype=storage_dtype) as cache:
        run(model, passes(2), noises(1)[0])
        return cache.export_state("a")


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (lambda: exported(XCache()), "another policy"),
        (lambda: exported(model=Denoiser(depth=4)), "another number of blocks"),
        (lambda: exported(model=Denoiser(seed=1)), "another weights"),
        (lambda: exported(storage_dtype=torch.bfloat16), "another storage dtype"),
        (lambda: exported(always_compute=frozenset({1})), "another choice of blocks that are always computed"),
        (lambda: exported(kv_writes="never"), "another moment at which K/V is written"),
        (lambda: b"nothing", "7 bytes are no exported state"),
        (lambda: None, "takes the bytes that export_state"),
        (lambda: exported()[:1000], "no exported state"),
    ],
)
def test_what_does_not_fit_is_named_and_the_rollout_that_was_there_stays(state: Any, why: str) -> None:
    model = Denoiser()
    with rollcache.enable(model, EAGER, adapter=ADAPTER) as cache:
        run(model, passes(3), noises(1)[0])
        held = cache.stats().bytes_actual
        with pytest.raises(RollcacheError, match=why):
            cache.restore_state("a", state())
        assert cache.stats().bytes_actual == held > 0


def test_what_is_held_counts_and_what_has_no_room_is_computed() -> None:
    model, state = Denoiser(), exported()
    with rollcache.enable(model, EAGER, adapter=ADAPTER) as cache:
        cache.restore_state("a", state)
        held = cache.stats().bytes_actual
        assert held > 0
        cache.restore_state("a", state)
        assert cache.stats().bytes_actual == held == cache._engine.budget.used
        cache.reset()
        assert cache._engine.budget.used == 0
    with rollcache.enable(model, EAGER, adapter=ADAPTER, memory_budget=held - 1) as cache:
        cache.restore_state("a", state)
        assert cache.stats().bytes_actual == 0
        run(model, passes(4)[2 * STEPS : 3 * STEPS], noises(1)[0])
        assert cache.stats().skip_rate == 0


def test_a_rollout_that_is_not_there_cannot_be_exported() -> None:
    with (
        rollcache.enable(Denoiser(), EAGER, adapter=ADAPTER) as cache,
        pytest.raises(RollcacheError, match=r"no rollout 'b' to export \(known: none\)"),
    ):
        cache.export_state("b")
