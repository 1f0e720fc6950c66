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

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollcache.measure.frames import Frames, Names, camera_names, check_pair
from rollcache.measure.learned import FeatureDistance, WeightsError, batched, fill, read_checked, split_state
from rollcache.measure.metric import Metric, over_cameras

ENVIRONMENT = "ROLLCACHE_LPIPS_WEIGHTS"
HEADS = Path(__file__).with_name("lpips_heads.safetensors")
AT_MOST = 48  # frames scored by default


@dataclass(frozen=True)
class Net:
    """One LPIPS backbone.

    Attributes:
        taps: Layers after which features are compared.
        smallest: Pixels a side; below it a pooling layer runs out of input.
        files: Names of its usual weight files, newest first.
    """

    taps: tuple[int, ...]
    smallest: int
    files: tuple[str, ...]


NETS: dict[str, Net] = {
    "alex": Net((1, 4, 7, 9, 11), 31, ("alexnet-owt-7be5be79.pth", "alexnet-owt-4df8aa71.pth")),
    "vgg16": Net((3, 8, 15, 22, 29), 16, ("vgg16-397923af.pth",)),
    "squeeze": Net((1, 4, 7, 9, 10, 11, 12), 17, ("squeezenet1_1-b8a52dc0.pth",)),
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
    _spec(net)
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
    smallest = _spec(net).smallest
    check_pair(test, reference)
    chosen = camera_names(test, names)
    if small := [n for group, x in test.items() for n in chosen[group] if min(x.shape[2:4]) < smallest]:
        raise ValueError(f"LPIPS {net} needs cameras of {smallest} pixels a side; too small: {', '.join(small)}")
    found = load(net, weights)
    if isinstance(found, Metric):
        return found
    model, settings = found
    return over_cameras(
        "lpips", batched(model), test, reference, at_most=at_most, settings=settings, names=names, stitched=stitched
    )


def load(
    net: str = "alex", weights: str | os.PathLike[str] | None = None
) -> tuple[FeatureDistance, dict[str, Any]] | Metric:
    """The model and the settings to record with its results, or a metric that says why there is none.

    Raises:
        WeightsError: a file that the caller or the environment named is missing, corrupt or of another network.
    """
    spec = _spec(net)
    settings: dict[str, Any] = {"net": net, "version": "0.1"}
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    named = weights or os.environ.get(ENVIRONMENT)
    path = Path(named) if named else next((folder / f for f in spec.files if (folder / f).is_file()), None)
    if path is None:
        reason = (
            f"LPIPS ({net}) needs torchvision's {spec.files[0]}: put it in {_home(folder)}, "
            f"or name it with --lpips-weights or {ENVIRONMENT}."
        )
        return Metric("lpips", settings=settings, short="no weights", reason=reason)
    try:
        return _read(net, path, settings)
    except WeightsError as error:
        if named:
            raise
        return Metric("lpips", settings=settings, short="bad weights", reason=str(error))
    except ModuleNotFoundError as error:
        reason = f"The heads of LPIPS are read with the {error.name} package: pip install 'rollcache[bench]'."
        return Metric("lpips", settings=settings, short=f"{error.name} missing", reason=reason)


@cache
def bundled_heads(net: str) -> list[Tensor]:
    """The linear heads of LPIPS v0.1, one `[C_tap]` per tap (BSD-2-Clause, see lpips_heads.NOTICE)."""
    from safetensors.torch import load_file

    held = load_file(HEADS)
    return [held[f"{net}.{i}"] for i in range(len(_spec(net).taps))]


def _read(net: str, path: Path, settings: dict[str, Any]) -> tuple[FeatureDistance, dict[str, Any]]:
    state, digest = read_checked(path)
    features, taps = backbone(net), _spec(net).taps
    try:
        tensors, heads = split_state(state, features)
        fill(features, tensors)
    except WeightsError as error:
        raise WeightsError(f"{path.name} is not for LPIPS {net}: {error}") from error
    heads = heads if len(heads) == len(taps) else bundled_heads(net)
    return FeatureDistance(features, taps, heads), {**settings, "weights_sha256": digest}


def _spec(net: str) -> Net:
    if net not in NETS:
        raise ValueError(f"unknown LPIPS net {net!r}; choose from {', '.join(NETS)}")
    return NETS[net]


def _home(path: Path) -> str:
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


def _ceil_pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, 2, ceil_mode=True)
