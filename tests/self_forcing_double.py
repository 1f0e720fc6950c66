"""A small double of the Wan "Self-Forcing family": the same calls and K/V bookkeeping, random weights, real attention.

`CausalWanModel` and its relatives keep the contract of the public models: x [B, C, F, h, w], t [B, F], a list of dicts
with K/V that are written in place, indices that every block moves for itself, a cross-attention cache filled when first
used. The loops around them are those of the public pipelines, boiled down.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WIDTH, HEADS, DEPTH, CHANNELS, TEXT = 32, 2, 5, 4, 8
SIZE = 4  # height and width of a latent frame; patches of 2 make 4 tokens of it
CELLS = (SIZE // 2) ** 2
FRAMES = 3  # of a chunk
Call = tuple[tuple[Any, ...], dict[str, Any]]
Calls = Generator[Call, Tensor, Tensor]
STEPS = (1000.0, 937.5, 833.25, 625.0)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a model: channels, heads, blocks, channels inside the feed-forward network.

    Of what it is called with: cells of a latent frame as (height, width), each four values; latent frames of a chunk.
    """

    width: int = WIDTH
    heads: int = HEADS
    depth: int = DEPTH
    hidden: int = 2 * WIDTH
    grid: tuple[int, int] = (SIZE // 2, SIZE // 2)
    frames: int = FRAMES

    @property
    def cells(self) -> int:
        """Tokens of a latent frame."""
        return self.grid[0] * self.grid[1]

    def linear(self) -> nn.Linear:
        """From a token to a token."""
        return nn.Linear(self.width, self.width)


SMALL = Sizes()


class Slot(NamedTuple):
    """Where new K/V go: what must be thrown out before, and the rows."""

    evicted: int
    start: int
    stop: int


def find_slot(size: int, end: int, local_end: int, start: int, count: int) -> Slot:
    """Rows for tokens start..start+count of a window of `size` whose last token is `end`, at row `local_end`."""
    new = max(0, start + count - end)
    evicted = max(0, local_end + count - size) if new else 0
    stop = local_end + start + count - end - evicted
    assert stop <= size
    return Slot(evicted, stop - count, stop)


def roll(rows: Tensor, slot: Slot, local_end: int, sink: int) -> None:
    """Throw out the oldest rows behind the sink."""
    if slot.evicted:
        kept = rows[:, sink + slot.evicted : local_end].clone()
        rows[:, sink : sink + kept.shape[1]] = kept


def rotate(x: Tensor, frames: Tensor) -> Tensor:
    """Rotary embedding of the absolute frame [L] in x [B, L, H, D]."""
    half = x.shape[-1] // 2
    angle = frames[:, None] * 100.0 ** -(torch.arange(half) / half)  # [L, D/2]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of [B, L, H, D] to [B, M, H, D]: [B, L, H * D]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Writes its K/V in place, moves its indices, and attends to its window."""

    def __init__(self, sizes: Sizes, window: int, sink: int) -> None:
        super().__init__()
        self.sizes, self.sink = sizes, sink
        self.window = window  # in frames, -1 for all
        self.q, self.k, self.v, self.o = (sizes.linear() for _ in range(4))

    def project(self, x: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, L, H, D], with positions."""
        frames = (start + torch.arange(x.shape[1])) // self.sizes.cells
        q, k, v = (layer(x).unflatten(2, (self.sizes.heads, -1)) for layer in (self.q, self.k, self.v))
        return rotate(q, frames), rotate(k, frames), v

    def forward(self, x: Tensor, kv: dict[str, Any], start: int) -> Tensor:
        q, k, v = self.project(x, start)
        end, local_end = int(kv["global_end_index"]), int(kv["local_end_index"])
        slot = find_slot(kv["k"].shape[1], end, local_end, start, x.shape[1])
        for rows, new in ((kv["k"], k), (kv["v"], v)):
            roll(rows, slot, local_end, self.sink * self.sizes.cells)
            rows[:, slot.start : slot.stop] = new
        kv["global_end_index"].fill_(start + x.shape[1])
        kv["local_end_index"].fill_(slot.stop)
        return self.o(attend(q, kv["k"][:, : slot.stop], kv["v"][:, : slot.stop]))


class Block(nn.Module):
    """Self-attention, cross-attention and a feed-forward network, modulated by the timestep of each frame."""

    def __init__(self, sizes: Sizes, window: int, sink: int) -> None:
        super().__init__()
        self.sizes, width = sizes, sizes.width
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(3))
        self.self_attn = self.attention(sizes, window, sink)
        self.cross_q, self.cross_k, self.cross_v = (sizes.linear() for _ in range(3))
        self.ffn = nn.Sequential(nn.Linear(width, sizes.hidden), nn.GELU(), nn.Linear(sizes.hidden, width))
        self.modulation = nn.Parameter(0.3 * torch.randn(1, 6, width))

    def attention(self, *args: Any) -> nn.Module:
        return SelfAttention(*args)

    def forward(
        self,
        x: Tensor,
        e: Tensor,
        grid_sizes: Tensor,
        context: Tensor,
        kv_cache: Any = None,
        crossattn_cache: Any = None,
        current_start: int = 0,
        **more: Any,
    ) -> Any:
        frames = e.shape[1]
        e = (self.modulation.unsqueeze(1) + e).unsqueeze(3).unbind(2)  # 6 of [B, F, 1, C]

        def modulate(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
            return (h.unflatten(1, (frames, -1)) * (1 + scale) + shift).flatten(1, 2)

        def gate(h: Tensor, by: Tensor) -> Tensor:
            return (h.unflatten(1, (frames, -1)) * by).flatten(1, 2)

        y = self.attend_to_self(modulate(self.norm1(x), e[0], e[1]), kv_cache, current_start, **more)
        y, aux = y if isinstance(y, tuple) else (y, None)
        x = x + gate(y, e[2])
        if not crossattn_cache["is_init"]:
            crossattn_cache["k"] = self.cross_k(context).unflatten(2, (self.sizes.heads, -1))
            crossattn_cache["v"] = self.cross_v(context).unflatten(2, (self.sizes.heads, -1))
            crossattn_cache["is_init"] = True
        q = self.cross_q(self.norm3(x)).unflatten(2, (self.sizes.heads, -1))
        x = x + attend(q, crossattn_cache["k"], crossattn_cache["v"])
        x = self.act(x, grid_sizes, current_start, **more)
        x = x + gate(self.ffn(modulate(self.norm2(x), e[3], e[4])), e[5])
        return x if aux is None else (x, aux)

    def attend_to_self(self, h: Tensor, kv_cache: Any, current_start: int, **more: Any) -> Any:
        return self.self_attn(h, kv_cache, current_start)

    def act(self, x: Tensor, grid_sizes: Tensor, current_start: int, **more: Any) -> Tensor:
        return x


class CausalWanModel(nn.Module):
    """Like Self-Forcing's."""

    patch_size = (1, 2, 2)
    block = Block

    def __init__(self, local_attn_size: int = -1, sink_size: int = 0, seed: int = 0, sizes: Sizes = SMALL) -> None:
        super().__init__()
        self.sizes, width = sizes, sizes.width
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.local_attn_size, self.sink_size = local_attn_size, sink_size
            self.patch_embedding = nn.Conv3d(CHANNELS, width, self.patch_size, self.patch_size)
            self.text_embedding = nn.Linear(TEXT, width)
            self.time_embedding = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, 6 * width))
            self.blocks = nn.ModuleList(self.make_block(i) for i in range(sizes.depth))
            self.head = nn.Linear(width, CHANNELS * 4)
        self.block_mask: Any = None
        self.requires_grad_(False)

    def make_block(self, index: int) -> nn.Module:
        return self.block(self.sizes, self.local_attn_size, self.sink_size)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("kv_cache") is None:
            raise NotImplementedError("the double has no training path")
        return self._forward_inference(*args, **kwargs)

    def _forward_inference(
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor,
        seq_len: int,
        kv_cache: Any = None,
        crossattn_cache: Any = None,
        current_start: int = 0,
        cache_start: int = 0,
    ) -> Tensor:
        return self.run(x, t, self.text_embedding(context), kv_cache, crossattn_cache, current_start)

    def run(
        self, x: Tensor, t: Tensor, context: Tensor, kv: Any, cross: Any, start: int, per_block: Any = None, **more: Any
    ) -> Tensor:
        x = self.patch_embedding(x)
        grid_sizes = torch.tensor(x.shape[2:])
        x = x.flatten(2).transpose(1, 2)  # [B, F*H*W, C]
        wave = t[..., None].float() / 1000 * 2 ** torch.arange(8)
        e = self.time_embedding(torch.cat((wave.sin(), wave.cos()), -1)).unflatten(-1, (6, self.sizes.width))
        for i, block in enumerate(self.blocks):
            own = {"kv_cache": kv[i], "crossattn_cache": cross[i], **({} if per_block is None else per_block(i))}
            result = block(x, e=e, grid_sizes=grid_sizes, context=context, current_start=start, **own, **more)
            x = self.take(i, result)
        x = self.head(x).unflatten(1, tuple(grid_sizes.tolist())).unflatten(-1, (CHANNELS, 1, 2, 2))
        x = x.permute(0, 4, 1, 5, 2, 6, 3, 7)  # [B, C, F, 1, H, 2, W, 2]
        return x.flatten(6).flatten(4, 5).flatten(2, 3)

    def take(self, index: int, result: Any) -> Tensor:
        return result


