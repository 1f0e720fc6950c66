"""Helios in diffusers: chunks of latent frames, many steps each, behind a compressed history of the video so far.

A chunk is told by a noise level that rises; in the pyramid pipeline so is every stage, since a stage has tokens of its
own. The history stands in front of the chunk: its tokens take part in what blocks add, and have no grid. Nothing is
handed on but latents.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rollcache.adapters.diffusers_common import argument, behind, grid, optional, padded, patches
from rollcache.adapters.loops import ANNOUNCE, TIMESTEPS, Loop
from rollcache.adapters.spec import Adapter, Args, Kwargs
from rollcache.passes import Pass, Role, Segment


def adapter(model: Any) -> Adapter:
    """The adapter of one `HeliosTransformer3DModel`; it counts the model's calls."""
    loop = Loop(model)

    def locate(model: Any, args: Args, kwargs: Kwargs) -> Pass:
        size, start = grid(argument(args, kwargs, 0, "hidden_states"), model.config.patch_size), history(args, kwargs)
        prompt = argument(args, kwargs, 2, "encoder_hidden_states")
        spot = loop.at(
            argument(args, kwargs, 1, "timestep"),
            (prompt,),
            layout=(size, start),
            latents=argument(args, kwargs, 0, "hidden_states"),
        )
        return Pass(
            role=Role.DENOISE,
            chunk=spot.chunk,
            step=spot.step,
            branch=spot.branch,
            segments=(Segment.contiguous("chunk", 1, size, start),),
            conditions=spot.conditions,
            fresh_noise=True,
            time=spot.levels[0] / TIMESTEPS,
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
    )


def history(args: Args, kwargs: Kwargs) -> int:
    """Tokens in front of the chunk: recent frames as they are, older ones in larger patches."""
    count = 0
    for position, (name, scale) in enumerate((("short", 1), ("mid", 2), ("long", 4))):
        if optional(args, kwargs, 4 + position, f"indices_latents_history_{name}") is not None:
            latents = optional(args, kwargs, 7 + position, f"latents_history_{name}")
            count += padded(latents, (scale, 2 * scale, 2 * scale))
    return count


def latent(model: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """The noisy latent of every token [B, L, Z], 0 for the history."""
    tokens = patches(argument(args, kwargs, 0, "hidden_states"), model.config.patch_size)
    return behind(history(args, kwargs), tokens)


def modulated(block: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """What block 0 attends with [B, L, C]: normalised, scaled and shifted."""
    hidden, temb = args[0], args[2]  # [B, L, 6, C]
    shift, scale = (block.scale_shift_table[:, :2] + temb[:, :, :2].float()).unbind(2)
    x: Tensor = block.norm1(hidden.float()) * (1 + scale) + shift
    return x.type_as(hidden)


def embedding(block: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Projected timestep [B, 6, C], which all tokens of the chunk share; that of the history stays the same."""
    temb: Tensor = args[2]
    return temb[:, -1]
