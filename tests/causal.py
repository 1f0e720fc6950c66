"""A small causal video transformer with a K/V cache, in the four ways in which such models keep one, and its loop."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rollcache import Adapter, BlockIO, Pass, Role

KV = list[dict[str, Tensor]]
Writes = Literal["never", "commit_only", "every_forward", "last_step"]

BATCH, TOKENS, WIDTH, CHUNKS, STEPS = 1, 6, 8, 4, 3


class Attending(nn.Module):
    """A block: attention to the past and itself, then a channel mixer. What it returns beside is for subclasses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        for name in ("q", "k", "v", "mlp"):
            weight = torch.randn(WIDTH, WIDTH, generator=g) / WIDTH**0.5
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))

    def attend(self, h: Tensor, time: Tensor, kv: dict[str, Tensor] | None, start: int, write: bool) -> Tensor:
        k, v = h @ self.k, h @ self.v
        if kv is not None:
            if write:
                kv["k"][:, start : start + h.shape[1]], kv["v"][:, start : start + h.shape[1]] = k, v
            k = torch.cat((kv["k"][:, :start], k), 1)
            v = torch.cat((kv["v"][:, :start], v), 1)
        h = h + torch.nn.functional.scaled_dot_product_attention(h @ self.q, k, v)
        return h + torch.tanh(h @ self.mlp) * (1 - 0.5 * time)

    def forward(self, h: Tensor, time: Tensor, kv: Any = None, start: int = 0, write: bool = False) -> Any:
        return self.attend(h, time, kv, start, write)


class Causal(nn.Module):
    """Takes the noisy latent [B, L, C], its noise level, and K/V of the past."""

    def __init__(self, depth: int = 4, block: type[Attending] = Attending) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(i) for i in range(depth)])
        self.calls: list[str] = []

    def forward(
        self,
        x: Tensor,
        time: float,
        *,
        chunk: int,
        step: int,
        role: str = "denoise",
        branch: str = "cond",
        start: int = 0,
        kv: KV | None = None,
        write: bool = False,
    ) -> Tensor:
        h = x * 1.0
        for i, block in enumerate(self.blocks):
            h = block(h, torch.tensor(time), None if kv is None else kv[i], start, write)
        return h


def loop(
    model: Causal,
    writes: Writes = "commit_only",
    branches: tuple[str, ...] = ("cond",),
    batch: int = BATCH,
    reverse: bool = False,
    longer: bool = False,
) -> Generator[Any, Any, None]:
    """The calls of a rollout: `out = yield args, kwargs` where a loop calls the model."""
    g = torch.Generator().manual_seed(0)
    room = TOKENS * (CHUNKS + 1)

    def fresh() -> KV:
        return [{name: torch.zeros(batch, room, WIDTH) for name in "kv"} for _ in model.blocks]

    caches = {b: fresh() for b in branches}
    start = 0
    for n in range(CHUNKS):
        tokens = TOKENS * (2 if longer and n == CHUNKS - 2 else 1)
        x = torch.randn(1, tokens, WIDTH, generator=g).expand(batch, -1, -1).contiguous()
        for t in range(STEPS):
            out = {}
            for b in reversed(branches) if reverse else branches:
                write = writes == "every_forward" or (writes == "last_step" and t == STEPS - 1)
                kv = None if writes == "never" else caches[b]
                given = x if b == "cond" else x * 0.5
                where = {"chunk": n, "step": t, "branch": b, "start": start}
                out[b] = yield (given, 1 - t / STEPS), {**where, "kv": kv, "write": write}
            x = x - sum(out.values()) / (STEPS * len(out))
        if writes in ("commit_only", "every_forward"):
            for b in branches:
                where = {"chunk": n, "step": STEPS, "branch": b, "role": "commit", "start": start}
                yield (x, 0.0), {**where, "kv": caches[b], "write": True}
        start += tokens


def locate(model: Causal, args: Any, kwargs: Any) -> Pass:
    """Reads what the loop says."""
    role = Role(kwargs.get("role", "denoise"))
    step = 0 if role is Role.COMMIT else kwargs["step"]
    last = kwargs["write"] and kwargs.get("last", False)
    return Pass(role=role, chunk=kwargs["chunk"], step=step, branch=kwargs["branch"], time=args[1], kv_write=last)


def adapter(writes: Writes = "commit_only", io: BlockIO | None = None, **changes: Any) -> Adapter:
    """The truth about `Causal`."""

    def located(model: Causal, args: Any, kwargs: Any) -> Pass:
        return locate(model, args, kwargs | {"last": writes == "last_step"})

    settings: dict[str, Any] = {"locate": located, "kv_writes": writes, "io": io or BlockIO(hidden=(0, "h"))}
    return Adapter(blocks=lambda m: list(m.blocks), **{**settings, **changes})