class DeferredAttention(SelfAttention):
    """LongLive's: works on a copy and returns what is to be written; may read where the window stands from outside."""

    def forward(self, x: Tensor, kv: dict[str, Any], start: int, published: Any = None) -> Any:
        q, k, v = self.project(x, start)
        published = published or (int(kv["global_end_index"]), int(kv["local_end_index"]))
        slot = find_slot(kv["k"].shape[1], *published, start, x.shape[1])
        update = (slot, published[1], k, v)
        seen = {"k": kv["k"].clone(), "v": kv["v"].clone()}
        write_update(seen, update, self.sink * self.sizes.cells)
        out = self.o(attend(q, seen["k"][:, : slot.stop], seen["v"][:, : slot.stop]))
        return out, (start + x.shape[1], slot.stop, update)


def write_update(kv: dict[str, Tensor], update: Any, sink: int) -> None:
    slot, local_end, k, v = update
    for rows, new in ((kv["k"], k), (kv["v"], v)):
        roll(rows, slot, local_end, sink)
        rows[:, slot.start : slot.stop] = new


class DeferredBlock(Block):
    def attention(self, *args: Any) -> nn.Module:
        return DeferredAttention(*args)

    def attend_to_self(self, h: Tensor, kv_cache: Any, current_start: int, published: Any = None, **more: Any) -> Any:
        return self.self_attn(h, kv_cache, current_start, published)


