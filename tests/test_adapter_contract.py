"""What an adapter may say: what comes beside the hidden state, what must be computed, and which models it is for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from dummies import Doubling, Stack, doubling
from torch import Tensor, nn

import rollcache
from rollcache import (
    Action,
    Adapter,
    BlockIO,
    Reason,
    RollcacheError,
    Stacked,
    StepReuse,
    Structure,
    WindowReuse,
    XCache,
)
from rollcache.adapters import find, register, registry

EAGER = XCache(min_cosine=-1, margin=2, max_deviation=None, front_blocks=0, condition_tol=None)
ONE_OF_TWO = StepReuse(steps=2, anchors=(0,))


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def ones(scale: float = 1.0) -> Tensor:
    return torch.full((1, 4, 2), float(scale))


def number(y: Tensor) -> float:
    assert torch.equal(y, y.flatten()[0].expand_as(y))
    return float(y.flatten()[0])


class Paired(Doubling):
    """Returns (hidden, how often it was called), or the hidden state alone."""

    alone = False

    def forward(self, h: Tensor, *_: Any) -> Any:
        out = super().forward(h)
        return out if self.alone else (out, self.calls)


class Collecting(Stack):
    """Takes blocks that return a pair or not, and remembers what came beside the hidden state."""

    def forward(self, h: Tensor, *_: Any) -> Tensor:
        self.seen: list[Any] = []
        for block in self.blocks:
            out = block(h)
            h, aux = out if isinstance(out, tuple) else (out, "alone")
            self.seen.append(aux)
        return h


def run(handle: rollcache.Cache, model: nn.Module, inputs: list[Tensor], steps: int = 1, **chunk: Any) -> list[Any]:
    out = []
    with handle.rollout():
        for x in inputs:
            with handle.chunk(**chunk):
                for _ in range(steps):
                    handle.step()
                    y = model(x)
                out.append(y)
    return out


def skip_once(policy: Any, aux: Any) -> tuple[Collecting, float]:
    """A pass that is computed and one that is skipped, in the next chunk or in the next step."""
    model = Collecting([Paired() for _ in range(3)])
    handle = rollcache.enable(
        model, policy, blocks=model.blocks, kv_writes="commit_only", io=BlockIO(returns="hidden, aux", aux=aux)
    )
    across_steps = isinstance(policy, StepReuse | Stacked)
    with handle.rollout():
        for n in range(1 if across_steps else 2):
            with handle.chunk():
                for t in range(2 if across_steps else 1):
                    handle.step()
                    y = model(ones(1 + 4 * (n or t)))
    assert list(handle.trace)[-1].action is Action.REPLAY
    return model, number(y)


@pytest.mark.parametrize("policy", [EAGER, WindowReuse(), ONE_OF_TWO, Stacked(passes=ONE_OF_TWO, blocks=EAGER)])
@pytest.mark.parametrize(("aux", "expected"), [("none", None), ("last", 1), ("omit", "alone")])
def test_a_skipped_block_returns_what_the_adapter_says_beside_its_hidden_state(
    policy: Any, aux: Any, expected: Any
) -> None:
    model, y = skip_once(policy, aux)
    assert y == 5 + 7
    assert model.seen == [expected] * 3
    assert model.calls == [1, 1, 1]


@pytest.mark.parametrize("policy", [EAGER, ONE_OF_TWO])
def test_a_function_makes_it_of_the_arguments_that_the_skipped_block_was_called_with(policy: Any) -> None:
    model, _ = skip_once(policy, lambda args, kwargs: number(args[0]))
    assert model.seen == [5, 12, 12]  # one addition carries block 0 to the end of the run


def test_what_a_block_returned_last_is_kept_by_branch() -> None:
    model = Collecting([Paired() for _ in range(2)])
    handle = rollcache.enable(
        model, EAGER, blocks=model.blocks, kv_writes="commit_only", io=BlockIO(returns="hidden, aux", aux="last")
    )
    seen = []
    with handle.rollout():
        for _ in range(2):
            with handle.chunk():
                for branch in ("cond", "uncond"):
                    handle.step(branch=branch)
                    model(ones())
                    seen.append(model.seen)
    assert seen == [[1, 1], [2, 2], [1, 1], [2, 2]]


@pytest.mark.parametrize("alone", [False, True])
def test_a_block_may_return_its_hidden_state_alone(alone: bool) -> None:
    model = Collecting([Paired() for _ in range(2)])
    for block in model.blocks:
        block.alone = alone
    handle = rollcache.enable(
        model, EAGER, blocks=model.blocks, kv_writes="commit_only", io=BlockIO(returns="hidden, aux", aux="omit")
    )
    first, second = run(handle, model, [ones(), ones(2)])
    assert (number(first), number(second)) == (4, 2 + 3)


def test_what_does_not_go_together_in_blockio_is_refused() -> None:
    with pytest.raises(ValueError, match="does not go with returns='hidden'"):
        BlockIO(aux="last")
    with pytest.raises(ValueError, match="must be 'none', 'last', 'omit' or a function"):
        BlockIO(returns="hidden, aux", aux="first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not go with encoder"):
        BlockIO(returns="hidden, aux", encoder=(1, "e"))


def with_locate(**settings: Any) -> tuple[Adapter, list[rollcache.Pass]]:
    """An adapter whose next position is what the list holds."""
    here: list[rollcache.Pass] = []
    return Adapter(blocks=lambda m: list(m.blocks), locate=lambda m, a, k: here[0], **settings), here


def go(model: Stack, here: list[rollcache.Pass], passes: list[tuple[int, int, str]]) -> list[float]:
    out = []
    for chunk, step, branch in passes:
        here[:] = [rollcache.Pass(role=rollcache.Role.DENOISE, chunk=chunk, step=step, branch=branch)]
        out.append(number(model(ones(1 + chunk))))
    return out


@pytest.mark.parametrize(
    "required", [frozenset({0}), frozenset({-1}), frozenset({1}), lambda blocks: [len(blocks) - 2]]
)
@pytest.mark.parametrize("policy", [EAGER, XCache(**{**vars(EAGER), "span_blocks": 4}), WindowReuse()])
def test_a_block_that_must_be_computed_always_is(policy: Any, required: Any) -> None:
    model = doubling(4)
    adapter, here = with_locate(always_compute=required)
    handle = rollcache.enable(model, policy, adapter=adapter)
    outputs = go(model, here, [(n, 0, "cond") for n in range(3)])
    (kept,) = adapter.required(list(model.blocks))
    assert model.calls == [3 if i == kept else 1 for i in range(4)]
    assert handle.stats().skip_rate == 3 / 4
    assert handle.stats().cells == 2 * 4
    x = 2.0
    for i in range(4):
        x = 2 * x if i == kept else x + 2**i
    assert outputs[1] == x
    assert Reason.ANCHOR in {r.reason for r in handle.trace if r.chunk}


@pytest.mark.parametrize("required", [{0}, {-1}, {0, 1, 3}])
def test_a_method_of_whole_passes_leaves_required_blocks_at_the_ends_to_the_model(required: set[int]) -> None:
    model = doubling(4)
    adapter, here = with_locate(always_compute=frozenset(required))
    handle = rollcache.enable(model, StepReuse(steps=3, anchors=(0,)), adapter=adapter)
    go(model, here, [(0, t, "cond") for t in range(3)])
    kept = adapter.required(list(model.blocks))
    assert model.calls == [3 if i in kept else 1 for i in range(4)]
    assert handle.stats().cells == 3 * 4
    assert handle.stats().skipped == 2 * (4 - len(kept))


def test_methods_that_cannot_do_without_a_required_block_are_refused_when_they_are_enabled() -> None:
    model = doubling(3)
    adapter, _ = with_locate(always_compute=frozenset({1}))
    with pytest.raises(RollcacheError, match=r"StepReuse cannot be used with Stack, of whose 3 blocks \[1\]"):
        rollcache.enable(model, StepReuse(steps=3, anchors=(0,)), adapter=adapter)
    adapter, _ = with_locate(always_compute=lambda blocks: range(len(blocks)))
    with pytest.raises(RollcacheError, match="XCache cannot be used"):
        rollcache.enable(model, EAGER, adapter=adapter)
    adapter, _ = with_locate(always_compute=frozenset({3}))
    with pytest.raises(RollcacheError, match="names block 3, but the model has 3 blocks"):
        rollcache.enable(model, EAGER, adapter=adapter)
    assert all("forward" not in vars(m) for m in model.modules())


@pytest.mark.parametrize("policy", [EAGER, WindowReuse()])
def test_the_first_pass_of_a_chunk_is_exact_in_every_branch_where_the_model_needs_it(policy: Any) -> None:
    model = doubling(2)
    adapter, here = with_locate(first_pass_exact=True)
    handle = rollcache.enable(model, policy, adapter=adapter)
    order = [(n, t, b) for n in range(3) for t in range(2) for b in ("cond", "uncond")]
    go(model, here, order)
    for chunk, step, branch in order:
        record = handle.trace.find(chunk, step, 1, branch)
        expected = (Action.COMPUTE, Reason.REQUIRED) if step == 0 else (Action.REPLAY, record.reason)
        assert chunk == 0 or (record.action, record.reason) == expected
    where = rollcache.Pass(role=rollcache.Role.DENOISE, chunk=3)
    assert not handle.replays_chunk(where)


def test_a_method_of_whole_passes_computes_a_first_pass_that_must_be_exact() -> None:
    model = doubling(2)
    adapter, here = with_locate(first_pass_exact=lambda m, args, kwargs: number(args[0]) == 2)
    handle = rollcache.enable(model, rollcache.C3ache(first=0, period=4), adapter=adapter)
    go(model, here, [(n, 0, "cond") for n in range(3)])
    assert handle.trace.find(1, 0, 0).reason is Reason.REQUIRED
    assert handle.trace.find(2, 0, 0).reason is not Reason.REQUIRED


def test_a_function_says_from_when_on_the_first_pass_must_be_exact() -> None:
    model = doubling(2)
    asked = []

    def rolls(m: Any, args: Any, kwargs: Any) -> bool:
        asked.append(number(args[0]))
        return number(args[0]) >= 3

    adapter, here = with_locate(first_pass_exact=rolls)
    handle = rollcache.enable(model, EAGER, adapter=adapter)
    go(model, here, [(n, t, "cond") for n in range(4) for t in range(2)])
    assert [handle.trace.find(n, 0, 1).action for n in (1, 2, 3)] == [Action.REPLAY, Action.COMPUTE, Action.COMPUTE]
    assert asked == [1, 2, 3, 4]  # once a chunk


class Wide(nn.Module):
    """Stands for a class that is copied from repository to repository."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Doubling() for _ in range(depth)])

    def forward(self, x: Tensor, kv_cache: Any = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BY_CLASS", dict(registry._BY_CLASS))
    monkeypatch.setattr(registry, "_BY_STRUCTURE", dict(registry._BY_STRUCTURE))


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch, clean_registry: None) -> ModuleType:
    """A module with adapters, which must be imported by name."""
    module = ModuleType("some_family")
    module.ADAPTER = with_locate()[0]  # type: ignore[attr-defined]
    module.OTHER = with_locate(kv_writes="never")[0]  # type: ignore[attr-defined]
    module.make = lambda model: with_locate(first_pass_exact=len(model.blocks) > 2)[0]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_family", module)
    return module


