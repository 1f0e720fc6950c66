"""A copy of a cached model, by any of the usual ways, is the model as it would be without the cache."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dummies import Doubling, Stack, doubling, mixing
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import rollcache
from rollcache import RollcacheError, WindowReuse


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS = [copy.deepcopy, saved, *(lambda m, p=p: pickle.loads(pickle.dumps(m, p)) for p in range(6))]


def run(cache: rollcache.Cache, model: nn.Module, x: Tensor) -> Tensor:
    with cache.rollout():
        for _ in range(2):
            with cache.chunk():
                cache.step()
                y = model(x)
    return y


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_holds_nothing_of_the_cache(way: Callable[[nn.Module], nn.Module]) -> None:
    model, x = mixing(3), torch.randn(1, 6, 8)
    expected = model(x)
    names = [set(vars(m)) for m in model.modules()]
    with rollcache.enable(model, WindowReuse(), blocks=model.blocks, kv_writes="commit_only") as cache:
        run(cache, model, x)
        other = way(model)
        assert [set(vars(m)) for m in other.modules()] == names
        assert torch.equal(other(x), expected)
        other.blocks[0].up.zero_()
        assert torch.equal(model.blocks[0].up, mixing(3).blocks[0].up)
        with rollcache.enable(other, WindowReuse(), blocks=other.blocks, kv_writes="commit_only") as another:
            run(another, other, x)
        assert cache.enabled
    assert [set(vars(m)) for m in model.modules()] == names


def test_a_file_of_a_cached_model_is_that_of_the_bare_one() -> None:
    """So it opens where rollcache is not installed."""
    model = torch.nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    bare, state = pickle.dumps(model), {k: v.clone() for k, v in model.state_dict().items()}
    with rollcache.enable(model, WindowReuse(), blocks=list(model), kv_writes="commit_only") as cache:
        run(cache, model, torch.randn(1, 6, 4))
        cached, now = pickle.dumps(model), model.state_dict()
    assert list(state) == list(now) and all(torch.equal(state[k], now[k]) for k in state)
    assert b"rollcache" not in cached
    code = (
        "import pickle, sys; sys.modules['rollcache'] = None\n"
        "models = [pickle.loads(bytes.fromhex(h)) for h in sys.stdin.read().split()]\n"
        "a, b = ([vars(m).keys() for m in model.modules()] for model in models); assert a == b"
    )
    subprocess.run([sys.executable, "-c", code], input=f"{bare.hex()} {cached.hex()}", text=True, check=True)


def test_a_shallow_copy_computes_with_the_shared_blocks() -> None:
    model = doubling(2)
    with rollcache.enable(model, WindowReuse(), blocks=model.blocks, kv_writes="commit_only"):
        assert float(copy.copy(model)(torch.ones(1))) == 4


def test_a_forward_that_was_put_on_the_instance_before_comes_along() -> None:
    model = doubling(1)
    model.blocks[0].forward = torch.neg
    with rollcache.enable(model, WindowReuse(), blocks=model.blocks, kv_writes="commit_only"):
        other = copy.deepcopy(model)
    assert other.blocks[0].forward is torch.neg


class Remembering(Doubling):
    """Chooses itself what a copy knows."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "calls": -1}


class Versioned(Doubling):
    """Has a state that is no dictionary."""

    def __getstate__(self) -> tuple[int, dict[str, Any]]:
        return 1, self.__dict__

    def __setstate__(self, state: tuple[int, dict[str, Any]]) -> None:
        super().__setstate__(state[1])


def test_a_state_of_its_own_is_asked_for() -> None:
    model = Stack([Remembering()])
    with rollcache.enable(model, WindowReuse(), blocks=model.blocks, kv_writes="commit_only"):
        other = copy.deepcopy(model)
    assert other.calls == [-1]
    assert not {"forward", "__getstate__"} & set(vars(other.blocks[0]))


def test_what_cannot_be_copied_without_its_hook_says_so() -> None:
    model = Stack([Versioned()])
    with rollcache.enable(model, WindowReuse(), blocks=model.blocks, kv_writes="commit_only"):
        for way in WAYS[:2]:
            with pytest.raises(RollcacheError, match=r"Versioned cannot be copied .* disable the cache first"):
                way(model)
    assert float(copy.deepcopy(model)(torch.ones(1))) == 2


def test_a_module_that_copies_its_attributes_itself_gives_a_bare_model() -> None:
    """Parametrised modules do."""
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)))
    x = torch.randn(1, 6, 4)
    expected = model(x)
    with rollcache.enable(model, WindowReuse(), blocks=list(model), kv_writes="commit_only") as cache:
        other = copy.deepcopy(copy.deepcopy(model))
        assert torch.equal(other(x), expected)
        assert cache.stats().passes == {}
    nn.init.zeros_(model[0].bias)
    assert torch.equal(other(x), expected)


def test_a_handle_is_not_copied() -> None:
    model = doubling(1)
    with rollcache.enable(model, WindowReuse(), blocks=model.blocks, kv_writes="commit_only") as cache:
        for way in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(RollcacheError, match="copy its model"):
                way(cache)
