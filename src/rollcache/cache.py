"""`Cache`: what `enable()` returns. The one object through which a user sees what a cache does."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from rollcache import adapters, portable
from rollcache.adapters.spec import Adapter, BlockIO, KVWrites, marked
from rollcache.decision import Action, Decision, Stats, Trace
from rollcache.engine import Engine
from rollcache.marks import Marks
from rollcache.passes import Cell, Pass, RollcacheError
from rollcache.policies.base import Evidence, PolicyConfig, StackEvidence
from rollcache.rollout import Rollout
from rollcache.settings import check_count
from rollcache.stack_store import StackRow
from rollcache.store import Reduce


class Cache:
    """A cache on one model. As a context manager it disables itself at the end.

    Attributes:
        trace: the decisions that were executed.
        policy: the settings of the method.
    """

    def __init__(self, engine: Engine, marks: Marks | None) -> None:
        """Use `enable`."""
        self._engine = engine
        self._marks = marks
        self.policy = engine.policy
        self.trace: Trace = engine.trace

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()

    def __reduce__(self) -> NoReturn:
        raise RollcacheError("a cache cannot be copied or pickled: copy its model, and enable() a cache on the copy.")

    def disable(self) -> None:
        """Unwrap the model, bit for bit what it was, and free everything. Statistics and trace stay readable."""
        self._engine.remove()

    @property
    def enabled(self) -> bool:
        """Whether the model is still wrapped."""
        return self._engine.enabled

    def reset(self, rollout: Hashable | None = None) -> None:
        """Forget a rollout, or all of them: the next chunk is exact."""
        self._engine.reset(rollout)

    def fork(self, source: Hashable, target: Hashable) -> None:
        """Let rollout `target` go on from the present state of `source`; the two share nothing afterwards."""
        self._engine.fork(source, target)

    def export_state(self, rollout: Hashable) -> bytes:
        """What is remembered of a rollout, to go on with in another process: see `restore_state`.

        Of the model and the loop nothing is in it: their latents and K/V are yours to move.

        Raises:
            RollcacheError: there is no such rollout.
        """
        return portable.export(self._engine, rollout)

    def restore_state(self, rollout: Hashable, state: bytes) -> None:
        """Let a rollout go on from a state that `export_state` gave, here or elsewhere; on the device of the blocks.

        The state is unpickled, so it must come from a source that you trust. A loop with marks goes on with
        `rollout(key, resume=True)`. A state that `memory_budget` has no room for is left: the next chunk is exact.

        Args:
            rollout: key that the rollout has from now on; what was known under it is forgotten.
            state: see `export_state`.

        Raises:
            RollcacheError: the policy, the storage dtype or the weights (by a few values of each parameter) are others.
        """
        portable.restore(self._engine, rollout, state)

    def notify_weights_changed(self) -> None:
        """Say that weights changed in a way PyTorch cannot tell: by a kernel of one's own, or under inference mode."""
        self._engine.touch_weights()

    def rollout(self, key: Hashable | None = None, *, resume: bool = False) -> AbstractContextManager[None]:
        """See `Marks.rollout`."""
        return self._mark().rollout(key, resume=resume)

    def chunk(self, index: int | None = None, **settings: Any) -> AbstractContextManager[Pass]:
        """See `Marks.chunk`."""
        return self._mark().chunk(index, **settings)

    def step(self, index: int | None = None, **settings: Any) -> None:
        """See `Marks.step`."""
        self._mark().step(index, **settings)

    def commit(self, **settings: Any) -> None:
        """See `Marks.commit`."""
        self._mark().commit(**settings)

    def prefill(self) -> None:
        """See `Marks.prefill`."""
        self._mark().prefill()

    def replays_chunk(self, where: Any) -> bool:
        """Whether every pass of a chunk would be replayed from its first block to its last.

        Then the chunk's result is that of the last computed chunk, and a loop that can emit from its last window needs
        no pass at all. Policies that look at hidden states or have anchor blocks answer no.

        Args:
            where: a `Pass`, or what the loop of the model's adapter says about its position (the street world:
                `Where`).
        """
        return self._whole_chunk(self._place(where)) is not None

    def skip_chunk(self, where: Any) -> bool:
        """Ask `replays_chunk`; if so, note that the chunk is emitted without any pass. Its cells count as skipped."""
        at = self._place(where)
        found = self._whole_chunk(at)
        if found is None:
            return False
        state, decisions = found
        state.skip(at.chunk)
        if self._engine.adapter.denoising_writes:
            state.dirty.update(cell.branch for cell, _ in decisions)
        self.trace.chunks += 1
        for cell, decision in decisions:
            entry = state.whole(cell.branch, cell.step).entries[0]
            assert entry is not None
            entry.replays += 1
            state.policy.observe(cell, decision)
            self.trace.note(at, cell, decision, entry.chunk, warmup=False)
        return True

    def stats(self) -> Stats:
        """Totals since the cache was enabled."""
        engine = self._engine
        return replace(
            self.trace.stats(),
            gate_seconds=engine.clock.gate,
            keep_seconds=engine.clock.keep,
            replay_seconds=engine.clock.replay,
            bytes_predicted=sum(r.predicted for r in engine.rollouts.values()),
            bytes_actual=sum(r.bytes for r in engine.rollouts.values()),
        )

    def explain(
        self, chunk: int, step: int, block: int, branch: str | None = None, rollout: Hashable | None = None
    ) -> str:
        """One sentence: what was done with a block, and on which numbers. See `Trace.find`.

        Raises:
            RollcacheError: nothing was decided there, or it is no longer in the trace.
        """
        return self.policy.explain(self.trace.find(chunk, step, block, branch, rollout))

    def summary(self) -> str:
        """A few lines about what the cache did and what it holds."""
        s, engine = self.stats(), self._engine
        roles = ", ".join(f"{n} {role}" for role, n in s.passes.items()) or "no"
        why = ", ".join(f"{reason} {n / s.cells:.1%}" for reason, n in s.reasons.items()) or "nothing after warm-up yet"
        limit = engine.budget.limit
        budget = "no budget" if limit is None else f"budget {_bytes(limit)}, {engine.budget.refused} times refused"
        return "\n".join(
            (
                f"rollcache on {type(engine.model).__name__} ({engine.depth} blocks): {_written(self.policy)}",
                f"  passes   {s.chunks} chunks, {roles} passes; only denoise passes are ever approximated",
                f"  skipped  {s.skip_rate:.1%} of {s.cells} block evaluations after warm-up, {s.warmup_cells} in it",
                f"  reasons  {why}",
                f"  memory   {_bytes(s.bytes_actual)} held, {_bytes(s.bytes_predicted)} predicted, {budget}, "
                f"{len(engine.rollouts)} rollout{'' if len(engine.rollouts) == 1 else 's'}",
                f"  seconds {s.gate_seconds:.3f} deciding, {s.keep_seconds:.3f} storing, {s.replay_seconds:.3f} adding",
            )
        )

    def _mark(self) -> Marks:
        if self._marks is None:
            raise RollcacheError(
                "this cache follows its adapter; marks are for enable(model, policy, blocks=...), and for adapters "
                "without locate."
            )
        if not self.enabled:
            raise RollcacheError("the cache is disabled, so marks mean nothing: enable() it again.")
        return self._marks

    def _place(self, where: Any) -> Pass:
        if isinstance(where, Pass):
            return where
        place = self._engine.adapter.place
        if place is None:
            raise RollcacheError(f"cannot tell a position from {type(where).__name__}: pass a rollcache.Pass.")
        return place(self._engine.model, where)

    def _whole_chunk(self, where: Pass) -> tuple[Rollout, list[tuple[Cell, Decision]]] | None:
        """The decisions of a chunk that is replayed from end to end, or None."""
        engine = self._engine
        state = engine.rollouts.get(where.rollout)
        if state is None or not state.may_skip(where, engine.weights):
            return None
        if state.outer is not None and where.fresh_noise:
            return None  # from other noise comes another result, whatever the passes add
        if engine.spans != (range(engine.depth),) or engine.adapter.first_pass_exact:
            return None
        if state.outer is not None and state.inner is not None:
            return None
        decisions = []
        for key in state.schedule():
            row = (state.stacks if state.outer is not None else state.rows).get(key)
            entry = None if row is None else row.entries[0]
            if row is None or entry is None or row.sound(0, 1, engine.reduce) is None:
                return None
            facts: dict[str, Any] = {
                "age": where.chunk - entry.chunk,
                "replays": entry.replays,
                "moved": partial(engine.distance, entry.snapshot, where),
            }
            at = replace(where, branch=key[0], step=key[1])
            if state.outer is not None:
                assert isinstance(row, StackRow)
                seen = StackEvidence(at, _unseen, stored=tuple(p.seen() for p in row.past), repairable=True, **facts)
                decisions.append((row.cells[0], state.outer.decide(row.cells[0], seen)))
            else:
                decisions.append((row.cells[0], state.policy.decide(row.cells[0], Evidence(at, **facts))))
        if not decisions or any(d.action is not Action.REPLAY for _, d in decisions):
            return None
        return state, decisions


