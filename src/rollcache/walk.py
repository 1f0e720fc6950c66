"""One denoise pass through the blocks: gate a run of blocks ahead, then replay or compute it.

At the first block of a run the true hidden state is known. As long as everything before a block is replayed, so is the
fingerprint of its input; the whole run is decided there, and one addition carries the hidden state to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollcache.adapters.spec import Args, Kwargs
from rollcache.conditions import Moved, Snapshot
from rollcache.decision import Action, Decision, Reason
from rollcache.fingerprint import Hidden, Similarity
from rollcache.lookahead import Lookahead
from rollcache.pass_walk import PassWalk
from rollcache.passes import Cell, Pass, RollcacheError
from rollcache.policies.base import UNKNOWN, Evidence
from rollcache.rollout import Rollout
from rollcache.store import Entry
from rollcache.witness import Witness

if TYPE_CHECKING:
    from rollcache.engine import Engine

_ANCHOR = Decision(Action.COMPUTE, Reason.ANCHOR)
_WARMUP = Decision(Action.COMPUTE, Reason.WARMUP)
_INVALIDATED = Decision(Action.COMPUTE, Reason.INVALIDATED)
_REQUIRED = Decision(Action.COMPUTE, Reason.REQUIRED)
_NOT_FINITE = Decision(Action.COMPUTE, Reason.NOT_FINITE)
_NOTHING_STORED = Decision(Action.COMPUTE, Reason.NOTHING_STORED)


def _unknown() -> Similarity:
    return UNKNOWN


class _Looked(Exception):
    """A policy asked for a similarity."""


def _look() -> Similarity:
    raise _Looked


class _Open:
    """A span under computation: what went in, and the fingerprint of that."""

    def __init__(self, span: int, before: Hidden, witness: Witness, fingerprint: Tensor | None) -> None:
        self.span = span
        self.before = before
        self.witness = witness
        self.fingerprint = fingerprint


class Walk(PassWalk):
    """The blocks of one denoise pass under a method that decides block by block."""

    def __init__(self, engine: Engine, rollout: Rollout, where: Pass, stamp: int, exact: bool) -> None:
        """Stand before block 0; `stamp` is the serial number of the pass, which must be computed if it is `exact`."""
        super().__init__(engine, rollout, where, exact)
        assert rollout.inner is not None
        self.policy = rollout.inner
        self.looks = self.policy.sampling is not None
        self.stamp = stamp
        self.cells = tuple(Cell(where.branch, where.step, s.start, s.stop) for s in engine.spans)
        self.resume = 0  # blocks before this one belong to a run that was replayed
        self.batch = len(self.cells)  # spans to compare at once
        self.open: _Open | None = None
        self.stretch: _Open | None = None  # the first span of those that nothing interrupted
        self.chained = -1  # the span whose fingerprint follows from the one stored last
        self.verdict: tuple[int, Decision] | None = None  # about the span that ended the last run
        self.known: tuple[int, Tensor] | None = None  # fingerprint of what enters a block
        self.witness: Witness | None = None  # of what the last block returned
        self.snapshot: Snapshot | None = None
        self.moved: dict[int, Moved] = {}  # by identity of the snapshot compared with

    def block(self, index: int, forward: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Stand in for one block: return what it would return."""
        began, clock = perf_counter(), self.engine.clock
        self._turn(index)
        hidden = self.io.read(args, kwargs)
        if index == 0:
            self._settle(hidden)
        with self.precise:
            self._arrive(index, hidden)
            replayed = hidden if index < self.resume else self._gate(index, hidden)
        if replayed is not None:
            clock.gate += perf_counter() - began
            return self.io.emit(replayed, args, kwargs, self._aux(index, args, kwargs))
        clock.gate += perf_counter() - began
        output = forward(*args, **kwargs)
        began = perf_counter()
        self._remember(index, output)
        with self.precise:
            self._leave(index, hidden, self._returned(index, args, kwargs, output))
        clock.gate += perf_counter() - began
        return output

    def _settle(self, hidden: Hidden) -> None:
        """Look at the hidden state for the first time in this pass."""
        self._look(hidden)
        self.sampler = self.engine.sampler(self.io.gated(hidden), self.where.segments, self.policy.sampling)
        self.row = self.rollout.row(self.where, self.cells)
        self.shapes = [h.shape for h in hidden]
        self.storing = self.rollout.ordinal >= 0
        self.warming = self.rollout.ordinal < self.policy.warmup_chunks
        self.probing = self.rollout.ordinal <= 0

    def _arrive(self, index: int, hidden: Hidden) -> None:
        """Check whether the model changed the hidden state between two blocks."""
        if self.witness is None or (self.witness.is_same(hidden) and self.witness.untouched()):
            return
        self.engine.breaks.add(index)
        self.known = self.stretch = self.verdict = None
        self.chained = -1
        if index < self.resume or self.open is not None:
            raise RollcacheError(
                f"the model changes the hidden state between blocks {index - 1} and {index}, which were to be replayed "
                "as one: XCache will not do so from now on, WindowReuse cannot be used with this model."
            )

    def _gate(self, index: int, hidden: Hidden) -> Hidden | None:
        """Decide about the run of spans that begins here. Returns what leaves it, or None to compute the block."""
        if self.open is not None:
            return None
        span = self.engine.span_at.get(index)
        if span is None:
            cell = Cell(self.where.branch, self.where.step, index, index + 1)
            self.engine.trace.note(self.where, cell, _ANCHOR, None, self.warming)
            return None
        ahead: Lookahead | None = None
        run: list[Decision] = []
        stop = self._reach(span)
        if self.verdict is not None and self.verdict[0] == span:
            verdict = self.verdict[1]
        else:
            if self.looks and self.row.bank is not None:
                ahead = Lookahead(
                    self.row,
                    self.sampler,
                    span,
                    stop,
                    fingerprint=partial(self._fingerprint, index, hidden),
                    batch=self.batch,
                    reduce=self.engine.reduce,
                )
            run, verdict = self._plan(span, stop, ahead)
        self.verdict = None
        while run:
            total = self.row.sound(span, span + len(run), self.engine.reduce)
            if total is not None:
                return self._replay(span, run, verdict, ahead, hidden, total)
            run, verdict = self._plan(span, stop, ahead)
        if hidden[0].device.type == "cpu":
            self.batch = 1
        self._note(self.cells[span], verdict, self.row.entries[span])
        self._begin(index, span, hidden)
        return None

    def _reach(self, span: int) -> int:
        """One past the last span that a run from `span` may include: spans adjoin, and nothing happens between them."""
        stop = span + 1
        while self._adjoins(stop):
            stop += 1
        return stop

    def _adjoins(self, span: int) -> bool:
        """Whether a run may go on from the span before into this one."""
        cells = self.cells
        if span == len(cells) or not self.engine.lookahead:
            return False
        start = cells[span].start
        return start == cells[span - 1].stop and start not in self.engine.breaks

    def _plan(self, span: int, stop: int, ahead: Lookahead | None) -> tuple[list[Decision], Decision]:
        """Decisions to replay from `span` on, and the one that ends the run (the last of them if nothing ends it)."""
        run: list[Decision] = []
        decision = _NOTHING_STORED
        for s in range(span, stop):
            decision = self._decide(s, ahead)
            if decision.action is Action.COMPUTE:
                break
            run.append(decision)
        return run, decision

    def _decide(self, span: int, ahead: Lookahead | None) -> Decision:
        """The engine's own reasons to compute, then the policy."""
        entry = self.row.entries[span]
        if not self.storing:
            return _INVALIDATED
        if self.warming:
            return _WARMUP
        if self.exact:
            return _REQUIRED
        if entry is None:
            return _NOTHING_STORED
        if not entry.finite:
            return _NOT_FINITE
        return self._ask(span, entry, _unknown if ahead is None else partial(ahead.similarity, span))

    def _ask(self, span: int, entry: Entry, measure: Callable[[], Similarity]) -> Decision:
        """The policy's decision."""
        evidence = Evidence(
            self.where,
            age=self.where.chunk - entry.chunk,
            replays=entry.replays,
            measure=measure,
            moved=partial(self._distance, entry),
        )
        return self.policy.decide(self.cells[span], evidence)

    def _will_look(self, span: int) -> bool:
        """Whether the policy will want to see the input of a span. It is pure, so it can be asked ahead."""
        entry = self.row.entries[span]
        if self.warming or self.exact or entry is None:
            return False
        try:
            self._ask(span, entry, _look)
        except _Looked:
            return True
        return False

    def _distance(self, entry: Entry) -> Moved:
        """How far the conditions moved since an entry was computed; measured once per snapshot."""
        key = id(entry.snapshot)
        if key not in self.moved:
            self.moved[key] = self.engine.distance(entry.snapshot, self.where)
        return self.moved[key]

    def _replay(
        self,
        span: int,
        run: list[Decision],
        verdict: Decision,
        ahead: Lookahead | None,
        hidden: Hidden,
        total: Hidden,
    ) -> Hidden:
        """Carry the hidden state over a run of spans by adding their total."""
        stop = span + len(run)
        self.chained = -1
        if verdict.action is Action.COMPUTE:
            self.verdict = (stop, verdict)
            arriving = ahead.at(stop) if ahead is not None and self.storing else None
            self.known = None if arriving is None else (self.cells[stop].start, arriving)
        began = perf_counter()
        last = self.row.entries[stop - 1]
        assert last is not None
        out = tuple(torch.add(h, r).to(d) for h, r, d in zip(hidden, total, last.dtypes, strict=True))
        self.engine.clock.replayed(perf_counter() - began)
        refresh = self.policy.sampling is not None and self.policy.sampling.refresh_on_replay
        if refresh and ahead is not None:
            ahead.refresh(stop, self.stamp)
        for s, decision in enumerate(run, span):
            entry = self.row.entries[s]
            assert entry is not None
            self._note(self.cells[s], decision, entry)
            entry.replays += 1
            if refresh:
                entry.snapshot = self._snapshot()
        self.resume = self.cells[stop - 1].stop
        self.witness = Witness(out, self.sampler, self.probing)
        self._left_out()
        return out

    def _begin(self, index: int, span: int, hidden: Hidden) -> None:
        """A span is about to be computed: remember what goes in."""
        if [h.shape for h in hidden] != self.shapes:
            raise RollcacheError(
                f"block {index} takes {[list(h.shape) for h in hidden]}, block 0 {[list(s) for s in self.shapes]}: "
                "only blocks that share one shape can be cached."
            )
        fingerprint = None
        if self.looks and self.storing:
            waiting = self.row.waiting(self.stamp)
            if waiting and any(map(self._will_look, waiting)):
                self.row.derive(self.sampler)
            else:
                self.row.give_up(waiting)
            if self.chained != span or (self.known is not None and self.known[0] == index):
                fingerprint = self._fingerprint(index, hidden)
        before = tuple(h.clone() for h in hidden) if index in self.engine.in_place else hidden
        self.open = _Open(span, before, Witness(before, self.sampler, self.probing), fingerprint)

    def _leave(self, index: int, hidden: Hidden, after: Hidden) -> None:
        """A block was computed."""
        if [h.shape for h in after] != [h.shape for h in hidden]:
            raise RollcacheError(
                f"block {index} turns {[list(h.shape) for h in hidden]} into {[list(h.shape) for h in after]}: "
                "only blocks that keep the shape of their hidden state can be cached."
            )
        opened, self.known = self.open, None
        if opened is not None and self.cells[opened.span].stop == index + 1:
            self.open = None
            if self.storing:
                self._keep(opened, after)
        self.witness = Witness(after, self.sampler, self.probing)

    def _keep(self, opened: _Open, after: Hidden) -> None:
        """Store the residual of a span that was just computed."""
        span, cell = opened.span, self.cells[opened.span]
        aliased = any(a.data_ptr() == b.data_ptr() for a, b in zip(after, opened.before, strict=True))
        if aliased or not opened.witness.untouched():
            self.engine.in_place.add(cell.start)
            self.row.entries[span] = self.stretch = None
            self.chained = -1
            return
        began = perf_counter()
        kept = self.row.keep(
            span,
            opened.before,
            after,
            chunk=self.where.chunk,
            snapshot=self._snapshot(),
            stamp=self.stamp,
            fingerprint=opened.fingerprint,
            pending=self.looks and opened.fingerprint is None,
        )
        self.chained = span + 1 if kept and self._adjoins(span + 1) else -1
        if not kept:
            self.stretch = None
        elif self.stretch is None and not self.engine.recycles:
            self.stretch = opened
        if not self._adjoins(span + 1):
            self._close_stretch(after, span + 1)
        self.engine.clock.kept(perf_counter() - began)

    def _close_stretch(self, after: Hidden, stop: int) -> None:
        """A stretch ends here: what its spans added, computed or replayed, is what came out less what went in."""
        first, self.stretch = self.stretch, None
        if first is None or stop - first.span == 1:
            return
        if first.witness.untouched():
            self.row.keep_run(first.span, stop, first.before, after)
        else:
            self.engine.recycles = True

    def _fingerprint(self, index: int, hidden: Hidden) -> Tensor:
        """Fingerprint of what enters a block, taken once."""
        if self.known is None or self.known[0] != index:
            self.known = (index, self.sampler(hidden))
        return self.known[1]

    def _snapshot(self) -> Snapshot:
        """The conditions of this pass, copied once."""
        if self.snapshot is None:
            self.snapshot = Snapshot.of(self.where.conditions)
        return self.snapshot

    def _note(self, cell: Cell, decision: Decision, entry: Entry | None) -> None:
        """A decision is executed."""
        self.policy.observe(cell, decision)
        self.engine.trace.note(self.where, cell, decision, None if entry is None else entry.chunk, self.warming)
