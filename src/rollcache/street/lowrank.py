"""Low-rank updates of linear layers: the few-step student is the teacher plus a small difference per matrix.

So both ship in little more than the size of one, and a merged student runs like any other transformer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

NAMES = ("up", "down")  # of the two factors, weight + up @ down


class _LowRank(nn.Module):
    """weight + up @ down, with `up` zero at first."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.up = nn.Parameter(torch.zeros(rows, rank, device=weight.device))
        self.down = nn.Parameter(torch.randn(rank, columns, device=weight.device) * columns**-0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def attach(module: nn.Module, rank: int) -> list[nn.Parameter]:
    """Give every linear layer a trainable low-rank update and freeze the rest; returns the parameters to train."""
    module.requires_grad_(False)
    trained: list[nn.Parameter] = []
    for layer in _linear(module).values():
        update = _LowRank(layer.weight, min(rank, *layer.weight.shape))
        parametrize.register_parametrization(layer, "weight", update)
        trained += [update.up, update.down]
    return trained


def updates(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The factors in the state dict of a module that `attach` was called on: `<layer>.up` and `<layer>.down`."""
    middle = ".parametrizations.weight.0."
    return {k.replace(middle, "."): v for k, v in state.items() if middle in k}


def merge(module: nn.Module, factors: dict[str, Tensor]) -> None:
    """Add updates to the weights of a plain module.

    Raises:
        ValueError: a factor belongs to no linear layer, or has the wrong shape.
    """
    layers = _linear(module)
    for name in {k.rpartition(".")[0] for k in factors}:
        up, down = (factors.get(f"{name}.{part}") for part in NAMES)
        layer = layers.get(name)
        fits = up is not None and down is not None and up.shape[1] == down.shape[0]
        if layer is None or not fits or (up.shape[0], down.shape[1]) != layer.weight.shape:
            raise ValueError(f"the low-rank update of {name} does not fit the transformer.")
        with torch.no_grad():
            layer.weight += (up.float() @ down.float()).to(layer.weight)


def _linear(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}