def enable(
    model: nn.Module,
    policy: PolicyConfig,
    *,
    adapter: Adapter | None = None,
    blocks: Sequence[nn.Module] | None = None,
    io: BlockIO | None = None,
    kv_writes: KVWrites | None = None,
    memory_budget: int | None = None,
    storage_dtype: torch.dtype | None = None,
    max_rollouts: int = 4,
    trace_capacity: int = 65536,
    reduce: Reduce | None = None,
    lookahead: bool = True,
) -> Cache:
    """Put a cache on a model.

    Args:
        model: the transformer whose forward is one pass.
        policy: the method, e.g. `XCache()`.
        adapter: the model family. By default found by the exact class of the model, or by its structure. One without
            `locate` leaves it to the loop to mark its passes.
        blocks: instead of an adapter: the blocks, in the order in which they are called; the loop then marks its passes
            with `Cache.rollout`, `chunk`, `step` and `commit`.
        io: how those blocks take and return their hidden state.
        kv_writes: when that model writes K/V that later chunks attend to, see `Adapter`. It has to be said with
            `blocks=`: a wrong guess would leave K/V of skipped blocks stale without a word.
        memory_budget: bytes that residuals and fingerprints may take; what does not fit is computed.
        storage_dtype: dtype of stored residuals; None keeps that of the hidden state.
        max_rollouts: rollouts whose state is kept at a time; the one used longest ago makes room.
        trace_capacity: decisions whose details are kept; totals are always complete.
        reduce: elementwise maximum over the ranks of a distributed model, e.g. an all-reduce. All ranks then decide
            alike.
        lookahead: decide about runs of blocks ahead and replay them in one addition. Off is the literal sequential
            gate: every block on its own measured input.

    Returns:
        The handle.

    Raises:
        RollcacheError: the model, its blocks or the settings do not fit; the model is then untouched.
        ValueError: a setting is out of its range; likewise.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"enable() takes a torch module, got {type(model).__name__}.")
    if isinstance(policy, type) or not hasattr(policy, "build"):
        raise TypeError(f"enable() takes the settings of a method, e.g. XCache(), got {policy!r}.")
    if reduce is not None and memory_budget is not None:
        raise RollcacheError("memory_budget= with reduce= could make ranks store different cells, and then disagree.")
    if storage_dtype is not None and storage_dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise RollcacheError(f"storage_dtype must be float16, bfloat16, float32 or float64, got {storage_dtype}.")
    if memory_budget is not None:
        check_count("memory_budget", memory_budget)
    check_count("max_rollouts", max_rollouts, 1)
    check_count("trace_capacity", trace_capacity, 1)
    marks = None
    if blocks is not None:
        if adapter is not None:
            raise RollcacheError("pass either adapter= or blocks=, not both.")
        marks, mine = Marks(), list(blocks)
        if kv_writes is None:
            raise RollcacheError(
                "blocks= needs kv_writes=, when the model writes K/V that later chunks attend to: 'never', "
                "'commit_only' (in passes of their own), 'every_forward' or 'last_step'."
            )
        adapter = Adapter(blocks=lambda _: mine, locate=marks.locate, io=io or BlockIO(), kv_writes=kv_writes)
    elif io is not None or kv_writes is not None:
        raise RollcacheError("io= and kv_writes= go with blocks=; an adapter has its own.")
    else:
        adapter = adapter or adapters.find(model)
        if adapter.locate is marked:
            marks = Marks()
            adapter = replace(adapter, locate=marks.locate)
    engine = Engine(
        model,
        policy,
        adapter,
        memory_budget=memory_budget,
        storage_dtype=storage_dtype,
        max_rollouts=max_rollouts,
        trace_capacity=trace_capacity,
        reduce=reduce,
        lookahead=lookahead,
    )
    _ENGINES[model] = ref(engine)
    if marks is not None:
        marks.last_chunk = engine.last_chunk
    return Cache(engine, marks)


def disable(model: nn.Module) -> None:
    """Take the cache off a model. It is then bit for bit what it was."""
    _engine(model).remove()


def summary(model: nn.Module) -> str:
    """See `Cache.summary`."""
    engine = _engine(model)
    return Cache(engine, None).summary()


def _engine(model: nn.Module) -> Engine:
    known = _ENGINES.get(model)
    engine = None if known is None else known()
    if engine is None or not engine.enabled:
        raise RollcacheError(f"{type(model).__name__} has no cache on it.")
    return engine


_ENGINES: WeakKeyDictionary[nn.Module, ref[Engine]] = WeakKeyDictionary()


def _unseen(name: str) -> Tensor:
    raise RollcacheError(f"a method that looks at the {name} of a pass cannot emit a chunk without any pass.")


def _written(policy: Any) -> str:
    """A policy as a user would write it: without the settings that are as they come."""
    changed = [f for f in fields(policy) if f.repr and getattr(policy, f.name) != f.default]
    return f"{type(policy).__name__}({', '.join(f'{f.name}={getattr(policy, f.name)!r}' for f in changed)})"


def _bytes(n: int) -> str:
    return f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n / 2**10:.1f} KiB"
