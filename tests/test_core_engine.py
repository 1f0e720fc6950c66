"""What users relied on and other caches broke. Doubling blocks: the output says what was computed."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from dummies import Doubling, Stack, doubling, mixing
from torch import Tensor, nn

import rollcache
from rollcache import Action, BlockIO, Cache, Condition, Reason, RollcacheError, Segment, WindowReuse, XCache

EAGER = XCache(min_cosine=-1, margin=2, max_deviation=None, front_blocks=0, condition_tol=None)
"""Replays whatever it is allowed to."""
ANCHORED = XCache(min_cosine=-1, margin=2, max_deviation=None, front_blocks=1, condition_tol=None)
"""The same behind an anchor block."""
SHY = XCache(min_cosine=1)
"""Never replays."""


@pytest.fixture(autouse=True, params=["no_grad", "inference_mode"])
def without_gradients(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.no_grad() if request.param == "no_grad" else torch.inference_mode():
        yield


def attach(model: Stack, policy: Any = EAGER, **settings: Any) -> Cache:
    return rollcache.enable(model, policy, blocks=list(model.blocks), kv_writes="commit_only", **settings)


def generate(
    handle: Cache, model: nn.Module, inputs: list[Tensor], steps: int = 1, key: Any = None, **chunk: Any
) -> list[Tensor]:
    """A rollout in which every step of a chunk gets the chunk's input. Returns the last output of every chunk."""
    out = []
    with handle.rollout(key):
        for x in inputs:
            with handle.chunk(**chunk):
                for _ in range(steps):
                    handle.step()
                    y = model(x)
                out.append(y)
    return out


def number(y: Tensor) -> float:
    """The one number all elements share."""
    assert torch.equal(y, y.flatten()[0].expand_as(y))
    return float(y.flatten()[0])


def ones(scale: float = 1.0, batch: int = 1, tokens: int = 4, width: int = 2) -> Tensor:
    return torch.full((batch, tokens, width), float(scale))


def test_a_replayed_block_adds_what_it_added_and_is_not_called() -> None:
    model = doubling(3)
    handle = attach(model)
    first, second = generate(handle, model, [ones(1), ones(2)])
    assert number(first) == 8  # 1 doubled three times: the blocks added 1, 2 and 4
    assert number(second) == 2 + 1 + 2 + 4
    assert model.calls == [1, 1, 1]


def test_an_anchor_block_is_computed_and_only_the_others_are_replayed() -> None:
    model = doubling(3)
    handle = attach(model, XCache(min_cosine=-1, margin=2, max_deviation=None, condition_tol=None, back_blocks=1))
    _, second = generate(handle, model, [ones(1), ones(3)])
    assert number(second) == (3 * 2 + 2) * 2
    assert model.calls == [2, 1, 2]
    assert [r.reason for r in handle.trace][-3:] == [Reason.ANCHOR, Reason.SIMILAR, Reason.ANCHOR]


def test_a_span_of_blocks_has_one_decision_and_one_residual() -> None:
    model = doubling(5)
    handle = attach(model, replace(ANCHORED, span_blocks=3))
    first, second, third = generate(handle, model, [ones(1), ones(3), ones(5)])
    assert (number(first), number(second), number(third)) == (32, 6 + 30, 10 + 30)
    assert model.calls == [3, 1, 1, 1, 1]
    assert [(r.block, r.blocks) for r in handle.trace][:3] == [(0, 1), (1, 3), (4, 1)]
    stats = handle.stats()
    assert stats.skip_rate == 4 / 5
    assert stats.by_step_block == [[0.0, 1.0, 1.0, 1.0, 1.0]]
    assert stats.bytes_actual == stats.bytes_predicted == (2 + 1) * 32 + 2 * (4 + 1) * 8


def test_window_reuse_replays_the_stack_as_one() -> None:
    model = doubling(3)
    handle = attach(model, WindowReuse())
    _, second = generate(handle, model, [ones(1), ones(2)])
    assert number(second) == 2 + 7
    assert model.calls == [1, 1, 1]
    assert len(handle.trace) == 2


@pytest.mark.parametrize(
    "policy", [SHY, XCache(max_staleness=0), WindowReuse(min_cosine=1), XCache.paper(min_cosine=1)]
)
def test_a_gate_that_is_shut_gives_the_bare_model_bit_for_bit(policy: Any) -> None:
    model = mixing(5)
    inputs = [torch.randn(2, 12, 8) for _ in range(3)] * 2
    bare = [model(x) for x in inputs]
    handle = attach(model, policy)
    cached = generate(handle, model, [x for x in inputs for _ in range(2)][::2], steps=2)
    assert all(torch.equal(a, b) for a, b in zip(bare, cached, strict=True))
    assert handle.stats().skipped == 0


