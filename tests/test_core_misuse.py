"""What a user may get wrong about a model or a loop: the first pass that shows it says so, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from dummies import Stack, doubling, mixing
from torch import Tensor, nn

import rollcache
from rollcache import Adapter, BlockIO, Condition, Pass, Role, RollcacheError, Segment, StepReuse, WindowReuse, XCache

EAGER = XCache(min_cosine=-1, margin=2, max_deviation=None, front_blocks=0, condition_tol=None)
X = torch.ones(1, 4, 2)
WALKS = pytest.mark.parametrize(
    "policy", [EAGER, WindowReuse(), StepReuse(steps=3, anchors=(0,))], ids=lambda p: type(p).__name__
)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def attach(model: Stack, policy: Any = EAGER, kv_writes: Any = "never", **settings: Any) -> rollcache.Cache:
    return rollcache.enable(model, policy, blocks=list(model.blocks), kv_writes=kv_writes, **settings)


def follow(model: Stack, policy: Any = EAGER, **facts: Any) -> Callable[..., Tensor]:
    """A cached model whose passes are told as they are called."""
    here: list[Any] = []
    adapter = Adapter(blocks=lambda m: list(m.blocks), locate=lambda *_: here[0], **facts)
    rollcache.enable(model, policy, adapter=adapter)

    def call(x: Tensor = X, **where: Any) -> Tensor:
        here[:] = [Pass(**{"role": Role.DENOISE, **where})]
        return model(x)

    return call


# When is K/V written?


def test_blocks_without_an_adapter_need_the_word_when_kv_is_written() -> None:
    model = doubling(2)
    with pytest.raises(RollcacheError, match=r"blocks= needs kv_writes=.*'every_forward'"):
        rollcache.enable(model, EAGER, blocks=model.blocks)
    with pytest.raises(ValueError, match=r"kv_writes must be one of 'never', .*got 'every-forward'"):
        attach(model, kv_writes="every-forward")
    assert "forward" not in vars(model)


def test_a_loop_with_marks_that_forgets_its_commit_is_stopped_at_the_next_chunk() -> None:
    model = doubling(2)
    cache = attach(model, kv_writes="every_forward")
    with cache.rollout():
        for n in range(3):
            with cache.chunk():
                cache.step()
                if n == 2:
                    with pytest.raises(RollcacheError, match="no commit pass of cond since chunk 1"):
                        model(X)
                else:
                    model(X)


@pytest.mark.parametrize("forgotten", ["cond", "uncond"])
def test_every_branch_commits_its_own_kv(forgotten: str) -> None:
    call = follow(doubling(2), kv_writes="every_forward")
    for n in range(3):
        for branch in ("cond", "uncond"):
            call(chunk=n, branch=branch)
        for branch in ("cond", "uncond"):
            if n < 2 or branch != forgotten:
                call(role=Role.COMMIT, chunk=n, branch=branch)
    with pytest.raises(RollcacheError, match=f"no commit pass of {forgotten} since chunk 2"):
        call(chunk=3)


def test_a_commit_mark_says_whose_kv_it_writes() -> None:
    model = doubling(2)
    cache = attach(model, kv_writes="every_forward")
    with cache.rollout():
        for _ in range(3):
            with cache.chunk():
                for branch in ("cond", "uncond"):
                    cache.step(branch=branch)
                    model(X)
                for branch in ("cond", "uncond"):
                    cache.commit(branch=branch)
                    model(X)
                with pytest.raises(RollcacheError, match=r"commit\(\) twice in one chunk \(uncond\)"):
                    cache.commit(branch="uncond")
    assert cache.stats().skip_rate == 1


@WALKS
def test_a_last_step_that_keeps_its_kv_must_say_so(policy: Any) -> None:
    passes = [(n, t) for n in range(4) for t in range(3)]
    call = follow(doubling(2), policy, kv_writes="last_step")
    for n, t in passes:
        call(chunk=n, step=t, kv_write=t == 2)
    call = follow(doubling(2), policy, kv_writes="last_step")
    with pytest.raises(RollcacheError, match="declare the passes whose K/V stays with kv_write"):
        [call(chunk=n, step=t) for n, t in passes]


def test_one_commit_of_kv_that_all_branches_share() -> None:
    call = follow(doubling(2), kv_writes="every_forward")
    for n in range(4):
        for branch in ("cond", "uncond"):
            call(chunk=n, branch=branch)
        call(role=Role.COMMIT, chunk=n, branch=rollcache.passes.EVERY_BRANCH)


class Broken(Exception):
    pass


def test_stale_kv_stays_stale_until_a_commit_pass_has_run() -> None:
    """Neither a commit pass that fails, nor an error that is caught, nor a change of shape makes it clean."""
    model = doubling(2)
    call = follow(model, kv_writes="every_forward")
    for n in range(2):
        call(chunk=n)
        if not n:
            call(role=Role.COMMIT, chunk=n)
    hook = model.blocks[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Broken()))
    with pytest.raises(Broken):
        call(role=Role.COMMIT, chunk=1)
    hook.remove()
    for chunk, x in ((2, X), (3, X), (4, torch.ones(1, 6, 2))):
        with pytest.raises(RollcacheError, match="no commit pass of cond since chunk 1"):
            call(x, chunk=chunk)
    call(role=Role.COMMIT, chunk=1)
    call(chunk=5)


def test_a_rollout_that_made_room_remembers_that_its_kv_is_stale() -> None:
    model = doubling(2)
    cache = attach(model, kv_writes="every_forward", max_rollouts=1)

    def chunk(key: str, commit: bool = True) -> None:
        with cache.rollout(key, resume=True), cache.chunk():
            cache.step()
            model(X)
            if commit:
                cache.commit()
                model(X)

    chunk("a")
    chunk("a", commit=False)
    chunk("b")
    with pytest.raises(RollcacheError, match="no commit pass of cond since chunk 1"):
        chunk("a")
    cache.reset("a")
    chunk("a")


# What do blocks take and return?


class Wrapping(nn.Module):
    """Doubles, and returns its output in a tuple with whatever else."""

    def __init__(self, *more: Any) -> None:
        super().__init__()
        self.more = more

    def forward(self, h: Tensor) -> Any:
        return (2 * h, *self.more)


class Unwrapping(Stack):
    """Takes the first of what its blocks return."""

    def forward(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)[0]
        return h


@WALKS
def test_a_tuple_for_a_tensor_is_refused_in_the_first_pass(policy: Any) -> None:
    cache = attach(Unwrapping([Wrapping(), Wrapping()]), policy)
    with cache.rollout(), cache.chunk():
        cache.step()
        with pytest.raises(RollcacheError, match=r"block \d takes a tensor and returns tuple\(Tensor\).*BlockIO"):
            cache._engine.model(X)


@pytest.mark.parametrize("more", [(), ("kv",), ("attention", None)], ids=len)
def test_tuples_of_any_length_that_begin_with_the_hidden_state_are_repeated(more: tuple[Any, ...]) -> None:
    model = Unwrapping([Wrapping(*more), Wrapping(*more)])
    seen: list[Any] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: seen.append(out[1:]))
    cache = attach(model, io=BlockIO(returns="hidden, aux", aux="last"))
    with cache.rollout():
        for _ in range(3):
            with cache.chunk():
                cache.step()
                assert torch.equal(model(X), 4 * X)
    assert cache.stats().skip_rate == 1
    assert seen == [more] * 6


class Listing(Wrapping):
    """Returns a list."""

    def forward(self, h: Tensor) -> Any:
        return [2 * h, *self.more]


class Named(NamedTuple):
    hidden: Tensor
    attention: Any = None


class Naming(Wrapping):
    """Returns a named tuple."""

    def forward(self, h: Tensor) -> Any:
        return Named(2 * h)


@pytest.mark.parametrize("block", [Listing, Naming])
@pytest.mark.parametrize("io", [BlockIO(), BlockIO(returns="hidden, aux", aux="last")], ids=["hidden", "aux"])
def test_other_sequences_than_tuples_are_refused_in_the_first_pass(block: Any, io: BlockIO) -> None:
    model = Unwrapping([block(), block()])
    cache = attach(model, io=io)
    with cache.rollout(), cache.chunk():
        cache.step()
        with pytest.raises(RollcacheError, match="only a tensor or a plain tuple can be repeated"):
            model(X)


def test_forms_of_return_that_do_not_exist_are_named() -> None:
    with pytest.raises(ValueError, match=r"BlockIO\.returns must be one of .*got 'hidden,aux'"):
        BlockIO(returns="hidden,aux", aux="last")  # type: ignore[arg-type]


@WALKS
@pytest.mark.parametrize("order", [(1, 0), (0, 0), (1,)], ids=str)
def test_blocks_that_are_called_in_another_order_are_named(policy: Any, order: tuple[int, ...]) -> None:
    model = doubling(2)
    blocks = list(model.blocks)
    cache = rollcache.enable(model, policy, blocks=blocks, kv_writes="never")
    model.blocks = nn.ModuleList(blocks[i] for i in order)
    with cache.rollout(), cache.chunk():
        cache.step()
        with pytest.raises(RollcacheError, match=r"block \d was called where block \d was due"):
            model(X)


# What does an adapter say?


@pytest.mark.parametrize("answer", [{"chunk": 0}, "denoise", (0, 0)], ids=repr)
def test_a_locate_that_gives_no_pass_is_named(answer: Any) -> None:
    model = doubling(2)
    rollcache.enable(model, EAGER, adapter=Adapter(blocks=lambda m: list(m.blocks), locate=lambda *_: answer))
    with pytest.raises(RollcacheError, match=r"locate\(\) of the adapter must give a Pass, or None"):
        model(X)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"role": "denoise"}, r"Pass\.role must be a Role such as Role\.DENOISE, got 'denoise'"),
        ({"chunk": "3"}, r"Pass\.chunk must be an integer of at least 0, got '3'"),
        ({"chunk": -1}, r"Pass\.chunk must be an integer of at least 0, got -1"),
        ({"chunk": torch.tensor(1)}, r"Pass\.chunk must be an integer of at least 0, got tensor"),
        ({"step": None}, r"Pass\.step must be an integer of at least 0, got None"),
        ({"step": True}, r"Pass\.step must be an integer of at least 0, got True"),
        ({"branch": None}, r"Pass\.branch must be the name of a branch, got None"),
        ({"segments": ["b"]}, r"Pass\.segments must be a list or tuple of Segment, got \['b'\]"),
        ({"conditions": Condition("a", torch.ones(1))}, r"Pass\.conditions must be a list or tuple of Condition"),
    ],
)
def test_a_pass_that_cannot_be_is_named(said: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Pass(**{"role": Role.DENOISE, "chunk": 0, **said})
    assert Pass(role=Role.DENOISE, chunk=np.int64(3)).chunk == 3


# What do marks say?


def test_steps_and_conditions_of_marks_that_cannot_be_are_named() -> None:
    model = doubling(2)
    cache = attach(model)
    with cache.rollout():
        with (
            pytest.raises(TypeError, match=r"chunk\(conditions=...\) must be a list or tuple of Condition"),
            cache.chunk(
                conditions=Condition("a", torch.ones(1))  # type: ignore[arg-type]
            ),
        ):
            pass
        with (
            pytest.raises(TypeError, match=r"chunk\(segments=...\) must be a list or tuple of Segment"),
            cache.chunk(
                segments=[(1, 2, 2)]  # type: ignore[list-item]
            ),
        ):
            pass
        with cache.chunk(segments=[Segment.contiguous("s", 1, (1, 2, 2))]) as where:
            assert where.chunk == 0
            for branch in ("cond", "uncond"):
                cache.step(1, branch=branch)
                model(X)
            for index in (0, 1):
                with pytest.raises(RollcacheError, match=rf"step\({index}\) after step 1 of this chunk \(cond\)"):
                    cache.step(index)
            cache.step(2)
            model(X)


def test_rollouts_that_take_turns_are_told_how() -> None:
    cache = attach(doubling(2))
    with (
        cache.rollout("a"),
        pytest.raises(RollcacheError, match=r"inside rollout 'a'.*resume=True"),
        cache.rollout("b"),
    ):
        pass


def test_marks_on_a_disabled_cache_say_that_it_is_disabled() -> None:
    cache = attach(doubling(2))
    with cache.rollout(), cache.chunk():
        cache.disable()
        with pytest.raises(RollcacheError, match="the cache is disabled"):
            cache.step()


# Who else is on the model?


def test_a_cache_that_was_taken_off_with_the_hook_under_it_says_so() -> None:
    """As `maybe_free_model_hooks` of a pipeline does: it puts the hook of the model back at the end of every call."""
    model = doubling(2)

    def put_on() -> None:
        bare = model.forward
        model.forward = lambda *args: bare(*args)  # type: ignore[method-assign]

    put_on()
    offloading = model.forward
    cache = attach(model)
    del model.forward
    model.forward = offloading  # type: ignore[method-assign]
    with pytest.raises(RollcacheError, match=r"runs without its cache.*enable one before offloading is set up"):
        model(X)
    cache.disable()
    assert torch.equal(model(X), 4 * X)


def test_a_block_may_be_called_by_itself() -> None:
    model = doubling(2)
    attach(model)
    assert torch.equal(model.blocks[0](X), 2 * X)


def test_a_reduction_that_returns_nothing_is_named() -> None:
    model = mixing(2)
    cache = attach(model, reduce=lambda x: None)
    with cache.rollout(), cache.chunk():
        cache.step()
        with pytest.raises(RollcacheError, match=r"reduce= must return .* it returned None; .*all_reduce writes into"):
            model(torch.ones(1, 4, 8))


def test_what_another_rank_has_forgotten_is_forgotten_here() -> None:
    """The other rank starts anew at chunk 3: this one computes there and in the chunk after its warm-up goes on."""
    model, age = doubling(2), [0]
    cache = attach(
        model, reduce=lambda mine: torch.maximum(mine, torch.tensor(1 / (2 + age[0]))) if mine.ndim else mine
    )
    with cache.rollout():
        for n in range(6):
            age[0] = n if n < 3 else n - 3
            with cache.chunk():
                cache.step()
                model(X)
    assert [n for n in range(6) if {r.action.value for r in cache.trace if r.chunk == n} == {"replay"}] == [1, 2, 4, 5]
