"""`check_adapter`: adapters that say the truth pass, and every lie is found by the check that is for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from causal import Attending, Causal, adapter, locate, loop
from street_doubles import random_model
from torch import Tensor

import rollcache
from rollcache import BlockIO, Pass, Role, RollcacheError, check_adapter
from rollcache.adapters.check import AdapterReport
from rollcache.street.dit import StreetDiT, WindowKV
from rollcache.street.protocol import Where
from rollcache.street.rig import CELLS
from rollcache.testing import assert_adapter


def check(model: Causal, its: Any, *args: Any, **options: Any) -> AdapterReport:
    """The report on a rollout of `causal.loop`."""

    def make(batch: int = 1, reverse: bool = False) -> Any:
        return loop(model, *args, batch=batch, reverse=reverse, **options)

    return check_adapter(model, make, adapter=its)


@pytest.mark.parametrize("writes", ["never", "commit_only", "every_forward", "last_step"])
def test_the_truth_passes_in_every_way_to_keep_kv(writes: Any) -> None:
    report = check(Causal(), adapter(writes), writes, ("cond", "uncond"), longer=True)
    assert report.passed, str(report)
    skipped = {f.name for f in report.findings if f.status == "skipped"}
    assert skipped <= {"what methods may look at", "repair of all tokens", "K/V after skipped passes"}
    assert ("K/V after skipped passes" in skipped) is False
    assert str(report).startswith("adapter of Causal: ")


class InPlace(Attending):
    def forward(self, h: Tensor, *rest: Any) -> Tensor:
        return h.copy_(super().forward(h, *rest))


class Shared(Attending):
    """Returns one buffer, over and over."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.buffer = torch.empty(0)

    def forward(self, h: Tensor, *rest: Any) -> Tensor:
        out = super().forward(h, *rest)
        if self.buffer.shape != out.shape:
            self.buffer = torch.empty_like(out)
        return self.buffer.copy_(out)


@pytest.mark.parametrize(("kind", "declared"), [(InPlace, False), (InPlace, True), (Shared, False)])
def test_blocks_that_write_in_place_or_share_buffers_pass(kind: Any, declared: bool) -> None:
    report = check(Causal(block=kind), adapter(io=BlockIO(hidden=(0, "h"), in_place=declared)))
    assert report.passed, str(report)
    why = report["blocks that write in place"].why
    assert ("noticed" in why) is (kind is InPlace and not declared)


