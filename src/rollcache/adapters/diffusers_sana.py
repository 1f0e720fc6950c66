"""The SANA-WM refiner in diffusers: blocks of latent frames, a few steps each, then a pass that captures their K/V.

The pipeline says what a call is for in `kv_cache_mode`. Denoising only reads the cache, so that blocks of the model may
be left out without a trace; the capturing passes are exact. A new `SanaWMRefinerKVCache` is a new video.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rollcache.adapters.diffusers_common import argument, optional, present
from rollcache.adapters.loops import Loop, one_level
from rollcache.adapters.spec import Adapter, Args, Kwargs
from rollcache.passes import Pass, Role, RollcacheError


def adapter(model: Any) -> Adapter:
    """The adapter of one `SanaWMLTX2RefinerTransformer3DModel`; it counts the model's calls."""
    loop = Loop(model)
    captured = 0  # passes so far: between two of them is a chunk

    def locate(model: Any, args: Args, kwargs: Kwargs) -> Pass:
        nonlocal captured
        cache, mode = optional(args, kwargs, 5, "kv_cache"), optional(args, kwargs, 6, "kv_cache_mode")
        if cache is None or mode is None:
            raise RollcacheError(
                "the refiner was called without kv_cache= and kv_cache_mode=, from which chunks and commits are told: "
                "pass them, or disable the cache."
            )
        loop.owned_by(cache)
        if mode == "capture_pre_rope":
            return Pass(role=Role.PREFILL, chunk=loop.chunk)
        if mode == "inject_and_capture_post_rope":
            captured += 1
            return Pass(role=Role.COMMIT, chunk=loop.chunk)
        if mode != "inject":
            raise RollcacheError(f"kv_cache_mode={mode!r} is not known: update rollcache, or disable the cache.")
        mask = optional(args, kwargs, 4, "encoder_attention_mask")
        prompt = present(argument(args, kwargs, 1, "encoder_hidden_states"), mask)
        spot = loop.at(argument(args, kwargs, 2, "timestep"), prompt, chunk=captured, levels=one_level)
        return Pass(
            role=Role.DENOISE,
            chunk=spot.chunk,
            step=spot.step,
            branch=spot.branch,
            conditions=spot.conditions,
            fresh_noise=True,
            time=spot.levels[0] / model.config.timestep_scale_multiplier,
            steps=loop.steps,
        )

    return Adapter(
        blocks=lambda model: list(model.transformer_blocks),
        locate=locate,
        kv_writes="commit_only",
        latent=lambda model, args, kwargs: argument(args, kwargs, 0, "hidden_states"),
        modulated=modulated,
        embedding=embedding,
    )


def modulated(block: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """What block 0 attends with [B, L, C]: normalised, scaled and shifted."""
    hidden, temb = kwargs["hidden_states"], kwargs["temb"]
    shift, scale, *_ = block.get_mod_params(block.scale_shift_table, temb, hidden.shape[0])
    x: Tensor = block.norm1(hidden) * (1 + scale) + shift
    return x


def embedding(block: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Projected timestep [B, 6C], which all tokens share."""
    temb: Tensor = kwargs["temb"]
    return temb[:, -1]
