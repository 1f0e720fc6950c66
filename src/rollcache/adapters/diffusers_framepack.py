"""FramePack in diffusers: sections of latent frames, many steps each, behind a compressed history.

A section is a chunk, told by a noise level that rises; whether the video grows forwards or backwards does not matter.
The history stands in front of the section: its tokens take part in what blocks add, and have no grid. Text and image
tokens are a second stream, which is replayed with the first. Nothing is handed on but latents.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rollcache.adapters.diffusers_common import Size, argument, behind, grid, optional, padded, patches, present
from rollcache.adapters.loops import ANNOUNCE, TIMESTEPS, Loop
from rollcache.adapters.spec import Adapter, Args, BlockIO, Kwargs
from rollcache.passes import Pass, Role, Segment


def adapter(model: Any) -> Adapter:
    """The adapter of one `HunyuanVideoFramepackTransformer3DModel`; it counts the model's calls."""
    loop = Loop(model)

    def locate(model: Any, args: Args, kwargs: Kwargs) -> Pass:
        size, start = grid(argument(args, kwargs, 0, "hidden_states"), patch(model)), history(args, kwargs)
        prompt = present(
            argument(args, kwargs, 2, "encoder_hidden_states"),
            optional(args, kwargs, 3, "encoder_attention_mask"),
            optional(args, kwargs, 4, "pooled_projections"),
            optional(args, kwargs, 5, "image_embeds"),
        )
        spot = loop.at(
            argument(args, kwargs, 1, "timestep"),
            prompt,
            layout=(size, start),
            latents=argument(args, kwargs, 0, "hidden_states"),
        )
        return Pass(
            role=Role.DENOISE,
            chunk=spot.chunk,
            step=spot.step,
            branch=spot.branch,
            segments=(Segment.contiguous("section", 1, size, start),),
            conditions=spot.conditions,
            fresh_noise=True,
            time=spot.levels[0] / TIMESTEPS,
            steps=loop.steps,
        )

    return Adapter(
        blocks=lambda model: [*model.transformer_blocks, *model.single_transformer_blocks],
        locate=locate,
        io=BlockIO(encoder=(1, "encoder_hidden_states"), returns="hidden, encoder"),
        kv_writes="never",
        hint=ANNOUNCE,
        latent=latent,
        modulated=modulated,
        embedding=embedding,
    )


def patch(model: Any) -> Size:
    """Patch (t, h, w) of the section."""
    config = model.config
    return config.patch_size_t, config.patch_size, config.patch_size


def history(args: Args, kwargs: Kwargs) -> int:
    """Tokens in front of the section: frames nearby as they are, others in patches of twice and four times the size."""
    count = 0
    for position, (name, scale) in ((8, ("clean", 1)), (10, ("history_2x", 2)), (12, ("history_4x", 4))):
        if optional(args, kwargs, position + 1, f"indices_latents_{name}") is not None:
            latents = optional(args, kwargs, position, f"latents_{name}")
            count += padded(latents, (scale, 2 * scale, 2 * scale))
    return count


def latent(model: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """The noisy latent of every token [B, L, Z], 0 for the history."""
    tokens = patches(argument(args, kwargs, 0, "hidden_states"), patch(model))
    return behind(history(args, kwargs), tokens)


def modulated(block: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """What block 0 attends with [B, L, C]: normalised, scaled and shifted."""
    x: Tensor = block.norm1(args[0], emb=args[2])[0]
    return x


def embedding(block: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Embedding of timestep, pooled text and guidance [B, C]."""
    temb: Tensor = args[2]
    return temb
