"""LPIPS v0.1 (Zhang et al. 2018) in plain torch: no torchvision, and never a random or foreign backbone.

The linear heads are in the package. The ImageNet backbones are not, and are never downloaded. They are looked for in

1. the file given by the caller (`--lpips-weights`),
2. the file named by the environment variable ROLLCACHE_LPIPS_WEIGHTS,
3. `torch.hub.get_dir()/checkpoints`, under the names that torchvision's downloads have.

Accepted are a torchvision state dict (`features.*`), a features-only one, and a full one of the `lpips` package
(`net.slice*.*`, its `lin*` heads included). Eight hex digits at the end of a file's name are the start of its SHA-256
and are checked. Without weights the metric has no value and says which file to put where.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollcache.measure.frames import Frames, Names, camera_names, check_pair
from rollcache.measure.metric import Metric, over_cameras

ENVIRONMENT = "ROLLCACHE_LPIPS_WEIGHTS"
HEADS = Path(__file__).with_name("lpips_heads.safetensors")
AT_MOST = 48  # frames scored by default
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)


class WeightsError(ValueError):
    """A weights file that was asked for cannot be used."""


@dataclass(frozen=True)
class Net:
    """One LPIPS backbone: its feature taps (indices after which features are read) and its usual weight files."""

    taps: tuple[int, ...]
    smallest: int  # pixels: below it a pooling layer runs out of input
    files: tuple[str, ...]


NETS: dict[str, Net] = {
    "alex": Net((1, 4, 7, 9, 11), 31, ("alexnet-owt-7be5be79.pth", "alexnet-owt-4df8aa71.pth")),
    "vgg16": Net((3, 8, 15, 22, 29), 16, ("vgg16-397923af.pth",)),
    "squeeze": Net((1, 4, 7, 9, 10, 11, 12), 24, ("squeezenet1_1-b8a52dc0.pth",)),
}


class Fire(nn.Module):
    """SqueezeNet's block: squeeze to few channels, expand through a 1x1 and a 3x3 convolution side by side."""

    def __init__(self, channels: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, h, w] -> [N, 2 * expanded, h, w]."""
        x = self.squeeze(x).relu()
        return torch.cat([self.expand1x1(x).relu(), self.expand3x3(x).relu()], 1)


def backbone(net: str) -> nn.Sequential:
    """The features of AlexNet, VGG-16 or SqueezeNet 1.1 up to the last tap, numbered as in torchvision."""
    check_net(net)
    layers: list[nn.Module]
    if net == "alex":
        layers = [
            *(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()),
        ]
    elif net == "vgg16":
        layers, channels = [], 3
        for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(depth):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2, 2))
        layers.pop()
    else:
        layers = [
            *(nn.Conv2d(3, 64, 3, stride=2), nn.ReLU(), _ceil_pool()),
            *(Fire(64, 16, 64), Fire(128, 16, 64), _ceil_pool()),
            *(Fire(128, 32, 128), Fire(256, 32, 128), _ceil_pool()),
            *(Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256), Fire(512, 64, 256)),
        ]
    return nn.Sequential(*layers)


class Lpips(nn.Module):
    """LPIPS v0.1 of one backbone.

    Args:
        net: "alex", "vgg16" or "squeeze".
        features: State dict of `backbone(net)`.
        heads: One weight vector per tap, `[C_tap]`; default: those of LPIPS v0.1, in the package.

    Raises:
        WeightsError: keys or shapes are not those of the network.
    """

    def __init__(self, net: str, features: Mapping[str, Tensor], heads: list[Tensor] | None = None) -> None:
        super().__init__()
        self.net = net
        self.taps = NETS[check_net(net)].taps
        self.features = backbone(net)
        try:
            self.features.load_state_dict(dict(features))
        except RuntimeError as error:
            raise WeightsError(f"these are not the features of {net}: {error}") from error
        self.heads = bundled_heads(net) if heads is None else heads
        self.requires_grad_(False).eval()

    @torch.no_grad()
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Distance of image pairs: two `[N, H, W, 3]` in [0, 1] -> `[N]`; 0 for equal images."""
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


def lpips(
    test: Frames,
    reference: Frames,
    *,
    net: str = "alex",
    weights: str | os.PathLike[str] | None = None,
    at_most: int = AT_MOST,
    names: Names | None = None,
    stitched: bool = True,
) -> Metric:
    """Mean LPIPS over frames and cameras, or a metric without a value when its weights are not on this machine.

    Args:
        test: Frames `[T, V, H, W, 3]` in [0, 1] by view group.
        reference: The full-compute twin.
        net: "alex", "vgg16" or "squeeze".
        weights: File with the backbone; default: the search of this module.
        at_most: Only every k-th frame is scored, with k the smallest that gives at most this many.
        names: Camera names by group.
        stitched: Whether to score the mosaic too.

    Raises:
        WeightsError: a file that the caller or the environment named is missing, corrupt or of another network.
        ValueError: unknown net, cameras too small for it, or frames that do not match (`FrameError`).
    """
    check_net(net)
    check_pair(test, reference)
    smallest = NETS[net].smallest
    chosen = camera_names(test, names)
    if small := [n for group, x in test.items() for n in chosen[group] if min(x.shape[2:4]) < smallest]:
        raise ValueError(
            f"LPIPS {net} needs cameras of at least {smallest} pixels a side; too small: {', '.join(small)}"
        )
    found = load(net, weights)
    if isinstance(found, Metric):
        return found
    model, settings = found
    return over_cameras(
        "lpips", batched(model), test, reference, at_most=at_most, settings=settings, names=names, stitched=stitched
    )