def test_disabling_restores_the_model_to_what_it_was() -> None:
    model = mixing(3)
    x = torch.randn(1, 6, 8)
    before = [dict(m.__dict__) for m in model.modules()]
    bare = model(x)
    handle = attach(model)
    generate(handle, model, [x, x])
    handle.disable()
    assert [{**m.__dict__, "calls": 0} for m in model.modules()] == [{**d, "calls": 0} for d in before]
    assert torch.equal(model(x), bare)
    assert not handle.enabled


def test_enabling_disabling_and_running_in_any_order() -> None:
    model, x = mixing(3), torch.randn(1, 6, 8)
    bare = model(x)
    for _ in range(2):
        handle = attach(model)
        assert torch.equal(generate(handle, model, [x, x])[0], bare)
        assert handle.stats().skipped == 3
        handle.disable()
        assert torch.equal(model(x), bare)
        model.blocks[1] = mixing(1, seed=7).blocks[0]  # the list of blocks is read anew each time
        bare = model(x)


def test_a_context_manager_disables_at_the_end() -> None:
    model = doubling()
    with attach(model) as handle:
        assert handle.enabled
    assert "forward" not in model.__dict__


def test_a_second_cache_on_a_model_or_on_one_of_its_blocks_is_refused() -> None:
    model = doubling()
    handle = attach(model)
    with pytest.raises(RollcacheError, match="already has a cache"):
        attach(model)
    with pytest.raises(RollcacheError, match="already has a cache"):
        attach(Stack(list(model.blocks)))
    handle.disable()
    attach(model).disable()


def test_disabling_without_a_cache_says_so() -> None:
    with pytest.raises(RollcacheError, match="has no cache"):
        rollcache.disable(doubling())


def test_module_functions_find_the_cache_of_a_model() -> None:
    model = doubling()
    generate(attach(model), model, [ones(), ones()])
    assert "skipped  100.0% of 4 block" in rollcache.summary(model)
    rollcache.disable(model)
    assert all("forward" not in m.__dict__ for m in model.modules())


