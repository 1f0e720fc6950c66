"""The blocks of the street transformer for chosen tokens alone: `SparseBlocks` of its adapter.

A dense pass leaves the K/V of its window in slots. A repair projects its tokens, overwrites their rows of the slots and
attends from them to everything that is there: in an even block to the window and the committed K/V of their camera, in
an odd block to all cells of their latent frame. Rows that are not chosen keep the K/V of the last pass that ran them.

Slots: (block, group) of even blocks holds [B*V, heads, committed + F*cells, d], the committed K/V ahead of the window's
as attention reads them; (block) of odd ones [B, F, P, heads, d]; "committed" says of which cache the former are. On a
CPU "told" holds what the cameras were told, and (block, group, "told") its K/V [B*F*V, heads, E + 1, d].

Shape letters as in `dit.py`, and M chosen latent frames, k chosen cells of a camera, K chosen tokens of a latent frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from rollcache.adapters.spec import Args, Kwargs, Slots
from rollcache.passes import Segment
from rollcache.street.dit import Block, BlockContext, _by_camera, _rotate
from rollcache.tokens import Tokens


class StreetRows:
    """See `SparseBlocks`."""

    def capture(self, args: Args, kwargs: Kwargs, slots: Slots) -> None:
        """Tap a pass over one window; one over several leaves nothing, and cannot be repaired."""
        ctx = _context(args, kwargs)
        if ctx.frames != ctx.window:
            return
        if ctx.told.device.type == "cpu":
            slots["told"] = (ctx.told,)
        if (committed := _committed(ctx)) is not None:
            slots["committed"] = (committed,)
        ctx.tap = slots

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
        ctx = _context(args, kwargs)
        _follow(ctx, slots)
        chosen = _Chosen.of(tokens, segments, ctx, slots)
        x = hidden.unflatten(1, (len(tokens.frames), -1))  # [B, M, K, C]
        with _precision(blocks[0], ctx):  # type: ignore[arg-type]
            for block in blocks:
                x = _run_block(block, x, chosen, slots)  # type: ignore[arg-type]
        return x.flatten(1, 2)


class _Frames:
    """Chosen latent frames as an index into axis 1, a slice where they follow each other.

    Attributes:
        at: the same as a tensor [M], made without a copy from the host.
    """

    def __init__(self, frames: tuple[int, ...], device: torch.device) -> None:
        self.at = torch.cat([torch.arange(f, f + 1, device=device) for f in frames])
        first, last = frames[0], frames[-1]
        self._slice = slice(first, last + 1) if last - first + 1 == len(frames) else None

    def of(self, x: Tensor) -> Tensor:
        """Their part of [B, F, ...]: [B, M, ...]."""
        return x.index_select(1, self.at) if self._slice is None else x[:, self._slice]

    def put(self, x: Tensor, part: Tensor) -> None:
        """Overwrite their part of [B, F, ...]."""
        if self._slice is None:
            x.index_copy_(1, self.at, part)
        else:
            x[:, self._slice].copy_(part)


@dataclass
class _Group:
    """Chosen tokens of one view group.

    Attributes:
        views: V.
        part: where they are on the axis K.
        window: tokens of one camera in the window, F*cells.
        into: rows of the K/V of even blocks, as [B*V*heads*T, d], that they own [B*V*heads*M*k]; None for whole frames.
        spans: otherwise the rows of each latent frame, counted from the first of the window.
        far: squared distance to what is told [B*M*V, 1, k, E + 1].
        told: indices of their cameras in [V of the rig].
    """

    views: int
    part: slice
    window: int
    into: Tensor | None
    spans: list[slice]
    far: Tensor
    told: slice


@dataclass
class _Chosen:
    """What all blocks of one repair share.

    Attributes:
        ctx: of the pass, with the condition of the chosen latent frames alone.
        frames: the chosen latent frames.
        rows: on the token axis of a window [M*K]; None for whole frames.
        rope: cos and sin [B, M, K, 1, d/2].
        groups: by view group.
        told: tokens of what the cameras see in the chosen frames [B, M, V, E + 1, C]; None where the slots have their
            K/V.
    """

    ctx: BlockContext
    frames: _Frames
    rows: Tensor | None
    rope: tuple[Tensor, Tensor]
    groups: list[_Group]
    told: Tensor | None

    @classmethod
    def of(cls, tokens: Tokens, segments: tuple[Segment, ...], ctx: BlockContext, slots: Slots) -> _Chosen:
        """Work out all indices of a repair."""
        device, count = ctx.c.device, len(tokens.frames)
        frames = _Frames(tokens.frames, device)
        at = frames.at
        whole = all(cells is None for cells in tokens.cells)
        groups: list[_Group] = []
        rows: list[Tensor] = []
        first = view = 0
        for g, (s, cells) in enumerate(zip(segments, tokens.cells, strict=True)):
            window, k = ctx.window * s.cells, s.cells if cells is None else cells.shape[2]
            part, seen = slice(first, first + s.views * k), slice(view, view + s.views)
            first, view = part.stop, seen.stop
            far, into = ctx.far[g].squeeze(3), None
            if cells is None:
                far = frames.of(far)
                inside = None if whole else torch.arange(s.cells, device=device).expand(count, s.views, -1)
            else:
                inside = cells.to(device).transpose(0, 1)  # [M, V, k]
                camera = torch.arange(s.views, device=device)[:, None]
                places = ((at[:, None, None] * s.views + camera) * s.cells + inside).flatten()
                far = far.flatten(1, 3).index_select(1, places)
                into = _rows_of(inside, at, s.cells, slots[0, g][0], window)
            if inside is not None:
                camera = torch.arange(s.views, device=device)[:, None] * s.view_stride
                rows.append((at[:, None, None] * s.frame_stride + camera + s.start + inside).flatten(1))
            far = far.reshape(-1, 1, k, far.shape[-1]).to(slots[0, g][0].dtype)
            spans = [slice(f * s.cells, (f + 1) * s.cells) for f in tokens.frames]
            groups.append(_Group(s.views, part, window, into, spans, far, seen))
        every = None if whole else torch.cat(rows, 1).flatten()
        rope = tuple(
            frames.of(t) if every is None else t.flatten(1, 2).index_select(1, every).unflatten(1, (count, -1))
            for t in ctx.rope
        )
        told = None if _remembered(ctx, slots) else frames.of(ctx.told)
        return cls(replace(ctx, c=frames.of(ctx.c), tap=None), frames, every, (rope[0], rope[1]), groups, told)


def _run_block(block: Block, x: Tensor, chosen: _Chosen, slots: Slots) -> Tensor:
    """One block [B, M, K, C]; as `Block.forward`."""
    mod = block.modulation(chosen.ctx).to(x.dtype)
    shift1, scale1, gate1, shift2, scale2, gate2 = mod.unsqueeze(2).chunk(6, -1)
    qkv = block.qkv(block._norm(x, shift1, scale1))
    attend = _attend_time if block.temporal else _attend_views
    x = torch.addcmul(x, gate1, block.proj(attend(block, qkv, chosen, slots)).to(x.dtype))
    if block.temporal:
        x = x + block.answer(_attend_told(block, x, chosen, slots)).to(x.dtype)
    hidden = nnf.gelu(block.up(block._norm(x, shift2, scale2)))
    return torch.addcmul(x, gate2, block.down(hidden).to(x.dtype))


def _attend_time(block: Block, qkv: Tensor, chosen: _Chosen, slots: Slots) -> Tensor:
    q, k, v = block._split(qkv)  # [B, M, K, heads, d]
    q, k = _rotate(q, *chosen.rope), _rotate(k, *chosen.rope)
    parts = []
    for g, group in enumerate(chosen.groups):
        qg, kg, vg = (_by_camera(t[:, :, group.part], group.views) for t in (q, k, v))  # [B*V, heads, M*k, d]
        keys, values = slots[block.index, g]
        with torch.inference_mode():  # slots of an inference_mode pass can be written to nowhere else
            for slot, fresh in ((keys, kg), (values, vg)):
                if group.into is not None:
                    slot.flatten(0, 2).index_copy_(0, group.into, fresh.flatten(0, 2))
                else:
                    window = slot[:, :, slot.shape[2] - group.window :]
                    for span, rows in zip(group.spans, fresh.chunk(len(group.spans), 2), strict=True):
                        window[:, :, span].copy_(rows)
        out = nnf.scaled_dot_product_attention(qg, keys, values)
        out = out.unflatten(0, (-1, group.views)).unflatten(3, (len(group.spans), -1))  # [B, V, heads, M, k, d]
        parts.append(out.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3))
    return torch.cat(parts, 2)


def _attend_views(block: Block, qkv: Tensor, chosen: _Chosen, slots: Slots) -> Tensor:
    q, k, v = block._split(qkv)  # [B, M, K, heads, d]
    keys, values = slots[block.index]  # [B, F, P, heads, d]
    with torch.inference_mode():
        for slot, fresh in ((keys, k), (values, v)):
            if chosen.rows is not None:
                slot.flatten(1, 2).index_copy_(1, chosen.rows, fresh.flatten(1, 2))
            else:
                chosen.frames.put(slot, fresh)
    keys, values = chosen.frames.of(keys), chosen.frames.of(values)
    q, keys, values = (t.flatten(0, 1).transpose(1, 2) for t in (q, keys, values))
    out = nnf.scaled_dot_product_attention(q, keys, values)  # [B*M, heads, K, d]
    return out.transpose(1, 2).flatten(2).unflatten(0, (-1, qkv.shape[1]))


def _attend_told(block: Block, x: Tensor, chosen: _Chosen, slots: Slots) -> Tensor:
    dtype = block.ask.weight.dtype
    q = block.ask(nnf.layer_norm(x, x.shape[-1:]).to(dtype)).unflatten(-1, (block.heads, -1))
    q = nnf.layer_norm(q, q.shape[-1:])
    k: Any = None
    if chosen.told is not None:
        k, v = block.told(chosen.told.to(dtype)).unflatten(-1, (2, block.heads, -1)).unbind(-3)
        k = nnf.layer_norm(k, k.shape[-1:])  # [B, M, V, E + 1, heads, d]
    slope = block.fade.exp().to(q.dtype)[:, None, None]
    parts = []
    for g, group in enumerate(chosen.groups):
        qg = q[:, :, group.part].unflatten(2, (group.views, -1)).transpose(3, 4).flatten(0, 2)  # [B*M*V, heads, k, d]
        if k is not None:
            kg, vg = (t[:, :, group.told].transpose(3, 4).flatten(0, 2) for t in (k, v))
        else:
            per_frame = (-1, chosen.ctx.frames, group.views)
            held = (t.unflatten(0, per_frame) for t in slots[block.index, g, "told"])
            kg, vg = (chosen.frames.of(t).flatten(0, 2) for t in held)
        out = nnf.scaled_dot_product_attention(qg, kg, vg, attn_mask=-slope * group.far)
        parts.append(out.transpose(1, 2).flatten(2).unflatten(0, (*x.shape[:2], -1)).flatten(2, 3))
    return torch.cat(parts, 2)


def _context(args: Args, kwargs: Kwargs) -> BlockContext:
    ctx: BlockContext = args[1] if len(args) > 1 else kwargs["ctx"]
    return ctx


def _precision(block: Block, ctx: BlockContext) -> AbstractContextManager[Any]:
    """Autocast as in the pass, which made its rotary tables in the dtype of its products."""
    products = ctx.rope[0].dtype
    if products == block.qkv.weight.dtype:
        return nullcontext()
    return torch.autocast(ctx.c.device.type, dtype=products)


def _committed(ctx: BlockContext) -> Tensor | None:
    """A tensor that is another one after every commit."""
    cached = None if ctx.kv is None else ctx.kv.read(0, 0)
    return None if cached is None else cached[0]


def _follow(ctx: BlockContext, slots: Slots) -> None:
    """After a commit, put the K/V that is committed now ahead of the window's."""
    committed = _committed(ctx)
    (known,) = slots.pop("committed", (None,))
    if committed is not None:
        slots["committed"] = (committed,)
    if committed is known:
        return
    for key in [key for key in slots if isinstance(key, tuple) and len(key) == 2]:
        window = ctx.far[key[1]].shape[-2] * ctx.window
        parts = [t[:, :, t.shape[2] - window :] for t in slots[key]]
        cached = None if ctx.kv is None else ctx.kv.read(*key)
        if cached is not None:
            parts = [torch.cat(pair, 2) for pair in zip(cached, parts, strict=True)]
        slots[key] = tuple(t.contiguous() for t in parts)


def _remembered(ctx: BlockContext, slots: Slots) -> bool:
    """Whether the cameras are told what the slots hold the K/V of. Comparing would make an accelerator wait."""
    known = slots.get("told")
    return known is not None and torch.equal(known[0], ctx.told)


def _rows_of(inside: Tensor, at: Tensor, cells: int, slot: Tensor, window: int) -> Tensor:
    """Rows of K/V [B*V, heads, T, d], taken as [B*V*heads*T, d], of the cells `inside` [M, V, k] of frames `at` [M]."""
    lines, heads, length = slot.shape[:3]
    inside = inside.transpose(0, 1) + (at * cells + length - window)[:, None]  # [V, M, k]
    inside = inside.repeat(lines // len(inside), 1, 1).flatten(1)[:, None]  # [B*V, 1, M*k]
    first = torch.arange(lines * heads, device=slot.device).view(lines, heads, 1) * length
    return (first + inside).flatten()
