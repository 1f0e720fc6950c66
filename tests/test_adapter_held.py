"""`check_adapter` on models that hold their K/V themselves, in every place where models do, and on what is no K/V."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import pytest
import torch
from causal import CHUNKS, STEPS, TOKENS, WIDTH, Attending, Causal, adapter, loop
from torch import Tensor, nn

from rollcache import check_adapter
from rollcache.adapters.check import AdapterReport
from rollcache.adapters.rehearse import Rehearsal
from rollcache.adapters.state import Snapshot, held_by, is_same, tensors_in

ROOM = TOKENS * (CHUNKS + 1)


class Plain:
    """K/V of a block in an object."""

    def __init__(self, batch: int) -> None:
        self.k, self.v = torch.zeros(batch, ROOM, WIDTH), torch.zeros(batch, ROOM, WIDTH)

    def __getitem__(self, name: str) -> Tensor:
        return getattr(self, name)


class Slotted(Plain):
    __slots__ = ("k", "v")


class Bare:
    """Has no `__dict__`."""

    __slots__ = ("__k", "v")
    __getitem__ = Plain.__getitem__
    __init__ = Plain.__init__

    @property
    def k(self) -> Tensor:
        return self.__k

    @k.setter
    def k(self, value: Tensor) -> None:
        self.__k = value


class Callable_(Plain):
    """As attention processors do."""

    def __call__(self) -> None:
        return None


class Buffers(nn.Module):
    """K/V of a block in registered buffers."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(batch, ROOM, WIDTH))
        self.register_buffer("v", torch.zeros(batch, ROOM, WIDTH))

    __getitem__ = Plain.__getitem__


class Nested:
    """An object in a list in a dict in an object."""

    def __init__(self, batch: int) -> None:
        self.inner = {"layers": [Plain(batch)]}

    def __getitem__(self, name: str) -> Tensor:
        return self.inner["layers"][0][name]


PLACES = {
    "object": (Plain, "store.k"),
    "slots and more": (Slotted, "store.k"),
    "slots": (Bare, "store._Bare__k"),
    "callable": (Callable_, "store.k"),
    "buffers": (Buffers, "store.k"),
    "nested": (Nested, "store.inner['layers'][0].k"),
    "dict": (lambda batch: dict(vars(Plain(batch))), "store['k']"),
}


class Keeping(Attending):
    """Keeps its K/V itself; `careless` writes it in every pass."""

    careless = False

    def forward(self, h: Tensor, time: Tensor, kv: Any, start: int, write: bool) -> Tensor:
        return self.attend(h, time, self.store, start, write or self.careless)


class Growing(Keeping):
    """Keeps its K/V in a list that grows."""

    def forward(self, h: Tensor, time: Tensor, kv: Any, start: int, write: bool) -> Tensor:
        k, v = h @ self.k, h @ self.v
        past = self.store if kv is None else kv["past"]
        seen = [*past, (k, v)]
        if write or self.careless:
            past.append((k, v))
        k, v = (torch.cat(parts, 1) for parts in zip(*seen, strict=True))
        return h + torch.nn.functional.scaled_dot_product_attention(h @ self.q, k, v)


def fed(calls: Any, change: Any = lambda args, kwargs: None) -> Generator[Any, Any, None]:
    """A loop whose calls are changed: without the K/V that the loop would keep."""
    out = None
    try:
        while True:
            args, kwargs = calls.send(out)
            kwargs["kv"] = None
            change(args, kwargs)
            out = yield args, kwargs
    except StopIteration:
        return


def keeping_loop(model: Causal, place: Any, writes: Any, batch: int = 1) -> Generator[Any, Any, None]:
    for block in model.blocks:
        block.store = place(batch)
    return fed(loop(model, writes, batch=batch))


def examine(model: Causal, make: Any, its: Any) -> AdapterReport:
    return check_adapter(model, make, adapter=its)


