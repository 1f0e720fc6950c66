"""The blocks of SkyReels-V2 for chosen tokens alone: `SparseBlocks` of its adapter.

A block attends to its window, then to the text, then applies an MLP; only the first mixes tokens. So a repair runs the
block's own forward on its tokens, with another attention processor in the one place: it overwrites the rows of the
window's K/V and attends to all of it.

Slots: (block) holds keys, rotated, and values [B, L, heads, d].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2AttnProcessor
from torch import Tensor, nn

from rollcache.adapters.spec import Args, Kwargs, Slots
from rollcache.passes import RollcacheError, Segment
from rollcache.tokens import Tokens

Rotary = tuple[Tensor, Tensor]


class SkyReelsRows:
    """See `SparseBlocks`."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        """For the blocks of one model."""
        self._blocks = blocks
        self._taps: list[_Tap] = []

    def capture(self, args: Args, kwargs: Kwargs, slots: Slots) -> None:
        """Let every block attend once through a processor that also keeps K and V."""
        for tap in self._taps:  # of blocks that were not run
            tap.remove()
        for index, block in enumerate(self._blocks):
            _check(index, block)
        self._taps = [_Tap(block.attn1, index, slots) for index, block in enumerate(self._blocks)]

    def run(
        self,
        blocks: Sequence[nn.Module],
        hidden: Tensor,
        tokens: Tokens,
        segments: tuple[Segment, ...],
        args: Args,
        kwargs: Kwargs,
        slots: Slots,
    ) -> Tensor:
        """See `SparseBlocks.run`."""
        _, text, temb, rotary, mask = args
        rows = tokens.rows(segments, hidden.device)
        temb = temb.index_select(2, rows) if temb.ndim == 4 else temb
        rotary = tuple(t.index_select(1, rows) for t in rotary)
        mask = None if mask is None else mask.index_select(2, rows)  # [1, 1, k, L]
        for index, block in enumerate(blocks):
            forward = getattr(block.forward, "original", block.forward)  # beneath the cache
            with _attending(block.attn1, _Rows(block.attn1, rows, slots[index])):
                hidden = forward(hidden, text, temb, rotary, mask)
        return hidden


class _Tap:
    """Attends as the block's own processor does, once, and leaves K and V in a slot."""

    def __init__(self, attn: Any, index: int, slots: Slots) -> None:
        self._attn, self._index, self._slots = attn, index, slots
        self._own = attn.processor
        attn.processor = self

    def remove(self) -> None:
        """Give the place back, and hold on to no K and V."""
        if self._attn.processor is self:
            self._attn.processor = self._own
        self._slots = {}

    def __call__(self, attn: Any, hidden: Tensor, text: None, mask: Tensor | None, rotary: Rotary) -> Tensor:
        slots = self._slots
        self.remove()
        q, k, v = _project(attn, hidden, rotary)
        slots[self._index] = (k, v)
        return _attend(attn, self._own, q, k, v, mask)


class _Rows:
    """Attends from some tokens to the window, after overwriting their rows of its K and V."""

    def __init__(self, attn: Any, rows: Tensor, slot: tuple[Tensor, ...]) -> None:
        self._own, self._rows, self._slot = attn.processor, rows, slot

    def __call__(self, attn: Any, hidden: Tensor, text: None, mask: Tensor | None, rotary: Rotary) -> Tensor:
        q, *fresh = _project(attn, hidden, rotary)
        with torch.inference_mode():  # slots of an inference_mode pass can be written to nowhere else
            for slot, new in zip(self._slot, fresh, strict=True):
                slot.index_copy_(1, self._rows, new)
        k, v = self._slot
        return _attend(attn, self._own, q, k, v, mask)


@contextmanager
def _attending(attn: Any, processor: Any) -> Iterator[None]:
    own = attn.processor
    attn.processor = processor
    try:
        yield
    finally:
        attn.processor = own


def _project(attn: Any, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normalised and rotated, and values [B, L, heads, d]."""
    if attn.fused_projections:
        q, k, v = attn.to_qkv(hidden).chunk(3, dim=-1)
        v = v.clone()  # alone, not with the queries and keys that it is a part of
    else:
        q, k, v = attn.to_q(hidden), attn.to_k(hidden), attn.to_v(hidden)
    q, k, v = (t.unflatten(2, (attn.heads, -1)) for t in (attn.norm_q(q), attn.norm_k(k), v))
    return _rotate(q, *rotary), _rotate(k, *rotary), v


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of neighbouring channels, in the order of operations of the model."""
    a, b = x[..., 0::2], x[..., 1::2]
    c, s = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = a * c - b * s
    out[..., 1::2] = a * s + b * c
    return out


def _attend(attn: Any, own: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention [B, k, C] with the backend that the block's own processor was given."""
    out = dispatch_attention_fn(q, k, v, attn_mask=mask, backend=own._attention_backend)
    out = out.flatten(2, 3).type_as(q)
    x: Tensor = attn.to_out[1](attn.to_out[0](out))
    return x


def _check(index: int, block: Any) -> None:
    """Refuse blocks whose attention is not the one that is known."""
    why = ""
    if "_orig_mod" in block._modules:
        why = "is compiled"
    elif type(block.attn1.processor) is not SkyReelsV2AttnProcessor:
        why = f"attends with {type(block.attn1.processor).__name__}"
    elif block.attn1.processor._parallel_config is not None:
        why = "attends in parallel over several devices"
    if why:
        raise RollcacheError(
            f"block {index} {why}, so that its tokens cannot be run alone: use repairs='refresh', which runs all and "
            "keeps the chosen ones."
        )
