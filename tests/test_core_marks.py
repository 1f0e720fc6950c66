"""Loops without an adapter: twenty lines, and every wrong mark is named."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dummies import doubling, mixing

import rollcache
from rollcache import Action, Condition, RollcacheError, WindowReuse, XCache


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_a_loop_of_twenty_lines_is_cached() -> None:
    model = mixing(depth=6, width=8)
    actions = [torch.tensor([10.0, 0.0])] * 5 + [torch.tensor([10.0, 0.2])] * 3
    scale = torch.tensor([9.0, 0.3])
    steps, kv_every = 4, 4

    cache = rollcache.enable(model, XCache(), blocks=model.blocks, kv_writes="commit_only")
    noise = torch.randn(1, 24, 8)
    with cache.rollout():
        for n, action in enumerate(actions):
            with cache.chunk(conditions=[Condition("action", action, scale)], kv_update=n % kv_every == 0):
                x = noise
                for _ in range(steps):
                    cache.step()
                    x = x - 0.1 * model(x)
                if n % kv_every == kv_every - 1:
                    cache.commit()
                    model(x)

    stats = cache.stats()
    assert stats.passes == {"denoise": 32, "commit": 2}
    # 7 chunks after warm-up; chunk 4 is protected, chunk 5 turns: 5 chunks replay 5 of 6 blocks
    assert stats.skip_rate == pytest.approx(5 / 7 * 5 / 6)
    assert "the conditions moved" in cache.explain(chunk=5, step=2, block=3)


def test_a_loop_that_can_emit_from_its_last_window_needs_no_pass() -> None:
    model = doubling(3)
    cache = rollcache.enable(model, WindowReuse(max_staleness=3), blocks=model.blocks, kv_writes="commit_only")
    scale = torch.ones(1)
    passes = []
    with cache.rollout():
        for n, action in enumerate([0.0, 0.0, 0.03, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2]):
            conditions = [Condition("action", torch.tensor([action]), scale)]
            with cache.chunk(conditions=conditions, kv_update=n == 8) as where:
                asked = cache.replays_chunk(where)
                assert cache.skip_chunk(where) is asked
                if not asked:
                    for _ in range(2):
                        cache.step()
                        model(torch.ones(1, 4, 2))
                passes.append(not asked)
    # computed: warm-up, the action moved, replayed three times in a row, committed
    assert passes == [True, False, False, True, False, False, False, True, True, False]
    assert model.calls == [2 * sum(passes)] * 3
    stats = cache.stats()
    assert (stats.chunks, stats.cells, stats.skipped) == (10, 9 * 2 * 3, 6 * 2 * 3)
    record = cache.trace.find(chunk=2, step=1, block=1)
    assert (record.action, record.condition_distance, record.source) == (Action.REPLAY, pytest.approx(0.03), 0)


@pytest.mark.parametrize(
    "policy", [XCache(min_cosine=-1), XCache(min_cosine=-1, front_blocks=0), WindowReuse(min_cosine=-1)]
)
def test_policies_that_must_see_the_input_never_skip_a_whole_chunk(policy: XCache | WindowReuse) -> None:
    model = doubling(2)
    cache = rollcache.enable(model, policy, blocks=model.blocks, kv_writes="commit_only")
    with cache.rollout():
        for _ in range(3):
            with cache.chunk() as where:
                assert not cache.replays_chunk(where)
                assert not cache.skip_chunk(where)
                cache.step()
                model(torch.ones(1, 4, 2))


def test_a_chunk_of_a_rollout_that_was_invalidated_is_not_skipped() -> None:
    model = doubling(2)
    cache = rollcache.enable(model, WindowReuse(), blocks=model.blocks, kv_writes="commit_only")
    with cache.rollout():
        for n in range(4):
            with cache.chunk() as where:
                assert cache.replays_chunk(where) is (n in (1, 3))
                if n == 2:
                    cache.notify_weights_changed()
                    assert not cache.replays_chunk(where)
                cache.step()
                model(torch.ones(1, 4, 2))
            if n == 1:
                cache.notify_weights_changed()


def test_marks_out_of_order_are_named() -> None:
    model = doubling(2)
    x = torch.ones(1, 4, 2)
    cache = rollcache.enable(model, XCache(), blocks=model.blocks, kv_writes="commit_only")
    with pytest.raises(RollcacheError, match="without a mark"):
        model(x)
    with pytest.raises(RollcacheError, match=r"chunk\(\) outside of a rollout"), cache.chunk():
        pass
    with cache.rollout():
        with pytest.raises(RollcacheError, match=r"rollout\(\) inside rollout"), cache.rollout():
            pass
        for verb in (cache.step, cache.commit, cache.prefill):
            with pytest.raises(RollcacheError, match="outside of a chunk"):
                verb()
        with cache.chunk():
            with pytest.raises(RollcacheError, match=r"chunk\(\) inside a chunk"), cache.chunk():
                pass
            with pytest.raises(RollcacheError, match="without a mark"):
                model(x)
            cache.step()
            with pytest.raises(RollcacheError, match=r"commit\(\) after step\(\), but the model was not called"):
                cache.commit()
            model(x)
            with pytest.raises(RollcacheError, match="without a mark"):
                model(x)
            cache.commit()
            model(x)
            with pytest.raises(RollcacheError, match=r"step\(\) after commit\(\)"):
                cache.step()
        with pytest.raises(RollcacheError, match=r"not called after step\(\)"), cache.chunk():
            cache.step()


def test_an_error_in_the_loop_is_not_hidden_by_a_mark_that_was_left_open() -> None:
    model = doubling(2)
    cache = rollcache.enable(model, XCache(), blocks=model.blocks, kv_writes="commit_only")
    with pytest.raises(ZeroDivisionError):
        break_off(cache)
    with cache.rollout(), cache.chunk():
        cache.step()
        model(torch.ones(1, 4, 2))


def break_off(cache: rollcache.Cache) -> None:
    with cache.rollout(), cache.chunk():
        cache.step()
        raise ZeroDivisionError


def test_steps_count_themselves_once_per_branch() -> None:
    model = doubling(1)
    cache = rollcache.enable(model, XCache(front_blocks=0), blocks=model.blocks, kv_writes="commit_only")
    with cache.rollout():
        for _ in range(2):
            with cache.chunk():
                for branch in ("cond", "uncond", "uncond", "cond", "cond"):
                    cache.step(branch=branch)
                    model(torch.ones(1, 4, 2))
    assert [(r.step, r.branch) for r in cache.trace][:5] == [
        (0, "cond"),
        (0, "uncond"),
        (1, "uncond"),
        (1, "cond"),
        (2, "cond"),
    ]


def test_marks_belong_to_loops_without_an_adapter() -> None:
    model = doubling(1)
    adapter = rollcache.Adapter(blocks=lambda m: list(m.blocks), locate=lambda m, args, kwargs: None)
    cache = rollcache.enable(model, XCache(front_blocks=0), adapter=adapter)
    with pytest.raises(RollcacheError, match="follows its adapter"):
        cache.step()
    with pytest.raises(RollcacheError, match=r"pass a rollcache\.Pass"):
        cache.replays_chunk("here")
    with pytest.raises(RollcacheError, match="already has a cache"):
        rollcache.enable(model, XCache(), adapter=adapter)
    cache.disable()
    with pytest.raises(RollcacheError, match="not both"):
        rollcache.enable(model, XCache(), adapter=adapter, blocks=model.blocks, kv_writes="commit_only")
    with pytest.raises(RollcacheError, match="io= and kv_writes= go with blocks="):
        rollcache.enable(model, XCache(), adapter=adapter, io=rollcache.BlockIO())


def test_an_adapter_without_locate_leaves_it_to_the_loop_to_mark_its_passes() -> None:
    """So marks go with everything else that an adapter may say, and all that a pass may say can be marked."""
    model = doubling(3)
    adapter = rollcache.Adapter(
        blocks=lambda m: list(m.blocks),
        always_compute=frozenset({0}),
        latent=lambda m, args, kwargs: args[0],
    )
    told = []

    def spy(m: Any, args: Any, kwargs: Any) -> bool:
        return told.append(args) or True  # type: ignore[func-returns-value]

    cache = rollcache.enable(model, XCache(), adapter=replace(adapter, first_pass_exact=spy))
    with cache.rollout():
        for n in range(2):
            with cache.chunk(steps=2, frame=n) as where:
                assert (where.steps, where.frame) == (2, n)
                for _ in range(2):
                    cache.step()
                    model(torch.ones(1, 4, 2))
    assert len(told) == 2
    assert model.calls == [4, 3, 3]
    cache.disable()
    with pytest.raises(RollcacheError, match=r"without locate\(\) says nothing"):
        rollcache.check_adapter(model, list, adapter=adapter)


def test_a_call_that_the_adapter_does_not_claim_passes_through() -> None:
    model = doubling(2)
    adapter = rollcache.Adapter(blocks=lambda m: list(m.blocks), locate=lambda m, args, kwargs: None)
    cache = rollcache.enable(model, XCache(), adapter=adapter)
    with torch.enable_grad():
        assert float(model(torch.ones(1, 4, 2))[0, 0, 0]) == 4
    assert cache.stats().passes == {}


def test_a_resumed_rollout_goes_on_where_it_stopped() -> None:
    """Two rollouts take turns, each left and entered again for every chunk."""
    model = doubling(3)
    cache = rollcache.enable(model, WindowReuse(), blocks=model.blocks, kv_writes="commit_only")
    for _ in range(6):
        for key in ("a", "b"):
            with cache.rollout(key, resume=True), cache.chunk():
                cache.step()
                model(torch.ones(1, 4, 2))
    assert cache.stats().skip_rate == 1
    assert model.calls == [2] * 3
    cache.reset("a")
    with cache.rollout("a", resume=True), cache.chunk() as where:
        assert where.chunk == 0
        cache.step()
        model(torch.ones(1, 4, 2))
    assert model.calls == [3] * 3
    cache.fork("b", "c")
    with cache.rollout("c", resume=True), cache.chunk() as where:
        assert where.chunk == 6
        cache.step()
        model(torch.ones(1, 4, 2))
    assert model.calls == [3] * 3
    with pytest.raises(RollcacheError, match="needs the key"), cache.rollout(resume=True):
        pass


def test_a_context_that_was_left_is_not_entered_again() -> None:
    model = doubling(1)
    cache = rollcache.enable(model, WindowReuse(), blocks=model.blocks, kv_writes="commit_only")
    rollout = cache.rollout()
    with rollout:
        chunk = cache.chunk()
        with chunk:
            pass
        with (
            pytest.raises(RollcacheError, match=r"one chunk\(\) was entered twice: write `with cache\.chunk\(\):`"),
            chunk,
        ):
            pass
        with pytest.raises(RollcacheError, match=r"one rollout\(\) was entered twice"), rollout:
            pass
        with cache.chunk() as where:
            assert where.chunk == 1
    with pytest.raises(RollcacheError, match=r"one rollout\(\) was entered twice"), rollout:
        pass


@pytest.mark.parametrize("bad", ["a", 1.0, True, -1, torch.tensor(1)])
def test_an_index_is_an_integer_from_0(bad: Any) -> None:
    model = doubling(1)
    cache = rollcache.enable(model, WindowReuse(), blocks=model.blocks, kv_writes="commit_only")
    with cache.rollout():
        with pytest.raises(RollcacheError, match=r"chunk\(\) takes an index, .* at least 0, got"), cache.chunk(bad):
            pass
        with cache.chunk() as where:
            assert where.chunk == 0
            with pytest.raises(RollcacheError, match=r"step\(\) takes an index, .* at least 0, got"):
                cache.step(bad)
            cache.step()
            model(torch.ones(1, 4, 2))
    assert [r.step for r in cache.trace] == [0]


def test_an_index_of_numpy_is_a_plain_one() -> None:
    model = doubling(1)
    cache = rollcache.enable(model, WindowReuse(), blocks=model.blocks, kv_writes="commit_only")
    with cache.rollout():
        for n in np.arange(2):
            with cache.chunk(n) as where:
                assert type(where.chunk) is int
                cache.step(np.int64(0))
                model(torch.ones(1, 4, 2))
    assert cache.stats().skipped == 1


def test_a_chunk_does_not_go_back_in_its_rollout() -> None:
    """In another rollout of the same key it does, and starts that afresh."""
    model = doubling(1)
    cache = rollcache.enable(model, WindowReuse(), blocks=model.blocks, kv_writes="commit_only")

    def run(index: int) -> None:
        with cache.chunk(index):
            cache.step()
            model(torch.ones(1, 4, 2))

    with cache.rollout("a"):
        run(3)
        for index in (3, 2, 0):
            with pytest.raises(RollcacheError, match=rf"chunk\({index}\) after chunk 3: the index only grows"):
                run(index)
        run(4)
    assert model.calls == [1]
    with cache.rollout("a", resume=True):
        with pytest.raises(RollcacheError, match=r"chunk\(4\) after chunk 4"):
            run(4)
        run(5)
    assert model.calls == [1]
    for index in (5, 3):
        with cache.rollout("a"):
            run(index)
    assert model.calls == [3]


def test_a_mark_is_for_the_thread_that_made_it() -> None:
    model = doubling(1)
    cache = rollcache.enable(model, WindowReuse(), blocks=model.blocks, kv_writes="commit_only")

    def call() -> None:
        with torch.no_grad():
            model(torch.ones(1, 4, 2))

    with ThreadPoolExecutor(thread_name_prefix="worker") as pool, cache.rollout(), cache.chunk():
        cache.step()
        with pytest.raises(RollcacheError, match=r"called in thread 'worker_0' after step\(\) in thread 'MainThread'"):
            pool.submit(call).result()
        assert model.calls == [0]
        call()  # the mark is still there
        pool.submit(cache.commit).result()
        with pytest.raises(RollcacheError, match=r"in thread 'MainThread' after commit\(\) in thread 'worker_0'"):
            call()
        pool.submit(call).result()
    assert cache.stats().passes == {"denoise": 1, "commit": 1}


def test_a_model_that_runs_is_not_called_from_another_thread() -> None:
    model = doubling(2)
    cache = rollcache.enable(model, WindowReuse(), blocks=model.blocks, kv_writes="commit_only")

    def call() -> None:
        with torch.no_grad():
            cache.step()
            model(torch.ones(1, 4, 2))

    def run() -> None:
        with ThreadPoolExecutor() as pool, cache.rollout(), cache.chunk():
            model.between = lambda i, h: pool.submit(call).result() if i == 1 else h
            call()

    with pytest.raises(RollcacheError, match=r"called while it runs, .* from another thread"):
        run()
