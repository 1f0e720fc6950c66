"""Small models whose output says what was computed: a doubling block makes skip or compute readable off one number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Doubling(nn.Module):
    """A block that doubles its input and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.factor = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, h: Tensor, *_: Any) -> Tensor:
        self.calls += 1
        return h * self.factor


class Mixing(nn.Module):
    """A random smooth block: a token mixer and a channel mixer, conditioned on a vector."""

    def __init__(self, width: int, seed: int, strength: float = 0.5) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.strength = strength
        self.up = nn.Parameter(torch.randn(width, width, generator=g) / width**0.5, requires_grad=False)
        self.down = nn.Parameter(torch.randn(width, width, generator=g) / width**0.5, requires_grad=False)
        self.calls = 0

    def forward(self, h: Tensor, condition: Tensor | None = None) -> Tensor:
        self.calls += 1
        mixed = h + 0.3 * h.mean(1, keepdim=True)
        x = torch.tanh(mixed @ self.up.to(h.dtype))
        if condition is not None:
            x = x * (1 + condition.to(h.dtype))
        return h + self.strength * (x @ self.down.to(h.dtype))


class Stack(nn.Module):
    """Blocks called one after the other, positionally. `between` is applied to the hidden state before each."""

    def __init__(self, blocks: list[nn.Module], between: Callable[[int, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.between = between

    def forward(self, h: Tensor, *extra: Any) -> Tensor:
        for i, block in enumerate(self.blocks):
            if self.between is not None:
                h = self.between(i, h)
            h = block(h, *extra)
        return h

    @property
    def calls(self) -> list[int]:
        """Calls of every block since they were forgotten."""
        return [b.calls for b in self.blocks]

    def forget_calls(self) -> None:
        """Count from zero again."""
        for b in self.blocks:
            b.calls = 0


def doubling(depth: int = 4) -> Stack:
    """A stack of doubling blocks."""
    return Stack([Doubling() for _ in range(depth)])


def mixing(depth: int = 6, width: int = 8, seed: int = 0, strength: float = 0.5) -> Stack:
    """A stack of random smooth blocks."""
    return Stack([Mixing(width, seed * 100 + i, strength) for i in range(depth)])
