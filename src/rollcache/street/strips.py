"""Strips to look at: what a transformer generates from a held-out start, under the truth it should have generated."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rollcache.street.codec import Codec
from rollcache.street.data import LatentClip
from rollcache.street.dit import StreetDiT
from rollcache.street.own import START
from rollcache.street.protocol import Protocol
from rollcache.street.rig import FRAMES_PER_LATENT
from rollcache.street.world import Session, Start, World

VIEWS = (("front", 1), ("sides", 0), ("rear", 0))  # view group and camera shown


def strip(
    model: StreetDiT,
    weights: dict[str, Tensor],
    codec: Codec,
    clip: LatentClip,
    *,
    steps: int = 8,
    windows: int = 6,
    shown: int = 6,
) -> np.ndarray:
    """Roll out `windows` windows from the start of a clip under its actions and lay the frames side by side.

    Args:
        model: gives the sizes; it is not changed.
        weights: its state dict to look at, e.g. averaged weights.
        codec: decodes both rows.
        clip: latents of truth, long enough for the start and the windows.
        steps: denoising steps.
        windows: windows to generate.
        shown: frames shown, evenly spaced in time.

    Returns:
        uint8 [height, width, 3]: for every view of `VIEWS` a row of truth and below it a row of generated frames.
    """
    size = model.config.window
    first, last = START * size, (START + windows) * size
    if len(clip.z) < last:
        raise ValueError(f"the clip has {len(clip.z)} latent frames; a strip of {windows} windows needs {last}.")
    kinds = model.state_dict()
    model = copy.deepcopy(model).cpu()
    model.load_state_dict({k: v.to("cpu", kinds[k].dtype) for k, v in weights.items()})
    world = World(model, codec)
    start = Start(clip.z[:first].float(), clip.action[:first], clip.scenery)
    session = Session(world, start, Protocol.named("chunked", steps=steps, window=size))
    actions = clip.action[first:last].reshape(windows, -1, 2)
    made = torch.cat([session.step(action).latents for action in actions])
    pick = torch.linspace(1, len(made) - 1, shown).round().long()
    rows = []
    truth, generated = (world.decode(z[pick]) for z in (clip.z[first:last].float(), made))
    for group, camera in VIEWS:
        for frames in (truth, generated):
            pictures = frames[group][FRAMES_PER_LATENT - 1 :: FRAMES_PER_LATENT, camera]  # [shown, H, W, 3]
            rows.append(torch.cat(list(pictures), 1))
    wide = max(r.shape[1] for r in rows)
    page = torch.cat([torch.nn.functional.pad(r, (0, 0, 0, wide - r.shape[1], 1, 1), value=1.0) for r in rows])
    return (page * 255).round().to(torch.uint8).numpy()


def save_strip(path: Path, picture: np.ndarray) -> None:
    """Write a strip as PNG, twice as large as its pixels."""
    from matplotlib.image import imsave

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.png")
    imsave(part, picture.repeat(2, 0).repeat(2, 1))
    part.replace(path)
