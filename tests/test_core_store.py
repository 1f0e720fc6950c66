"""Memory: predicted, held, limited, given back, and flat over a long rollout."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dummies import Stack, doubling, mixing
from torch import Tensor

import rollcache
from rollcache import Action, Cache, Reason, RollcacheError, WindowReuse, XCache

EAGER = XCache(min_cosine=-1, margin=2, max_deviation=None, front_blocks=1, condition_tol=None)
DEPTH, STEPS, BATCH, TOKENS, WIDTH = 5, 3, 2, 40, 8


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def run(
    handle: Cache, model: Stack, chunks: int, x: Tensor | None = None, steps: int = STEPS, key: Any = None
) -> Tensor:
    x = torch.randn(BATCH, TOKENS, WIDTH) if x is None else x
    with handle.rollout(key):
        for _ in range(chunks):
            with handle.chunk():
                for _ in range(steps):
                    handle.step()
                    y = model(x)
    return y


def tensors_held(handle: Cache) -> int:
    """Bytes of all tensors that the rollouts hold, counted one by one."""
    rows = [row for state in handle._engine.rollouts.values() for row in state.rows.values()]
    kept = [t for row in rows for e in row.entries if e is not None for t in e.residual]
    kept += [row.bank for row in rows if row.bank is not None]
    kept += [t for row in rows if row._total is not None for t in row._total]
    return sum({t.data_ptr(): t.nbytes for t in kept}.values())


@pytest.mark.parametrize("policy", [EAGER, WindowReuse(), XCache(front_blocks=2, back_blocks=1, fingerprint_tokens=8)])
def test_predicted_bytes_are_the_bytes_that_are_held_and_anchors_hold_none(policy: Any) -> None:
    model = mixing(DEPTH, WIDTH)
    handle = rollcache.enable(model, policy, blocks=model.blocks, kv_writes="commit_only")
    run(handle, model, 1)
    stats = handle.stats()
    assert stats.bytes_predicted == stats.bytes_actual == tensors_held(handle)
    run(handle, model, 3, key=1)
    residual = BATCH * TOKENS * WIDTH * 4
    spans = {EAGER: 4, WindowReuse(): 1}.get(policy, 2)
    totals = 1 if spans > 1 else 0
    rows = 0 if isinstance(policy, WindowReuse) else (8 if policy.fingerprint_tokens == 8 else 32) + 1
    one = STEPS * ((spans + totals) * residual + spans * BATCH * rows * WIDTH * 4)
    assert handle.stats().bytes_actual == 2 * one == tensors_held(handle)


def test_a_thousand_chunks_hold_what_three_held() -> None:
    model = doubling(3)
    handle = rollcache.enable(model, EAGER, blocks=model.blocks, kv_writes="commit_only", trace_capacity=50)
    x = torch.ones(1, 4, 2)
    held = []
    with handle.rollout():
        for n in range(1000):
            with handle.chunk(kv_update=n % 4 == 0):
                handle.step()
                model(x)
            if n in (3, 999):
                held.append((handle.stats().bytes_actual, tensors_held(handle), len(handle._engine._samplers)))
    assert held[0] == held[1]
    assert len(handle.trace) == 50
    assert handle.stats().cells == 999 * 3
    assert handle.stats().skipped == 750 * 2
    with pytest.raises(RollcacheError, match="raise trace_capacity"):
        handle.explain(chunk=5, step=0, block=1)


def test_disabling_and_resetting_give_everything_back() -> None:
    model = mixing(DEPTH, WIDTH)
    handle = rollcache.enable(model, EAGER, blocks=model.blocks, kv_writes="commit_only")
    run(handle, model, 2)
    some = weakref.ref(handle._engine.rollouts[("rollout", 1)].rows["cond", 0].entries[0].residual[0])
    handle.reset()
    gc.collect()
    assert some() is None
    assert handle.stats().bytes_actual == handle._engine.budget.used == 0
    run(handle, model, 2)
    handle.disable()
    assert handle.stats().bytes_actual == handle._engine.budget.used == 0
    assert handle.stats().skipped == 2 * STEPS * (DEPTH - 1)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("policy", [EAGER, WindowReuse()])
def test_a_memory_budget_is_kept_and_costs_skips_only(share: float, policy: Any) -> None:
    model, x = mixing(DEPTH, WIDTH), torch.randn(BATCH, TOKENS, WIDTH)
    free = rollcache.enable(model, policy, blocks=model.blocks, kv_writes="commit_only")
    run(free, model, 3, x)
    limit = int(share * free.stats().bytes_actual)
    everything = free.stats().skipped
    free.disable()
    expected = model(x)
    handle = rollcache.enable(model, policy, blocks=model.blocks, kv_writes="commit_only", memory_budget=limit)
    torch.testing.assert_close(run(handle, model, 3, x), expected)
    stats = handle.stats()
    assert tensors_held(handle) == stats.bytes_actual <= limit
    assert (stats.skipped == everything) is (share == 1.0)
    assert (stats.skipped == 0) is (share in (0.0, 0.1))
    if share < 1:
        assert Reason.NOTHING_STORED in {r.reason for r in handle.trace}
        assert "times refused" in handle.summary()


def test_a_device_without_room_costs_skips_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = doubling(2)
    handle = rollcache.enable(model, EAGER, blocks=model.blocks, kv_writes="commit_only")

    def full(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("rollcache.store.torch.empty", full)
    assert float(run(handle, model, 3, torch.ones(1, 4, 2))[0, 0, 0]) == 4
    assert handle.stats().skipped == 0
    assert handle._engine.budget.used == 0


def test_residuals_may_be_stored_in_a_smaller_dtype() -> None:
    model, x = mixing(DEPTH, WIDTH), torch.randn(BATCH, TOKENS, WIDTH)
    exact = model(x)
    sizes = []
    for dtype in (None, torch.bfloat16):
        handle = rollcache.enable(
            model, WindowReuse(), blocks=model.blocks, kv_writes="commit_only", storage_dtype=dtype
        )
        y = run(handle, model, 2, x)
        assert y.dtype is torch.float32
        torch.testing.assert_close(y, exact, rtol=1e-2, atol=1e-2)
        sizes.append(handle.stats().bytes_actual)
        handle.disable()
    assert sizes[1] * 2 == sizes[0]


def test_a_run_in_bfloat16_adds_up_in_float32() -> None:
    """One large residual and many small ones: added up one by one in bfloat16 the small ones would be lost."""

    class Adding(torch.nn.Module):
        def __init__(self, amount: float) -> None:
            super().__init__()
            self.amount = amount

        def forward(self, h: Tensor) -> Tensor:
            return (h.float() + self.amount).to(h.dtype)

    model = Stack([Adding(256.0), *[Adding(0.5) for _ in range(8)]])
    handle = rollcache.enable(
        model, XCache(front_blocks=0), blocks=model.blocks, kv_writes="commit_only", storage_dtype=torch.float32
    )
    x = torch.zeros(1, 4, 2)
    run(handle, model, 1, x, steps=1, key="a")
    row = handle._engine.rollouts["a"].rows["cond", 0]
    for entry in row.entries:
        assert entry is not None
        entry.residual = tuple(r.bfloat16() for r in entry.residual)
    row._run = None  # force the sum of single residuals
    row._total = None
    assert float(row.total(0, 9)[0][0, 0, 0]) == 260.0


def test_a_stored_residual_does_not_change_when_the_model_reuses_its_tensors() -> None:
    model = doubling(2)
    handle = rollcache.enable(model, EAGER, blocks=model.blocks, kv_writes="commit_only")
    x = torch.ones(1, 4, 2)
    y = run(handle, model, 1, x, steps=1, key="a")
    y.fill_(99.0)
    x.fill_(1.0)
    with handle.rollout("a"), handle.chunk(1):
        handle.step()
        assert float(model(x)[0, 0, 0]) == 4
    assert list(handle.trace)[-1].action is Action.REPLAY


@pytest.mark.parametrize(
    ("name", "value"),
    [("memory_budget", bad) for bad in (-1, "1 GB", float("nan"), float("inf"), 2e9, True)]
    + [(name, bad) for name in ("max_rollouts", "trace_capacity") for bad in (0, -1, "4", 1.5, True)],
)
def test_a_setting_of_enable_out_of_range_is_named(name: str, value: Any) -> None:
    model = doubling(2)
    with pytest.raises(ValueError, match=f"^{name} must be an integer of at least [01], got "):
        rollcache.enable(model, EAGER, blocks=model.blocks, kv_writes="commit_only", **{name: value})
    assert "forward" not in vars(model)


def test_what_is_no_module_is_named() -> None:
    with pytest.raises(TypeError, match="takes a torch module, got list"):
        rollcache.enable([], EAGER)  # type: ignore[arg-type]
