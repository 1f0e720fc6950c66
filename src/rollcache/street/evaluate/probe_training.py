"""Training the inverse-dynamics probe on the latents of rendered clips."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rollcache.street.codec import Codec
from rollcache.street.data import LatentClip, LatentSet
from rollcache.street.evaluate.probe import HISTORY, Probe
from rollcache.street.rig import FRAMES_PER_LATENT
from rollcache.street.training import Trainer


@dataclass(frozen=True, kw_only=True)
class ProbeTraining:
    """Budget and recipe of the inverse-dynamics probe."""

    minutes: float = 3.0
    lr: float = 2e-3
    batch: int = 48
    noise: float = 0.3  # largest sd of the noise on the latents
    fade: float = 0.7  # largest share of the finest channel that is taken away: generated frames are less sharp
    seed: int = 0


def train_probe(
    data: Path, codec: Codec, folder: Path, config: ProbeTraining, on_step: Callable[[Trainer], None] | None = None
) -> Trainer:
    """Train the probe on the clips in `data`; resumes from `folder`. Losses are in the probe's units."""
    torch.manual_seed(config.seed)
    clips = LatentSet(data, codec).clips
    held_out = LatentSet(data, codec, held_out=True, mirror=False).clips
    probe = Probe(codec.channels)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01)
    trainer = Trainer(
        folder,
        probe,
        [optimizer],
        minutes=config.minutes,
        ema=0.99,
        decay=0.6,
        seed=config.seed,
        stamp=f"codec {codec.tag}",
        recipe=config,
    )

    def step(generator: torch.Generator) -> Tensor:
        z, action = triples(clips, config.batch, generator)
        return probe_loss(probe, worn(z, config.noise, config.fade, generator), action)

    @torch.no_grad()
    def evaluate() -> float:
        generator = torch.Generator().manual_seed(0)
        return float(torch.stack([probe_loss(probe, *triples(held_out, 64, generator)) for _ in range(8)]).mean())

    trainer.run(step, evaluate=evaluate, every=100, on_step=on_step)
    return trainer


def triples(clips: list[LatentClip], count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random latents in a row [count, 3, P, Z] and the mean (speed, yaw rate) of the last [count, 2]."""
    z, action = [], []
    for _ in range(count):
        clip = clips[int(torch.randint(len(clips), (), generator=generator))]
        first = int(torch.randint(len(clip.z) - HISTORY + 1, (), generator=generator))
        z.append(clip.z[first : first + HISTORY])
        action.append(clip.action[first + HISTORY - 1].unflatten(0, (FRAMES_PER_LATENT, 2)).mean(0))
    return torch.stack(z).float(), torch.stack(action).float()


def worn(z: Tensor, noise: float, fade: float, generator: torch.Generator) -> Tensor:
    """Latents [B, 3, P, Z] as a world might generate them: noisy, and weaker in their finer channels."""
    count, channels = len(z), z.shape[-1]
    lost = fade * torch.rand((count, 1, 1, 1), generator=generator) * torch.linspace(0, 1, channels)
    sd = noise * torch.rand((count, 1, 1, 1), generator=generator)
    return z * (1 - lost) + sd * torch.randn(z.shape, generator=generator)


def probe_loss(probe: Probe, z: Tensor, action: Tensor) -> Tensor:
    """Mean squared error in the probe's units, large errors counted linearly."""
    return torch.nn.functional.smooth_l1_loss(probe(z) / probe.units, action / probe.units, beta=0.3)