class LongLive1Model(CausalWanModel):
    """Updates after all blocks, but every block reads its own indices."""

    block = DeferredBlock

    def _forward_inference(
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor,
        seq_len: int,
        kv_cache: Any = None,
        crossattn_cache: Any = None,
        current_start: int = 0,
        sink_recache_after_switch: bool = False,
    ) -> Tensor:
        return self.deferred(x, t, context, kv_cache, crossattn_cache, current_start)

    def deferred(
        self, x: Tensor, t: Tensor, context: Tensor, kv: Any, cross: Any, start: int, published: Any = None
    ) -> Tensor:
        self.updates: list[Any] = []
        out = self.run(x, t, self.text_embedding(context), kv, cross, start, published=published)
        for i, (end, local_end, update) in self.updates:
            write_update(kv[i], update, self.sink_size * self.sizes.cells)
            kv[i]["global_end_index"].fill_(end)
            kv[i]["local_end_index"].fill_(local_end)
        return out

    def take(self, index: int, result: Any) -> Tensor:
        if not isinstance(result, tuple):
            return result
        self.updates.append((index, result[1]))
        return result[0]


class LongLive2Model(LongLive1Model):
    """Publishes where block 0 stands to all blocks."""

    def _forward_inference(
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor,
        seq_len: int,
        kv_cache: Any = None,
        crossattn_cache: Any = None,
        current_start: int = 0,
        defer_cache_updates: bool = False,
    ) -> Tensor:
        at = (int(kv_cache[0]["global_end_index"]), int(kv_cache[0]["local_end_index"]))
        return self.deferred(x, t, context, kv_cache, crossattn_cache, current_start, published=at)