def street_calls(model: StreetDiT) -> Any:
    g = torch.Generator().manual_seed(0)
    kv, z = WindowKV(len(model.blocks) // 2), torch.randn(1, 4, CELLS, model.config.channels, generator=g)
    still = torch.zeros(1, 1, CELLS, model.config.channels)
    action = torch.tensor([[10.0, 0.0] * 2] * 4)
    for n in range(5):
        where = Where(0, n, 0, "denoise", kv_update=n % 4 == 0, action=action)
        x = z
        for t in range(2):
            out = yield (
                (x, torch.full((1, 1), 1 - t / 2), action[None], still, torch.zeros(1, 1), torch.zeros(1, 1)),
                {
                    "kv": kv,
                    "where": replace(where, step=t, sigma=1 - t / 2),
                },
            )
            x = x - out / 2
        if n % 4 == 3:
            yield (
                (x, torch.zeros(1, 1), action[None], still, torch.zeros(1, 1), torch.zeros(1, 1)),
                {
                    "kv": kv,
                    "commit": True,
                    "where": Where(0, n, 0, "commit", action=action),
                },
            )


def test_the_adapter_of_the_street_world_passes() -> None:
    model = random_model()
    report = assert_adapter(model, partial(street_calls, model))
    assert report["repair of all tokens"].status == "passed"
    assert report["what methods may look at"].why == "latent, modulated, embedding"
    assert report["K/V after skipped passes"].status == "passed"


def wrong(model: Causal, its: Any, *args: Any, **options: Any) -> list[str]:
    """Names of the failed checks."""
    report = check(model, its, *args, **options)
    return [f.name for f in report.failures]


def test_blocks_in_another_order_are_found() -> None:
    model = Causal()
    assert wrong(model, replace(adapter(), blocks=lambda m: list(m.blocks)[::-1])) == ["blocks"]


@pytest.mark.parametrize("missing", [0, 2, 3])
def test_a_block_that_is_not_listed_is_found(missing: int) -> None:
    its = replace(adapter(), blocks=lambda m: [b for i, b in enumerate(m.blocks) if i != missing])
    report = check(Causal(), its)
    assert [f.name for f in report.failures] == ["blocks"]
    assert f"blocks.{missing} (Attending)" in report["blocks"].why


@pytest.mark.parametrize("writes", ["commit_only", "every_forward"])
def test_a_commit_pass_that_is_taken_for_a_denoise_pass_is_found(writes: Any) -> None:
    def lie(model: Any, args: Any, kwargs: Any) -> Pass:
        return replace(locate(model, args, kwargs), role=Role.DENOISE, step=kwargs["step"])

    expected = {"commit_only": "K/V writes", "every_forward": "commit passes"}
    assert expected[writes] in wrong(Causal(), adapter(writes, locate=lie), writes)


class Returning(Causal):
    """As in MIRA and HY-WorldPlay: K/V is returned by the pass that makes it, and written nowhere."""

    def forward(self, x: Tensor, time: float, **call: Any) -> Any:
        out = super().forward(x, time, **{**call, "write": False})
        return out, ([out @ block.k for block in self.blocks] if call["write"] else None)


def returning_loop(model: Causal) -> Any:
    calls, out = loop(model), None
    try:
        while True:
            answer = yield calls.send(None if out is None else out[0])
            out = answer
    except StopIteration:
        return


def test_a_commit_pass_that_returns_its_kv_and_is_taken_for_a_denoise_pass_is_found() -> None:
    model = Returning()
    assert_adapter(model, partial(returning_loop, model), adapter=adapter())

    def lie(model: Any, args: Any, kwargs: Any) -> Pass:
        return replace(locate(model, args, kwargs), role=Role.DENOISE, step=kwargs["step"])

    report = check_adapter(model, partial(returning_loop, model), adapter=adapter(locate=lie))
    assert [f.name for f in report.failures] == ["K/V writes"]
    assert "returns more than those before" in report["K/V writes"].why


def test_a_last_step_whose_kv_stays_must_say_so() -> None:
    assert "commit passes" in wrong(Causal(), adapter("last_step", locate=locate), "last_step")


def test_kv_that_denoise_passes_write_without_a_word_is_found() -> None:
    assert wrong(Causal(), adapter("commit_only"), "every_forward") == ["K/V writes"]


@pytest.mark.parametrize(
    "lie",
    [
        lambda where: replace(where, step=0),
        lambda where: replace(where, step=where.step + 1),
        lambda where: replace(where, chunk=3 - where.chunk),
        lambda where: replace(where, step=2 * where.step),
    ],
    ids=["a step that never advances", "steps from 1", "chunks that fall", "steps with gaps"],
)
def test_positions_that_do_not_count_up_are_found(lie: Any) -> None:
    its = adapter(locate=lambda *call: lie(locate(*call)) if "role" not in call[2] else locate(*call))
    assert wrong(Causal(), its) == ["positions"]


@pytest.mark.parametrize("forgotten", ["cond", "uncond"])
@pytest.mark.parametrize("writes", ["every_forward", "last_step"])
def test_every_branch_needs_its_own_commit_pass(writes: Any, forgotten: str) -> None:
    def lie(model: Any, args: Any, kwargs: Any) -> Pass:
        where = locate(model, args, kwargs | {"last": writes == "last_step"})
        if kwargs["branch"] != forgotten:
            return where
        return replace(where, role=Role.DENOISE, step=kwargs["step"], kv_write=False)

    report = check(Causal(), adapter(writes, locate=lie), writes, ("cond", "uncond"))
    why = report["commit passes"].why
    assert report["commit passes"].status == "failed"
    assert f"ends a chunk of branch {forgotten!r} under kv_writes={writes!r}" in why
    assert "every branch needs one of its own" in why


def test_branches_that_are_told_by_turns_are_found() -> None:
    count = [0]

    def by_turns(model: Any, args: Any, kwargs: Any) -> Pass:
        where = locate(model, args, kwargs)
        if where.role is Role.DENOISE:
            count[0] += 1
            where = replace(where, branch=("uncond", "cond")[count[0] % 2])
        return where

    assert wrong(Causal(), adapter(locate=by_turns), "commit_only", ("cond", "uncond")) == ["order of branches"]


def test_a_second_rollout_that_is_not_noticed_is_found() -> None:
    chunks: list[int] = [0]
    last: list[int] = [0]

    def forever(model: Any, args: Any, kwargs: Any) -> Pass:
        where = locate(model, args, kwargs)
        if where.chunk != last[0]:
            chunks[0], last[0] = chunks[0] + 1, where.chunk
        return replace(where, chunk=chunks[0])

    assert wrong(Causal(), adapter(locate=forever)) == ["a second rollout"]


class Values(Attending):
    """As in Overworld: the first block makes a value that the others mix in and pass on."""

    def forward(self, h: Tensor, time: Tensor, kv: Any, start: int, write: bool, v: Any = None) -> Any:
        out = self.attend(h, time, kv, start, write)
        v = h.tanh() if v is None else v
        return out + 0.5 * v, v


class Passing(Causal):
    def forward(self, x: Tensor, time: float, **call: Any) -> Tensor:
        h, v = x * 1.0, None
        for i, block in enumerate(self.blocks):
            h, v = block(h, torch.tensor(time), call["kv"][i], call["start"], call["write"], v)
        return h


VALUES = BlockIO(hidden=(0, "h"), returns="hidden, aux", aux=lambda args, kwargs: args[5])


def test_values_that_are_passed_on_pass_with_the_first_block_always_computed() -> None:
    report = check(Passing(block=Values), adapter(io=VALUES, always_compute=frozenset({0})))
    assert report.passed, str(report)


def test_an_aux_that_is_forgotten_is_found() -> None:
    model = Passing(block=Values)
    # two tensors look like a list of view groups: the very first pass does not fit
    assert wrong(model, adapter()) == ["exact when nothing is skipped"]
    # None instead of the value: later blocks make another one
    forgotten = adapter(io=replace(VALUES, aux="none"), always_compute=frozenset({0}))
    assert wrong(model, forgotten) == ["what a skipped block returns"]


def test_a_block_that_must_be_computed_and_is_not_declared_is_found() -> None:
    assert wrong(Passing(block=Values), adapter(io=VALUES)) == ["what a skipped block returns"]


class RollingBlock(Attending):
    """Moves its K/V along in the first pass of a chunk, as models with a rolling window do."""

    def forward(self, h: Tensor, time: Tensor, kv: Any, start: int, write: bool) -> Tensor:
        if float(kv["at"]) != start:
            kv["k"].copy_(kv["k"].roll(1, 1))
            kv["at"].fill_(start)
        return self.attend(h, time, kv, 6, write)


def rolling_loop(model: Causal, **options: Any) -> Any:
    """As in LongLive 2, commit passes take the window for moved: they do not move it."""
    calls = loop(model, "every_forward", **options)
    out = None
    try:
        while True:
            args, kwargs = calls.send(out)
            for kv in kwargs["kv"]:
                kv.setdefault("at", torch.zeros(()))
                if kwargs.get("role") == "commit":
                    kv["at"].fill_(kwargs["start"])
            out = yield args, kwargs
    except StopIteration:
        return


def test_a_window_that_moves_in_the_first_pass_needs_that_pass_exact() -> None:
    model = Causal(block=RollingBlock)
    its = adapter("every_forward")
    report = check_adapter(model, partial(rolling_loop, model), adapter=its)
    assert [f.name for f in report.failures] == ["K/V after skipped passes"]
    assert "first_pass_exact" in report["K/V after skipped passes"].why
    exact = replace(its, first_pass_exact=lambda m, args, kwargs: kwargs["start"] > 0)
    report = check_adapter(model, partial(rolling_loop, model), adapter=exact)
    assert report.passed, str(report)


def test_a_loop_that_is_not_reproducible_is_told_first() -> None:
    model = Causal()

    def make() -> Any:
        for args, kwargs in loop_without_answers(model):
            yield (args[0] + torch.randn(()), args[1]), kwargs

    report = check_adapter(model, make, adapter=adapter("never"))
    assert [f.name for f in report.failures] == ["reproducible"]
    assert "seed" in report["reproducible"].why


class Steered(Causal):
    """As with a ControlNet: something is added to the hidden state between two blocks."""

    def forward(self, x: Tensor, time: float, **call: Any) -> Tensor:
        h = x * 1.0
        for i, block in enumerate(self.blocks):
            if i == 2:
                h = h + 0.5
            h = block(h, torch.tensor(time), call["kv"][i], call["start"], call["write"])
        return h


def test_a_model_that_changes_the_hidden_state_between_blocks_passes() -> None:
    report = check(Steered(), adapter(), "commit_only", ("cond", "uncond"))
    assert report.passed, str(report)
    assert "before blocks [2]" in report["exact when nothing is skipped"].why
    assert "0 replayed across steps" in report["residuals"].why
    assert not report["residuals"].why.startswith("0 ")


def test_wrong_arithmetic_behind_a_change_between_blocks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cover = BlockIO.emit
    monkeypatch.setattr(
        BlockIO, "emit", lambda self, streams, *rest: cover(self, tuple(1.1 * h for h in streams), *rest)
    )
    assert "residuals" in wrong(Steered(), adapter())


def test_an_error_inside_locate_and_an_answer_that_is_no_pass_are_told_as_such() -> None:
    def raising(model: Any, args: Any, kwargs: Any) -> Pass:
        return kwargs.rollout

    for lie, why in (
        (raising, "locate() raised AttributeError: 'dict' object has no attribute 'rollout'"),
        (lambda *_: {"chunk": 0}, "locate() returned {'chunk': 0} (dict): it must give a Pass, or None"),
        (lambda *_: 1 / 0, "locate() raised ZeroDivisionError: division by zero"),
    ):
        report = check(Causal(), adapter(locate=lie))
        assert [f.name for f in report.failures] == ["exact when nothing is skipped"]
        assert report.failures[0].why == why


def test_an_adapter_that_raises_is_told_and_leaves_the_model_alone() -> None:
    model = Causal()

    def broken(model: Any, args: Any, kwargs: Any) -> Pass:
        raise RollcacheError("cannot tell")

    report = check(model, adapter(locate=broken))
    assert [f.name for f in report.failures] == ["exact when nothing is skipped"]
    assert "cannot tell" in report["exact when nothing is skipped"].why
    assert all("forward" not in vars(m) for m in model.modules())
    with pytest.raises(RollcacheError, match="cannot tell"):
        report.raise_for_failures()
    with pytest.raises(AssertionError, match="cannot tell"):
        assert_adapter(model, partial(loop, model), adapter=adapter(locate=broken))


def test_calls_may_be_a_list_and_what_was_not_shown_is_skipped() -> None:
    model = Causal()
    report = check_adapter(model, lambda: list(loop_without_answers(model)), adapter=adapter("never"))
    assert report.passed, str(report)
    assert {f.name for f in report.findings if f.status == "skipped"} == {
        "shapes that change",
        "another batch size",
        "order of branches",
        "what methods may look at",
        "repair of all tokens",
    }
    with pytest.raises(AssertionError, match="make_inputs takes no batch="):
        assert_adapter(model, partial(loop_without_answers, model), adapter=adapter("never"), may_skip=False)


def loop_without_answers(model: Causal) -> Iterator[Any]:
    for n in range(3):
        for t in range(2):
            x = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(n))
            yield (x, 1 - t / 2), {"chunk": n, "step": t, "branch": "cond", "write": False}


def test_a_model_nobody_knows_is_an_error_and_no_finding() -> None:
    with pytest.raises(RollcacheError, match="no adapter for"):
        rollcache.check_adapter(Causal(), lambda: [])
