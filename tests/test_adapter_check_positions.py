"""`check_adapter` on what `locate` counts: steps from 0, chunks that are no steps, and enough of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from causal import Causal, adapter, locate

from rollcache import Pass, check_adapter


def positions(its: Any, calls: Any) -> str:
    """What the check of positions finds wrong in a list of `(chunk, step, time)`; empty if nothing."""
    model = Causal()

    def make() -> Any:
        for n, (chunk, step, time) in enumerate(calls):
            x = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(n))
            yield (x, time), {"chunk": chunk, "step": step, "branch": "cond", "write": False}

    finding = check_adapter(model, make, adapter=its)["positions"]
    return finding.why if finding.status == "failed" else ""


CALLS = [(n, t, 1 - t / 2) for n in range(3) for t in range(2)]


def test_a_chunk_index_that_never_advances_is_found() -> None:
    still = adapter(locate=lambda *call: replace(locate(*call), chunk=0))
    why = positions(still, CALLS)
    assert why.startswith("call 2 (denoise, chunk 0, step 0): chunk 0 begins twice; step 2 ")
    assert "chunk 0 begins twice" in positions(still, [(n, 0, 1.0) for n in range(4)])


def test_steps_that_are_taken_for_chunks_are_found_by_their_time() -> None:
    def stepwise(model: Any, args: Any, kwargs: Any) -> Pass:
        where = locate(model, args, kwargs)
        return replace(where, chunk=2 * where.chunk + where.step, step=0)

    why = positions(adapter("never", locate=stepwise), CALLS)
    assert why.startswith(
        "call 1 (denoise, chunk 1, step 0) begins a chunk at time 0.5, which is lower than the 1 that"
    )
    assert "is it a step of that chunk?" in why
    untold = adapter("never", locate=lambda *call: replace(stepwise(*call), time=None))
    assert not positions(untold, CALLS)


@pytest.mark.parametrize(
    "times", [(1, 0.5), (0.5, 0.5), (0, 0.5), (1,)], ids=["falling", "standing still", "rising", "one step"]
)
def test_chunks_that_begin_where_the_one_before_began_pass(times: tuple[float, ...]) -> None:
    assert not positions(adapter("never"), [(n, t, time) for n in range(3) for t, time in enumerate(times)])


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_rollout_of_fewer_than_three_chunks_shows_too_little(chunks: int) -> None:
    why = positions(adapter("never"), CALLS[: 2 * chunks])
    assert why == f"the rollout has {chunks} of what locate() calls a chunk: let it have three or more"
