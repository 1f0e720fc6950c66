"""SkyReels-V2 in diffusers: windows of latent frames, denoised in step or, with `ar_step`, one behind the other.

A window is a chunk and a call of the model a step, whatever the single frames of the window are at: finished frames and
those that have not begun are tokens like the others. No K/V is kept; the frames that a window inherits are denoised
again with it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rollcache.adapters.diffusers_common import argument, grid, optional, patches, present
from rollcache.adapters.diffusers_skyreels_rows import SkyReelsRows
from rollcache.adapters.loops import ANNOUNCE, TIMESTEPS, Loop, Spot
from rollcache.adapters.spec import Adapter, Args, Kwargs
from rollcache.passes import Pass, Role, Segment

SAMPLES = 256
"""Tokens of which the embedding of the timestep is shown."""


def adapter(model: Any) -> Adapter:
    """The adapter of one `SkyReelsV2Transformer3DModel`; it counts the model's calls."""
    loop = Loop(model)

    def locate(model: Any, args: Args, kwargs: Kwargs) -> Pass:
        window = grid(argument(args, kwargs, 0, "hidden_states"), model.config.patch_size)
        prompt = argument(args, kwargs, 2, "encoder_hidden_states")
        image = optional(args, kwargs, 3, "encoder_hidden_states_image")
        spot = loop.at(
            argument(args, kwargs, 1, "timestep"),
            present(prompt, image),
            layout=window,
            latents=argument(args, kwargs, 0, "hidden_states"),
        )
        return Pass(
            role=Role.DENOISE,
            chunk=spot.chunk,
            step=spot.step,
            branch=spot.branch,
            segments=(Segment.contiguous("window", 1, window),),
            conditions=spot.conditions,
            fresh_noise=True,
            time=noise_level(spot),
            steps=loop.steps,
        )

    return Adapter(
        blocks=lambda model: list(model.blocks),
        locate=locate,
        kv_writes="never",
        hint=ANNOUNCE,
        latent=latent,
        modulated=modulated,
        embedding=embedding,
        sparse=SkyReelsRows(list(model.blocks)),
    )


def noise_level(spot: Spot) -> float:
    """Mean sigma of the frames that the window denoises: those that were not below the noisiest when it began."""
    top = max(spot.first)
    own = [now for now, first in zip(spot.levels, spot.first, strict=True) if first == top]
    return sum(own) / len(own) / TIMESTEPS


def latent(model: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """The noisy latent of every token [B, L, Z]."""
    return patches(argument(args, kwargs, 0, "hidden_states"), model.config.patch_size)


def modulated(block: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """What block 0 attends with [B, L, C]: normalised, scaled and shifted."""
    hidden, temb = args[0], args[2]
    if temb.ndim == 4:  # [B, 6, L, C]: every frame has a timestep
        shift, scale = (block.scale_shift_table.unsqueeze(2)[:, :2] + temb[:, :2].float()).unbind(1)
    else:
        shift, scale = (block.scale_shift_table[:, :2] + temb[:, :2].float()).chunk(2, 1)
    x: Tensor = block.norm1(hidden.float()) * (1 + scale) + shift
    return x.type_as(hidden)


def embedding(block: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Projected timestep: [B, 6, C], or [B, 6, n, C] of evenly spread tokens where every frame has its own."""
    temb: Tensor = args[2]
    return temb if temb.ndim == 3 else temb[:, :, :: -(-temb.shape[2] // SAMPLES)]
