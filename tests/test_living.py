"""Living with others: adapters of weights, compilers, offloading, other ranks, other rollouts, other models."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from causal import Causal, adapter, locate, loop
from dummies import Doubling, Stack, doubling, mixing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rollcache
from rollcache import Action, Cache, Pass, Reason, Role, RollcacheError, RollcacheWarning, Segment, StepReuse, XCache
from rollcache.conditions import Moved

EAGER = XCache(min_cosine=-1, margin=2, max_deviation=None, front_blocks=0, condition_tol=None)
"""Replays whatever it is allowed to."""


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def attach(model: Stack, policy: Any = EAGER, **settings: Any) -> Cache:
    return rollcache.enable(model, policy, blocks=list(model.blocks), kv_writes="commit_only", **settings)


def generate(handle: Cache, model: nn.Module, inputs: list[Tensor], steps: int = 1, key: Any = None) -> list[Tensor]:
    out = []
    with handle.rollout(key):
        for x in inputs:
            with handle.chunk():
                for _ in range(steps):
                    handle.step()
                    y = model(x)
                out.append(y)
    return out


def one(handle: Cache, model: nn.Module, x: Tensor, n: int, key: Any = "a") -> Tensor:
    """One chunk of a rollout that goes on."""
    with handle.rollout(key), handle.chunk(n):
        handle.step()
        return model(x)


def ones(scale: float = 1.0, tokens: int = 4) -> Tensor:
    return torch.full((1, tokens, 8), float(scale))


# Weights


class Tuned(nn.Module):
    """A linear layer as PEFT leaves it: the base layer, low-rank weights beside it, switches that are plain Python."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Parameter(torch.full((2, 8), 0.1), requires_grad=False)
        self.lora_B = nn.Parameter(torch.full((8, 2), 0.1), requires_grad=False)
        self.scaling = {"default": 1.0}
        self.merged_adapters: list[str] = []
        self._disable_adapters = False
        self._active_adapter = ["default"]

    def merge(self) -> None:
        self.base_layer.weight.data += self.scaling["default"] * self.lora_B @ self.lora_A
        self.merged_adapters.append("default")

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        if self._disable_adapters or self.merged_adapters:
            return y
        return y + self.scaling["default"] * (x @ self.lora_A.T) @ self.lora_B.T


class Linear(nn.Module):
    """A block with a linear layer in it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj: nn.Module = nn.Linear(8, 8)
        self.requires_grad_(False)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.proj(h)


def inject(block: Linear) -> None:
    assert isinstance(block.proj, nn.Linear)
    block.proj = Tuned(block.proj)


CHANGES: dict[str, Callable[[Any], None]] = {
    "scaled": lambda block: block.proj.scaling.update(default=0.5),
    "switched off": lambda block: setattr(block.proj, "_disable_adapters", True),
    "merged": lambda block: block.proj.merge(),
    "trained on": lambda block: block.proj.lora_A.add_(1),
    "taken out": lambda block: setattr(block, "proj", block.proj.base_layer),
}


@pytest.mark.parametrize("change", [*CHANGES, "put in"])
def test_a_lora_that_is_put_in_scaled_switched_or_merged_takes_effect_at_the_next_chunk(change: str) -> None:
    model = Stack([Linear() for _ in range(3)])
    if change != "put in":
        inject(model.blocks[1])
    handle = attach(model)
    x = torch.randn(1, 4, 8)
    before = one(handle, model, x, 0)
    one(handle, model, x, 1)
    (inject if change == "put in" else CHANGES[change])(model.blocks[1])
    after = one(handle, model, x, 2)
    expected = functools.reduce(lambda h, block: type(block).forward(block, h), model.blocks, x)
    assert torch.equal(after, expected)
    assert change == "merged" or not torch.equal(after, before)
    one(handle, model, x, 3)
    actions = [{r.action for r in handle.trace if r.chunk == n} for n in range(4)]
    assert actions == [{Action.COMPUTE}, {Action.REPLAY}, {Action.COMPUTE}, {Action.REPLAY}]


class Wrapper(nn.Module):
    """Stands around a block, as tuners and sharding libraries do, and hands everything through."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.wrapped = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(*args, **kwargs)


