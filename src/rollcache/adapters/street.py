"""The embedded street world: the loop says where it is in the keyword argument `where`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollcache.adapters.spec import Adapter, Args, Kwargs
from rollcache.passes import Condition, Pass, Role, RollcacheError, Segment
from rollcache.street.dit import ACTION_SD, Block, StreetDiT
from rollcache.street.protocol import Where
from rollcache.street.rows import StreetRows

AGENT_UNIT = torch.tensor(2.0)  # cells: at the usual tolerance an agent may cover a tenth of a cell more or less


def place(model: StreetDiT, where: Where) -> Pass:
    """A position of the street loop as a `Pass`."""
    conditions: tuple[Condition, ...] = ()
    if where.action is not None:
        per_frame = where.action.new_tensor(ACTION_SD).repeat(where.action.shape[-1] // len(ACTION_SD))
        conditions = (Condition("action", where.action, per_frame),)
    if where.agents is not None:
        conditions = (*conditions, Condition("agents", where.agents, AGENT_UNIT, in_cosine=False))
    return Pass(
        role=Role(where.role),
        rollout=where.rollout,
        chunk=where.chunk,
        step=where.step,
        segments=tuple(Segment(*row) for row in model.layout),
        conditions=conditions,
        kv_update=where.kv_update,
        fresh_noise=where.fresh_noise,
        time=where.sigma,
        steps=where.steps,
        frame=where.frame,
    )


def locate(model: StreetDiT, args: Args, kwargs: Kwargs) -> Pass:
    """Read `where`; a cached model cannot do without it."""
    where: Any = kwargs.get("where")
    if where is None:
        raise RollcacheError(
            "StreetDiT was called without where= while a cache is enabled: pass it, or disable the cache."
        )
    return place(model, where)


def latent(model: StreetDiT, args: Args, kwargs: Kwargs) -> Tensor:
    """The noisy latent of every token [B, L, Z]."""
    z: Tensor = args[0] if args else kwargs["z"]
    return z.flatten(1, 2)


def modulated(block: Block, args: Args, kwargs: Kwargs) -> Tensor:
    """What block 0 attends with [B, L, C]."""
    return block.modulated(args[0], args[1]).flatten(1, 2)


def embedding(block: Block, args: Args, kwargs: Kwargs) -> Tensor:
    """Scales, shifts and gates of block 0 [B, N, 6C]: what timestep and action make of them."""
    return block.modulation(args[1])


ADAPTER = Adapter(
    blocks=lambda model: list(model.blocks),
    locate=locate,
    kv_writes="commit_only",
    place=place,
    latent=latent,
    modulated=modulated,
    embedding=embedding,
    sparse=StreetRows(),
)