@pytest.mark.parametrize("place", PLACES)
def test_a_model_that_holds_its_kv_and_writes_it_in_commit_passes_passes(place: str) -> None:
    model = Causal(block=Keeping)
    make = partial(keeping_loop, model, PLACES[place][0], "commit_only")
    report = examine(model, make, adapter("commit_only"))
    assert report.passed, str(report)
    assert report["K/V writes"].why == "no later pass reads what a denoise pass wrote"


@pytest.mark.parametrize("declared", ["never", "commit_only"])
@pytest.mark.parametrize("place", PLACES)
def test_held_kv_that_denoise_passes_write_without_a_word_is_found(place: str, declared: Any) -> None:
    model = Causal(block=Keeping)
    model.blocks[2].careless = True
    make = partial(keeping_loop, model, PLACES[place][0], "never")
    report = examine(model, make, adapter(declared))
    assert [f.name for f in report.failures] == ["K/V writes"], str(report)
    why = report["K/V writes"].why
    assert f"call {STEPS - 1} (denoise, chunk 0, step {STEPS - 1}) leaves model.blocks.2.{PLACES[place][1]}," in why
    assert f"which call {STEPS} (denoise, chunk 1, step 0) needs, although kv_writes={declared!r}" in why


def test_held_kv_that_every_pass_writes_passes_where_it_is_declared() -> None:
    model = Causal(block=Keeping)
    for block in model.blocks:
        block.careless = True
    report = examine(model, partial(keeping_loop, model, Buffers, "every_forward"), adapter("every_forward"))
    assert report.passed, str(report)
    assert report["K/V writes"].why == "denoise passes write K/V, as declared"


@pytest.mark.parametrize("declared", ["never", "commit_only"])
@pytest.mark.parametrize("held", [True, False])
def test_a_list_that_grows_in_denoise_passes_is_found(held: bool, declared: Any) -> None:
    model = Causal(block=Growing)

    def make(batch: int = 1) -> Any:
        pasts = [[] for _ in model.blocks]
        calls = keeping_loop(model, lambda _: [], declared, batch=batch)
        return calls if held else fed(calls, lambda args, kwargs: kwargs.update(kv=[{"past": past} for past in pasts]))

    assert examine(model, make, adapter(declared)).passed
    model.blocks[1].careless = True
    report = examine(model, make, adapter(declared))
    assert "K/V writes" in [f.name for f in report.failures], str(report)
    path = "model.blocks.1.store" if held else "[1]['kv'][1]['past']"
    assert f"call 1 (denoise, chunk 0, step 1) leaves {path}, which call 2 " in report["K/V writes"].why


def test_kv_in_the_slots_of_an_argument_is_found() -> None:
    model = Causal()

    def make(writes: Any) -> Any:
        kv = [Bare(1) for _ in model.blocks]
        return fed(loop(model, writes), lambda args, kwargs: kwargs.update(kv=kv))

    assert examine(model, lambda: make("commit_only"), adapter()).passed
    report = examine(model, lambda: make("every_forward"), adapter())
    assert [f.name for f in report.failures] == ["K/V writes"]
    assert "call 0 (denoise, chunk 0, step 0) writes to [1]['kv'][0]._Bare__k" in report["K/V writes"].why


