"""What the learned distances (LPIPS, ST-LPIPS) share: a distance between tapped features, and checked weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollcache.measure.metric import Score

# Mean and spread of ImageNet colours in [-1, 1], as LPIPS v0.1 has them.
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)


class WeightsError(ValueError):
    """A weights file that was asked for cannot be used."""


class FeatureDistance(nn.Module):
    """Distance of image pairs: weighted squared difference of unit-length features, mean over space, sum over taps.

    Args:
        features: Layers applied in turn.
        taps: Indices of the layers whose output is compared.
        heads: One weight vector `[C_tap]` per tap.
    """

    def __init__(self, features: nn.Sequential, taps: Collection[int], heads: Sequence[Tensor]) -> None:
        super().__init__()
        self.features, self.taps, self.heads = features, taps, list(heads)
        self.requires_grad_(False).eval()

    @torch.no_grad()
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Two `[N, H, W, 3]` in [0, 1] -> `[N]`; 0 for equal images."""
        total = torch.zeros(x.shape[0], dtype=x.dtype, device=x.device)
        for head, f, g in zip(self.heads, self._tapped(x), self._tapped(y), strict=True):
            difference = (_unit(f) - _unit(g)).square()  # [N, C, h, w]
            total += torch.einsum("nchw,c->nhw", difference, head).mean((1, 2))
        return total

    def _tapped(self, x: Tensor) -> list[Tensor]:
        shift, scale = (torch.tensor(v, dtype=x.dtype, device=x.device) for v in (SHIFT, SCALE))
        h = ((2 * x - 1 - shift) / scale).movedim(-1, 1)  # [N, 3, H, W]
        found = []
        for i, layer in enumerate(self.features):
            h = layer(h)
            if i in self.taps:
                found.append(h)
        return found


def batched(model: FeatureDistance, pixels: int = 1 << 18) -> Score:
    """Score frames in slices of about `pixels` pixels, so that memory does not grow with the rollout."""

    def score(x: Tensor, y: Tensor) -> Tensor:
        size = max(1, pixels // (x.shape[1] * x.shape[2]))
        return torch.cat([model(a, b) for a, b in zip(torch.split(x, size), torch.split(y, size), strict=True)])

    return score


def split_state(state: Mapping[str, Any], features: nn.Sequential) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The tensors of `features` and the heads out of a state dict; no heads when it has none.

    The features may stand under `features.*`, `net.slice*.*` or bare numbers; other tensors are ignored.

    Raises:
        WeightsError: tensors of `features` are missing.
    """
    wanted = set(features.state_dict())
    found: dict[str, Tensor] = {}
    heads: dict[int, Tensor] = {}
    for key, value in state.items():
        if head := re.fullmatch(r"lin(\d+)\.model\.1\.weight", key):
            heads[int(head[1])] = value.flatten()
            continue
        short = re.sub(r"^(features\.|net\.slice\d+\.)", "", key)
        if short in wanted:
            found[short] = value
    if missing := sorted(wanted - set(found)):
        raise WeightsError(f"another network: {len(missing)} of {len(wanted)} tensors missing, first {missing[0]!r}")
    return found, [heads[i] for i in sorted(heads)]


def fill(features: nn.Sequential, state: Mapping[str, Tensor]) -> nn.Sequential:
    """`features` with the weights of `state`.

    Raises:
        WeightsError: keys or shapes are not those of the network.
    """
    try:
        features.load_state_dict(dict(state))
    except RuntimeError as error:
        raise WeightsError(f"weights of another network: {error}") from error
    return features


def read_checked(path: Path) -> tuple[dict[str, Any], str]:
    """A state dict and the SHA-256 of its file; eight hex digits at the end of the file's name must be its start.

    Raises:
        WeightsError: unreadable, not a state dict, or the checksum differs.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise WeightsError(f"cannot read weights file {path}: {error.strerror}") from error
    found = digest.hexdigest()
    said = re.search(r"-([0-9a-f]{8})\.pth$", path.name)
    if said and not found.startswith(said[1]):
        raise WeightsError(f"{path.name} is corrupt: its SHA-256 starts with {found[:8]}, not {said[1]}; get it anew")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise WeightsError(f"{path.name} is not a readable weights file ({type(error).__name__})") from error
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise WeightsError(f"{path.name} holds no state dict of tensors")
    return dict(state), found


def _unit(features: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    return features / (norm + 1e-10)
