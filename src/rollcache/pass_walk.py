"""What every walk through the blocks of a pass has: their order, their aux, arithmetic in full precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from rollcache.adapters.spec import Args, Kwargs
from rollcache.fingerprint import Hidden
from rollcache.passes import Pass, RollcacheError
from rollcache.rollout import Rollout, Signature

if TYPE_CHECKING:
    from rollcache.engine import Engine


class PassWalk:
    """The blocks of one denoise pass, in the order in which the model calls them."""

    def __init__(self, engine: Engine, rollout: Rollout, where: Pass, exact: bool) -> None:
        """Stand before block 0; the pass must be computed if it is `exact`."""
        self.engine = engine
        self.io = engine.adapter.io
        self.rollout = rollout
        self.where = where
        self.exact = exact
        self.next = 0  # the block that must come next
        self.precise: AbstractContextManager[Any]

    def finish(self) -> None:
        """The model returned."""
        if self.next != self.engine.depth:
            raise RollcacheError(
                f"a denoise pass called {self.next} of {self.engine.depth} blocks; each must be called once per pass."
            )

    def _turn(self, index: int) -> None:
        """Check that it is the turn of a block."""
        if index != self.next:
            raise RollcacheError(
                f"block {index} was called where block {self.next} was due; each must be called once, in order."
            )
        self.next += 1

    def _look(self, hidden: Hidden) -> None:
        """See the hidden state for the first time in this pass."""
        self.rollout.settle(self.where.branch, Signature.of(hidden, self.where.segments))
        if self.engine.reduce is not None:
            self.rollout.agree(self.engine.reduce, hidden[0].device)
        device = hidden[0].device.type
        mixed = torch.is_autocast_enabled(device)  # which would run the arithmetic of the gate in low precision
        self.precise = torch.autocast(device, enabled=False) if mixed else nullcontext()

    def _returned(self, index: int, args: Args, kwargs: Kwargs, output: Any) -> Hidden:
        """The streams that a block returned, in the form in which it took them."""
        if wrong := self.io.misfit(args, kwargs, output):
            raise RollcacheError(f"block {index} {wrong}")
        return self.io.parse(output)

    def _left_out(self) -> None:
        """Blocks of this pass were not run: the K/V that they would have written is missing."""
        if self.engine.adapter.denoising_writes and not self.where.kv_write:
            self.rollout.dirty.add(self.where.branch)

    def _remember(self, index: int, output: Any) -> None:
        """What a block that was run returned beside its hidden state may have to be repeated."""
        if self.io.aux == "last":
            self.rollout.aux[self.where.branch, index] = self.io.aside(output)

    def _aux(self, index: int, args: Args, kwargs: Kwargs) -> Any:
        """What a block that is not run returns beside its hidden state."""
        return self.io.stand_in(args, kwargs, lambda: self.rollout.aux[self.where.branch, index])