class Scratch(Attending):
    """Holds a scratch pad, a memo of what depends on shapes alone, text K/V filled once a rollout, and a count."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.register_buffer("pad", torch.zeros(1, TOKENS, WIDTH))
        self.memo: dict[Any, Tensor] = {}
        self.count = 0

    def forward(self, h: Tensor, time: Tensor, kv: Any, start: int, write: bool) -> Tensor:
        self.count += 1
        if self.pad.shape != h.shape:
            self.pad = torch.empty_like(h)
        self.pad.copy_(h)
        if start not in self.memo:
            self.memo[start] = torch.arange(float(h.shape[1])).add(start).cos()[:, None]
        if kv.get("text") is None:
            kv["text"] = torch.full((WIDTH,), 0.1)
        if self.text is None:
            self.text = torch.full((WIDTH,), 0.1)
        return self.attend(self.pad + 0.01 * self.memo[start] + self.text + kv["text"], time, kv, start, write)


@pytest.mark.parametrize("writes", ["commit_only", "every_forward", "last_step"])
def test_what_is_filled_once_or_written_before_it_is_read_is_no_kv(writes: Any) -> None:
    model = Causal(block=Scratch)

    def make(batch: int = 1, reverse: bool = False) -> Any:
        for block in model.blocks:
            block.text, block.memo = None, {}
        return loop(model, writes, ("cond", "uncond"), batch=batch, reverse=reverse, longer=True)

    report = examine(model, make, adapter(writes))
    assert report.passed, str(report)


class Archiving(Keeping):
    """Keeps what it saw in a list, one entry a chunk, made at one noise level; reads an entry three chunks later."""

    at = 0.0

    def forward(self, h: Tensor, time: Tensor, kv: Any, start: int, write: bool) -> Tensor:
        chunk = start // TOKENS
        if time == self.at:
            self.store.append(h * 1.0)
        return h + torch.tanh(h @ self.mlp) + (0.1 * self.store[chunk - 3] if chunk > 2 else 0.0)


@pytest.mark.parametrize(("at", "once"), [(0.0, False), (1.0, False), (1.0, True)])
def test_entries_that_only_skipped_passes_make_are_missed_after_the_second_one(at: float, once: bool) -> None:
    model = Causal(block=Archiving)
    for block in model.blocks:
        block.at = at
    make = partial(keeping_loop, model, lambda _: [], "every_forward")
    report = examine(model, make, adapter("every_forward", first_pass_exact=once))
    if at == 0 or once:
        assert report.passed, str(report)
        return
    assert [f.name for f in report.failures] == ["K/V after skipped passes"], str(report)
    why = f"after call {3 * (STEPS + 1) - 1} (commit, chunk 2) model.blocks.0.store[2] is missing: see always_compute"
    assert report["K/V after skipped passes"].why == f"{why} and first_pass_exact"


class Publishing(Keeping):
    """Block 0 moves all windows in the first pass of a chunk."""

    first = False

    def forward(self, h: Tensor, time: Tensor, kv: Any, start: int, write: bool) -> Tensor:
        if self.first and self.clock["at"] != start:
            self.clock["at"] = start
            self.clock["mean"] = h.mean(1, keepdim=True)
        return super().forward(h, time, kv, start, write) + 0.1 * self.clock["mean"]


def publishing_loop(model: Causal) -> Any:
    clock: dict[str, Any] = {"at": -1}
    model.blocks[0].first = True
    for block in model.blocks:
        block.clock = clock
    return keeping_loop(model, Plain, "commit_only")


@pytest.mark.parametrize("promise", [{"first_pass_exact": True}, {"always_compute": frozenset({0})}], ids=str)
def test_what_is_left_by_blocks_and_passes_that_are_always_computed_may_be_needed(promise: Any) -> None:
    model = Causal(block=Publishing)
    report = examine(model, partial(publishing_loop, model), adapter())
    assert "K/V writes" in [f.name for f in report.failures]
    assert "leaves model.blocks.0.clock['" in report["K/V writes"].why
    report = examine(model, partial(publishing_loop, model), adapter(**promise))
    assert report["K/V writes"].status == "passed", str(report)


def test_the_model_is_left_as_it_was() -> None:
    model = Causal(block=Growing)
    for block in model.blocks:
        block.store, block.seen, block.careless = [(torch.ones(1, 1, WIDTH),) * 2], {"n": torch.ones(2)}, True
    stores = [block.store for block in model.blocks]
    before = {path: tensor.clone() for path, tensor in held_by(model).items()}

    def make() -> Any:
        for block in model.blocks:
            block.store.clear()
            block.seen["n"].mul_(0)
            block.seen["more"] = 1
        return fed(loop(model, "never"))

    report = examine(model, make, adapter("never"))
    assert [f.name for f in report.failures] == ["K/V writes"]
    assert len(before) == 3 * len(model.blocks) and is_same(held_by(model), before)
    assert all(block.store is store for block, store in zip(model.blocks, stores, strict=True))
    assert all(list(block.seen) == ["n"] for block in model.blocks)


@pytest.mark.parametrize("fails", [True, False])
def test_a_run_in_which_a_model_forgets_leaves_it_as_it_was(fails: bool) -> None:
    model = Causal(block=Growing)
    for block in model.blocks:
        block.store, block.careless = [], True

    def fail(model: Causal, args: Any, kwargs: Any) -> None:
        if fails and kwargs["chunk"] == 4:
            raise KeyError(4)

    model.register_forward_pre_hook(fail, with_kwargs=True)
    calls = [((torch.ones(1, TOKENS, WIDTH), 1.0), {"chunk": n, "step": 0}) for n in range(6)]
    run = Rehearsal(model, adapter("never"), lambda: calls).forgetful([None] * 6, lambda call, *_: call > 2)
    assert (len(run.outputs), type(run.error)) == ((4, KeyError) if fails else (6, type(None)))
    assert run.taken[:3] == [[], [], []] and run.taken[3] == [f"model.blocks.{i}.store" for i in range(4)]
    assert all(not block.store for block in model.blocks)


def test_what_a_repeated_pass_left_is_taken_back_before_it_is_repeated() -> None:
    model = Causal(block=Growing)
    for block in model.blocks:
        block.careless = True
    report = examine(model, partial(keeping_loop, model, lambda _: [], "every_forward"), adapter("every_forward"))
    assert report["what a skipped block returns"].status == "passed", str(report)


FAR = torch.zeros(1)


def glance() -> Tensor:
    """A function that could be looked into for its globals."""
    return FAR


def test_everything_is_found_once_and_parameters_and_functions_never() -> None:
    model = Causal(depth=2, block=Keeping)
    for block in model.blocks:
        block.store, block.friend, block.tied = Buffers(1), [model.blocks[0]], [nn.Parameter(torch.zeros(1))]
    model.lone = [nn.Sequential(Buffers(1))]  # modules that the model does not know
    model.function, model.module, model.more = glance, torch.nn.functional, {"partly": partial(glance)}
    held = {f"model.blocks.{i}.store.{name}" for i in range(2) for name in "kv"}
    assert held_by(model).keys() == held | {"model.lone[0].0.k", "model.lone[0].0.v"}
    assert "[0].k" in tensors_in((Buffers(1),)) and not tensors_in((glance,))


def test_a_snapshot_puts_back_numbers_shapes_and_objects() -> None:
    model = nn.Module()
    model.register_buffer("b", torch.tensor([1.0, float("nan")]))
    model.wide = torch.zeros(1, 2).expand(3, 2)
    model.kv, model.names = Bare(1), {"a"}
    del model.kv.v
    kept, was = Snapshot(model), model.b
    assert not list(kept.changes())
    model.b, model.new = torch.zeros(3), torch.zeros(1)
    was[0] = 5
    model.wide[0, 0] = 7
    model.kv.v, model.kv.k = torch.ones(1), torch.ones(2)
    model.names.add("b")
    paths = {change.path for change in kept.changes()}
    assert paths == {"model.b", "model.new", "model.wide", "model.kv.v", "model.kv._Bare__k", "model.names"}
    kept.put_back()
    assert model.b is was and was[0] == 1 and was[1].isnan() and not hasattr(model, "new")
    assert not model.wide.any() and not hasattr(model.kv, "v") and model.kv.k.shape[1] == ROOM and model.names == {"a"}
    model.kv.k.data = torch.ones(2)
    kept.put_back()
    assert model.kv.k.shape == (1, ROOM, WIDTH) and not list(kept.changes())
