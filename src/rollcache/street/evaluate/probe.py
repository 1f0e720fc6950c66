"""A small inverse-dynamics net: how fast the rig goes and turns, read from three latents in a row.

It is trained on rendered clips, so what it says of a generated one can be compared with the commanded action. Its own
error on rendered frames is the floor of that comparison.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from rollcache.street.rig import CAMERAS, FRAMES_PER_LATENT, RIG

HISTORY = 3  # latents that the probe looks at
WIDTH = 32
UNITS = (10.0, 1 / 3)  # m/s and rad/s of one unit of the net's output


class Probe(nn.Module):
    """Latents of the whole rig [B, 3, P, Z] to (speed m/s, yaw rate rad/s) of the last of them [B, 2].

    Every camera goes through the same convolutions; the means of its left and right half go on to the answer.

    Args:
        channels: latent channels Z.
    """

    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        self.channels = channels
        self.stem = nn.Conv2d(HISTORY * channels, WIDTH, 1)
        self.layers = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(3))
        self.hidden = nn.Linear(2 * WIDTH * len(CAMERAS), 48)
        self.head = nn.Linear(48, 2)
        self.register_buffer("units", torch.tensor(UNITS))

    def forward(self, z: Tensor) -> Tensor:
        """[B, 3, P, Z] -> [B, 2] in m/s and rad/s."""
        if z.ndim != 4 or z.shape[1] != HISTORY or z.shape[-1] != self.channels:
            raise ValueError(f"latents have shape {tuple(z.shape)}; expected [B, {HISTORY}, P, {self.channels}].")
        pooled, start = [], 0
        for group in RIG:
            views, (h, w) = len(group.cameras), group.grid
            x = z[:, :, start : start + views * h * w].unflatten(2, (views, h, w))
            start += views * h * w
            x = x.permute(0, 2, 1, 5, 3, 4).flatten(2, 3).flatten(0, 1)  # [B*V, 3*Z, h, w]
            x = nnf.silu(self.stem(x))
            for layer in self.layers:
                x = x + nnf.silu(layer(x))
            pooled.append(nnf.adaptive_avg_pool2d(x, (1, 2)).unflatten(0, (len(z), views)).flatten(1))
        answer: Tensor = self.head(nnf.silu(self.hidden(torch.cat(pooled, 1)))) * self.units
        return answer


def per_latent(action: Tensor) -> Tensor:
    """Actions per frame [T, 2] as means per latent frame [T/2, 2]: what the probe tells."""
    return action.unflatten(0, (-1, FRAMES_PER_LATENT)).mean(1)


@torch.no_grad()
def read(probe: Probe, latents: Tensor, before: Tensor) -> Tensor:
    """(speed, yaw rate) [F, 2] of latents [F, P, Z] that follow on `before` [2, P, Z]."""
    both = torch.cat((before, latents)).float()
    triples = torch.stack([both[i : i + len(latents)] for i in range(HISTORY)], 1)
    return torch.cat([probe(part) for part in triples.split(64)])
