"""Methods that decide about whole passes: what the engine does with their decisions, on blocks that can be counted."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from dummies import Doubling, Stack, doubling, mixing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rollcache
from rollcache import (
    Action,
    Adapter,
    Condition,
    Decision,
    Pass,
    Reason,
    Role,
    RollcacheError,
    Segment,
    Stacked,
    StackPolicy,
    StepReuse,
    Tokens,
    XCache,
)
from rollcache.passes import Cell
from rollcache.policies.base import StackEvidence

Rule = Callable[[StackEvidence], Decision]
GRID = (Segment.contiguous("all", 1, (2, 1, 3)),)
COMPUTE = Decision(Action.COMPUTE, Reason.SCHEDULE)
REPLAY = Decision(Action.REPLAY, Reason.SCHEDULE)


@dataclass(frozen=True)
class Scripted:
    """Settings of a method that does as a function says, and writes down what it is told."""

    rule: Rule
    options: dict[str, Any] = field(default_factory=dict)
    heard: list[tuple[int, int, str, str]] = field(default_factory=list)

    def build(self, blocks: int) -> StackPolicy:
        policy = ScriptedPolicy(blocks)
        policy.rule, policy.heard = self.rule, self.heard
        for name, value in self.options.items():
            setattr(policy, name, value)
        return policy

    def explain(self, record: Any) -> str:
        return str(record.action)


class ScriptedPolicy(StackPolicy):
    rule: Rule
    heard: list[tuple[int, int, str, str]]

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        return self.rule(evidence)

    def conclude(self, cell: Cell, decision: Decision, evidence: StackEvidence) -> None:
        assert evidence.output is not None
        self.heard.append((evidence.where.chunk, cell.step, cell.branch, str(decision.action)))


def run(policy: Any, inputs: list[list[Tensor]], model: Stack, **chunk: Any) -> tuple[list[Tensor], Any]:
    """Chunks of steps under marks; returns the outputs and the handle."""
    handle = rollcache.enable(model, policy, blocks=list(model.blocks), kv_writes="commit_only")
    out = []
    with torch.no_grad(), handle.rollout():
        for steps in inputs:
            with handle.chunk(**chunk):
                for x in steps:
                    handle.step()
                    out.append(model(x))
    handle.disable()
    return out, handle


def filled(*values: float) -> list[Tensor]:
    return [torch.full((1, 6, 2), float(v)) for v in values]


@pytest.mark.parametrize(("budget", "known"), [(150, [2, 1, 0]), (100, [2, 1]), (50, [2]), (40, [])])
def test_without_room_for_the_whole_history_the_newest_are_kept(budget: int, known: list[int]) -> None:
    """A residual takes 48 bytes."""
    seen: list[list[int]] = []

    def rule(e: StackEvidence) -> Decision:
        seen.append([s.step for s in e.stored])
        return COMPUTE

    model = doubling(1)
    policy = Scripted(rule, {"history": 3})
    handle = rollcache.enable(model, policy, blocks=model.blocks, kv_writes="never", memory_budget=budget)
    with torch.no_grad(), handle.rollout(), handle.chunk():
        for x in filled(1, 2, 3, 4):
            handle.step()
            model(x)
    assert seen[-1:] == ([known] if known else [])
    assert handle.stats().bytes_actual == 48 * len(known)


def test_a_prediction_is_a_weighted_sum_of_stored_residuals_the_newest_first() -> None:
    """One doubling block adds its input: residuals are the inputs themselves."""

    def rule(e: StackEvidence) -> Decision:
        if e.where.step < 3:
            return COMPUTE
        assert [s.step for s in e.stored] == [2, 1, 0]
        return Decision(Action.PREDICT, Reason.SCHEDULE, weights=(3.0, -3.0, 1.0))

    out, handle = run(Scripted(rule, {"history": 3}), [filled(1, 4, 9, 100)], doubling(1))
    assert float(out[3][0, 0, 0]) == 100 + 3 * 9 - 3 * 4 + 1
    stats = handle.stats()
    assert (stats.computed, stats.skipped, stats.repaired, stats.skip_rate) == (3, 1, 0, 0.25)


def test_only_so_many_residuals_are_kept_and_asking_for_more_is_an_error() -> None:
    def rule(e: StackEvidence) -> Decision:
        assert len(e.stored) <= 2
        return COMPUTE if e.where.step < 3 else Decision(Action.PREDICT, Reason.SCHEDULE, weights=(1.0, 1.0, 1.0))

    with pytest.raises(RollcacheError, match="Scripted combines 3 residuals, 2 are stored"):
        run(Scripted(rule, {"history": 2}), [filled(1, 2, 3, 4)], doubling(1))


@pytest.mark.parametrize("chosen", [(0, 1), (1,)])
def test_a_refresh_repair_takes_the_chosen_tokens_from_a_dense_pass(chosen: tuple[int, ...]) -> None:
    """Frame 1 is computed (16 times the input), frame 0 adds 15 times the first input."""
    tokens = Tokens.whole_frames(chosen, GRID)
    repair = Decision(Action.REPAIR, Reason.DRIFT, tokens=tokens, share=tokens.share(GRID))

    def rule(e: StackEvidence) -> Decision:
        return repair if e.where.step == 1 else REPLAY

    model = doubling(4)
    policy = Scripted(rule, {"repairs": True, "backend": "refresh"})
    out, handle = run(policy, [filled(1, 2, 4)], model, segments=GRID)
    first = 32.0 if 0 in chosen else 2 + 15.0
    assert out[1][0, :, 0].tolist() == [first] * 3 + [32.0] * 3
    later = 4 + 30.0 if 0 in chosen else 4 + 15.0  # the repaired residual is what the next step replays
    assert out[2][0, :, 0].tolist() == [later] * 3 + [4 + 30.0] * 3
    assert model.calls == [2] * 4
    share = len(chosen) / 2
    assert handle.stats().skip_rate == pytest.approx((1 - share + 1) / 3)
    assert handle.stats().repaired == 4


def test_a_repair_of_everything_equals_the_full_pass_bit_for_bit() -> None:
    model = mixing(3, 8)
    inputs = [[torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]]
    tokens = Tokens((0, 1), (torch.arange(3).expand(1, 2, 3),))
    repair = Decision(Action.REPAIR, Reason.DRIFT, tokens=tokens, share=1.0)
    policy = Scripted(lambda e: repair, {"repairs": True, "backend": "refresh"})
    repaired, _ = run(policy, inputs, model, segments=GRID)
    with torch.no_grad():
        assert all(torch.equal(a, model(x)) for a, x in zip(repaired, inputs[0], strict=True))


def test_sparse_repair_of_a_model_that_cannot_is_refused_and_nothing_is_attached() -> None:
    model = doubling(2)
    with pytest.raises(RollcacheError, match="repairs='refresh'"):
        rollcache.enable(
            model, Scripted(lambda e: COMPUTE, {"repairs": True}), blocks=list(model.blocks), kv_writes="commit_only"
        )
    assert all("forward" not in vars(m) for m in model.modules())


def test_repair_over_ranks_is_refused() -> None:
    model = doubling(2)
    policy = Scripted(lambda e: COMPUTE, {"repairs": True, "backend": "refresh"})
    with pytest.raises(RollcacheError, match="reduce="):
        rollcache.enable(model, policy, blocks=list(model.blocks), kv_writes="commit_only", reduce=lambda x: x)


def test_every_pass_is_concluded_and_a_new_chunk_begins_with_nothing() -> None:
    policy = Scripted(lambda e: REPLAY)
    run(policy, [filled(1, 2), filled(3, 4)], doubling(1))
    assert policy.heard == [(n, t, "cond", done) for n in (0, 1) for t, done in enumerate(("compute", "replay"))]


def test_a_condition_that_moves_within_a_chunk_makes_the_next_step_exact() -> None:
    model = doubling(1)
    action = torch.zeros(2)
    handle = rollcache.enable(
        model, StepReuse(steps=4, anchors=(0,)), blocks=list(model.blocks), kv_writes="commit_only"
    )
    with torch.no_grad(), handle.rollout(), handle.chunk(conditions=[Condition("action", action)]):
        for t, x in enumerate(filled(1, 2, 4, 8)):
            action.fill_(float(t >= 2))
            handle.step()
            model(x)
    assert [r.action for r in handle.trace] == [Action.COMPUTE, Action.REPLAY, Action.COMPUTE, Action.REPLAY]
    assert handle.trace.find(0, 2, 0).reason is Reason.CONDITION


def test_a_residual_that_is_not_finite_is_never_added() -> None:
    inputs = [filled(1, 2, math.inf, 4, 5)]
    anchors = StepReuse(steps=5, anchors=(0, 2))
    _, handle = run(anchors, inputs, doubling(1))
    assert [r.reason for r in handle.trace][2:] == [Reason.SCHEDULE, Reason.NOT_FINITE, Reason.SCHEDULE]


def test_blocks_that_write_in_place_and_models_that_change_the_state_between_blocks() -> None:
    class InPlace(Doubling):
        def forward(self, h: Tensor, *_: Any) -> Tensor:
            return h.mul_(2)

    model = Stack([InPlace(), InPlace()])
    out, _ = run(StepReuse(steps=3, anchors=(0, 1)), [filled(1, 2, 4), filled(1, 2, 4)], model)
    assert [float(x[0, 0, 0]) for x in out[3:]] == [4, 8, 4 + 6]
    moving = doubling(2)
    moving.between = lambda i, h: h + 1 if i == 1 else h
    with pytest.raises(RollcacheError, match=r"between blocks 0 and 1.*StepReuse cannot be used"):
        run(StepReuse(steps=2, anchors=(0,)), [filled(1, 2)], moving)


def test_a_method_sees_what_entered_although_the_first_block_wrote_over_it() -> None:
    class InPlace(Doubling):
        def forward(self, h: Tensor, *_: Any) -> Tensor:
            return h.mul_(2)

    class Watching(ScriptedPolicy):
        def conclude(self, cell: Cell, decision: Decision, evidence: StackEvidence) -> None:
            self.heard.append((float(evidence.hidden[0, 0, 0]), float(evidence.modulated[0, 0, 0])))  # type: ignore

    @dataclass(frozen=True)
    class Config(Scripted):
        def build(self, blocks: int) -> StackPolicy:
            policy = Watching(blocks)
            policy.rule, policy.heard = self.rule, self.heard
            return policy

    config = Config(lambda e: COMPUTE)
    run(config, [filled(1, 2, 3), filled(1, 2, 3)], Stack([InPlace(), InPlace()]))
    assert config.heard[3:] == [(1, 1), (2, 2), (3, 3)]


def test_a_change_of_the_number_of_steps_is_told_when_the_next_chunk_begins() -> None:
    with pytest.raises(RollcacheError, match="set up for 3 denoising steps a chunk, but chunk 0 had 2"):
        run(StepReuse.uniform(3, 1), [filled(1, 2), filled(1, 2, 3)], doubling(1))


def test_a_budget_without_room_computes() -> None:
    model = doubling(2)
    handle = rollcache.enable(
        model, StepReuse(steps=3, anchors=(0,)), blocks=list(model.blocks), kv_writes="commit_only", memory_budget=10
    )
    with torch.no_grad(), handle.rollout(), handle.chunk():
        for x in filled(1, 2, 3):
            handle.step()
            assert float(model(x)[0, 0, 0]) == 4 * float(x[0, 0, 0])
    assert handle.stats().skip_rate == 0 and handle.stats().bytes_actual == 0


@pytest.mark.parametrize("history", [1, 3])
def test_bytes_are_given_back(history: int) -> None:
    model = doubling(2)
    handle = rollcache.enable(
        model, Scripted(lambda e: COMPUTE, {"history": history}), blocks=list(model.blocks), kv_writes="commit_only"
    )
    with torch.no_grad(), handle.rollout("a"):
        for _ in range(2):
            with handle.chunk():
                for x in filled(1, 2, 3, 4):
                    handle.step()
                    model(x)
    assert handle.stats().bytes_actual == history * 12 * 4 == handle.stats().bytes_predicted
    handle.reset("a")
    assert handle.stats().bytes_actual == 0 == handle._engine.budget.used


def test_stacked_methods_share_a_trace_in_which_nothing_is_counted_twice() -> None:
    """Steps 0 and 2 are computed; in the second chunk X-Cache replays their blocks, but for the front one."""
    model = mixing(4, 8)
    policy = Stacked(passes=StepReuse(steps=4, anchors=(0, 2)), blocks=XCache(min_cosine=0.5, margin=0.5))
    x = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0))
    _, handle = run(policy, [[x] * 4] * 3, model)
    seen = [(r.chunk, r.step, r.block, r.blocks, str(r.action)) for r in handle.trace if r.chunk == 1]
    whole = [(1, t, 0, 4, "replay") for t in (1, 3)]
    anchors = [(1, t, b, 1, "compute" if b == 0 else "replay") for t in (0, 2) for b in range(4)]
    assert sorted(seen) == sorted(whole + anchors)
    stats = handle.stats()
    assert stats.cells + stats.warmup_cells == 3 * 4 * 4
    assert model.calls == [6, 2, 2, 2]
    assert "replayed" in handle.explain(1, 1, 3) and "Block 2" in handle.explain(1, 2, 2).title()


def test_stacking_the_wrong_way_round_is_refused() -> None:
    model = doubling(2)
    with pytest.raises(RollcacheError, match="passes=XCache decides about blocks"):
        rollcache.enable(
            model, Stacked(passes=XCache(), blocks=XCache()), blocks=list(model.blocks), kv_writes="commit_only"
        )
    once = StepReuse(steps=2, anchors=(0,))
    with pytest.raises(RollcacheError, match="blocks=StepReuse decides about whole passes"):
        rollcache.enable(model, Stacked(passes=once, blocks=once), blocks=list(model.blocks), kv_writes="commit_only")


def test_what_an_adapter_does_not_show_is_named() -> None:
    def rule(e: StackEvidence) -> Decision:
        assert e.hidden.shape == e.modulated.shape == (1, 6, 2)
        return Decision(Action.COMPUTE, Reason.DRIFT, drift=float(e.latent.sum()))

    with pytest.raises(RollcacheError, match=r"Scripted looks at the latent of a pass.*Adapter\(latent=\.\.\.\)"):
        run(Scripted(rule), [filled(1, 2)], doubling(1))


def test_an_exception_in_the_middle_of_a_pass_forgets_the_rollout() -> None:
    class Failing(Doubling):
        fails = False

        def forward(self, h: Tensor, *_: Any) -> Tensor:
            if self.fails:
                raise RuntimeError("out of memory")
            return super().forward(h)

    block = Failing()
    model = Stack([Doubling(), block])
    handle = rollcache.enable(
        model, StepReuse(steps=3, anchors=(0, 1)), blocks=list(model.blocks), kv_writes="commit_only"
    )
    with torch.no_grad(), handle.rollout():
        with handle.chunk():
            handle.step()
            model(torch.ones(1, 1, 1))
            block.fails = True
            handle.step()
            with pytest.raises(RuntimeError):
                model(torch.ones(1, 1, 1))
        block.fails = False
        with handle.chunk():
            for _ in range(3):
                handle.step()
                assert float(model(torch.ones(1, 1, 1))) == 4
    assert handle.trace.find(1, 2, 0).action is Action.REPLAY


def test_forks_go_their_own_ways() -> None:
    model = doubling(1)
    handle = rollcache.enable(
        model, StepReuse(steps=2, anchors=(0,)), blocks=list(model.blocks), kv_writes="commit_only"
    )
    with torch.no_grad():
        with handle.rollout("a"), handle.chunk():
            handle.step()
            model(torch.ones(1, 1, 1))
            handle.step()
            model(torch.ones(1, 1, 1))
        handle.fork("a", "b")
        rows = handle._engine.rollouts["a"].stacks, handle._engine.rollouts["b"].stacks
        assert rows[0]["cond", -1].past[0].residual[0] is not rows[1]["cond", -1].past[0].residual[0]
    bare = copy.deepcopy(model)
    assert not any("forward" in vars(m) for m in bare.modules())


class Split(nn.Module):
    """A block of two streams."""

    def forward(self, h: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        return h * 2, e * 3


def test_the_encoder_stream_is_replayed_along() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Split(), Split()])

        def forward(self, h: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
            for block in self.blocks:
                h, e = block(h, e)
            return h, e

    model = Two()
    io = rollcache.BlockIO(encoder=(1, "encoder_hidden_states"), returns="hidden, encoder")
    handle = rollcache.enable(
        model, StepReuse(steps=2, anchors=(0,)), blocks=list(model.blocks), kv_writes="commit_only", io=io
    )
    with torch.no_grad(), handle.rollout(), handle.chunk():
        handle.step()
        model(torch.ones(1, 1, 1), torch.ones(1, 2, 1))
        handle.step()
        h, e = model(torch.full((1, 1, 1), 10.0), torch.full((1, 2, 1), 10.0))
    assert float(h) == 13 and e.flatten().tolist() == [18, 18]


@given(data=st.data(), frames=st.integers(1, 3), views=st.integers(1, 3), height=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_chosen_tokens_are_where_the_layout_says(data: st.DataObject, frames: int, views: int, height: int) -> None:
    """Against a table of (segment, view, frame, cell) by token, for both layouts that a segment can express."""
    width = 2
    interleaved = data.draw(st.booleans())
    per_frame = views * height * width + 3  # a second segment of three cells
    first = Segment(
        "a",
        views,
        (frames, height, width),
        0,
        *((height * width, per_frame) if interleaved else (frames * height * width, height * width)),
    )
    start = views * height * width if interleaved else frames * views * height * width
    second = Segment("b", 1, (frames, 1, 3), start, 0, per_frame if interleaved else 3)
    layout = (first, second)
    length = frames * per_frame
    score = torch.rand(length, generator=torch.Generator().manual_seed(frames))
    from rollcache.tokens import fold, unfold

    parts = unfold(score, layout)
    assert torch.equal(fold(parts, layout, length), score)
    tokens = Tokens.top(parts, 0.5)
    rows = tokens.rows(layout, torch.device("cpu"))
    assert len(rows) == tokens.count(layout) == len(set(rows.tolist()))
    assert tokens.share(layout) == pytest.approx(len(rows) / length)
    for segment, part in zip(layout, parts, strict=True):
        for v in range(segment.views):
            for f in range(frames):
                base = segment.start + v * segment.view_stride + f * segment.frame_stride
                mine = [r - base for r in rows.tolist() if base <= r < base + segment.cells]
                wanted = part[v, f].topk(max(1, round(0.5 * segment.cells))).indices.sort().values.tolist()
                assert sorted(mine) == wanted


def test_nothing_is_predicted_from_both_sides_of_a_change_of_conditions() -> None:
    model = doubling(1)
    action = torch.zeros(1)
    policy = StepReuse(steps=6, anchors=(0, 1, 3), order=1)
    handle = rollcache.enable(model, policy, blocks=list(model.blocks), kv_writes="commit_only")
    with torch.no_grad(), handle.rollout(), handle.chunk(conditions=[Condition("action", action)]):
        for t, x in enumerate(filled(1, 2, 4, 8, 16, 32)):
            action.fill_(float(t >= 3))
            handle.step(time=1 - t / 6)
            model(x)
    actions = [str(r.action) for r in handle.trace]
    assert actions == ["compute", "compute", "predict", "compute", "replay", "replay"]


@pytest.mark.parametrize("order", [1, 2])
def test_a_noise_level_that_is_no_number_computes(order: int) -> None:
    model = doubling(1)
    handle = rollcache.enable(
        model, StepReuse.uniform(8, 4, order=order), blocks=list(model.blocks), kv_writes="commit_only"
    )
    with torch.no_grad(), handle.rollout(), handle.chunk():
        for t in range(8):
            handle.step(time=math.nan if t > 2 else 1 - t / 8)
            assert torch.isfinite(model(torch.ones(1, 6, 2))).all()
    assert Reason.NOT_FINITE in {r.reason for r in handle.trace}


def test_steps_out_of_order_are_refused() -> None:
    model, steps = doubling(1), iter((5, 2))
    adapter = Adapter(
        blocks=lambda m: list(m.blocks), locate=lambda *_: Pass(role=Role.DENOISE, chunk=0, step=next(steps))
    )
    rollcache.enable(model, StepReuse.uniform(8, 3), adapter=adapter)
    with torch.no_grad():
        model(torch.ones(1, 1, 1))
        with pytest.raises(RollcacheError, match=r"step 2 of chunk 0 comes after step 5 \(cond\): StepReuse needs"):
            model(torch.ones(1, 1, 1))


def test_fewer_steps_are_told_whatever_chunk_they_come_in() -> None:
    for lengths in ((8, 5, 8), (8, 8, 5, 5), (5, 5)):
        with pytest.raises(RollcacheError, match=f"chunk {lengths.index(5)} had 5"):
            run(StepReuse.uniform(8, 3), [filled(*range(1, n + 1)) for n in lengths], doubling(1))


def test_methods_that_look_refuse_hidden_states_that_are_lists_or_have_more_dimensions() -> None:
    def rule(e: StackEvidence) -> Decision:
        return Decision(Action.REPLAY, Reason.STEADY, drift=float(e.hidden.sum()))

    with pytest.raises(RollcacheError, match=r"Scripted looks at the hidden state, which must be one tensor"):
        run(Scripted(rule), [[torch.ones(1, 2, 3, 4)] * 2], doubling(1))
    out, _ = run(StepReuse(steps=2, anchors=(0,)), [[torch.ones(1, 2, 3, 4)] * 2], doubling(1))
    assert float(out[1].mean()) == 2


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn, "float16"])
def test_a_storage_dtype_that_cannot_hold_residuals_is_refused(dtype: Any) -> None:
    model = doubling(1)
    with pytest.raises(RollcacheError, match="storage_dtype must be"):
        rollcache.enable(
            model, StepReuse.uniform(2, 1), blocks=list(model.blocks), kv_writes="commit_only", storage_dtype=dtype
        )


def test_frames_that_a_window_does_not_have_are_refused() -> None:
    for frame in (2, -1):
        with pytest.raises(RollcacheError, match="of a window of 2"):
            Tokens.whole_frames((frame,), GRID)


def test_the_summary_leaves_out_what_a_probe_has_recorded() -> None:
    probe = rollcache.MagnitudeProbe(steps=3)
    _, handle = run(probe, [filled(1, 2, 3)] * 2, doubling(1))
    assert probe.records and "MagnitudeProbe(steps=3)" in handle.summary() and "tensor" not in handle.summary()