class ActionModule(nn.Module):
    """Adds what the mouse and the keys of the last three latent frames say to every token of a frame."""

    vae_time_compression_ratio, windows_size = 4, 3

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.cells = sizes.cells
        self.read = nn.Linear(12 * (2 + 4), sizes.width)

    def forward(
        self, x: Tensor, frames: int, mouse: Tensor, keyboard: Tensor, kv: dict[str, Any], start: int
    ) -> Tensor:
        both = torch.cat((mouse, keyboard), -1)
        both = torch.cat((both[:, :1].expand(-1, 12, -1), both), 1)  # row 12 + n is pixel frame n
        first = start // self.cells
        rows = [both[:, 4 * (first + i) : 4 * (first + i) + 12].flatten(1) for i in range(frames)]
        new = self.read(torch.stack(rows, 1))  # [B, F, C]
        end, local_end = int(kv["global_end_index"]), int(kv["local_end_index"])
        slot = find_slot(kv["k"].shape[1], end, local_end, first, frames)
        roll(kv["k"], slot, local_end, 0)
        kv["k"][:, slot.start : slot.stop] = new
        kv["global_end_index"].fill_(first + frames)
        kv["local_end_index"].fill_(slot.stop)
        past = kv["k"][:, : slot.stop].mean(1, keepdim=True)
        return x + (x.unflatten(1, (frames, -1)) * 0 + (new + past).unsqueeze(2)).flatten(1, 2)


class GameBlock(Block):
    def __init__(self, sizes: Sizes, window: int, sink: int, action: bool) -> None:
        super().__init__(sizes, window, sink)
        self.action_model = ActionModule(sizes) if action else None

    def act(
        self,
        x: Tensor,
        grid_sizes: Tensor,
        current_start: int,
        mouse_cond: Any = None,
        keyboard_cond: Any = None,
        kv_cache_mouse: Any = None,
        **more: Any,
    ) -> Tensor:
        if self.action_model is None:
            return x
        frames = int(grid_sizes[0])
        return self.action_model(x, frames, mouse_cond, keyboard_cond, kv_cache_mouse, current_start)


class GameModel(CausalWanModel):
    """Like Matrix-Game 2.0's: conditions by keyword, K/V of its own for the mouse."""

    def make_block(self, index: int) -> nn.Module:
        return GameBlock(self.sizes, self.local_attn_size, self.sink_size, action=index in (0, 2))

    def _forward_inference(
        self,
        x: Tensor,
        t: Tensor,
        visual_context: Tensor,
        cond_concat: Tensor,
        mouse_cond: Any = None,
        keyboard_cond: Any = None,
        kv_cache: Any = None,
        kv_cache_mouse: Any = None,
        kv_cache_keyboard: Any = None,
        crossattn_cache: Any = None,
        current_start: int = 0,
        cache_start: int = 0,
    ) -> Tensor:
        return self.run(
            x + cond_concat,
            t,
            self.text_embedding(visual_context),
            kv_cache,
            crossattn_cache,
            current_start,
            per_block=lambda i: {"kv_cache_mouse": kv_cache_mouse[i]},
            mouse_cond=mouse_cond,
            keyboard_cond=keyboard_cond,
        )


class PlainAttention(SelfAttention):
    """CausVid's: no indices, no window."""

    def forward(self, x: Tensor, kv: dict[str, Any], start: int) -> Tensor:
        q, k, v = self.project(x, start)
        end = start + x.shape[1]
        kv["k"][:, start:end], kv["v"][:, start:end] = k, v
        return self.o(attend(q, kv["k"][:, :end], kv["v"][:, :end]))


class PlainBlock(Block):
    def attention(self, *args: Any) -> nn.Module:
        return PlainAttention(*args)


class CausVidModel(CausalWanModel):
    block = PlainBlock

    def _forward_inference(
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor,
        seq_len: int,
        kv_cache: Any = None,
        crossattn_cache: Any = None,
        current_start: int = 0,
        current_end: int = 0,
    ) -> Tensor:
        assert current_end - current_start == x.shape[2] * self.sizes.cells
        return self.run(x, t, self.text_embedding(context), kv_cache, crossattn_cache, current_start)


class RecomputingAttention(SelfAttention):
    """Krea's: under a mask it writes the K/V of the past anew."""

    def forward(self, x: Tensor, kv: dict[str, Any], start: int, block_mask: Any = None) -> Tensor:
        if block_mask is None:
            return super().forward(x, kv, start)
        q, k, v = self.project(x, 0)
        kv["k"][:, : x.shape[1]], kv["v"][:, : x.shape[1]] = k, v
        kv["global_end_index"].fill_(x.shape[1])
        kv["local_end_index"].fill_(x.shape[1])
        return self.o(attend(q, k, v))

    def fuse_projections(self) -> None:
        """Krea's code has this, Self-Forcing's does not."""