def test_blocks_that_somebody_wrapped_are_cached_as_they_stand() -> None:
    model = doubling(3)
    inner = list(model.blocks)
    model.blocks = nn.ModuleList([Wrapper(b) for b in inner])
    handle = attach(model)
    first, second = generate(handle, model, [ones(1), ones(2)])
    assert (float(first.mean()), float(second.mean())) == (8, 2 + 7)
    assert [b.calls for b in inner] == [1, 1, 1]
    handle.disable()
    assert float(model(ones(2)).mean()) == 16


def elsewhere(block: Linear) -> None:
    """As when a module is moved to the host and back: its parameters are what they were, at another address."""
    for p in block.parameters():
        p.data = p.data.clone()


def anew(block: Linear) -> None:
    """As when an offloader makes the parameters again."""
    for module in block.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[name] = nn.Parameter(p.data.clone(), requires_grad=False)


def away(block: Linear) -> None:
    """As an offloader leaves a module between two forwards, until the hook under the cache brings its weights back."""
    if not hasattr(block, "home"):
        object.__setattr__(block, "home", {k: v.clone() for k, v in block.state_dict().items()})
        block.forward = functools.partial(torch.func.functional_call, copy.deepcopy(block), block.home)
    block.to("meta")


@pytest.mark.parametrize("move", [elsewhere, anew])
def test_weights_that_moved_before_a_chunk_are_the_same_weights_until_they_change(
    move: Callable[[Any], None],
) -> None:
    model = Stack([Linear() for _ in range(3)])
    handle = attach(model)
    x = torch.randn(1, 4, 8)
    for n in range(6):
        for block in model.blocks:
            move(block)
        if n == 3:
            with torch.no_grad():
                model.blocks[1].proj.weight.mul_(2)
        if n == 5:
            model.blocks[2].proj.bias.data = torch.zeros(8)  # other values under the same name
        one(handle, model, x, n)
    actions = [{r.action for r in handle.trace if r.chunk == n} for n in range(6)]
    computed, replayed = {Action.COMPUTE}, {Action.REPLAY}
    assert actions == [computed, replayed, replayed, computed, replayed, computed]


def test_weights_on_the_meta_device_between_two_forwards_are_no_change() -> None:
    model = Stack([Linear() for _ in range(2)])
    handle = None
    x = torch.randn(1, 4, 8)
    expected = model(x)
    for block in model.blocks:
        away(block)
    handle = attach(model)
    outputs = [one(handle, model, x, n) for n in range(3)]
    for y in outputs:
        torch.testing.assert_close(y, expected)
    assert handle.stats().skip_rate == 1


def test_a_cache_that_is_told_of_new_weights_before_every_chunk_says_why_it_replays_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = doubling(2)
    handle = attach(model)
    for n in range(9):
        handle.notify_weights_changed()
        assert float(one(handle, model, ones(1 + n), n).mean()) == 4 * (1 + n)
    assert [m for m in caplog.messages if "nothing was replayed" in m] == [
        "rollcache: nothing was replayed in 7 chunks, mostly: every chunk was a first one (the weights changed)."
    ]


# Compilers


