"""`check_adapter` on every model family of diffusers that has an adapter, in loops like those of its pipeline.

Branches have no names in these loops, the first one called is the conditional one: so their order is never turned.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

pytest.importorskip("transformers", reason="the pipelines of diffusers need it: pip install 'rollcache[diffusers]'")
pytest.importorskip("diffusers", reason="the real classes are needed: pip install 'rollcache[diffusers]'")

from diffusers.models.transformers import transformer_anyflow_far
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache
from diffusers_doubles import WAN, diffusers, noise, seeded

from rollcache.adapters import (
    diffusers_anyflow,
    diffusers_framepack,
    diffusers_helios,
    diffusers_sana,
    diffusers_skyreels,
)
from rollcache.adapters.check import check_adapter
from rollcache.adapters.loops import generation

Calls = Iterator[tuple[tuple[Any, ...], dict[str, Any]]]
LEVELS = (900.0, 500.0)


def denoised(x: Tensor, v: Tensor) -> Tensor:
    return x - 0.3 * v


def prompts(batch: int, seed: int = 50) -> list[Tensor]:
    return [noise(1, 8, 16, seed=seed + i).expand(batch, -1, -1).contiguous() for i in range(2)]


def rows(batch: int, *shape: int, seed: int) -> Tensor:
    """The same for every sample of a batch."""
    return noise(1, *shape, seed=seed).expand(batch, *shape).contiguous()


def skyreels() -> tuple[Any, Any, Callable[..., Calls]]:
    model = seeded(lambda: diffusers.SkyReelsV2Transformer3DModel(**WAN))

    def calls(batch: int = 1) -> Calls:
        with generation(model):
            text = prompts(batch)
            for n, frames in enumerate((2, 2, 3)):
                x = rows(batch, 4, frames, 4, 4, seed=n)
                for t in LEVELS:
                    timestep = torch.full((batch, frames), t)
                    out = []
                    for prompt in text:
                        call = {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": prompt}
                        answer = yield (), {**call, "enable_diffusion_forcing": True, "return_dict": False}
                        out.append(answer[0])
                    x = denoised(x, 2 * out[0] - out[1])

    return model, diffusers_skyreels.adapter(model), calls


def helios() -> tuple[Any, Any, Callable[..., Calls]]:
    model = seeded(lambda: diffusers.HeliosTransformer3DModel(**WAN, rope_dim=(8, 4, 4)))

    def calls(batch: int = 1) -> Calls:
        with generation(model):
            text, past = prompts(batch), rows(batch, 4, 19, 4, 4, seed=9)
            for n in range(3):
                x = rows(batch, 4, 2, 4, 4, seed=n)
                long, mid, short = past[:, :, -19:].split([16, 2, 1], 2)
                history = {
                    "indices_hidden_states": torch.arange(19, 21)[None],
                    "indices_latents_history_long": torch.arange(16)[None],
                    "indices_latents_history_mid": torch.arange(16, 18)[None],
                    "indices_latents_history_short": torch.arange(18, 19)[None],
                    "latents_history_long": long,
                    "latents_history_mid": mid,
                    "latents_history_short": short,
                }
                for t in LEVELS:
                    timestep = torch.full((batch,), t)
                    out = []
                    for prompt in text:
                        call = {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": prompt}
                        answer = yield (), {**call, **history, "return_dict": False}
                        out.append(answer[0])
                    x = denoised(x, 2 * out[0] - out[1])
                past = torch.cat([past, x], 2)

    return model, diffusers_helios.adapter(model), calls


def framepack() -> tuple[Any, Any, Callable[..., Calls]]:
    model = seeded(
        lambda: diffusers.HunyuanVideoFramepackTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=1,
            num_single_layers=2,
            num_refiner_layers=1,
            text_embed_dim=16,
            pooled_projection_dim=8,
            rope_axes_dim=(2, 4, 4),
            has_image_proj=True,
            image_proj_dim=16,
            has_clean_x_embedder=True,
        )
    )

    def calls(batch: int = 1) -> Calls:
        with generation(model):
            text, past = prompts(batch), rows(batch, 4, 19, 4, 4, seed=9)
            for n in range(3):
                x = rows(batch, 4, 2, 4, 4, seed=n)
                far, near, clean = past[:, :, -19:].split([16, 2, 1], 2)
                given = {
                    "encoder_attention_mask": torch.ones(batch, 8),
                    "pooled_projections": rows(batch, 8, seed=7),
                    "image_embeds": rows(batch, 3, 16, seed=8),
                    "guidance": torch.full((batch,), 6000.0),
                    "indices_latents": torch.arange(19, 21),
                    "latents_clean": clean,
                    "indices_latents_clean": torch.arange(18, 19),
                    "latents_history_2x": near,
                    "indices_latents_history_2x": torch.arange(16, 18),
                    "latents_history_4x": far,
                    "indices_latents_history_4x": torch.arange(16),
                }
                for t in LEVELS:
                    call = {"hidden_states": x, "timestep": torch.full((batch,), t), "encoder_hidden_states": text[0]}
                    answer = yield (), {**call, **given, "return_dict": False}
                    x = denoised(x, answer[0])
                past = torch.cat([past, x], 2)

    return model, diffusers_framepack.adapter(model), calls


def anyflow() -> tuple[Any, Any, Callable[..., Calls]]:
    partition = (1, 2, 2)
    model = seeded(lambda: diffusers.AnyFlowFARTransformer3DModel(**WAN, chunk_partition=partition))
    size = {"height": 4, "width": 4, "device": torch.device("cpu"), "mode": "cache"}
    masks = [model.build_attention_mask(chunk_partition=list(partition[: n + 1]), **size) for n in range(3)]
    for mask in masks:
        mask.dense = create_mask(mask.mask_mod, None, None, *mask.seq_lengths, device="cpu")

    def calls(batch: int = 1) -> Calls:
        text, cells = prompts(batch)[0], 4
        kv = {
            layer: {
                "full_cache": torch.zeros(2, batch, 2, 3 * 2 * cells, 16),
                "compressed_cache": torch.zeros(2, batch, 2, 2 * 1, 16),
            }
            for layer in range(3)
        }
        made = torch.zeros(batch, 5, 4, 4, 4)
        for n, frames in enumerate(partition):
            x, so_far = rows(batch, frames, 4, 4, 4, seed=n), list(partition[: n + 1])
            for t, r in zip(LEVELS, (*LEVELS[1:], 0.0), strict=True):
                answer = yield (
                    (),
                    {
                        "hidden_states": x,
                        "timestep": torch.full((batch, frames), t),
                        "r_timestep": torch.full((batch, frames), r),
                        "encoder_hidden_states": text,
                        "chunk_partition": so_far,
                        "kv_cache": kv,
                        "kv_cache_flag": {"num_cached_chunks": n, "is_cache_step": False},
                        "return_dict": False,
                    },
                )
                x = denoised(x, answer[0])
            made[:, sum(so_far) - frames : sum(so_far)] = x
            clean = torch.zeros(batch, sum(so_far))
            yield (
                (),
                {
                    "hidden_states": made[:, : sum(so_far)].clone(),
                    "timestep": clean,
                    "r_timestep": clean,
                    "encoder_hidden_states": text,
                    "chunk_partition": so_far,
                    "kv_cache": kv,
                    "attention_mask": masks[n],
                    "kv_cache_flag": {"num_cached_chunks": n, "is_cache_step": True},
                    "return_dict": False,
                },
            )

    return model, diffusers_anyflow.adapter(model), calls


def sana() -> tuple[Any, Any, Callable[..., Calls]]:
    model = seeded(
        lambda: diffusers.SanaWMLTX2RefinerTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            num_layers=3,
            caption_channels=16,
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=2,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=16,
        )
    )

    def calls(batch: int = 1) -> Calls:
        text, kv, cells = prompts(batch)[0], SanaWMRefinerKVCache(3), 6

        def place(frames: range) -> Any:
            size = {"height": 2, "width": 3, "device": torch.device("cpu"), "fps": 16.0}
            return model.build_rotary_emb_for_absolute_positions(batch_size=batch, frame_positions=list(frames), **size)

        def call(x: Tensor, t: float, frames: range, mode: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return (), {
                "hidden_states": x,
                "encoder_hidden_states": text,
                "timestep": torch.full((batch, x.shape[1]), t),
                "video_rotary_emb": place(frames),
                "kv_cache": kv,
                "kv_cache_mode": mode,
                "return_dict": False,
            }

        yield call(rows(batch, cells, 8, seed=20), 0.0, range(1), "capture_pre_rope")
        for i in range(3):
            kv.get(i).store_sink(*kv.get(i).get_captured_pre_rope())
        begin = 1
        for n, length in enumerate((2, 2, 1)):
            frames = range(begin, begin + length)
            kv.sink_pe = place(range(1))
            x = rows(batch, length * cells, 8, seed=n)
            for t in LEVELS:
                answer = yield call(x, t, frames, "inject")
                x = denoised(x, answer[0])
            yield call(x, 0.0, frames, "inject_and_capture_post_rope")
            for i in range(3):
                layer = kv.get(i)
                new, old = layer.get_captured_post_rope(), layer.get_history()
                layer.store_history(*(new if old is None else (torch.cat(p, 1) for p in zip(old, new, strict=True))))
            begin += length

    return model, diffusers_sana.adapter(model), calls


def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, scale: float | None = None, **_: Any) -> Tensor:
    """Attention under the mask of a flex attention, which is slow on a CPU."""
    if attn_mask is not None:
        attn_mask = attn_mask.dense
    return nnf.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask, scale=scale
    ).transpose(1, 2)


@pytest.mark.parametrize("family", [skyreels, helios, framepack, anyflow, sana])
def test_the_adapter_says_the_truth(
    family: Callable[[], tuple[Any, Any, Callable[..., Calls]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer_anyflow_far, "dispatch_attention_fn", attend)
    model, adapter, calls = family()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex_attention without torch.compile, on a CPU
        report = check_adapter(model, calls, adapter=adapter)
    report.raise_for_failures()
    skipped = {f.name for f in report.findings if f.status == "skipped"}
    assert skipped <= {"order of branches", "repair of all tokens", "shapes that change"}, str(report)