class RecomputingBlock(Block):
    def attention(self, *args: Any) -> nn.Module:
        return RecomputingAttention(*args)

    def attend_to_self(self, h: Tensor, kv_cache: Any, current_start: int, block_mask: Any = None, **more: Any) -> Any:
        return self.self_attn(h, kv_cache, current_start, block_mask)


class KreaModel(CausalWanModel):
    block = RecomputingBlock

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().run(*args, block_mask=self.block_mask, **kwargs)


def index() -> Tensor:
    return torch.tensor([0])


def new_kv(rows: int, sizes: Sizes = SMALL, batch: int = 1, indices: bool = True) -> list[dict[str, Any]]:
    """K/V of all blocks, empty."""
    shape = (batch, rows, sizes.heads, sizes.width // sizes.heads)
    return [
        {"k": torch.zeros(shape), "v": torch.zeros(shape)}
        | ({"global_end_index": index(), "local_end_index": index()} if indices else {})
        for _ in range(sizes.depth)
    ]


def noise_like(seed: int, frames: int = FRAMES, sizes: Sizes = SMALL) -> Tensor:
    shape = (1, CHANNELS, frames, 2 * sizes.grid[0], 2 * sizes.grid[1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text(seed: int = 0) -> Tensor:
    """A prompt [1, 6, TEXT]."""
    return torch.randn(1, 6, TEXT, generator=torch.Generator().manual_seed(1000 + seed))


class Loop:
    """Self-Forcing's pipeline: every chunk in a few steps, noised again in between, then a clean pass."""

    def __init__(
        self,
        model: CausalWanModel,
        *,
        window: int = 12,
        steps: tuple[float, ...] = STEPS,
        context_noise: float = 0,
        shared_noise: bool = False,
        seed: int = 0,
        indices: bool = True,
        batch: int = 1,
    ) -> None:
        self.model, self.steps, self.context_noise = model, steps, context_noise
        self.shared_noise, self.seed, self.batch, self.sizes = shared_noise, seed, batch, model.sizes
        rows = window if model.local_attn_size == -1 else model.local_attn_size
        self.kv = new_kv(rows * self.sizes.cells, self.sizes, batch, indices)
        self.cross: list[dict[str, Any]] = [{"is_init": False} for _ in range(self.sizes.depth)]
        self.prompt = text().expand(batch, -1, -1)
        self.frame = self.chunk = 0

    def reset(self) -> None:
        """As the pipeline does at the beginning of another video: the same K/V, other index tensors."""
        for cross in self.cross:
            cross["is_init"] = False
        for kv in self.kv:
            if "global_end_index" in kv:
                kv["global_end_index"], kv["local_end_index"] = index(), index()
        self.frame = self.chunk = 0

    def inputs(self, x: Tensor, t: float | Tensor) -> Call:
        """Arguments of the model."""
        kv = {"kv_cache": self.kv, "crossattn_cache": self.cross, "current_start": self.frame * self.sizes.cells}
        t = t if isinstance(t, Tensor) else torch.full((len(x), x.shape[2]), t)
        return (x,), {"t": t, **kv, **self.conditions(x)}

    def conditions(self, x: Tensor) -> dict[str, Any]:
        return {"context": self.prompt, "seq_len": 32760}

    def call(self, x: Tensor, t: float | Tensor) -> Tensor:
        args, kwargs = self.inputs(x, t)
        return self.model(*args, **kwargs)

    def drive(self, calls: Calls) -> Tensor:
        """Make the calls that are wanted."""
        try:
            args, kwargs = next(calls)
            while True:
                args, kwargs = calls.send(self.model(*args, **kwargs))
        except StopIteration as end:
            return end.value

    def noise(self, step: int, frames: int) -> Tensor:
        """Of a step: fresh, or the same in every chunk."""
        chunk = 0 if self.shared_noise else self.chunk
        noise = noise_like(10_000 * self.seed + 100 * chunk + step, frames, self.sizes)
        return noise.repeat(self.batch, 1, 1, 1, 1)

    def prefill(self, latent: Tensor) -> None:
        """Encode given frames."""
        self.call(latent, 0.0)
        self.frame += latent.shape[2]

    def denoise(self, frames: int | None = None) -> Tensor:
        return self.drive(self.denoising(frames))

    def denoising(self, frames: int | None = None) -> Calls:
        frames = frames or self.sizes.frames
        x = self.noise(0, frames)
        clean = x
        for step, t in enumerate(self.steps):
            clean = x - t / 1000 * (yield self.inputs(x, t))
            if step + 1 < len(self.steps):
                sigma = self.steps[step + 1] / 1000
                x = (1 - sigma) * clean + sigma * self.noise(step + 1, frames)
        return clean

    def commit(self, clean: Tensor) -> None:
        self.call(clean, float(self.context_noise))

    def step_chunk(self, frames: int | None = None) -> Tensor:
        """One chunk."""
        return self.drive(self.one_chunk(frames))

    def one_chunk(self, frames: int | None = None) -> Calls:
        clean = yield from self.denoising(frames)
        yield self.inputs(clean, float(self.context_noise))
        self.frame += clean.shape[2]
        self.chunk += 1
        return clean

    def run(self, chunks: int) -> list[Tensor]:
        """Several chunks."""
        return [self.step_chunk() for _ in range(chunks)]

    def state(self) -> list[Tensor]:
        """K/V and indices, copied."""
        return [v.clone() for kv in self.kv for v in kv.values()]

    def indices(self) -> list[int]:
        """Indices of all blocks."""
        return [int(kv[name]) for kv in self.kv for name in ("global_end_index", "local_end_index") if name in kv]


class CausVidLoop(Loop):
    def __init__(self, model: CausalWanModel, **settings: Any) -> None:
        super().__init__(model, indices=False, **{"window": 24, **settings})

    def conditions(self, x: Tensor) -> dict[str, Any]:
        return {**super().conditions(x), "current_end": (self.frame + x.shape[2]) * self.sizes.cells}


class LongLive1Loop(Loop):
    """LongLive 1's: at another prompt the frames in the window are encoded anew, under a mask that then stays."""

    def switch(self, prompt: Tensor, past: list[Tensor]) -> None:
        for cross in self.cross:
            cross["is_init"] = False
        self.prompt = prompt
        latents = torch.cat(past, 2)[:, :, -self.model.local_attn_size :]
        self.model.block_mask = object()
        now, self.frame = self.frame, self.frame - latents.shape[2]
        self.call(latents, float(self.context_noise))
        self.frame = now


class GameLoop(Loop):
    """Matrix-Game 2.0's: the mouse and the keys of all pixel frames so far."""

    def __init__(self, model: CausalWanModel, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.mouse = torch.zeros(self.batch, 4 * 60, 2)
        self.keys = torch.zeros(self.batch, 4 * 60, 4)
        rows = torch.zeros(self.batch, 2 * self.sizes.frames, self.sizes.width)
        self.kv_mouse = [{"k": rows.clone(), "global_end_index": index(), "local_end_index": index()} for _ in self.kv]

    def state(self) -> list[Tensor]:
        return [*super().state(), *(v.clone() for kv in self.kv_mouse for v in kv.values())]

    def conditions(self, x: Tensor) -> dict[str, Any]:
        until = 1 + 4 * (self.frame + x.shape[2] - 1)
        return {
            "visual_context": self.prompt,
            "cond_concat": torch.zeros_like(x),
            "mouse_cond": self.mouse[:, :until],
            "keyboard_cond": self.keys[:, :until],
            "kv_cache_mouse": self.kv_mouse,
            "kv_cache_keyboard": self.kv_mouse,
        }


class KreaLoop(Loop):
    """Krea's: before a chunk the last three frames are encoded anew; the steps end at t=0, and nothing is committed."""

    def __init__(self, model: CausalWanModel, **settings: Any) -> None:
        super().__init__(model, **{"window": 2 * model.sizes.frames, "steps": (1000.0, 750.0, 0.0), **settings})
        self.past: Tensor | None = None

    def one_chunk(self, frames: int | None = None) -> Calls:
        for kv in self.kv:
            kv["k"].zero_(), kv["v"].zero_()
            kv["global_end_index"].zero_(), kv["local_end_index"].zero_()
        if self.past is not None:
            self.frame = self.past.shape[2]
            self.model.block_mask = object()
            yield self.inputs(self.past, 0.0)
            self.model.block_mask = None
        self.encoded = self.state()
        self.past = yield from self.denoising(frames)
        self.chunk += 1
        return self.past
