"""A small street world with random weights: everything runs, nothing looks like a street."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rollcache.street.codec import PATCH_DIM, Codec
from rollcache.street.dit import DiTConfig, StreetDiT
from rollcache.street.drives import Drive
from rollcache.street.rig import RIG
from rollcache.street.weights import pack
from rollcache.street.world import World


def random_model(depth: int = 4, width: int = 32, seed: int = 0) -> StreetDiT:
    """A transformer in which every parameter that starts at zero is random, and that listens to its actions."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = StreetDiT(DiTConfig(depth=depth, width=width, heads=2, rank=16))
        for parameter in model.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.02)
        torch.nn.init.normal_(model.head.weight, std=0.1)
        for layer in (model.action_in, model.action_out, *(block.mod_out for block in model.blocks)):
            torch.nn.init.normal_(layer.weight, std=0.2)
    return model


def random_codec(seed: int = 0, **sizes: int) -> Codec:
    """A codec with a random orthonormal basis around mid-grey."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        codec = Codec(24, **sizes)
        codec.basis.copy_(torch.linalg.qr(torch.randn(PATCH_DIM, 24)).Q.T)
        codec.mean.fill_(0.5)
    return codec


def random_world(dtype: str = "float32", depth: int = 4, width: int = 32) -> World:
    """A world of random weights."""
    return World(random_model(depth, width), random_codec(width=16, depth=1), dtype=dtype)  # type: ignore[arg-type]


def random_weights(folder: Path, depth: int = 4, width: int = 32) -> Path:
    """A weights file of a random world, with its checksum beside it."""
    path = folder / "random.safetensors"
    pack(path, random_model(depth, width), random_codec(), {"made": "at random"})
    return path


def noise_frames(scenario: str, seed: int, drive: Drive) -> Mapping[str, Tensor]:
    """Stands in for the renderer: smooth random pictures that drift, quickly made."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for group in RIG:
        coarse = torch.rand((len(drive), len(group.cameras), 3, 3, 5), generator=generator).flatten(0, 1)
        fine = torch.nn.functional.interpolate(coarse, (group.height, group.width), mode="bilinear")
        fine = fine.unflatten(0, (len(drive), len(group.cameras))).permute(0, 1, 3, 4, 2)
        out[group.name] = (fine * 255).to(torch.uint8)
    return out