class Stubborn(Doubling):
    """Refuses to be wrapped."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            raise RuntimeError("no")
        super().__setattr__(name, value)


def test_enabling_that_fails_halfway_leaves_no_hook() -> None:
    model = Stack([Doubling(), Doubling(), Stubborn(), Doubling()])
    with pytest.raises(RuntimeError, match="no"):
        attach(model)
    assert all("forward" not in m.__dict__ for m in model.modules())


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (lambda m: [], "no blocks"),
        (lambda m: [m.blocks[0], m.blocks[0]], "stands twice"),
        (lambda m: [Doubling()], "no part of"),
    ],
)
def test_blocks_that_cannot_be_wrapped_are_refused(blocks: Callable[[Stack], list[nn.Module]], message: str) -> None:
    model = doubling()
    with pytest.raises(RollcacheError, match=message):
        rollcache.enable(model, EAGER, blocks=blocks(model), kv_writes="never")


def test_a_model_nobody_knows_is_refused_with_a_way_out() -> None:
    with pytest.raises(RollcacheError, match=r"no adapter for dummies\.Stack .*blocks="):
        rollcache.enable(doubling(), EAGER)


def test_a_policy_class_instead_of_settings_is_refused() -> None:
    with pytest.raises(TypeError, match=r"XCache\(\)"):
        attach(doubling(), XCache)


def test_a_block_compiled_in_place_is_refused_at_once() -> None:
    model = doubling()
    model.blocks[0].compile(backend="eager")
    with pytest.raises(RollcacheError, match="compiled in place"):
        attach(model)


def test_gradients_are_refused() -> None:
    model = doubling()
    handle = attach(model)
    with torch.inference_mode(False), torch.enable_grad(), handle.rollout(), handle.chunk():
        handle.step()
        with pytest.raises(RollcacheError, match="for inference"):
            model(ones())


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "batch": lambda x: x.expand(2, -1, -1).contiguous(),
    "tokens": lambda x: x[:, :8].contiguous(),
    "dtype": lambda x: x.double(),
    "width": lambda x: x[..., :6].contiguous(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("policy", [EAGER, WindowReuse()])
def test_another_shape_or_dtype_makes_that_chunk_exact_and_reuse_goes_on_after_it(
    change: str, policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollcache")
    model = doubling(3)
    handle = attach(model, policy)
    x = torch.rand(1, 12, 8) + 1
    other = CHANGES[change](x)
    sequence = [x, x, other, other, x, x]
    for y, given in zip(generate(handle, model, sequence), sequence, strict=True):
        torch.testing.assert_close(y, 8 * given)
    assert model.calls == [3, 3, 3]
    assert [("hidden state changed" in m) for m in caplog.messages] == [True]  # twice, but logged once


def test_another_grid_with_as_many_tokens_invalidates_too() -> None:
    model, x = doubling(2), torch.rand(1, 12, 2)
    handle = attach(model)
    with handle.rollout():
        for grid in ((1, 3, 4), (1, 3, 4), (3, 2, 2)):
            with handle.chunk(segments=[Segment.contiguous("all", 1, grid)]):
                handle.step()
                model(x)
    assert model.calls == [2, 2]


def test_a_shape_that_changes_in_mid_chunk_makes_the_next_chunk_exact() -> None:
    model = doubling(2)
    handle = attach(model)
    small, large = ones(tokens=4), ones(tokens=8)
    with handle.rollout():
        for x0, x1 in ((small, small), (small, large), (large, large), (large, large)):
            with handle.chunk():
                for x in (x0, x1):
                    handle.step()
                    assert number(model(x)) == 4
    # chunk 1: step 0 replays, step 1 has another shape; chunk 2 is computed; chunk 3 replays
    assert model.calls == [2 + 1 + 2, 2 + 1 + 2]


@pytest.mark.parametrize("policy", [EAGER, WindowReuse()])
def test_an_exception_in_mid_pass_makes_the_next_chunk_exact(policy: Any) -> None:
    model = mixing(4)
    x = torch.randn(1, 6, 8)
    handle = attach(model, policy)
    with handle.rollout():
        for _ in range(2):
            with handle.chunk():
                handle.step()
                model(x)
        with handle.chunk():
            handle.step()
            hook = model.blocks[2].register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(x + 100)
            hook.remove()
        with handle.chunk():
            handle.step()
            assert torch.equal(model(x + 2), bare(model, x + 2))
        assert list(handle.trace)[-1].reason is Reason.WARMUP
        with handle.chunk():
            handle.step()
            model(x + 2)
        assert list(handle.trace)[-1].action is Action.REPLAY


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def bare(model: Stack, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = type(block).forward(block, x)
    return x


@pytest.mark.parametrize("policy", [EAGER, replace(EAGER, warmup_chunks=0), WindowReuse(warmup_chunks=0)])
def test_the_rest_of_a_broken_chunk_is_not_used_either(policy: Any) -> None:
    """Steps that still run after the exception compute, and what they compute is not stored."""
    model = doubling(2)
    handle = attach(model, policy)
    with handle.rollout():
        with handle.chunk():
            handle.step()
            model(ones())
            handle.step()
            with pytest.raises(RollcacheError, match="got str"):
                model("nothing")
            handle.step()
            model(ones())
        with handle.chunk():
            for _ in range(3):
                handle.step()
                model(ones())
    assert {r.action for r in handle.trace} == {Action.COMPUTE}
    assert Reason.INVALIDATED in {r.reason for r in handle.trace}


def test_a_rollout_that_starts_over_under_the_same_key_starts_fresh() -> None:
    model = doubling(2)
    handle = attach(model)
    first = generate(handle, model, [ones(1), ones(1)], key="seed 0")
    second = generate(handle, model, [ones(5), ones(5)], key="seed 0")
    assert [number(y) for y in first + second] == [4, 4, 20, 20]
    assert handle.stats().skipped == 4


def test_two_rollouts_taking_turns_on_one_model_do_not_see_each_other() -> None:
    def inputs(seed: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(1, 6, 8, generator=g)
        return [x + 0.05 * torch.randn(1, 6, 8, generator=g) for _ in range(5)]

    policy = XCache(min_cosine=0.99, margin=0.005)
    apart = []
    for seed in (0, 1):
        model = mixing(4)
        handle = attach(model, policy)
        apart.append((generate(handle, model, inputs(seed)), handle.trace.text()))
    model = mixing(4)
    handle = rollcache.enable(model, policy, adapter=by_argument(model))
    mixed: list[list[Tensor]] = [[], []]
    for n, pair in enumerate(zip(inputs(0), inputs(1), strict=True)):
        for seed, x in enumerate(pair):
            mixed[seed].append(model(x, where=(seed, n)))
    for seed in (0, 1):
        assert all(torch.equal(a, b) for a, b in zip(mixed[seed], apart[seed][0], strict=True))
        assert "".join(r.line() + "\n" for r in handle.trace if r.rollout == seed) == apart[seed][1]
    assert {r.action for r in handle.trace} == {Action.REPLAY, Action.COMPUTE}


def by_argument(model: Stack) -> rollcache.Adapter:
    """An adapter for models that take `where=(rollout, chunk)`; the blocks do not see it."""

    def locate(_: Any, args: Any, kwargs: Any) -> rollcache.Pass:
        rollout, chunk = kwargs.pop("where")
        return rollcache.Pass(role=rollcache.Role.DENOISE, rollout=rollout, chunk=chunk)

    return rollcache.Adapter(blocks=lambda m: list(m.blocks), locate=locate)


def test_of_many_rollouts_the_one_used_longest_ago_makes_room() -> None:
    model = doubling(2)
    handle = attach(model, max_rollouts=2)
    for key in "abac":  # c takes the place of b
        generate(handle, model, [ones(1)] * 2, key=key)
    held = handle.stats().bytes_actual
    with handle.rollout("a"), handle.chunk(5):
        handle.step()
        model(ones(3))
    assert list(handle.trace)[-1].action is Action.REPLAY
    with handle.rollout("b"), handle.chunk(5):
        handle.step()
        model(ones(3))
    assert list(handle.trace)[-1].action is Action.COMPUTE
    assert handle.stats().bytes_actual == held


def test_a_fork_goes_on_from_where_its_source_is_and_shares_nothing() -> None:
    model = doubling(2)
    handle = attach(model)
    generate(handle, model, [ones(1), ones(1)], key="a")
    handle.fork("a", "b")

    def go_on(key: str, x: Tensor, **chunk: Any) -> float:
        with handle.rollout(key), handle.chunk(handle_index[key], **chunk):
            handle_index[key] += 1
            handle.step()
            return number(model(x))

    handle_index = {"a": 2, "b": 2}
    assert go_on("b", ones(2)) == 2 + 3
    assert go_on("b", ones(2), kv_update=True) == 8
    assert go_on("b", ones(1)) == 1 + 6
    assert go_on("a", ones(2)) == 2 + 3
    with pytest.raises(RollcacheError, match="no rollout 'c' to fork"):
        handle.fork("c", "d")


@pytest.mark.parametrize("order", [("cond",), ("cond", "uncond"), ("uncond", "cond"), ("cond", "uncond", "motion")])
def test_branches_have_state_of_their_own_in_any_order(order: tuple[str, ...]) -> None:
    model = doubling(2)
    handle = attach(model)
    scale = {"cond": 1.0, "uncond": 10.0, "motion": 100.0}
    with handle.rollout():
        for n in range(3):
            with handle.chunk():
                for _ in range(2):
                    for branch in order if n % 2 else reversed(order):
                        handle.step(branch=branch)
                        assert number(model(ones(scale[branch]))) == 4 * scale[branch]
    assert handle.stats().skip_rate == 1.0
    assert {(r.branch, r.step) for r in handle.trace} == {(b, t) for b in order for t in (0, 1)}


def test_branches_in_one_batch_decide_together_and_as_carefully_as_the_most_careful() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 8, generator=g)
    moves = [0.0, 0.0, 0.3, 0.0, 0.0]  # of the second branch only
    policy = XCache(min_cosine=0.99, front_blocks=0)

    def decisions(batched: bool) -> list[list[Action]]:
        model = mixing(3)
        handle = attach(model, policy)
        with handle.rollout():
            for move in moves:
                cond, uncond = x[:1], x[1:] + move
                with handle.chunk():
                    if batched:
                        handle.step()
                        model(torch.cat((cond, uncond)))
                    else:
                        for branch, y in (("cond", cond), ("uncond", uncond)):
                            handle.step(branch=branch)
                            model(y)
        branches = sorted({r.branch for r in handle.trace})
        return [[r.action for r in handle.trace if r.branch == b] for b in branches]

    (together,), (cond, uncond) = decisions(True), decisions(False)
    assert together == uncond
    assert cond[3:] == [Action.REPLAY] * 12


def test_a_branch_that_comes_or_goes_makes_the_next_chunk_exact() -> None:
    model = doubling(1)
    handle = attach(model)
    sets = [("cond", "uncond"), ("cond", "uncond"), ("cond",), ("cond", "uncond"), ("cond", "uncond")]
    with handle.rollout():
        for branches in sets:
            with handle.chunk():
                for branch in branches:
                    handle.step(branch=branch)
                    model(ones())
    by_chunk = [[r.action for r in handle.trace if r.chunk == n] for n in range(5)]
    assert by_chunk[2] == [Action.REPLAY]  # nothing is known yet
    assert by_chunk[3] == [Action.COMPUTE] * 2
    assert by_chunk[4] == [Action.REPLAY] * 2


def test_another_number_of_steps_makes_the_next_chunk_exact() -> None:
    model = doubling(1)
    handle = attach(model)
    for steps in (2, 2, 4, 4, 4):
        with handle.rollout("a"), handle.chunk(handle.stats().chunks):
            for _ in range(steps):
                handle.step()
                model(ones())
    by_chunk = [[str(r.action)[0] for r in handle.trace if r.chunk == n] for n in range(5)]
    assert ["".join(c) for c in by_chunk] == ["cc", "rr", "rrcc", "cccc", "rrrr"]


def test_a_residual_is_not_reused_at_another_noise_level() -> None:
    model = doubling(1)
    handle = attach(model)
    with handle.rollout():
        for time in (0.9, 0.9, 0.5, 0.5):
            with handle.chunk():
                handle.step(time=time)
                model(ones())
    assert [r.action for r in handle.trace] == [Action.COMPUTE, Action.REPLAY] * 2


@pytest.mark.parametrize("touch", ["in place", "replaced", "loaded", "told"])
def test_changed_weights_make_the_next_chunk_exact(touch: str) -> None:
    with torch.inference_mode(False):
        model = doubling(2)
    handle = attach(model)
    with handle.rollout():
        for n in range(4):
            if n == 2:
                change_weights(handle, model, touch)
            with handle.chunk():
                handle.step()
                assert number(model(ones())) == (4 if n < 2 else 6)
    assert [r.action for r in handle.trace] == ([Action.COMPUTE] * 2 + [Action.REPLAY] * 2) * 2


def change_weights(handle: Cache, model: Stack, touch: str) -> None:
    """Let the second block triple from now on."""
    with torch.inference_mode(False), torch.no_grad():
        block = model.blocks[1]
        if touch == "in place":
            block.factor += 1
        elif touch == "replaced":
            block.factor = nn.Parameter(torch.tensor(3.0), requires_grad=False)
        elif touch == "loaded":
            model.load_state_dict({**model.state_dict(), "blocks.1.factor": torch.tensor(3.0)})
        else:
            handle.notify_weights_changed()
            object.__setattr__(block, "factor", 3.0)
            del block._parameters["factor"]


def test_commit_and_prefill_passes_are_exact_and_leave_the_cache_alone() -> None:
    model = doubling(2)
    handle = attach(model)
    with handle.rollout():
        for n in range(3):
            with handle.chunk():
                if n == 0:
                    handle.prefill()
                    assert number(model(ones(50))) == 200
                handle.step()
                model(ones(1 + n))
                handle.commit()
                assert number(model(ones(7, tokens=9))) == 28  # another layout does not disturb
    assert handle.stats().passes == {"prefill": 1, "denoise": 3, "commit": 3}
    assert handle.stats().skipped == 4


def test_the_chunk_that_will_be_committed_is_exact_and_refreshes_the_cache() -> None:
    model = doubling(2)
    handle = attach(model)
    with handle.rollout():
        for n, expected in enumerate((4, 1 + 1 + 3, 12, 1 + 3 + 9)):
            with handle.chunk(kv_update=n == 2):
                handle.step()
                assert number(model(ones(1 + n))) == expected
    assert [r.reason for r in handle.trace][4:6] == [Reason.PROTECTED] * 2


def test_a_denoise_pass_whose_kv_stays_is_exact() -> None:
    model = doubling(2)
    handle = attach(model)
    with handle.rollout():
        for _ in range(2):
            with handle.chunk():
                for t in range(2):
                    handle.step(kv_write=t == 1)
                    model(ones())
    assert handle.stats().by_step_block == [[1.0, 1.0], [0.0, 0.0]]


def test_replays_without_a_commit_pass_are_refused_where_every_forward_writes_kv() -> None:
    model = doubling(2)

    def locate(_: Any, args: Any, kwargs: Any) -> rollcache.Pass:
        return where

    adapter = rollcache.Adapter(blocks=lambda m: list(m.blocks), locate=locate, kv_writes="every_forward")
    rollcache.enable(model, EAGER, adapter=adapter)
    for n in range(3):
        where = rollcache.Pass(role=rollcache.Role.DENOISE, chunk=n)
        model(ones())
        where = rollcache.Pass(role=rollcache.Role.COMMIT, chunk=n)
        model(ones())
    for n in (3, 4):
        where = rollcache.Pass(role=rollcache.Role.DENOISE, chunk=n)
        if n == 4:
            with pytest.raises(RollcacheError, match="no commit pass of cond since chunk 3"):
                model(ones())
        else:
            model(ones())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("policy", [EAGER, WindowReuse(min_cosine=-1), WindowReuse()])
def test_what_is_not_finite_is_neither_replayed_nor_taken_for_similar(bad: float, policy: Any) -> None:
    model = doubling(2)
    handle = attach(model, policy)
    broken = ones()
    broken[0, 1, 1] = bad
    generate(handle, model, [broken, ones(), ones(), ones()])
    assert [r.action for r in handle.trace if r.chunk in (1, 3)] == (
        [Action.COMPUTE] * (len(handle.trace) // 4) + [Action.REPLAY] * (len(handle.trace) // 4)
    )
    assert Reason.NOT_FINITE in [r.reason for r in handle.trace if r.chunk == 1]


class InPlace(Doubling):
    """Doubles its input in place and returns it."""

    def forward(self, h: Tensor, *_: Any) -> Tensor:
        self.calls += 1
        return h.mul_(self.factor)


class Scribbling(Doubling):
    """Returns a new tensor, but uses its input as scratch space."""

    def forward(self, h: Tensor, *_: Any) -> Tensor:
        self.calls += 1
        out = h * self.factor
        h.zero_()
        return out


class Reusing(Doubling):
    """Returns one buffer that is overwritten by every call."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: Tensor | None = None

    def forward(self, h: Tensor, *_: Any) -> Tensor:
        self.calls += 1
        if self.buffer is None:
            self.buffer = torch.empty_like(h)
        return torch.mul(h, self.factor, out=self.buffer)


