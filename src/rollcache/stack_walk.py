"""One denoise pass under a method that decides about the whole stack at once, at block 0.

A pass that is replayed or predicted is one addition; the blocks then only hand the result through. A sparse repair runs
all blocks for the chosen tokens at block 0. Anything else lets the model run: bare, or under a block-wise method.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isfinite
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollcache.adapters.spec import Args, Kwargs, Slots
from rollcache.conditions import Moved, Snapshot
from rollcache.decision import Action, Decision, Reason
from rollcache.fingerprint import Hidden
from rollcache.pass_walk import PassWalk
from rollcache.passes import Cell, Pass, RollcacheError
from rollcache.policies.base import StackEvidence, StackPolicy
from rollcache.rollout import Rollout
from rollcache.walk import Walk
from rollcache.witness import Witness

if TYPE_CHECKING:
    from rollcache.engine import Engine

_INVALIDATED = Decision(Action.COMPUTE, Reason.INVALIDATED)
_WARMUP = Decision(Action.COMPUTE, Reason.WARMUP)
_PROTECTED = Decision(Action.COMPUTE, Reason.PROTECTED)
_REQUIRED = Decision(Action.COMPUTE, Reason.REQUIRED)
_ANCHOR = Decision(Action.COMPUTE, Reason.ANCHOR)
_NOTHING_STORED = Decision(Action.COMPUTE, Reason.NOTHING_STORED)
_NOT_FINITE = Decision(Action.COMPUTE, Reason.NOT_FINITE)


class StackWalk(PassWalk):
    """The blocks of one denoise pass under a method that decides about the whole stack."""

    def __init__(
        self,
        engine: Engine,
        rollout: Rollout,
        policy: StackPolicy,
        where: Pass,
        call: tuple[Args, Kwargs],
        inner: Walk | None,
        exact: bool,
    ) -> None:
        """Stand before block 0.

        Args:
            engine: of the model.
            rollout: whose state is used.
            policy: the method.
            where: the pass.
            call: arguments of the model.
            inner: walks the blocks of a computed pass.
            exact: the pass must be computed.
        """
        super().__init__(engine, rollout, where, exact)
        self.policy = policy
        self.call = call
        self.inner = inner
        self.stack = engine.stack
        self.cell = Cell(where.branch, where.step, self.stack.start, self.stack.stop)
        self.running = True  # the model's blocks are run
        self.witness: Witness | None = None  # of what the blocks hand through
        self.before: Hidden = ()
        self.slots: Slots = {}

    def block(self, index: int, forward: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Stand in for one block: return what it would return."""
        began, clock = perf_counter(), self.engine.clock
        self._turn(index)
        hidden = self.io.read(args, kwargs)
        if index not in self.stack:
            return self._outside(index, forward, args, kwargs)
        if index == self.stack.start:
            self._settle(hidden, args, kwargs)
            self.evidence = self._evidence(hidden)
            with self.precise:
                self.decision = self._decide()
            out = self._begin(hidden)
            clock.gate += perf_counter() - began
            if out is not None:
                self.running = False
                self.witness = Witness(out, self.sampler, self.rollout.ordinal <= 0)
                return self.io.emit(out, args, kwargs, self._aux(index, args, kwargs))
        elif not self.running:
            assert self.witness is not None
            if not (self.witness.is_same(hidden) and self.witness.untouched()):
                self.engine.breaks.add(index)
                raise RollcacheError(
                    f"the model changes the hidden state between blocks {index - 1} and {index}, which are replayed as "
                    f"one: {self.policy.name} cannot be used with this model."
                )
            return self.io.emit(hidden, args, kwargs, self._aux(index, args, kwargs))
        if self.inner is not None and self.decision.action is Action.COMPUTE:
            output = self.inner.block(index, forward, args, kwargs)
        else:
            output = forward(*args, **kwargs)
        self._remember(index, output)
        if index == self.stack.stop - 1:
            began = perf_counter()
            with self.precise:
                after = self._returned(index, args, kwargs, output)
                changed = self._end(after)
            clock.gate += perf_counter() - began
            if changed is not None:
                return self.io.emit(changed, args, kwargs, self.io.aside(output))
        return output

    def _outside(self, index: int, forward: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """A block before or behind the stack that the method sees: the model needs it computed."""
        if self.inner is not None and (index < self.stack.start or self.decision.action is Action.COMPUTE):
            return self.inner.block(index, forward, args, kwargs)
        warming = self.rollout.ordinal < self.policy.warmup_chunks
        cell = Cell(self.where.branch, self.where.step, index, index + 1)
        self.engine.trace.note(self.where, cell, _ANCHOR, None, warming)
        output = forward(*args, **kwargs)
        self._remember(index, output)
        return output

    def finish(self) -> None:
        """The model returned."""
        super().finish()
        if self.inner is not None and self.running and self.decision.action is Action.COMPUTE:
            self.inner.finish()

    def _settle(self, hidden: Hidden, args: Args, kwargs: Kwargs) -> None:
        """Look at the hidden state for the first time in this pass."""
        wanted, steps = self.policy.steps, self.where.steps
        if wanted is not None and (steps not in (None, wanted) or self.where.step >= wanted):
            runs = f"has {steps}" if steps is not None else f"is at step {self.where.step}, counted from 0"
            raise RollcacheError(
                f"{self.policy.name} is set up for {wanted} denoising steps a chunk, but chunk {self.where.chunk} "
                f"{runs}: give it the number of steps that the loop runs."
            )
        self.block_call = (args, kwargs)
        self._look(hidden)
        self.row = self.rollout.stack(self.where, self.cell, self.policy)
        self.sampler = self.engine.sampler(self.io.gated(hidden), self.where.segments, None)

    def _begin(self, hidden: Hidden) -> Hidden | None:
        """Execute the decision. Returns what leaves the stack, or None to run the blocks."""
        decision = self.decision
        if decision.action is Action.COMPUTE or (decision.action is Action.REPAIR and self.policy.backend == "refresh"):
            self.before = tuple(h.clone() for h in hidden) if self.engine.in_place else hidden
            self.first = Witness(self.before, self.sampler, self.rollout.ordinal <= 0)
            if decision.action is Action.COMPUTE and self._captures():
                assert self.engine.adapter.sparse is not None
                self.engine.adapter.sparse.capture(*self.block_call, self.slots)
            return None
        began = perf_counter()
        out = self._repair(hidden) if decision.action is Action.REPAIR else self.row.total(hidden, decision.weights)
        self.engine.clock.replayed(perf_counter() - began)
        self._note(out)
        self._left_out()
        return out

    def _decide(self) -> Decision:
        """The engine's own reasons to compute, then the policy."""
        policy, rollout = self.policy, self.rollout
        if self.where.kv_write:
            return _PROTECTED
        if rollout.ordinal < 0:
            return _INVALIDATED
        if rollout.ordinal < policy.warmup_chunks:
            return _WARMUP
        if self.exact:
            return _REQUIRED
        if not self.row.past:
            return _NOTHING_STORED
        if policy.across == "steps" and (self.where.conditions or self.row.past[0].snapshot.conditions):
            distance = self.evidence.moved.distance
            if distance != 0:
                self.row.forget()  # nothing may be predicted from both sides of a change
                reason = Reason.CONDITION if distance == distance else Reason.NOT_FINITE
                return Decision(Action.COMPUTE, reason, condition_distance=distance)
        decision = policy.decide(self.cell, self.evidence)
        if decision.action is Action.COMPUTE:
            return decision
        if decision.action is Action.REPAIR and self.policy.backend == "sparse" and not self.row.complete:
            return decision._replace(action=Action.COMPUTE, reason=Reason.NO_ROOM, tokens=None)
        if not all(map(isfinite, decision.weights)):
            return _NOT_FINITE
        if len(decision.weights) > len(self.row.past):
            raise RollcacheError(
                f"{policy.name} combines {len(decision.weights)} residuals, {len(self.row.past)} are stored."
            )
        if self.row.sound(0, 1, self.engine.reduce, len(decision.weights)) is None:
            return _NOT_FINITE
        return decision

    def _captures(self) -> bool:
        """Whether the K/V of this pass is kept for later repairs."""
        return self.policy.repairs and self.policy.backend == "sparse" and self.rollout.ordinal >= 0

    def _repair(self, hidden: Hidden) -> Hidden:
        """Run all blocks for the chosen tokens."""
        tokens, sparse = self.decision.tokens, self.engine.adapter.sparse
        assert tokens is not None and sparse is not None
        rows = tokens.rows(self.where.segments, hidden[0].device)
        inside = hidden[0].index_select(1, rows)
        args, kwargs = self.block_call
        after = sparse.run(self.engine.blocks, inside, tokens, self.where.segments, args, kwargs, self.row.slots)
        return self._mixed(hidden, rows, inside, after)

    def _mixed(self, hidden: Hidden, rows: Tensor, inside: Tensor, after: Tensor) -> Hidden:
        """Some tokens went through the blocks, from `inside` to `after` [B, k, C]; the others add what is stored."""
        self.row.put_rows(rows, after.float() - inside.float())
        out = self.row.total(hidden, (1.0,))
        out[0].index_copy_(1, rows, after.to(out[0].dtype))
        return out

    def _end(self, after: Hidden) -> Hidden | None:
        """The last block has run. Returns what leaves the stack if that is not what it returned."""
        if [h.shape for h in after] != [h.shape for h in self.before]:
            raise RollcacheError(
                f"the stack turns {[list(h.shape) for h in self.before]} into {[list(h.shape) for h in after]}: only "
                "blocks that keep the shape of their hidden state can be cached."
            )
        aliased = any(a.data_ptr() == b.data_ptr() for a, b in zip(after, self.before, strict=True))
        sound = not aliased and self.first.untouched()
        if not sound:
            self.engine.in_place.add(self.stack.start)
        if self.decision.action is Action.REPAIR:
            return self._refresh(after, sound)
        if self.rollout.ordinal >= 0 and sound:
            began = perf_counter()
            kept = self.row.keep(self.before, after, self.where, Snapshot.of(self.where.conditions))
            if kept and self._captures():
                self.row.keep_slots(self.slots)
            self.engine.clock.kept(perf_counter() - began)
        elif not sound:
            self.row.forget()
        self._note(after)
        return None

    def _refresh(self, after: Hidden, sound: bool) -> Hidden:
        """A dense forward was made for a repair: only the chosen tokens take part in it."""
        tokens = self.decision.tokens
        assert tokens is not None
        if not sound:  # what went in is lost: everything that came out is taken
            self.row.forget()
            self._note(after)
            return after
        rows = tokens.rows(self.where.segments, after[0].device)
        out = self._mixed(self.before, rows, self.before[0].index_select(1, rows), after[0].index_select(1, rows))
        self._note(out)
        return out

    def _note(self, out: Hidden) -> None:
        """The decision was executed: tell the trace and the policy."""
        stored = self.evidence.stored
        warming = self.rollout.ordinal < self.policy.warmup_chunks
        if self.decision.action is not Action.COMPUTE or self.inner is None:
            source = stored[0].chunk if stored else None
            self.engine.trace.note(self.where, self.cell, self.decision, source, warming)
        if self.decision.action is Action.COMPUTE:
            self.rollout.streak[self.where.branch] = 0
        else:
            self.rollout.streak[self.where.branch] = self.rollout.streak.get(self.where.branch, 0) + 1
            self.row.past[0].replays += 1
        self.evidence.output = out[0]
        self.policy.conclude(self.cell, self.decision, self.evidence)

    def _evidence(self, hidden: Hidden) -> StackEvidence:
        past = self.row.past
        age = self.where.chunk - past[0].chunk if past else 0
        if self.policy.across == "chunks":
            replays = past[0].replays if past else 0
        else:
            replays = self.rollout.streak.get(self.where.branch, 0)
        return StackEvidence(
            self.where,
            partial(self._show, hidden),
            numbers=self._numbers,
            stored=tuple(p.seen() for p in past),
            repairable=self.policy.backend == "refresh" or self.row.complete,
            age=age,
            replays=replays,
            moved=self._moved,
        )

    def _moved(self) -> Moved:
        if not self.row.past:
            raise RollcacheError("nothing is stored that the conditions could have moved away from.")
        return self.engine.distance(self.row.past[0].snapshot, self.where)

    def _numbers(self, scalars: Tensor) -> list[float]:
        """Scalars as numbers, the largest over all ranks."""
        scalars = scalars.detach().float().flatten()
        if self.engine.reduce is not None:
            scalars = self.engine.reduce(torch.nan_to_num(scalars, nan=float("inf"), posinf=float("inf")))
        return [float(x) for x in scalars.tolist()]

    def _show(self, hidden: Hidden, name: str) -> Tensor:
        """What a policy asked to see."""
        if name != "latent" and (len(self.io.gated(hidden)) > 1 or hidden[0].ndim != 3):
            shapes = [list(h.shape) for h in self.io.gated(hidden)]
            raise RollcacheError(
                f"{self.policy.name} looks at the hidden state, which must be one tensor [B, L, C]; here it is "
                f"{shapes}. Use a method that does not look, such as StepReuse."
            )
        adapter, (args, kwargs) = self.engine.adapter, self.block_call
        first = self.engine.blocks[self.stack.start]
        if self.before and self.before is not hidden:  # block 0 wrote over what it was called with
            hidden = self.before
            args, kwargs = self.io.replaced(hidden, args, kwargs)
        if name == "hidden":
            return hidden[0]
        if name == "latent":
            if adapter.latent is not None:
                return adapter.latent(self.engine.model, *self.call)
        elif name == "modulated":
            return hidden[0] if adapter.modulated is None else adapter.modulated(first, args, kwargs)
        elif adapter.embedding is not None:
            return adapter.embedding(first, args, kwargs)
        raise RollcacheError(
            f"{self.policy.name} looks at the {name} of a pass, which the adapter of "
            f"{type(self.engine.model).__name__} does not show: give Adapter({name}=...)."
        )


def check_repairs(policy: StackPolicy, sparse: object, model: object, ranks: bool) -> None:
    """Refuse repairs that cannot be done, before anything is attached."""
    if not policy.repairs:
        return
    name = type(model).__name__
    if policy.backend == "sparse" and sparse is None:
        raise RollcacheError(
            f"the adapter of {name} cannot run blocks for chosen tokens: set repairs='refresh', the backend that runs "
            "all tokens and keeps the chosen ones (as exact, but it saves nothing), or use a method without repairs."
        )
    if ranks:
        raise RollcacheError("token repair and reduce= do not go together: ranks would need each other's K/V.")
