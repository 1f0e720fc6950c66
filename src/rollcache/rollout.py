"""The state of one rollout, and every rule by which it ends: fail closed, the next chunk exact."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rollcache.fingerprint import Hidden
from rollcache.passes import Cell, Pass, RollcacheError, Segment
from rollcache.policies.base import Policy, StackPolicy
from rollcache.policies.stacked import split
from rollcache.stack_store import StackRow
from rollcache.store import Budget, Reduce, Row

log = logging.getLogger("rollcache")


def _is_heard(_: logging.LogRecord) -> bool:
    """Of the ranks of a distributed program only the first one speaks."""
    world = torch.distributed
    return not (world.is_available() and world.is_initialized()) or world.get_rank() == 0


log.addFilter(_is_heard)


class Signature(NamedTuple):
    """What the hidden state of a branch looks like; residuals of another signature are of no use."""

    tensors: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, hidden: Hidden, segments: tuple[Segment, ...]) -> Signature:
        """Describe a hidden state."""
        return cls(tuple((t.shape, t.dtype, t.device) for t in hidden), segments)


class Rollout:
    """Everything that is remembered between the passes of one rollout.

    Attributes:
        policy: the method, with what it has learnt.
        inner: the part of it that decides about blocks, if there is one.
        outer: the part of it that decides about whole passes, if there is one.
        rows: residuals of blocks by (branch, step).
        stacks: residuals of the whole stack by (branch, step); by (branch, -1) where they are reused across steps.
        aux: by (branch, block), what a block last returned beside its hidden state, where that is to be repeated.
        streak: by branch, how many passes in a row were not computed.
        chunk: index of the chunk under way.
        ordinal: chunks begun before this one since the state was last invalidated; -1 until one begins. Nothing is
            stored before, so after an invalidation in mid-chunk the next chunk is exact.
        dirty: branches in which K/V of replayed blocks is stale and waits for a commit pass.
        told: why the state was invalidated so far.
        budget: bytes that it shares with the other rollouts.
    """

    def __init__(self, policy: Policy, budget: Budget, dtype: torch.dtype | None) -> None:
        """Start empty."""
        self.policy = policy
        self.outer, self.inner = split(policy)
        self.rows: dict[tuple[str, int], Row] = {}
        self.stacks: dict[tuple[str, int], StackRow] = {}
        self.aux: dict[tuple[str, int], Any] = {}
        self.streak: dict[str, int] = {}
        self.chunk: int | None = None
        self.ordinal = -1
        self.dirty: set[str] = set()
        self.budget = budget
        self._dtype = dtype
        self._signatures: dict[str, Signature] = {}
        self._visited: set[tuple[str, int]] = set()
        self._schedule: set[tuple[str, int]] | None = None
        self._weights: object = None
        self.told: set[str] = set()

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return sum(row.bytes for row in self._held())

    @property
    def predicted(self) -> int:
        """Bytes that will be held when every cell seen so far is stored."""
        return sum(row.predicted for row in self._held())

    def _held(self) -> list[Row | StackRow]:
        return [*self.rows.values(), *self.stacks.values()]

    def adopt(self, weights: object) -> None:
        """The state is that of these weights: see `enter`."""
        self._weights = weights

    def begins(self, where: Pass) -> bool:
        """Whether a denoise pass is the first of its chunk."""
        return where.chunk != self.chunk or (where.branch, where.step) in self._visited

    def enter(self, where: Pass, weights: Callable[[], object]) -> bool:
        """Take note of a denoise pass.

        Args:
            where: the pass.
            weights: gives a token that changes with the weights of the blocks; asked when a chunk begins.

        Returns:
            Whether a chunk begins.
        """
        begins = self.begins(where)
        if begins:
            self._begin(where, weights())
        self._check_order(where)
        self._visited.add((where.branch, where.step))
        return begins

    def is_first(self, where: Pass) -> bool:
        """Whether a pass that was entered is the first of its branch in this chunk."""
        return [step for branch, step in self._visited if branch == where.branch] == [where.step]

    def _begin(self, where: Pass, weights: object) -> None:
        if self.chunk is not None and where.chunk <= self.chunk:
            self.clear("the chunk index went back, which starts a new rollout", anew=True)
        if self.dirty:
            raise RollcacheError(
                f"no commit pass of {', '.join(sorted(self.dirty))} since chunk {self.chunk}, although its replayed "
                "blocks left stale K/V behind: run the commit pass of every chunk, in every branch that has K/V, or "
                "declare the passes whose K/V stays with kv_write."
            )
        if self._weights != weights:
            self.clear("the weights changed")
        if self.outer is not None and self.outer.across == "steps":
            self._check_steps()
        if self._visited and self.ordinal >= 0:
            if self._schedule is not None and self._schedule != self._visited:
                self.clear("the steps or branches of a chunk changed")
            else:
                self._schedule = self._visited
        if self.outer is not None and self.outer.across == "steps":
            for row in self.stacks.values():
                row.forget()
            self.streak.clear()
        self._weights = weights
        self._visited = set()
        self.chunk = where.chunk
        self.ordinal += 1

    def _check_order(self, where: Pass) -> None:
        """Across the steps of a chunk, a residual is for later steps."""
        if self.outer is None or self.outer.across != "steps":
            return
        later = [step for branch, step in self._visited if branch == where.branch and step >= where.step]
        if later:
            raise RollcacheError(
                f"step {where.step} of chunk {where.chunk} comes after step {max(later)} ({where.branch}): "
                f"{self.outer.name} needs the steps of a chunk in order."
            )

    def _check_steps(self) -> None:
        """The chunk that ended had as many steps as the method is set up for."""
        if self.outer is None or self.outer.steps is None or not self._visited:
            return
        wanted = self.outer.steps
        seen = 1 + max(step for _, step in self._visited)
        if seen != wanted:
            raise RollcacheError(
                f"{self.outer.name} is set up for {wanted} denoising steps a chunk, but chunk {self.chunk} "
                f"had {seen}: give it the number of steps that the loop runs, and reset the rollout to change it."
            )

    def settle(self, branch: str, signature: Signature) -> None:
        """Compare the hidden state of a pass with the passes of this branch before it."""
        known = self._signatures.get(branch)
        if known is not None and known != signature:
            visited = self._visited
            self.clear("the hidden state changed", f"from {_describe(known)} to {_describe(signature)}")
            if len(visited) == 1:  # nothing else has happened in this chunk: it is the first of a new life
                self._visited, self.ordinal = visited, 0
        self._signatures[branch] = signature

    def agree(self, reduce: Reduce, device: torch.device) -> None:
        """What one rank has forgotten, all forget: the most recent invalidation of any rank is that of all."""
        mine = torch.tensor([1 / (2 + self.ordinal)], device=device)  # the larger, the less is remembered
        latest = reduce(mine.clone())
        if latest > mine:
            visited = self._visited
            self.clear("another rank had forgotten it")
            self._visited, self.ordinal = visited, round(1 / float(latest)) - 2

    def row(self, where: Pass, cells: tuple[Cell, ...]) -> Row:
        """Where the residuals of a pass are kept."""
        key = (where.branch, where.step)
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = Row(cells, self.budget, self._dtype)
        elif row.time != where.time:
            row.drop()
        row.time = where.time
        return row

    def stack(self, where: Pass, cell: Cell, policy: StackPolicy) -> StackRow:
        """Where the residuals of a whole pass are kept."""
        across_steps = policy.across == "steps"
        key = (where.branch, -1 if across_steps else where.step)
        row = self.stacks.get(key)
        if row is None:
            row = self.stacks[key] = StackRow(cell, self.budget, self._dtype, policy.history)
        elif row.time != where.time and not across_steps:
            row.drop()
        row.time = where.time
        return row

    def whole(self, branch: str, step: int) -> Row | StackRow:
        """Where the residual of the whole stack is kept, for methods with one span."""
        return self.stacks[branch, step] if self.outer is not None else self.rows[branch, step]

    def schedule(self) -> list[tuple[str, int]]:
        """The (branch, step) pairs that a chunk of this rollout is made of, as far as known."""
        return sorted(self._visited or self._schedule or ())

    def may_skip(self, where: Pass, weights: Callable[[], object]) -> bool:
        """Whether a chunk could be emitted from what this rollout remembers."""
        return (
            (self.outer is None or self.outer.across == "chunks")
            and self.chunk is not None
            and where.chunk > self.chunk
            and self.ordinal >= 0
            and self.ordinal + 1 >= self.policy.warmup_chunks
            and self._schedule in (None, self._visited)
            and self._weights == weights()
        )

    def skip(self, chunk: int) -> None:
        """Take note of a chunk that is emitted without any pass."""
        self.chunk = chunk
        self.ordinal += 1

    def clear(self, why: str, detail: str = "", anew: bool = False) -> None:
        """Forget everything that was learnt, and log each cause once. Until a chunk begins, nothing is stored.

        K/V that is stale stays so, but for a rollout that begins `anew`.
        """
        if (self.rows or self.stacks) and why not in self.told:
            log.info("rollcache: %s %s: the next chunk is computed in full.", why, detail)
            self.told.add(why)
        for row in self._held():
            row.drop()
        self.rows.clear()
        self.stacks.clear()
        self.aux.clear()
        self.streak.clear()
        self._signatures.clear()
        self._schedule = None
        self._visited = set()
        self.ordinal = -1
        if anew:
            self.dirty.clear()
        self.policy.reset()


def _describe(signature: Signature) -> str:
    return " + ".join(f"{list(shape)} {str(dtype)[6:]} {device}" for shape, dtype, device in signature.tensors)
