"""The method in one file decides and computes what the library does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import rollcache
from rollcache import Action, Condition, Pass, Role, Segment, XCache

PATH = Path(__file__).parent.parent / "examples" / "xcache_in_one_file.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("xcache_in_one_file", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_short() -> None:
    assert len(PATH.read_text().splitlines()) < 200


@pytest.mark.parametrize("seed", range(4))
def test_it_takes_the_decisions_of_the_library_and_gives_its_numbers(example: ModuleType, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    yaw = (0.4 * torch.randn(12, generator=g)).cumsum(0) * (torch.rand(12, generator=g) < 0.5)
    actions = [torch.tensor([1.0, float(y)]) for y in yaw.cumsum(0) / 4]
    blocks = [example.Block(10 * seed + b) for b in range(example.DEPTH)]
    where: dict[str, Any] = {}

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(blocks)

        def forward(self, h: Tensor, action: Tensor) -> Tensor:
            for block in self.blocks:
                h = block(h, action)
            return h

    def locate(*_: Any) -> Pass:
        return Pass(role=Role.DENOISE, segments=(Segment.contiguous("window", 1, example.GRID),), **where)

    model = Model()

    def library(h: Tensor, n: int, t: int, action: Tensor, kv_update: bool) -> Tensor:
        where.update(chunk=n, step=t, conditions=(Condition("action", action),), kv_update=kv_update)
        return model(h, action)

    with torch.no_grad():
        single = example.XCache([type(b).forward.__get__(b) for b in blocks], example.GRID)
        theirs = example.drive(lambda h, n, t, a, kv: single(h, n, t, a, kv, a), actions)
        adapter = rollcache.Adapter(blocks=lambda m: list(m.blocks), locate=locate)
        handle = rollcache.enable(model, XCache.paper(), adapter=adapter)
        ours = example.drive(library, actions)

    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    records = [r for r in handle.trace if r.block >= example.FRONT_BLOCKS]
    assert len(records) == len(single.log)
    for r, (n, t, b, skipped, similarity, threshold) in zip(records, single.log, strict=True):
        assert (r.chunk, r.step, r.block, r.action is Action.REPLAY) == (n, t, b, skipped)
        if similarity is not None:
            assert (r.cosine, r.threshold) == pytest.approx((similarity, threshold), abs=1e-5)
    taken = {skipped for *_, skipped, _, _ in single.log}
    assert taken == {True, False}


def test_it_runs_as_a_script(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        example.main()
    finally:
        torch.set_grad_enabled(True)
    assert "skip rate after warm-up" in capsys.readouterr().out