@pytest.mark.parametrize("kind", [InPlace, Scribbling, Reusing])
@pytest.mark.parametrize("policy", [EAGER, WindowReuse(), ANCHORED])
@pytest.mark.parametrize("declared", [False, True])
def test_blocks_that_write_in_place_or_reuse_buffers_keep_their_residuals(
    kind: Any, policy: Any, declared: bool
) -> None:
    model = Stack([kind() for _ in range(3)])
    handle = attach(model, policy, io=BlockIO(in_place=declared))
    outputs = []
    with handle.rollout():
        for n in range(6):
            with handle.chunk():
                for _ in range(2):
                    handle.step()
                    y = model(ones(1 + n))
                outputs.append(number(y))
    assert handle.stats().bytes_actual == handle.stats().bytes_predicted
    replayed = [any(r.action is Action.REPLAY for r in handle.trace if r.chunk == n) for n in range(6)]
    assert replayed[2:] == [True] * 4  # found out in the first chunk, at most one more is computed
    assert replayed[1] is (declared or kind is Reusing or replayed[1])
    source = max(n for n in range(6) if not replayed[n])
    anchor = 2 if getattr(policy, "front_blocks", 0) else 1
    for n in range(source + 1, 6):
        assert outputs[n] == anchor * (1 + n) + (8 - anchor) * (1 + source)


