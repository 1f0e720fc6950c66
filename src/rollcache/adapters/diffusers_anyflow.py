"""AnyFlow-FAR in diffusers: chunks of latent frames, a few steps each, then a pass that encodes everything so far.

The pipeline says the chunk by the length of `chunk_partition`, and what a call is for in `kv_cache_flag`. Denoising
only reads the cache; the encoding passes, whose tokens are those of all chunks so far, are exact. New K/V tensors are a
new video. The first and the last chunk may have fewer frames than the others, and share nothing with them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rollcache.adapters.diffusers_common import argument, grid, optional, patches, present
from rollcache.adapters.loops import TIMESTEPS, Loop
from rollcache.adapters.spec import Adapter, Args, Kwargs
from rollcache.passes import Pass, Role, RollcacheError, Segment


def adapter(model: Any) -> Adapter:
    """The adapter of one `AnyFlowFARTransformer3DModel`; it counts the model's calls."""
    loop = Loop(model)

    def locate(model: Any, args: Args, kwargs: Kwargs) -> Pass:
        cache, flag = optional(args, kwargs, 8, "kv_cache"), optional(args, kwargs, 9, "kv_cache_flag")
        if cache is None or flag is None:
            raise RollcacheError(
                "AnyFlow-FAR was called without kv_cache= and kv_cache_flag=, from which chunks and commits are told: "
                "keep use_kv_cache=True, or disable the cache."
            )
        loop.owned_by(cache[0]["full_cache"])
        if flag["is_cache_step"]:
            return Pass(role=Role.COMMIT, chunk=loop.chunk)
        latents = frames_second(argument(args, kwargs, 0, "hidden_states"))
        image = optional(args, kwargs, 5, "encoder_hidden_states_image")
        prompt = present(argument(args, kwargs, 3, "encoder_hidden_states"), image)
        partition = argument(args, kwargs, 4, "chunk_partition")
        spot = loop.at(argument(args, kwargs, 1, "timestep"), prompt, chunk=len(partition) - 1)
        return Pass(
            role=Role.DENOISE,
            chunk=spot.chunk,
            step=spot.step,
            branch=spot.branch,
            segments=(Segment.contiguous("chunk", 1, grid(latents, model.config.patch_size)),),
            conditions=spot.conditions,
            fresh_noise=True,
            time=spot.levels[0] / TIMESTEPS,
            steps=loop.steps,
        )

    return Adapter(
        blocks=lambda model: list(model.blocks),
        locate=locate,
        kv_writes="commit_only",
        latent=latent,
        modulated=modulated,
        embedding=embedding,
    )


def frames_second(latents: Tensor) -> Tensor:
    """Latents [B, F, C, H, W] of this model as [B, C, F, H, W]."""
    return latents.transpose(1, 2)


def latent(model: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """The noisy latent of every token [B, L, Z]."""
    return patches(frames_second(argument(args, kwargs, 0, "hidden_states")), model.config.patch_size)


def modulated(block: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """What block 0 attends with [B, L, C]: normalised, scaled and shifted."""
    hidden, temb = args[0], args[2]  # [B, L, 6, C]
    shift, scale = (block.scale_shift_table[:, :2] + temb[:, :, :2].float()).unbind(2)
    x: Tensor = block.norm1(hidden.float()) * (1 + scale) + shift
    return x.type_as(hidden)


def embedding(block: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Projected timesteps [B, 6, C], which all tokens share."""
    temb: Tensor = args[2]
    return temb[:, -1]
