"""Small models of every family, and loops like those of their pipelines, as generators of the calls.

Each is written like the loop itself, with `answer = yield args, kwargs` where that calls the model. Calling `calls`
begins a generation with K/V of its own. The Self-Forcing family is research code without a package: its models are the
doubles of the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache
from torch import Tensor, nn

from rollcache.adapters import (
    diffusers_anyflow,
    diffusers_framepack,
    diffusers_helios,
    diffusers_sana,
    diffusers_skyreels,
)
from rollcache.adapters import self_forcing as wan_adapter
from rollcache.adapters import street as street_adapter
from rollcache.adapters.loops import generation
from rollcache.adapters.spec import Adapter
from rollcache.street.dit import DiTConfig, StreetDiT, WindowKV
from rollcache.street.protocol import Protocol, Where
from rollcache.street.rig import CELLS

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import self_forcing_double as double

Call = tuple[tuple[Any, ...], dict[str, Any]]
Calls = Iterator[Call]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Size of the models and of what they are called with.

    Attributes:
        depth: blocks.
        heads: attention heads.
        head: channels of one, a multiple of 8.
        frames: latent frames of every chunk.
        cells: tokens of a latent frame, as (height, width).
        steps: denoising steps of a chunk.
    """

    depth: int = 12
    heads: int = 4
    head: int = 32
    frames: tuple[int, ...] = (9, 9, 9)
    cells: tuple[int, int] = (10, 10)
    steps: int = 4

    @property
    def width(self) -> int:
        """Channels."""
        return self.heads * self.head

    @property
    def tokens(self) -> int:
        """Of the last chunk."""
        return self.frames[-1] * self.cells[0] * self.cells[1]

    @property
    def levels(self) -> list[float]:
        """Timesteps of a chunk."""
        return [1000 * (1 - t / self.steps) for t in range(self.steps)]

    def wan(self) -> dict[str, Any]:
        """Arguments of models built like Wan."""
        return {
            "num_attention_heads": self.heads,
            "attention_head_dim": self.head,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 32,
            "ffn_dim": 4 * self.width,
            "num_layers": self.depth,
        }


@dataclass(frozen=True)
class Inputs:
    """What models are called with: some samples, all alike."""

    scale: Scale
    batch: int

    def rows(self, *shape: int, seed: int) -> Tensor:
        """Noise [batch, ...], the same for every sample."""
        noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed))
        return noise.expand(self.batch, *shape).contiguous()

    def latents(self, frames: int, seed: int) -> Tensor:
        """Noise [batch, 4, frames, h, w], in patches of 2x2."""
        return self.rows(4, frames, 2 * self.scale.cells[0], 2 * self.scale.cells[1], seed=seed)

    def text(self, seed: int = 50) -> Tensor:
        """An embedded prompt [batch, 8, 16]."""
        return self.rows(8, 16, seed=seed)

    def level(self, t: float, *shape: int) -> Tensor:
        """One timestep for all."""
        return torch.full((self.batch, *shape), t)


@dataclass(frozen=True)
class Family:
    """A model, its adapter, and a loop that calls it.

    Attributes:
        model: with random weights.
        adapter: of this model.
        calls: begins a generation.
        across: what can be left out: steps of a chunk where there are many, else what the chunk before did.
        tokens: of a chunk, where they are not those of the scale.
    """

    model: nn.Module
    adapter: Adapter
    calls: Callable[..., Calls]
    across: Literal["steps", "chunks"] = "steps"
    tokens: int | None = None


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A model whose random weights are always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().eval().requires_grad_(False)


def euler(x: Tensor, v: Tensor, scale: Scale) -> Tensor:
    """One step of the loop."""
    return x - v / scale.steps


