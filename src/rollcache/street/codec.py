"""The video codec of the street world: a linear causal encoder and a residual convolutional decoder.

Two consecutive frames of one camera are folded into one latent frame, so latent `i` depends on frames `2i` and `2i+1`
alone and the codec is causal by construction. The encoder projects every 8x8x2 patch onto its leading principal
components; the decoder adds a convolutional correction to the inverse projection. Every view group has its own grid
shape; the weights are shared.

Shape letters: B batch, T pixel frames, F latent frames (T = 2F), V cameras, H W pixels, P latent cells of the whole
rig (see `rig.CELLS`), Z latent channels.
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollcache.street.rig import CELLS, FRAMES_PER_LATENT, PATCH, RIG

PATCH_DIM = FRAMES_PER_LATENT * 3 * PATCH * PATCH
WHITENING = 0.6  # latents are divided by sd ** WHITENING: tail components are texture nobody can predict


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(width, width, 3, padding=1)
        self.b = nn.Conv2d(width, width, 3, padding=1)
        nn.init.zeros_(self.b.weight)
        nn.init.zeros_(self.b.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.silu(self.a(F.silu(x))))


class Codec(nn.Module):
    """Frames to latents and back.

    Args:
        channels: latent channels Z.
        width: channels of the decoder at latent resolution.
        depth: residual blocks of the decoder at latent resolution.
    """

    def __init__(self, channels: int = 24, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.channels = channels
        fine = 32
        self.register_buffer("mean", torch.zeros(PATCH_DIM))
        self.register_buffer("basis", torch.zeros(channels, PATCH_DIM))  # orthonormal rows
        self.register_buffer("scale", torch.ones(channels))  # latent = projection / scale
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.coarse = nn.Sequential(*[_Residual(width) for _ in range(depth)])
        self.up = nn.Conv2d(width, fine * 16, 1)
        self.fine = nn.Sequential(_Residual(fine), _Residual(fine))
        self.out = nn.Conv2d(fine, FRAMES_PER_LATENT * 3 * 4, 3, padding=1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    @property
    def tag(self) -> str:
        """Eight hexadecimal digits that name the latent space: those of its linear part."""
        return hashlib.sha256(self.basis.numpy().tobytes() + self.scale.numpy().tobytes()).hexdigest()[:8]

    @torch.no_grad()
    def fit(self, patches: Tensor) -> Tensor:
        """Set the linear part from sample `patches` [N, PATCH_DIM]; returns the variance share kept (a scalar)."""
        x = patches.double()
        mean = x.mean(0)
        covariance = (x - mean).T @ (x - mean) / len(x)
        values, vectors = torch.linalg.eigh(covariance)
        order = values.argsort(descending=True)[: self.channels]
        sd = values[order].clamp_min(1e-12).sqrt()
        scale = sd**WHITENING
        scale = scale * (sd / scale).square().mean().sqrt()  # unit variance on average over the channels
        self.mean.copy_(mean)
        self.basis.copy_(vectors[:, order].T)
        self.scale.copy_(scale)
        return values[order].sum() / values.sum()

    def encode(self, frames: dict[str, Tensor]) -> Tensor:
        """Encode the rig's frames (group -> [T, V, H, W, 3], uint8 or float in [0, 1], T even) to [T/2, P, Z]."""
        check_frames(frames)
        parts = []
        for group in RIG:
            patches = to_patches(frames[group.name])  # [F, V, h, w, PATCH_DIM]
            z = (patches - self.mean) @ self.basis.T / self.scale
            parts.append(z.flatten(1, 3))
        return torch.cat(parts, 1)

    def decode(self, latents: Tensor, batch: int = 8) -> dict[str, Tensor]:
        """Decode [F, P, Z] to frames in [0, 1], group -> [2F, V, H, W, 3] (float32)."""
        if latents.ndim != 3 or latents.shape[1:] != (CELLS, self.channels):
            raise ValueError(f"latents have shape {tuple(latents.shape)}; expected [F, {CELLS}, {self.channels}].")
        out: dict[str, Tensor] = {}
        start = 0
        for group in RIG:
            views, (h, w) = len(group.cameras), group.grid
            z = latents[:, start : start + views * h * w].unflatten(1, (views, h, w))
            start += views * h * w
            flat = z.flatten(0, 1).permute(0, 3, 1, 2)  # [F*V, Z, h, w]
            images = torch.cat([self.decode_images(part) for part in flat.split(batch * views)])
            images = images.unflatten(0, (len(latents), views))  # [F, V, 2, 3, H, W]
            out[group.name] = images.permute(0, 2, 1, 4, 5, 3).flatten(0, 1).float().clamp(0, 1)
        return out

    def decode_images(self, z: Tensor) -> Tensor:
        """Decode latents [N, Z, h, w] to image pairs [N, 2, 3, 8h, 8w], not clamped."""
        with torch.autocast(z.device.type, enabled=False):
            linear = (z.float().permute(0, 2, 3, 1) * self.scale) @ self.basis + self.mean  # [N, h, w, PATCH_DIM]
        n, h, w, _ = linear.shape
        base = linear.unflatten(-1, (FRAMES_PER_LATENT, 3, PATCH, PATCH))
        base = base.permute(0, 3, 4, 1, 5, 2, 6).reshape(n, FRAMES_PER_LATENT, 3, h * PATCH, w * PATCH)
        dtype = self.stem.weight.dtype
        x = self.coarse(self.stem(z.to(dtype)))
        x = self.fine(F.pixel_shuffle(self.up(F.silu(x)), 4))
        x = F.pixel_shuffle(self.out(F.silu(x)), 2).unflatten(1, (FRAMES_PER_LATENT, 3))
        return base + x.to(base.dtype)


def to_patches(frames: Tensor) -> Tensor:
    """Fold one group's frames [T, V, H, W, 3] into patches [T/2, V, h, w, PATCH_DIM], float32 in [0, 1]."""
    x = frames.float() / 255 if frames.dtype == torch.uint8 else frames.float()
    t, v, height, width, _ = x.shape
    x = x.reshape(t // 2, 2, v, height // PATCH, PATCH, width // PATCH, PATCH, 3)
    return x.permute(0, 2, 3, 5, 1, 7, 4, 6).flatten(4)


def check_frames(frames: dict[str, Tensor]) -> None:
    """Raise ValueError unless `frames` has every view group of the rig with its shape and an even frame count."""
    for group in RIG:
        if group.name not in frames:
            raise ValueError(f"frames lack the view group {group.name!r}; got {sorted(frames)}.")
        shape = tuple(frames[group.name].shape)
        want = (len(group.cameras), group.height, group.width, 3)
        if shape[1:] != want or shape[0] % FRAMES_PER_LATENT:
            raise ValueError(f"view group {group.name!r} has shape {shape}; expected an even T and {('T', *want)}.")
