"""What a user may have got wrong, asked before any work begins: settings that do not fit the model, missing weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from rollcache.bench.decisions import Window
from rollcache.bench.tables import too_short

if TYPE_CHECKING:
    from rollcache.bench.fidelity import Perceptual
    from rollcache.bench.lanes import Plan
    from rollcache.street.protocol import Protocol
    from rollcache.street.world import World


def check_plans(world: World, protocol: Protocol, plans: Iterable[Plan]) -> None:
    """Fail when a variant cannot run on this world.

    Raises:
        RollcacheError: a policy does not fit the number of blocks.
        ValueError: the protocol does not fit the model.
    """
    if protocol.window != (window := world.model.config.window):
        raise ValueError(f"the protocol's window is {protocol.window}, that of these weights is {window}.")
    for plan in plans:
        if plan.policy is not None:
            plan.policy.build(len(world.model.blocks))


def check_metrics(perceptual: Perceptual) -> None:
    """Fail when weights that were named cannot be used, or a required metric cannot be computed here.

    Raises:
        ValueError: it says which file or package (`WeightsError` for weights).
    """
    picture = {"x": torch.zeros(1, 1, 64, 64, 3)}
    perceptual.score(picture, picture)


def warn_short(chunks: int, protocol: Protocol) -> None:
    """Warn when so few chunks give no speedup."""
    if not Window.of(chunks, protocol).whole:
        warnings.warn(f"speedup and ceiling will be n/a. {too_short(chunks, protocol.kv_every)}", stacklevel=2)
