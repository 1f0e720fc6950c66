"""The model's own rollouts as training context.

In a rollout the model builds on what it generated before, errors included. So it is trained on that: context windows
come from rollouts of the model as it is now, while the target stays the truth, which the actions and what is told of
the scene determine however far the context has drifted.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from rollcache.street.codec import Codec
from rollcache.street.data import LatentClip
from rollcache.street.dit import StreetDiT
from rollcache.street.protocol import Protocol
from rollcache.street.world import Session, Start, World

START = 2  # windows of truth before the first generated one


@dataclass(frozen=True)
class OwnClip:
    """A clip of which the model generated a part: `seen` [F, P, Z] is truth up to there, then the model's."""

    clip: LatentClip
    seen: Tensor


class OwnRollouts:
    """The latest rollouts of the model through training clips.

    Args:
        codec: needed by a `World`; nothing is decoded.
        keep: rollouts that are kept; the oldest goes first.
        windows: windows generated per rollout.
        steps: denoising steps.
    """

    def __init__(self, codec: Codec, keep: int = 160, windows: int = 8, steps: int = 4) -> None:
        self.codec, self.keep, self.windows, self.steps = codec, keep, windows, steps
        self.clips: list[OwnClip] = []

    def add(
        self, model: StreetDiT, weights: dict[str, Tensor], clips: list[LatentClip], generator: torch.Generator
    ) -> None:
        """Roll out a random clip with `weights` (a state dict of `model`) and keep the result."""
        device = model.place.device
        model = copy.deepcopy(model)
        model.load_state_dict(weights)
        clip = clips[int(torch.randint(len(clips), (), generator=generator))]
        size = model.config.window
        room = len(clip.z) - (START + 1) * size
        if room < 0:
            raise ValueError(f"clips of {len(clip.z)} latent frames are too short for a rollout of windows of {size}.")
        begin = size * int(torch.randint(room // size + 1, (), generator=generator))
        first = begin + START * size
        windows = min(self.windows, (len(clip.z) - first) // size)
        world = World(model, self.codec, device=str(device))
        scenery = clip.scenery.part(begin, len(clip.z)).to(device)
        start = Start(clip.z[begin:first].float().to(device), clip.action[begin:first].to(device), scenery)
        seed = int(torch.randint(2**31, (), generator=generator))
        session = Session(world, start, Protocol.named("chunked", steps=self.steps, window=size), seed=seed)
        actions = clip.action[first : first + windows * size].reshape(windows, -1, 2)
        made = torch.cat([session.step(action).latents for action in actions])
        with torch.inference_mode(False):
            seen = clip.z.clone()
            seen[first : first + len(made)] = made.cpu().to(seen.dtype)
        self.clips = [*self.clips, OwnClip(clip, seen)][-self.keep :]

    def draw(self, generator: torch.Generator) -> OwnClip:
        """One of them at random."""
        return self.clips[int(torch.randint(len(self.clips), (), generator=generator))]