class Moody(Doubling):
    """Doubles in place while `in_place` is set."""

    in_place = False

    def forward(self, h: Tensor, *_: Any) -> Tensor:
        self.calls += 1
        return h.mul_(self.factor) if self.in_place else h * self.factor


@pytest.mark.parametrize("policy", [EAGER, WindowReuse()])
def test_a_block_that_starts_to_write_in_place_later_is_noticed(policy: Any) -> None:
    model = Stack([Moody() for _ in range(2)])
    handle = attach(model, policy)
    outputs = []
    with handle.rollout():
        for n in range(6):
            for block in model.blocks:
                block.in_place = n >= 2
            with handle.chunk(kv_update=n in (2, 3)):
                handle.step()
                outputs.append(number(model(ones(1 + n))))
    # the residual of chunk 2 is lost, that of chunk 3 is not
    assert outputs == [4, 2 + 3, 12, 16, 5 + 12, 6 + 12]


@pytest.mark.parametrize("policy", [EAGER, WindowReuse(), ANCHORED])
def test_blocks_that_share_two_buffers_by_turns_keep_their_residuals(policy: Any) -> None:
    """What went into a run is overwritten before the run ends; replaying it must not use that."""
    buffers = [torch.empty(1, 4, 2), torch.empty(1, 4, 2)]

    class ByTurns(Doubling):
        def forward(self, h: Tensor, *_: Any) -> Tensor:
            self.calls += 1
            return torch.mul(h, self.factor, out=buffers[h is buffers[0]])

    model = Stack([ByTurns() for _ in range(4)])
    handle = attach(model, policy)
    source, first = 0, 2 if policy is ANCHORED else 1  # what enters the run, in units of the input
    with handle.rollout():
        for n in range(8):
            with handle.chunk(kv_update=n == 4):
                for _ in range(2):
                    handle.step()
                    y = number(model(ones(1 + n)))
            if list(handle.trace)[-1].action is Action.REPLAY:
                assert y == first * (1 + n) + (16 - first) * (1 + source)
            else:
                assert y == 16 * (1 + n)
                source = n
    assert handle.stats().skipped == 6 * 2 * (3 if policy is ANCHORED else 4)