def load(net: str = "alex", weights: str | os.PathLike[str] | None = None) -> tuple[Lpips, dict[str, Any]] | Metric:
    """The model and the settings to record with its results, or a metric that says why there is none.

    Raises:
        WeightsError: a file that the caller or the environment named is missing, corrupt or of another network.
    """
    check_net(net)
    settings: dict[str, Any] = {"net": net, "version": "0.1"}
    named = weights or os.environ.get(ENVIRONMENT)
    if named:
        path = Path(named)
        if not path.is_file():
            raise WeightsError(f"no LPIPS weights file at {path}")
        try:
            return _read(net, path, settings)
        except ModuleNotFoundError as error:
            return _unavailable(settings, "safetensors missing", f"LPIPS heads need safetensors: {error}.")
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    for path in (folder / name for name in NETS[net].files):
        if path.is_file():
            try:
                return _read(net, path, settings)
            except WeightsError as error:
                return _unavailable(settings, "bad weights", str(error))
            except ModuleNotFoundError as error:
                return _unavailable(settings, "safetensors missing", f"LPIPS heads need safetensors: {error}.")
    return _unavailable(
        settings,
        "no weights",
        f"LPIPS ({net}) needs torchvision's {NETS[net].files[0]}: put it in {_home(folder)}, "
        f"or name it with --lpips-weights or {ENVIRONMENT}.",
    )


def split_state(state: Mapping[str, Any], net: str) -> tuple[dict[str, Tensor], list[Tensor] | None]:
    """Backbone and heads from any accepted state dict; heads are None when the file has none."""
    wanted = set(backbone(net).state_dict())
    features: dict[str, Tensor] = {}
    heads: dict[int, Tensor] = {}
    for key, value in state.items():
        if head := re.fullmatch(r"lin(\d+)\.model\.1\.weight", key):
            heads[int(head[1])] = value.flatten()
            continue
        short = re.sub(r"^(features\.|net\.slice\d+\.)", "", key)
        if short in wanted:
            features[short] = value
    if missing := sorted(wanted - set(features)):
        raise WeightsError(
            f"this is no {net} backbone: {len(missing)} tensors are missing, the first is {missing[0]!r}"
        )
    return features, [heads[i] for i in sorted(heads)] if len(heads) == len(NETS[net].taps) else None


def read_checked(path: Path) -> tuple[dict[str, Any], str]:
    """A state dict and the SHA-256 of its file; the checksum in the file's name, when there, must agree.

    Raises:
        WeightsError: unreadable, not a state dict, or the checksum differs.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise WeightsError(f"{path.name}: {error.strerror}") from error
    said = re.search(r"-([0-9a-f]{8})\.pth$", path.name)
    if said and not digest.hexdigest().startswith(said[1]):
        raise WeightsError(
            f"{path.name} is corrupt: its SHA-256 starts with {digest.hexdigest()[:8]}, not {said[1]}; fetch it again"
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise WeightsError(f"{path.name} is not a readable weights file ({type(error).__name__})") from error
    if not isinstance(state, Mapping):
        raise WeightsError(f"{path.name} holds a {type(state).__name__}, not a state dict")
    return dict(state), digest.hexdigest()


@cache
def bundled_heads(net: str) -> list[Tensor]:
    """The linear heads of LPIPS v0.1, one `[C_tap]` per tap (BSD-2-Clause, see lpips_heads.NOTICE)."""
    from safetensors.torch import load_file

    held = load_file(HEADS)
    return [held[f"{net}.{i}"] for i in range(len(NETS[net].taps))]


def batched(model: nn.Module, pixels: int = 1 << 18) -> Any:
    """Score frames in slices of about `pixels` pixels, so that memory does not grow with the rollout."""

    def score(x: Tensor, y: Tensor) -> Tensor:
        size = max(1, pixels // (x.shape[1] * x.shape[2]))
        return torch.cat([model(a, b) for a, b in zip(torch.split(x, size), torch.split(y, size), strict=True)])

    return score


def check_net(net: str) -> str:
    """`net` itself when it is known."""
    if net not in NETS:
        raise ValueError(f"unknown LPIPS net {net!r}; choose from {', '.join(NETS)}")
    return net


def _read(net: str, path: Path, settings: dict[str, Any]) -> tuple[Lpips, dict[str, Any]]:
    state, digest = read_checked(path)
    try:
        features, heads = split_state(state, net)
        model = Lpips(net, features, heads)
    except WeightsError as error:
        raise WeightsError(f"{path.name}: {error}") from error
    return model, {**settings, "weights_sha256": digest}


def _unavailable(settings: dict[str, Any], short: str, reason: str) -> Metric:
    return Metric("lpips", settings=settings, short=short, reason=reason)


def _home(path: Path) -> str:
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


def _unit(features: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    return features / (norm + 1e-10)


def _ceil_pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, 2, ceil_mode=True)