def test_a_class_is_known_by_itself_or_by_its_exact_name_and_subclasses_are_not(family: ModuleType) -> None:
    register(Wide, "some_family")
    assert find(Wide()) is family.ADAPTER
    register(f"{__name__}.Wide", "some_family:OTHER")
    assert find(Wide()) is family.OTHER

    class Wider(Wide):
        pass

    with pytest.raises(RollcacheError, match=r"no adapter for .*Wider"):
        find(Wider())


def test_an_adapter_may_be_made_for_the_model(family: ModuleType) -> None:
    register(Wide, "some_family:make")
    assert [find(Wide(depth)).first_pass_exact for depth in (2, 3)] == [False, True]
    register(Wide, lambda model: "nothing")  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="gives no Adapter for Wide, but str"):
        find(Wide())


def test_a_structure_fits_a_class_of_that_name_wherever_it_was_copied_to(family: ModuleType) -> None:
    structure = Structure(
        class_name="Wide",
        attributes=("blocks.0.factor",),
        parameters=("kv_cache",),
        block_parameters=("h",),
    )
    register(structure, "some_family")
    assert find(Wide()) is family.ADAPTER
    copied = type("Wide", (Wide,), {"__module__": "elsewhere"})
    assert find(copied()) is family.ADAPTER


def test_a_namesake_that_looks_different_is_refused_with_what_it_lacks(family: ModuleType) -> None:
    register(
        Structure(
            class_name="Wide",
            attributes=("blocks.0.self_attn.q", "head"),
            parameters=("current_start",),
            block_parameters=("e",),
        ),
        "some_family",
    )
    lacks = "has no blocks.0.self_attn.q, has no head, takes no current_start=, its blocks take no e="
    with pytest.raises(RollcacheError, match=lacks):
        find(Wide())