def test_a_rollout_may_change_between_inference_mode_and_no_grad() -> None:
    model, x = mixing(3), torch.randn(1, 6, 8)
    expected = model(x)
    handle = attach(model)
    conditions = [Condition("a", torch.ones(2), torch.ones(2))]

    def go(key: str, n: int, mode: bool, **chunk: Any) -> None:
        with torch.inference_mode(mode), handle.rollout(key), handle.chunk(n, conditions=conditions, **chunk):
            handle.step()
            with torch.no_grad():
                torch.testing.assert_close(model(x), expected)

    for n, mode in enumerate([True, False, True, False, True]):
        go("a", n, mode, kv_update=n == 3)
        with torch.inference_mode(not mode):
            handle.fork("a", f"fork {n}")
        go(f"fork {n}", n + 1, not mode)
    assert handle.stats().skipped == (3 + 5) * 3


def test_a_model_that_adds_between_blocks_is_followed() -> None:
    """Runs do not cross the place, so every gate sees what its block will see."""
    model = Stack([Doubling() for _ in range(3)], between=lambda i, h: h + 10 if i == 1 else h)
    handle = attach(model)
    first, second = generate(handle, model, [ones(1), ones(2)])
    assert number(first) == (1 * 2 + 10) * 4
    assert number(second) == 2 + 1 + 10 + 12 + 24
    assert handle._engine.breaks == {1}


def test_the_gate_behind_such_a_place_compares_what_really_enters_the_block() -> None:
    model = Stack([Doubling() for _ in range(4)], between=lambda i, h: h + 10 * (h + 1).cos() if i == 2 else h)
    handle = attach(model, XCache(front_blocks=0))
    x = torch.rand(1, 24, 8)
    generate(handle, model, [x, x, x])
    assert handle.stats().skip_rate == 1.0
    assert min(r.cosine for r in handle.trace if r.chunk) > 0.999999


