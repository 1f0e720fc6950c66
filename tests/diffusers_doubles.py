"""Model families of diffusers in small, with random weights, in their real pipelines; and policies with a script."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rollcache
from rollcache import Action, Cell, Decision, Reason, Tokens
from rollcache.adapters.spec import Adapter
from rollcache.decision import Record
from rollcache.policies.base import StackEvidence, StackPolicy

WHY = "the real classes of diffusers are needed: pip install 'rollcache[diffusers]'"
pytest.importorskip("transformers", reason=WHY)
diffusers = pytest.importorskip("diffusers", reason=WHY)

WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 3,
}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(make: Any, seed: int = 0) -> Any:
    """A model whose random weights are always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().eval().requires_grad_(False)


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def vae() -> Any:
    return seeded(
        lambda: diffusers.AutoencoderKLWan(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        )
    )


@dataclass(frozen=True, kw_only=True)
class Script:
    """Computes the steps named; repairs those in `repaired` with whole frames or given tokens; replays the others."""

    computed: tuple[int, ...] = (0,)
    repaired: tuple[int, ...] = ()
    tokens: Tokens | None = None
    backend: str = "sparse"

    def build(self, blocks: int) -> Scripted:
        return Scripted(self, blocks)

    def explain(self, record: Record) -> str:
        return f"step {record.step}"


class Scripted(StackPolicy):
    """Follows a script."""

    def __init__(self, config: Script, blocks: int) -> None:
        super().__init__(blocks)
        self.config, self.repairs, self.backend = config, bool(config.repaired), config.backend

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:
        if cell.step in self.config.computed:
            return Decision(Action.COMPUTE, Reason.SCHEDULE)
        if cell.step in self.config.repaired:
            segments = evidence.where.segments
            tokens = self.config.tokens or Tokens.whole_frames(tuple(range(segments[0].grid[0])), segments)
            return Decision(Action.REPAIR, Reason.SCHEDULE, tokens=tokens, share=tokens.share(segments))
        return Decision(Action.REPLAY, Reason.SCHEDULE)


@dataclass(frozen=True)
class Did:
    """One call of a model under a cache."""

    chunk: int
    step: int
    branch: str
    action: str


def done(handle: rollcache.Cache) -> list[Did]:
    """What was decided, in order; passes of a stack method."""
    return [Did(r.chunk, r.step, r.branch, r.action.value) for r in handle.trace]


def located(adapter: Adapter) -> tuple[Adapter, list[Any]]:
    """An adapter that also writes down where it was."""
    seen: list[Any] = []

    def locate(model: Any, args: Any, kwargs: Any) -> Any:
        where = adapter.locate(model, args, kwargs)
        seen.append(where)
        return where

    return replace(adapter, locate=locate), seen


class Failing(Exception):
    pass


@contextlib.contextmanager
def failing(module: nn.Module, call: int) -> Iterator[None]:
    """A module whose forward raises at its `call`-th call, counted from 1."""
    count = 0

    def stop(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == call:
            raise Failing

    handle = module.register_forward_pre_hook(stop)
    try:
        yield
    finally:
        handle.remove()


logging.getLogger("diffusers").setLevel(logging.ERROR)
