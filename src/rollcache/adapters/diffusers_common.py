"""What the model families of diffusers share: arguments by position or name, and latents as tokens."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as nnf
from torch import Tensor

from rollcache.adapters.spec import Args, Kwargs
from rollcache.passes import RollcacheError

Size = tuple[int, int, int]


def argument(args: Args, kwargs: Kwargs, position: int, name: str) -> Any:
    """An argument that the model cannot do without."""
    if position < len(args):
        return args[position]
    if name in kwargs:
        return kwargs[name]
    raise RollcacheError(f"the model was called without {name}=, argument {position}.")


def optional(args: Args, kwargs: Kwargs, position: int, name: str) -> Any:
    """An argument, None where it was left out."""
    return args[position] if position < len(args) else kwargs.get(name)


def present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Those that are there."""
    return tuple(t for t in tensors if t is not None)


def grid(latents: Tensor, patch: Size) -> Size:
    """Token grid (F, H, W) of latents [B, C, f, h, w]."""
    frames, height, width = (n // p for n, p in zip(latents.shape[2:], patch, strict=True))
    return frames, height, width


def padded(latents: Tensor | None, patch: Size) -> int:
    """Tokens of latents [B, C, f, h, w] that are padded to whole patches."""
    if latents is None:
        return 0
    frames, height, width = (-(-n // p) for n, p in zip(latents.shape[2:], patch, strict=True))
    return frames * height * width


def patches(latents: Tensor, patch: Size) -> Tensor:
    """Latents [B, C, f, h, w] as tokens [B, F*H*W, C*patch], frame by frame."""
    batch, channels = latents.shape[:2]
    split = [n for whole, size in zip(grid(latents, patch), patch, strict=True) for n in (whole, size)]
    return latents.reshape(batch, channels, *split).permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def behind(history: int, tokens: Tensor) -> Tensor:
    """Tokens [B, L, Z] behind `history` tokens of value 0.

    To methods that compare latents from step to step the history is worth nothing: it stays the same in a chunk.
    """
    return nnf.pad(tokens, (0, 0, history, 0))