def test_a_model_that_writes_between_blocks_in_place_is_followed() -> None:
    model = Stack([Doubling() for _ in range(3)], between=lambda i, h: h.add_(10) if i == 1 else h)
    handle = attach(model)
    first, second = generate(handle, model, [ones(1), ones(2)])
    assert (number(first), number(second)) == (48, 2 + 1 + 10 + 12 + 24)


def test_a_model_that_adds_between_blocks_cannot_have_its_stack_replayed_as_one() -> None:
    model = Stack([Doubling() for _ in range(3)], between=lambda i, h: h + 10 if i == 1 else h)
    with pytest.raises(RollcacheError, match="between blocks 0 and 1"):
        generate(attach(model, WindowReuse()), model, [ones(1)])


def test_a_model_that_starts_to_add_between_blocks_later_is_an_error_once_and_right_afterwards() -> None:
    adds = [False]
    model = Stack([Doubling() for _ in range(3)], between=lambda i, h: h + 10 if i == 1 and adds[0] else h)
    handle = attach(model)
    generate(handle, model, [ones(1), ones(1)], key="a")
    adds[0] = True
    with handle.rollout("a"):
        with handle.chunk(2):
            handle.step()
            with pytest.raises(RollcacheError, match="between blocks 0 and 1"):
                model(ones(1))
        for n, expected in ((3, 48), (4, 2 + 1 + 10 + 12 + 24)):
            with handle.chunk(n):
                handle.step()
                assert number(model(ones(n - 2))) == expected


def test_blocks_called_out_of_order_or_not_at_all_are_refused() -> None:
    class Hopping(Stack):
        def forward(self, h: Tensor, *order: int) -> Tensor:
            for i in order:
                h = self.blocks[i](h)
            return h

    model = Hopping([Doubling() for _ in range(3)])
    handle = attach(model)
    for order, message in (((0, 2, 1), "block 2 was called where block 1"), ((0, 1), "called 2 of 3 blocks")):
        with handle.rollout(), handle.chunk():
            handle.step()
            with pytest.raises(RollcacheError, match=message):
                model(ones(), *order)


def test_blocks_that_change_the_shape_are_refused() -> None:
    model = Stack([nn.Linear(2, 4), nn.Linear(4, 4)])
    with pytest.raises(RollcacheError, match=r"block 0 turns \[\[1, 4, 2\]\] into \[\[1, 4, 4\]\]"):
        generate(attach(model), model, [ones()])


class Pair(nn.Module):
    """A two-stream block: hidden doubles, encoder triples."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order, self.calls = order, 0

    def forward(self, hidden_states: Tensor, encoder: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        out = hidden_states * 2, encoder * 3
        return out if self.order == "hidden, encoder" else out[::-1]


class TwoStreams(Stack):
    """Calls its blocks by keyword."""

    def forward(self, h: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            out = block(hidden_states=h, encoder=e)
            h, e = out if block.order == "hidden, encoder" else out[::-1]
        return h, e


@pytest.mark.parametrize("order", ["hidden, encoder", "encoder, hidden"])
@pytest.mark.parametrize("policy", [EAGER, WindowReuse()])
def test_two_streams_in_either_order_are_both_replayed(order: Any, policy: Any) -> None:
    model = TwoStreams([Pair(order) for _ in range(2)])
    handle = attach(model, policy, io=BlockIO(encoder=(1, "encoder"), returns=order))
    with handle.rollout():
        for n, (hidden, encoder) in enumerate(((4, 9), (2 + 3, 2 + 8))):
            with handle.chunk():
                handle.step()
                h, e = model(ones(1 + n), ones(1 + n, tokens=3))
                assert (number(h), number(e)) == (hidden, encoder)
    assert model.calls == [1, 1]


class Views(nn.Module):
    """Takes and returns a list of view groups."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, hidden: list[Tensor]) -> list[Tensor]:
        self.calls += 1
        return [2 * h for h in hidden]


def test_a_list_of_view_groups_has_one_decision_and_the_group_that_changed_most_takes_it() -> None:
    model = Stack([Views() for _ in range(2)])
    handle = attach(model, XCache(front_blocks=0))
    front, sides = torch.randn(1, 2, 12, 4), torch.randn(1, 4, 6, 4)
    segments = [
        Segment.contiguous("front", 2, (1, 3, 4), tensor=0),
        Segment.contiguous("sides", 4, (1, 2, 3), tensor=1),
    ]
    with handle.rollout():
        for change in (0, 0, 0.1):
            with handle.chunk(segments=segments):
                handle.step()
                a, b = model([front, sides + change])
                torch.testing.assert_close(a, 4 * front)
                torch.testing.assert_close(b, 4 * (sides + change))
    assert model.calls == [2, 2]


def test_a_copied_or_pickled_model_is_a_bare_model() -> None:
    model, x = mixing(3), torch.randn(1, 6, 8)
    expected = model(x)
    handle = attach(model)
    generate(handle, model, [x, x])
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    with torch.inference_mode(False), torch.no_grad():
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
        for other in copies:
            seen = handle.stats().passes
            assert torch.equal(other(x), expected)
            assert handle.stats().passes == seen
            assert other.blocks[0].up is not model.blocks[0].up
            generate(attach(other), other, [x, x])
            rollcache.disable(other)
            assert torch.equal(other(x), expected)
    assert handle.enabled