def test_two_structures_that_fit_are_not_chosen_between(family: ModuleType) -> None:
    register(Structure(class_name="Wide"), "some_family")
    register(Structure(class_name="Wide", parameters=("kv_cache",)), "some_family:OTHER")
    with pytest.raises(RollcacheError, match="2 adapters fit"):
        find(Wide())


class Holding(nn.Module):
    """Has another module as an attribute of a given name."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


def test_a_wrapper_is_refused_with_the_part_that_has_an_adapter(clean_registry: None) -> None:
    register(Wide, "a_family_that_is_not_there")  # and need not be: nothing is imported
    register(Structure(class_name="Collecting", attributes=("blocks",)), "neither_is_this")
    one = r"But its part `model` \(Wide\) has one: enable the cache on that\.$"
    with pytest.raises(RollcacheError, match=one):
        find(Holding(vae=nn.Linear(1, 1), model=Wide()))
    nested = Holding(base_model=Holding(model=Collecting([Paired()])), teacher=Wide())
    several = r"its part `base_model\.model` \(Collecting\) or `teacher` \(Wide\) has one: enable the cache on that\.$"
    with pytest.raises(RollcacheError, match=several):
        find(nested)
    register(Structure(class_name="Collecting", attributes=("blocks",)), "rollcache.adapters.refused:magi")
    outer = Wide()
    outer.inner = Wide()
    with pytest.raises(RollcacheError, match=r"its part `teacher` \(Wide\) has one"):
        find(Holding(refused=Collecting([Paired()]), teacher=outer))
    for without in (Holding(), Holding(refused=Collecting([Paired()]))):
        with pytest.raises(RollcacheError, match=r"mark the passes\.$"):
            find(without)


def test_a_model_that_was_compiled_as_a_whole_is_told_so(clean_registry: None) -> None:
    register(Wide, "a_family_that_is_not_there")
    compiled = torch.compile(Wide(), backend="eager")
    advice = r"was compiled as a whole, .* compile its blocks one by one.* docs/footguns\.md\.$"
    with pytest.raises(RollcacheError, match=f"^this Wide {advice}"):
        rollcache.enable(compiled, EAGER)  # type: ignore[arg-type]
    with pytest.raises(RollcacheError, match=rf"part `generator\.model` \(Wide\) has one; it {advice}"):
        find(Holding(generator=Holding(model=compiled)))


def test_the_classes_of_diffusers_that_are_known_exist_and_have_an_adapter() -> None:
    pytest.importorskip("diffusers")
    names = [name for name in registry._BY_CLASS if name.startswith("diffusers.")]
    assert len(names) == 5
    for name in names:
        module, _, cls = name.rpartition(".")
        assert registry.qualified(getattr(import_module(module), cls)) == name
        source, _, function = str(registry._BY_CLASS[name]).partition(":")
        assert callable(getattr(import_module(source), function))


def test_the_family_of_self_forcing_is_known_by_its_structure_wherever_it_was_copied_to() -> None:
    import self_forcing_double

    model = self_forcing_double.CausalWanModel()
    assert type(model).__module__ == "self_forcing_double"
    assert find(model).kv_writes == "every_forward"
    del model.blocks[0].modulation
    with pytest.raises(RollcacheError, match=r"It is no CausalWanModel as known: has no blocks\.0\.modulation"):
        find(model)


def test_an_adapter_is_imported_when_a_model_of_its_class_turns_up() -> None:
    code = (
        "import sys, rollcache.public\n"
        "from rollcache.adapters import registry\n"
        "sources = [*registry._BY_CLASS.values(), *registry._BY_STRUCTURE.values()]\n"
        "families = [s.partition(':')[0] for s in sources]\n"
        "print(len(families), [m for m in (*families, 'diffusers', 'rollcache.street') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, loaded = done.stdout.strip().split(" ", 1)
    assert int(count) >= 1
    assert loaded == "[]"