def skyreels(scale: Scale, branches: int = 1) -> Family:
    """Windows in step."""
    model = seeded(lambda: diffusers.SkyReelsV2Transformer3DModel(**scale.wan()))

    def calls(batch: int = 1) -> Calls:
        its = Inputs(scale, batch)
        prompts = [its.text(50 + i) for i in range(branches)]
        with generation(model):
            for n, frames in enumerate(scale.frames):
                x = its.latents(frames, seed=n)
                for t in scale.levels:
                    timestep, out = its.level(t, frames), []
                    for prompt in prompts:
                        call = {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": prompt}
                        answer = yield (), {**call, "enable_diffusion_forcing": True, "return_dict": False}
                        out.append(answer[0])
                    x = euler(x, torch.stack(out).mean(0), scale)

    return Family(model, diffusers_skyreels.adapter(model), calls)


def helios(scale: Scale, branches: int = 1) -> Family:
    """Chunks behind a compressed history."""
    rope = (scale.head // 2, scale.head // 4, scale.head // 4)
    model = seeded(lambda: diffusers.HeliosTransformer3DModel(**scale.wan(), rope_dim=rope))

    def calls(batch: int = 1) -> Calls:
        its = Inputs(scale, batch)
        prompts = [its.text(50 + i) for i in range(branches)]
        with generation(model):
            past = its.latents(19, seed=9)
            for n, frames in enumerate(scale.frames):
                x, (long, mid, short) = its.latents(frames, seed=n), past[:, :, -19:].split([16, 2, 1], 2)
                history = {
                    "indices_hidden_states": torch.arange(19, 19 + frames)[None],
                    "indices_latents_history_long": torch.arange(16)[None],
                    "indices_latents_history_mid": torch.arange(16, 18)[None],
                    "indices_latents_history_short": torch.arange(18, 19)[None],
                    "latents_history_long": long,
                    "latents_history_mid": mid,
                    "latents_history_short": short,
                }
                for t in scale.levels:
                    timestep, out = its.level(t), []
                    for prompt in prompts:
                        call = {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": prompt}
                        answer = yield (), {**call, **history, "return_dict": False}
                        out.append(answer[0])
                    x = euler(x, torch.stack(out).mean(0), scale)
                past = torch.cat([past, x], 2)

    return Family(model, diffusers_helios.adapter(model), calls)


def framepack(scale: Scale) -> Family:
    """Sections behind a compressed history, in blocks of two streams."""
    double = max(1, scale.depth // 3)
    model = seeded(
        lambda: diffusers.HunyuanVideoFramepackTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=scale.heads,
            attention_head_dim=scale.head,
            num_layers=double,
            num_single_layers=scale.depth - double,
            num_refiner_layers=1,
            text_embed_dim=16,
            pooled_projection_dim=8,
            rope_axes_dim=(scale.head // 4, 3 * scale.head // 8, 3 * scale.head // 8),
            has_image_proj=True,
            image_proj_dim=16,
            has_clean_x_embedder=True,
        )
    )

    def calls(batch: int = 1) -> Calls:
        its = Inputs(scale, batch)
        given = {
            "encoder_hidden_states": its.text(),
            "encoder_attention_mask": torch.ones(batch, 8),
            "pooled_projections": its.rows(8, seed=7),
            "image_embeds": its.rows(3, 16, seed=8),
            "guidance": its.level(6000.0),
            "indices_latents_clean": torch.arange(18, 19),
            "indices_latents_history_2x": torch.arange(16, 18),
            "indices_latents_history_4x": torch.arange(16),
            "return_dict": False,
        }
        with generation(model):
            past = its.latents(19, seed=9)
            for n, frames in enumerate(scale.frames):
                x, (far, near, clean) = its.latents(frames, seed=n), past[:, :, -19:].split([16, 2, 1], 2)
                history = {"latents_clean": clean, "latents_history_2x": near, "latents_history_4x": far}
                for t in scale.levels:
                    call = {
                        "hidden_states": x,
                        "timestep": its.level(t),
                        "indices_latents": torch.arange(19, 19 + frames),
                    }
                    answer = yield (), {**call, **history, **given}
                    x = euler(x, answer[0], scale)
                past = torch.cat([past, x], 2)

    return Family(model, diffusers_framepack.adapter(model), calls)


def anyflow(scale: Scale) -> Family:
    """Chunks, each encoded with all before it when it is done."""
    partition, cells = scale.frames, scale.cells[0] * scale.cells[1]
    model: Any = seeded(lambda: diffusers.AnyFlowFARTransformer3DModel(**scale.wan(), chunk_partition=partition))
    height, width = 2 * scale.cells[0], 2 * scale.cells[1]
    size = {"height": height, "width": width, "device": torch.device("cpu"), "mode": "cache"}
    masks = [
        model.build_attention_mask(chunk_partition=list(partition[: n + 1]), **size) for n in range(len(partition))
    ]

    def calls(batch: int = 1) -> Calls:
        its = Inputs(scale, batch)
        text = its.text()
        room = (2, batch, scale.heads, len(partition) * max(partition) * cells, scale.head)
        kv = {
            layer: {"full_cache": torch.zeros(room), "compressed_cache": torch.zeros(room)}
            for layer in range(scale.depth)
        }
        made = torch.zeros(batch, sum(partition), 4, height, width)
        for n, frames in enumerate(partition):
            x, so_far = its.rows(frames, 4, height, width, seed=n), list(partition[: n + 1])
            given = {"encoder_hidden_states": text, "chunk_partition": so_far, "kv_cache": kv, "return_dict": False}
            for t, r in zip(scale.levels, [*scale.levels[1:], 0.0], strict=True):
                answer = yield (
                    (),
                    {
                        **given,
                        "hidden_states": x,
                        "timestep": its.level(t, frames),
                        "r_timestep": its.level(r, frames),
                        "kv_cache_flag": {"num_cached_chunks": n, "is_cache_step": False},
                    },
                )
                x = euler(x, answer[0], scale)
            made[:, sum(so_far) - frames : sum(so_far)] = x
            yield (
                (),
                {
                    **given,
                    "hidden_states": made[:, : sum(so_far)].clone(),
                    "timestep": its.level(0.0, sum(so_far)),
                    "r_timestep": its.level(0.0, sum(so_far)),
                    "attention_mask": masks[n],
                    "kv_cache_flag": {"num_cached_chunks": n, "is_cache_step": True},
                },
            )

    return Family(model, diffusers_anyflow.adapter(model), calls, "chunks")


def sana(scale: Scale) -> Family:
    """Blocks of frames with a sink and a history of K/V, captured when a block is done."""
    model: Any = seeded(
        lambda: diffusers.SanaWMLTX2RefinerTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=scale.heads,
            attention_head_dim=scale.head,
            cross_attention_dim=scale.width,
            num_layers=scale.depth,
            caption_channels=16,
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=2,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=16,
        )
    )
    cells = scale.cells[0] * scale.cells[1]

    def calls(batch: int = 1) -> Calls:
        its = Inputs(scale, batch)
        text, kv = its.text(), SanaWMRefinerKVCache(scale.depth)

        def place(frames: range) -> Any:
            grid = {"height": scale.cells[0], "width": scale.cells[1], "device": torch.device("cpu")}
            return model.build_rotary_emb_for_absolute_positions(batch, list(frames), fps=16.0, **grid)

        def call(x: Tensor, t: float, frames: range, mode: str) -> Call:
            return (), {
                "hidden_states": x,
                "encoder_hidden_states": text,
                "timestep": its.level(t, x.shape[1]),
                "video_rotary_emb": place(frames),
                "kv_cache": kv,
                "kv_cache_mode": mode,
                "return_dict": False,
            }

        yield call(its.rows(cells, 8, seed=20), 0.0, range(1), "capture_pre_rope")
        layers = [kv.get(i) for i in range(scale.depth)]
        for layer in layers:
            layer.store_sink(*layer.get_captured_pre_rope())
        kv.sink_pe, begin = place(range(1)), 1
        for n, length in enumerate(scale.frames):
            frames, x = range(begin, begin + length), its.rows(length * cells, 8, seed=n)
            for t in scale.levels:
                answer = yield call(x, t, frames, "inject")
                x = euler(x, answer[0], scale)
            yield call(x, 0.0, frames, "inject_and_capture_post_rope")
            for layer in layers:
                new, old = layer.get_captured_post_rope(), layer.get_history()
                layer.store_history(*(new if old is None else (torch.cat(p, 1) for p in zip(old, new, strict=True))))
            begin += length

    return Family(model, diffusers_sana.adapter(model), calls, "chunks")


def self_forcing(
    scale: Scale,
    kind: type[double.CausalWanModel] = double.CausalWanModel,
    loop: type[double.Loop] = double.Loop,
    *,
    window: int | None = 2,
    sink: int = 0,
) -> Family:
    """Chunks that write K/V in every pass, and a clean pass after each. All begin with the same noise.

    Args:
        scale: see there.
        kind: which of the relatives.
        loop: its loop.
        window: chunks that the K/V window holds, this one included; None holds all.
        sink: latent frames at its beginning that stay.
    """
    sizes = double.Sizes(
        width=scale.width,
        heads=scale.heads,
        depth=scale.depth,
        hidden=4 * scale.width,
        grid=scale.cells,
        frames=max(scale.frames),
    )
    model = kind(-1 if window is None else window * sizes.frames, sink, sizes=sizes).eval()
    levels = (*scale.levels[:-1], 0.0) if loop is double.KreaLoop else tuple(scale.levels)

    def calls(batch: int = 1) -> Calls:
        its = loop(model, window=sum(scale.frames), steps=levels, shared_noise=True, batch=batch)
        if isinstance(its, double.GameLoop):
            its.keys[..., 0] = 1  # one key is held
        for frames in scale.frames:
            yield from its.one_chunk(frames)

    return Family(model, wan_adapter.self_forcing(fresh_noise=False), calls, "chunks")


def street(scale: Scale) -> Family:
    """The embedded world as a `Session` calls it: a window is denoised once for every latent frame that it emits."""
    config = DiTConfig(depth=scale.depth, width=scale.width, heads=scale.heads, window=2)  # its cells are given
    protocol = Protocol(window=config.window, kv_every=config.window, steps=scale.steps)

    def awake() -> nn.Module:
        model = StreetDiT(config)
        for parameter in model.parameters():
            if not parameter.any():  # gates that are trained from zero
                nn.init.normal_(parameter, std=0.1)
        return model

    model, shape = seeded(awake), (config.window, CELLS, config.channels)

    def calls(batch: int = 1) -> Calls:
        its, kv = Inputs(scale, batch), WindowKV(config.kv_windows)
        action = torch.tensor([10.0, 0.0]).repeat(config.window, 2)  # straight on [F, A]

        def call(x: Tensor, context: Tensor, time: int, where: Where) -> Call:
            known, steer = its.level(float(time > 0), 1), action.expand(batch, -1, -1)
            given = (its.level(where.sigma or 0.0, 1), steer, context, known, its.level(time, 1))
            return (x, *given), {"kv": kv, "commit": where.role != "denoise", "where": where}

        past = its.rows(*shape, seed=9)
        yield call(past, torch.zeros_like(past[:, -1:]), 0, Where(0, -1, 0, "prefill", action=action))
        for cycle in range(len(scale.frames)):
            context, time, made = past[:, -1:], (cycle + 1) * config.window, []
            for j in range(config.window):
                where = Where(0, cycle * config.window + j, 0, "denoise", j == 0, j == 0, action, frame=j)
                x = its.rows(*shape, seed=2 * cycle)
                for step, (t, after) in enumerate(pairwise(protocol.sigmas.tolist())):
                    here = replace(where, step=step, sigma=t, steps=scale.steps)
                    x = x - (t - after) * (yield call(x, context, time, here))
                made.append(x[:, j : j + 1])
            past = torch.cat(made, 1)
            yield call(past, context, time, Where(0, where.chunk, 0, "commit", action=action))

    return Family(model, street_adapter.ADAPTER, calls, "chunks", tokens=config.window * CELLS)


FAMILIES: dict[str, Callable[..., Family]] = {
    "SkyReels-V2": skyreels,
    "Helios": helios,
    "FramePack": framepack,
    "AnyFlow-FAR": anyflow,
    "SANA-WM refiner": sana,
    "Self-Forcing": partial(self_forcing, sink=1),
    "LongLive 2": partial(self_forcing, kind=double.LongLive2Model, sink=1),
    "Matrix-Game 2.0": partial(self_forcing, kind=double.GameModel, loop=double.GameLoop),
    "CausVid": partial(self_forcing, kind=double.CausVidModel, loop=double.CausVidLoop, window=None),
    "Krea Realtime": partial(self_forcing, kind=double.KreaModel, loop=double.KreaLoop, window=None),
    "street world": street,
}