@pytest.fixture
def dynamo() -> Iterator[Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo
    torch._dynamo.reset()


class Still(nn.Module):
    """A block that does not count its calls, which a compiler would take for a constant."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(8, 8, generator=g) / 3, requires_grad=False)

    def forward(self, h: Tensor) -> Tensor:
        return h + 0.5 * torch.tanh((h + 0.3 * h.mean(1, keepdim=True)) @ self.weight)


def test_blocks_compiled_one_by_one_have_one_graph_each_and_none_is_compiled_again(dynamo: Any) -> None:
    model = Stack([torch.compile(Still(i), backend="eager") for i in range(3)])  # type: ignore[misc]
    handle = attach(model, XCache(min_cosine=0.9, front_blocks=1))
    x = torch.randn(1, 6, 8)
    inputs = [x, x, -x, x + 0.01, torch.randn(1, 6, 8), x]
    bare = [functools.reduce(lambda h, b: b._orig_mod(h), model.blocks, x) for x in inputs]
    outputs = generate(handle, model, inputs[:1], steps=2, key="a")
    counters = dynamo.utils.counters
    graphs = counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= 3
    with dynamo.config.patch(error_on_recompile=True):
        outputs = generate(handle, model, inputs, steps=2, key="b")
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    assert {r.action for r in handle.trace} == {Action.COMPUTE, Action.REPLAY}
    for n in (0, 2, 4):  # other content is computed
        torch.testing.assert_close(outputs[n], bare[n])
    handle.disable()
    torch.testing.assert_close(model(x), bare[0])


@pytest.mark.parametrize("what", ["blocks", "model"])
def test_compiling_after_the_cache_was_put_on_is_refused_at_the_first_pass(dynamo: Any, what: str) -> None:
    model = mixing(2)
    handle = attach(model)
    compiled: nn.Module = model
    if what == "blocks":
        for i in range(2):
            model.blocks[i] = torch.compile(model.blocks[i], backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")  # type: ignore[assignment]
    name = "Mixing" if what == "blocks" else "Stack"
    with handle.rollout(), handle.chunk():
        handle.step()
        with pytest.raises(RollcacheError, match=f"{name} was compiled after the cache was put on it"):
            compiled(torch.randn(1, 6, 8))
        if what == "model":
            model(torch.randn(1, 6, 8))  # the mark is still there


# Hooks of others


def offload(module: nn.Module, log: list[str], name: str) -> None:
    """Put a hook on a module as accelerate does: its forward is replaced, and remembered on the module."""
    old = module.forward
    module._old_forward = old  # type: ignore[assignment]

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        log.append(name)
        return module._old_forward(*args, **kwargs)

    module.forward = functools.update_wrapper(functools.partial(forward, module), old)  # type: ignore[method-assign]


def take_off(module: nn.Module) -> None:
    """Take it away as accelerate does: the forward that was remembered comes back."""
    module.forward = module._old_forward  # type: ignore[method-assign,assignment]
    del module._old_forward


def offload_by_diffusers(module: nn.Module, log: list[str], name: str) -> None:
    """The same by a hook of diffusers."""
    hooks = pytest.importorskip("diffusers.hooks")

    class Loading(hooks.ModelHook):  # type: ignore[misc,name-defined]
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            log.append(name)
            return args, kwargs

    hooks.HookRegistry.check_if_exists_or_initialize(module).register_hook(Loading(), "loading")


def take_off_by_diffusers(module: Any) -> None:
    module._diffusers_hook.remove_hook("loading", recurse=False)


WAYS = {"accelerate": (offload, take_off), "diffusers": (offload_by_diffusers, take_off_by_diffusers)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("off", list(itertools.permutations(["cache off", "offload off"])), ids=" then ".join)
@pytest.mark.parametrize("on", list(itertools.permutations(["cache on", "offload on"])), ids=" then ".join)
def test_offloading_and_the_cache_come_and_go_in_any_order(on: tuple[str, ...], off: tuple[str, ...], way: str) -> None:
    model = doubling(3)
    offload, take_off = WAYS[way]
    modules = [model, *model.blocks]
    log: list[str] = []
    handle: Any = None
    for what in (*on, "run", *off):
        if what == "cache on":
            handle = attach(model)
        elif what == "offload on":
            for i, module in enumerate(modules):
                offload(module, log, f"{i}")
        elif what == "run":
            outputs = generate(handle, model, [ones(1), ones(2)])
            assert [float(y.mean()) for y in outputs] == [8, 2 + 7]
            assert model.calls == [1, 1, 1]
            # a hook under the cache moves weights for blocks that are run, one around it for all
            assert log == list("0123") * 2 if on[0] == "cache on" else log == [*"0123", "0"]
        elif what == "cache off":
            handle.disable()
        else:
            for module in modules:
                take_off(module)
        if what.endswith("off") and not handle.enabled:
            model.forget_calls()
            assert float(model(ones(3)).mean()) == 24
            assert model.calls == [1, 1, 1]
    again = attach(model)  # nothing that is left stands in the way of another cache
    assert again.enabled
    generate(again, model, [ones(1), ones(2)])
    assert again.stats().skip_rate == 1
    again.disable()
    assert float(model(ones(3)).mean()) == 24


def test_a_cache_under_the_hook_of_somebody_else_is_still_noticed() -> None:
    model = doubling(2)
    handle = attach(model)
    for module in (model, *model.blocks):
        offload(module, [], "")
    with pytest.raises(RollcacheError, match="already has a cache"):
        attach(model)
    assert rollcache.summary(model) == handle.summary()
    rollcache.disable(model)
    assert not handle.enabled
    attach(model).disable()


def test_a_hook_that_was_under_the_cache_and_is_taken_off_takes_the_cache_along_and_that_is_an_error() -> None:
    model = doubling(3)
    offload(model.blocks[1], [], "")
    handle = attach(model)
    take_off(model.blocks[1])
    with pytest.raises(RollcacheError, match="block 2 was called where block 1 was due"):
        one(handle, model, ones(), 0)
    handle.disable()
    assert float(model(ones()).mean()) == 8


def test_forward_hooks_that_were_there_before_see_every_call_and_may_change_what_they_see() -> None:
    model = doubling(3)
    seen: list[float] = []

    def before(module: nn.Module, args: Any) -> None:
        seen.append(float(args[0].mean()))

    def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + 1

    model.blocks[0].register_forward_pre_hook(before)
    hook = model.blocks[1].register_forward_hook(after)
    handle = attach(model)
    first, second = generate(handle, model, [ones(1), ones(2)])
    assert (float(first.mean()), float(second.mean())) == ((1 * 4 + 1) * 2, 2 + 1 + 2 + 1 + 5)
    assert seen == [1, 2]
    handle.disable()
    assert float(model(ones(1)).mean()) == 10
    hook.remove()
    assert float(model(ones(1)).mean()) == 8


@pytest.mark.parametrize("on", list(itertools.permutations(["cache on", "offload on"])), ids=" then ".join)
def test_a_copy_of_a_cached_model_that_is_offloaded_computes_and_holds_nothing_of_the_cache(
    on: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = doubling(2)
    log: list[str] = []
    for what in on:
        if what == "cache on":
            handle = attach(model)
        else:
            for module in (model, *model.blocks):
                offload(module, log, "moved")
    generate(handle, model, [ones(1), ones(1)])
    seen = handle.stats().passes
    copied: list[Any] = []
    monkeypatch.setattr(type(handle._engine), "__deepcopy__", lambda self, memo: copied.append(self), raising=False)
    other = copy.deepcopy(model)
    log.clear()
    assert float(other(ones(3)).mean()) == 12
    assert log == ["moved"] * 3
    assert handle.stats().passes == seen
    assert copied == []


# Ranks


def reduce_max(x: Tensor) -> Tensor:
    torch.distributed.all_reduce(x, torch.distributed.ReduceOp.MAX)
    return x


class Sharded(nn.Module):
    """A block that sees the tokens of all ranks: ranks that disagree whether to run it wait for each other for ever."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(8, 8, generator=g) / 3, requires_grad=False)

    def forward(self, h: Tensor) -> Tensor:
        mean = h.mean(1, keepdim=True)
        torch.distributed.all_reduce(mean)
        return h + 0.5 * torch.tanh((h + mean) @ self.weight)


def on_two_ranks(run: Callable[[int, str], None], folder: Path) -> list[Any]:
    """What two processes wrote down."""
    context = torch.multiprocessing.spawn(run, (str(folder),), nprocs=2, join=False)
    for _ in range(60):
        if context.join(timeout=2):
            break
    else:
        for process in context.processes:
            process.kill()
        pytest.fail("the ranks wait for each other")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


MOVED = (4, 6)  # the chunks in which the tokens of one rank change


def on_rank(rank: int, folder: str) -> None:
    """Half of the tokens: those of rank 1 change in chunk 4, those of rank 0 in chunk 6."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rollcache").addHandler(handler)
    asked: list[float] = []

    def reduce(x: Tensor) -> Tensor:
        asked.append(float(x.max()))
        return reduce_max(x)

    model = Stack([Sharded(i) for i in range(3)])
    segments = [Segment.contiguous("half", 1, (2, 2, 3))]
    still = torch.randn(1, 12, 8, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        handle = attach(model, XCache(min_cosine=0.99, front_blocks=0, condition_tol=None), reduce=reduce)
        local, outputs = [], []
        with handle.rollout("a"):
            for n in range(8):
                x = -still if n == MOVED[1 - rank] else still
                asked.clear()
                with handle.chunk(segments=segments):
                    handle.step()
                    outputs.append(float(model(x).sum()))
                local.append(asked[1] if len(asked) > 1 else 0.0)  # what enters block 0, after the age of the state
        actions = [[r.action for r in handle.trace if r.chunk == n] for n in range(8)]
        with handle.rollout("b"):
            for _ in range(rollcache.engine.IDLE_CHUNKS * 2):
                with handle.chunk(kv_update=True):
                    handle.step()
                    model(still)
    handle.disable()
    idle = attach(model, EAGER, reduce=reduce)
    with torch.no_grad(), idle.rollout():
        for _ in range(rollcache.engine.IDLE_CHUNKS + 1):
            with idle.chunk(kv_update=True):
                idle.step()
                model(still)
    report = {"actions": actions, "local": local, "outputs": outputs, "heard": heard}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


def with_uneven_tokens(rank: int, folder: str) -> None:
    """Rank 1 has a token less from chunk 4 on, and forgets everything in chunk 8."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    model = Stack([Sharded(i) for i in range(3)])
    x = torch.randn(1, 12, 8, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        handle = attach(model, XCache(min_cosine=0.99, front_blocks=0), reduce=reduce_max)
        for n in range(12):
            if rank == 1 and n == 8:
                handle.reset("a")
            with handle.rollout("a", resume=True), handle.chunk(n):
                handle.step()
                model(x[:, : 12 - (rank == 1 and n >= 4)])
    actions = [[r.action for r in handle.trace if r.chunk == n] for n in range(12)]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(actions))
    torch.distributed.destroy_process_group()


def test_ranks_of_which_one_forgets_agree(tmp_path: Path) -> None:
    one, two = on_two_ranks(with_uneven_tokens, tmp_path)
    assert one == two
    computed = [n for n, actions in enumerate(one) if set(actions) == {"compute"}]
    assert computed == [0, 4, 8]


def test_ranks_with_opposite_evidence_agree_and_only_the_first_one_logs(tmp_path: Path) -> None:
    one, two = on_two_ranks(on_rank, tmp_path)
    assert one["actions"] == two["actions"]
    kinds = [set(chunk) for chunk in one["actions"]]
    assert kinds[1] == {"replay"}
    assert kinds[MOVED[0]] == kinds[MOVED[1]] == {"compute"}
    for n, (calm, stirred) in zip(MOVED, ((one, two), (two, one)), strict=True):  # alone, one would have replayed
        assert calm["local"][n] < 0.01 < stirred["local"][n]
    assert any("nothing was replayed" in message for message in one["heard"])
    assert two["heard"] == []


# Loops


@given(steps=st.lists(st.integers(1, 5), min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
def test_the_number_of_steps_is_never_asked_for(steps: list[int]) -> None:
    """Every rollout of a handle may have another one, and is decided as in a fresh process."""
    model = doubling(2)
    handle = attach(model)
    for i, count in enumerate(steps):
        fresh_model = doubling(2)
        fresh = attach(fresh_model)
        inputs = [ones(1), ones(2), ones(3)]
        ours = generate(handle, model, inputs, steps=count, key=i)
        theirs = generate(fresh, fresh_model, inputs, steps=count, key=i)
        assert all(map(torch.equal, ours, theirs))
        mine = [r for r in handle.trace if r.rollout == i]
        assert [r.line() for r in mine] == [r.line() for r in fresh.trace]
        assert sum(r.action is Action.REPLAY for r in mine) == 2 * count * 2


def test_a_warm_up_with_one_step_leaves_nothing_behind_for_the_run_with_four() -> None:
    """Under one key, as a server does that warms up before it serves."""
    model = doubling(2)
    handle = attach(model)
    generate(handle, model, [ones(5)], steps=1, key="served")
    outputs = generate(handle, model, [ones(1), ones(2)], steps=4, key="served")
    assert [float(y.mean()) for y in outputs] == [4, 2 + 3]
    assert [r.action for r in handle.trace][2:] == [Action.COMPUTE] * 8 + [Action.REPLAY] * 8


def test_the_same_rollout_twice_is_skipped_alike() -> None:
    model = mixing(4)
    handle = attach(model, XCache(min_cosine=0.99))
    x = torch.randn(1, 6, 8)
    inputs = [x + 0.05 * i * torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    once = generate(handle, model, inputs, steps=2, key=1)
    twice = generate(handle, model, inputs, steps=2, key=2)
    assert all(map(torch.equal, once, twice))
    lines = [[r.line() for r in handle.trace if r.rollout == key] for key in (1, 2)]
    assert lines[0] == lines[1]
    assert {r.action for r in handle.trace} == {Action.COMPUTE, Action.REPLAY}


@pytest.mark.parametrize("key", [None, "the same"])
def test_a_rollout_that_was_cancelled_in_mid_chunk_leaves_nothing_to_the_next(key: Any) -> None:
    """A viewer who leaves closes the generator of frames: no exception passes through the model."""
    model = doubling(2)
    handle = attach(model)

    def frames() -> Iterator[float]:
        with handle.rollout(key):
            for n in range(4):
                with handle.chunk():
                    for _ in range(2):
                        handle.step()
                        yield float(model(ones(1 + n)).mean())

    watched = frames()
    assert [next(watched) for _ in range(3)] == [4, 4, 2 + 3]
    watched.close()
    assert list(frames()) == [4, 4, 2 + 3, 2 + 3, 3 + 3, 3 + 3, 4 + 3, 4 + 3]


def test_rollouts_of_different_sizes_take_turns_on_one_model() -> None:
    model = doubling(2)
    handle = attach(model)
    for n in range(3):
        for key, tokens in (("small", 4), ("large", 12)):
            y = one(handle, model, ones(1 + n, tokens), n, key)
            assert y.shape[1] == tokens
            assert float(y.mean()) == 1 + n + 3
    assert handle.stats().skip_rate == 1


def test_two_models_in_one_process_share_nothing() -> None:
    models = [doubling(2), doubling(3)]
    handles = [attach(m) for m in models]
    for n in range(3):
        for handle, model in zip(handles, models, strict=True):
            assert float(one(handle, model, ones(1 + n), n).mean()) == 1 + n + (3 if model is models[0] else 7)
    rollcache.disable(models[0])
    assert [h.enabled for h in handles] == [False, True]
    assert float(one(handles[1], models[1], ones(1), 3).mean()) == 8
    assert float(models[0](ones(1)).mean()) == 4


def test_guidance_that_is_switched_off_and_on_again_writes_the_kv_of_both_branches_exactly() -> None:
    model = Causal()
    toggled = [True, True, False, True]

    def go(policy: Any) -> list[Tensor]:
        commits: list[Tensor] = []
        calls = loop(model, branches=("cond", "uncond"))
        handle = None if policy is None else rollcache.enable(model, policy, adapter=adapter())
        out: Any = None
        try:
            while True:
                args, kwargs = calls.send(out)
                denoises = kwargs.get("role") != "commit"
                if denoises and kwargs["branch"] == "uncond" and not toggled[kwargs["chunk"]]:
                    out = torch.zeros(1, 6, 8)  # guidance is off: no pass
                    continue
                out = args[0] * 0 + torch.tensor(0.1) if denoises else model(*args, **kwargs)
                if denoises:
                    model(*args, **kwargs)
                else:
                    commits.append(out)
        except StopIteration:
            pass
        if handle is not None:
            assert handle.stats().skipped > 0
            handle.disable()
        return commits

    bare, cached = go(None), go(EAGER)
    assert len(bare) == 2 * 4
    assert all(map(torch.equal, bare, cached))


def off_by(model: Causal, locate: Any, protect: str) -> list[float]:
    """By chunk, how far the K of block 0 is from that of the latents, when everything that may be skipped is."""
    chunks: list[float] = []
    policy = XCache(**{**vars(EAGER), "protect": protect})
    with rollcache.enable(model, policy, adapter=adapter(locate=locate)):
        calls, out = loop(model), None
        try:
            while True:
                args, kwargs = calls.send(out)
                out = model(*args, **kwargs)
                if kwargs.get("role") == "commit":
                    written = kwargs["kv"][0]["k"][:, kwargs["start"] : kwargs["start"] + 6]
                    true = args[0] @ model.blocks[0].k
                    chunks.append(float((written - true).norm() / true.norm()))
        except StopIteration:
            return chunks


def test_without_exact_commit_passes_the_kv_of_later_chunks_is_lost() -> None:
    def unprotected(model: Any, args: Any, kwargs: Any) -> Pass:
        where = locate(model, args, kwargs)
        return where if where.role is Role.DENOISE else Pass(role=Role.DENOISE, chunk=where.chunk, step=3)

    model = Causal()
    assert off_by(model, locate, "chunk") == [0, 0, 0, 0]
    with pytest.warns(RollcacheWarning, match="errors add up"):
        assert off_by(model, unprotected, "off") == [0, 1, 1, 1]  # nothing was written at all


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_few_steps_leave_methods_across_steps_little_and_those_across_chunks_everything(steps: int) -> None:
    model = doubling(2)
    with attach(model, StepReuse.uniform(steps, (steps + 1) // 2)) as across_steps:
        generate(across_steps, model, [ones(1)] * 4, steps=steps)
    with attach(model, EAGER) as across_chunks:
        generate(across_chunks, model, [ones(1)] * 4, steps=steps)
    assert across_steps.stats().skip_rate == {1: 0, 2: 0.5, 4: 0.5}[steps]
    assert across_chunks.stats().skip_rate == 1


def test_what_a_gate_remembers_does_not_grow_with_the_sequence() -> None:
    held = []
    for tokens in (64, 4096):
        model = doubling(2)
        handle = attach(model, XCache(front_blocks=0, fingerprint_tokens=16))
        generate(handle, model, [ones(1, tokens)] * 2)
        residuals = 3 * tokens * 8 * 4  # two blocks and their sum
        held.append(handle.stats().bytes_actual - residuals)
    assert held[0] == held[1] == 2 * (16 + 1) * 8 * 4  # sampled tokens and their mean, per block


class Negative(Doubling):
    """Gives zeros with a sign."""

    def forward(self, h: Tensor, *_: Any) -> Tensor:
        self.calls += 1
        return h * -1.0


def test_zeros_keep_their_sign_where_nothing_is_skipped_and_are_alike_for_the_gate() -> None:
    zeros = torch.zeros(1, 4, 8)
    model = Stack([Negative()])
    with attach(model, XCache(min_cosine=1, front_blocks=0)) as handle:
        for y in generate(handle, model, [zeros, zeros]):
            assert bool(torch.signbit(y).all())
        assert handle.stats().skipped == 0
    with attach(model, XCache(front_blocks=0)) as handle:
        generate(handle, model, [zeros, -zeros])
        assert handle.stats().skip_rate == 1


def test_a_prompt_that_changes_takes_effect_at_the_next_chunk_if_it_is_declared() -> None:
    model = mixing(3)
    handle = attach(model, XCache(min_cosine=0.5, front_blocks=0))
    prompts = [torch.ones(4), torch.ones(4), -torch.ones(4), -torch.ones(4)]
    with handle.rollout():
        for prompt in prompts:
            with handle.chunk(conditions=[rollcache.Condition("prompt", prompt)]):
                handle.step()
                model(ones(1))
    assert [next(r.reason for r in handle.trace if r.chunk == n) for n in range(4)] == [
        Reason.WARMUP,
        Reason.SIMILAR,
        Reason.CONDITION,
        Reason.SIMILAR,
    ]


@given(
    cosine=st.floats(-1, 1),
    deviation=st.floats(0, 5),
    moved=st.floats(0, 0.2),
    floors=st.tuples(st.floats(-1, 1), st.floats(-1, 1)),
    limits=st.tuples(st.floats(0, 5), st.floats(0, 5)),
    tolerances=st.tuples(st.floats(0, 0.2), st.floats(0, 0.2)),
)
def test_a_looser_knob_of_xcache_never_computes_more_of_the_same_evidence(
    cosine: float,
    deviation: float,
    moved: float,
    floors: tuple[float, float],
    limits: tuple[float, float],
    tolerances: tuple[float, float],
) -> None:
    def replays(floor: float, limit: float, tolerance: float) -> bool:
        policy = XCache(min_cosine=floor, max_deviation=limit, condition_tol=tolerance, front_blocks=0).build(2)
        evidence = rollcache.Evidence(
            Pass(role=Role.DENOISE, chunk=1),
            measure=lambda: rollcache.Similarity(cosine, deviation),
            moved=lambda: Moved(moved, 1.0),
        )
        return policy.decide(rollcache.Cell("cond", 0, 0, 1), evidence).action is Action.REPLAY

    strict = replays(max(floors), min(limits), min(tolerances))
    assert not strict or replays(min(floors), max(limits), max(tolerances))


def test_the_tests_that_the_page_of_footguns_names_exist() -> None:
    folder = Path(__file__).parent
    page = (folder.parent / "docs" / "footguns.md").read_text("utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    there = {
        name for path in folder.glob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))
    }
    assert len(named) > 50
    assert named <= there, sorted(named - there)