def test_a_wrapper_put_on_afterwards_survives_and_the_cache_still_goes() -> None:
    model = doubling(2)
    handle = attach(model)
    inner = model.blocks[0].forward
    model.blocks[0].forward = lambda *args: inner(*args)  # as offloading libraries do
    generate(handle, model, [ones(), ones()])
    handle.disable()
    model.forget_calls()
    assert number(model(ones())) == 4
    assert model.calls == [1, 1]


def test_a_wrapper_that_was_there_before_is_called_and_comes_back() -> None:
    model = doubling(2)
    seen: list[int] = []
    own = model.blocks[0].forward

    def counting(*args: Any) -> Tensor:
        seen.append(1)
        return own(*args)

    model.blocks[0].forward = counting
    handle = attach(model)
    generate(handle, model, [ones(), ones()])
    assert len(seen) == 1
    handle.disable()
    assert model.blocks[0].forward is counting


def test_ranks_are_asked_for_the_worst_evidence_of_all() -> None:
    """The reduction sees distances, larger is worse; another rank that saw less similar inputs decides for all."""
    model = mixing(3)
    asked: list[Tensor] = []

    def worst(mine: Tensor) -> Tensor:
        asked.append(mine.clone())
        return torch.maximum(mine, torch.full_like(mine, 0.02))

    x = torch.randn(1, 6, 8)
    lone = attach(model, XCache(min_cosine=0.99, front_blocks=0))
    generate(lone, model, [x, x])
    assert lone.stats().skipped == 3
    lone.disable()
    handle = attach(model, XCache(min_cosine=0.99, front_blocks=0), reduce=worst)
    generate(handle, model, [x, x], conditions=[Condition("a", torch.zeros(1), torch.ones(1))])
    assert handle.stats().skipped == 0
    assert {r.reason for r in handle.trace if r.chunk == 1} == {Reason.COSINE}
    assert all(torch.isfinite(a).all() for a in asked)


def test_nothing_replayed_in_eight_chunks_is_said_once_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    model = doubling(2)
    handle = attach(model)
    generate(handle, model, [ones()] * 12, kv_update=True)
    assert [m for m in caplog.messages if "nothing was replayed" in m] == [
        "rollcache: nothing was replayed in 7 chunks, mostly: commit protection."
    ]


def test_autocast_does_not_coarsen_the_gate() -> None:
    x = torch.randn(1, 24, 8)
    inputs = [x, x + 0.004 * torch.randn(1, 24, 8), x, x + 0.02 * torch.randn(1, 24, 8)]

    def cosines(mixed: bool) -> list[float]:
        model = mixing(3)
        handle = attach(model, XCache.paper(front_blocks=0, min_cosine=-1, margin=2, max_deviation=None))
        with torch.autocast("cpu", enabled=mixed):
            generate(handle, model, inputs)
        return [r.cosine for r in handle.trace if r.chunk and r.block == 0]  # what enters block 0 is float32 in both

    assert cosines(True) == pytest.approx(cosines(False), abs=1e-7)


def test_a_rank_that_saw_something_not_finite_makes_all_compute() -> None:
    model = mixing(3)
    others = torch.zeros(())

    def worst(mine: Tensor) -> Tensor:  # the age of the state has a dimension, a flag has none
        return mine if mine.ndim else torch.maximum(mine, others)

    handle = attach(model, EAGER, reduce=worst)
    x = torch.randn(1, 6, 8)
    generate(handle, model, [x, x], key="a")
    assert handle.stats().skipped == 3
    others += 1
    generate(handle, model, [x, x], key="b")
    assert handle.stats().skipped == 3
    assert {r.reason for r in handle.trace if r.rollout == "b" and r.chunk == 1} == {Reason.NOT_FINITE}


def test_a_budget_that_could_split_the_ranks_is_refused() -> None:
    with pytest.raises(RollcacheError, match="ranks store different cells"):
        attach(doubling(), reduce=lambda t: t, memory_budget=1000)


def test_a_model_compiled_as_a_whole_is_refused() -> None:
    model = doubling()
    with pytest.raises(RollcacheError, match="compiled as a whole"):
        rollcache.enable(
            torch.compile(model, backend="eager"), EAGER, blocks=list(model.blocks), kv_writes="commit_only"
        )


@pytest.mark.slow
def test_blocks_that_were_compiled_one_by_one_are_cached() -> None:
    model = doubling(2)
    for i in range(2):
        model.blocks[i] = torch.compile(model.blocks[i], backend="eager")
    handle = attach(model)
    first, second = generate(handle, model, [ones(1), ones(2)])
    assert (number(first), number(second)) == (4, 2 + 3)
    handle.disable()
    assert number(model(ones(2))) == 8
