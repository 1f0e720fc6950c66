"""Runs of a short rollout for `check_adapter`: with and without a cache, watched, with decisions that are given.

A rehearsal never feeds an approximation back into the loop: whatever the cached model returns, the loop is told what
the bare model returned. So every call has the arguments of the bare run, and what differs is due to the cache alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from rollcache.adapters.spec import Adapter, Args, BlockIO, Kwargs
from rollcache.adapters.state import Change, Snapshot, State, copied, held_by, kind_of, tensors_in
from rollcache.cache import Cache, enable
from rollcache.decision import Action, Decision, Reason, Record
from rollcache.fingerprint import Hidden
from rollcache.passes import Cell, Pass
from rollcache.policies.base import Evidence, Policy, StackEvidence, StackPolicy
from rollcache.tokens import Tokens

Call = tuple[Args, Kwargs]
Calls = Iterable[Call] | Generator[Call, Any, None]

_COMPUTE = Decision(Action.COMPUTE, Reason.SCHEDULE)
_REPLAY = Decision(Action.REPLAY, Reason.SCHEDULE)


@dataclass(frozen=True)
class Blocks:
    """Settings of a method that replays the same blocks in every chunk after the first."""

    replayed: frozenset[int] | None = None  # None: all

    def build(self, blocks: int) -> Policy:
        """See `PolicyConfig.build`."""
        return _BlockScript(frozenset(range(blocks)) if self.replayed is None else self.replayed, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        return str(record)


NEVER = Blocks(frozenset())
ALWAYS = Blocks()


class _BlockScript(Policy):
    warmup_chunks = 1
    sampling = None

    def __init__(self, replayed: frozenset[int], blocks: int) -> None:
        self.replayed = replayed
        self.spans = tuple(range(b, b + 1) for b in range(blocks))

    def decide(self, cell: Cell, evidence: Evidence) -> Decision:
        return _REPLAY if cell.start in self.replayed and not evidence.where.kv_write else _COMPUTE


@dataclass(frozen=True)
class Passes:
    """Settings of a method that computes the first step of a chunk and replays the others, or repairs all tokens."""

    repair: bool = False

    def build(self, blocks: int) -> StackPolicy:
        """See `PolicyConfig.build`."""
        return _PassScript(self.repair, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        return str(record)


class _PassScript(StackPolicy):
    def __init__(self, repair: bool, blocks: int) -> None:
        super().__init__(blocks)
        self.repairs = repair

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        if not self.repairs:
            return _REPLAY
        segments = evidence.where.segments
        everything = Tokens.whole_frames(tuple(range(segments[0].grid[0])), segments)
        return Decision(Action.REPAIR, Reason.SCHEDULE, tokens=everything, share=1.0)


@dataclass
class Seen:
    """What was seen of one block in one call.

    Attributes:
        block: its index.
        before: its streams as they came in, copied.
        after: as they went out, copied.
    """

    block: int
    before: Hidden
    after: Hidden = ()


@dataclass
class Run:
    """What was seen of a whole rollout, one item a call.

    Attributes:
        outputs: of the model, copied; None for a call that was interrupted.
        passes: what `locate` said; empty for a bare run.
        before: tensors inside the arguments, before the call.
        after: the same, and those that the model holds, after it.
        blocks: the blocks in the order in which they were called.
        records: decisions that were executed.
    """

    outputs: list[Any] = field(default_factory=list)
    passes: list[Pass | None] = field(default_factory=list)
    before: list[State] = field(default_factory=list)
    after: list[State] = field(default_factory=list)
    blocks: list[list[Seen]] = field(default_factory=list)
    records: list[list[Record]] = field(default_factory=list)


@dataclass
class Forgetful:
    """What came of a run in which a model forgot what its blocks had left in it.

    Attributes:
        outputs: of the calls until one failed, copied.
        taken: paths of what was taken back after each call.
        error: what ended the call after those, if one failed.
    """

    outputs: list[Any] = field(default_factory=list)
    taken: list[list[str]] = field(default_factory=list)
    error: Exception | None = None


class Failed(Exception):
    """The adapter is wrong about something."""


class Interrupted(Exception):
    """Stands for whatever ends a pass half-way."""


class Rehearsal:
    """A model, an adapter, and a loop that can be run again and again."""

    def __init__(self, model: nn.Module, adapter: Adapter, make_inputs: Callable[..., Calls]) -> None:
        """Nothing is run yet."""
        self.model = model
        self.adapter = adapter
        self.make = make_inputs
        self.blocks = list(adapter.blocks(model))

    def bare(self, io: BlockIO | None = None, **options: Any) -> Run:
        """A run without a cache; blocks are looked into if it is said how."""
        run = Run()
        with self._watched(run, io):
            self._play(run, partial(self.make, **options), None, None)
        return run

    @contextmanager
    def cached(self, policy: Any, run: Run) -> Iterator[Cache]:
        """A cache whose adapter's words are written down."""

        def locate(model: Any, args: Args, kwargs: Kwargs) -> Pass | None:
            run.passes.append(None)
            run.passes[-1] = where = _located(self.adapter, model, args, kwargs)
            return where

        with enable(self.model, policy, adapter=replace(self.adapter, locate=locate)) as handle:
            yield handle

    def play(self, policy: Any, answers: list[Any] | None, *, interrupt: int | None = None, **options: Any) -> Run:
        """A run under a cache that is taken away afterwards.

        Args:
            policy: the method.
            answers: what the loop is told that the model returned; None tells it the truth.
            interrupt: index of a call that is interrupted before its last block.
            options: for `make_inputs`.
        """
        run = Run()
        with self.cached(policy, run) as handle:
            self.play_on(handle, run, answers, interrupt=interrupt, **options)
        return run

    def play_on(
        self, handle: Cache, run: Run, answers: list[Any] | None, *, interrupt: int | None = None, **options: Any
    ) -> None:
        """The loop from its beginning, under a cache that is there."""
        with self._watched(run, self.adapter.io):
            self._play(run, partial(self.make, **options), answers, handle, interrupt)

    def _play(
        self,
        run: Run,
        make: Callable[[], Calls],
        answers: list[Any] | None,
        handle: Cache | None,
        interrupt: int | None = None,
    ) -> None:
        for index, (args, kwargs, answer) in enumerate(calls(make())):
            known = 0 if handle is None else len(handle.trace)
            run.before.append(copied(self.given(args, kwargs)))
            run.blocks.append([])
            if index == interrupt:
                self._interrupt(args, kwargs)
                output = None
            else:
                output = self.model(*args, **kwargs)
            run.outputs.append(copied(output))
            run.after.append(copied(self.given(args, kwargs) | self.held()))
            if handle is not None:
                run.records.append(list(handle.trace)[known:])
            answer(output if answers is None else copied(answers[index]))

    def _interrupt(self, args: Args, kwargs: Kwargs) -> None:
        def stop(*_: Any) -> None:
            raise Interrupted

        hook = self.blocks[-1].register_forward_pre_hook(stop)
        try:
            self.model(*args, **kwargs)
        except Interrupted:
            return
        finally:
            hook.remove()

    def forgetful(self, answers: list[Any], forget: Callable[[int, Args, Kwargs], bool], only: str = "") -> Forgetful:
        """A bare run in which the model forgets what its blocks left behind, as if they had been skipped.

        Whatever a block changed of what the model holds is taken back when the call is over, and so is what it put
        into containers among the arguments, but for numbers that it wrote into tensors there, and but for blocks that
        are always computed. The model is left as it was.

        Args:
            answers: what the loop is told that the model returned.
            forget: whether to do so after a call, from its index and its arguments.
            only: take back what has this `kind_of` path alone.
        """
        run, done = Forgetful(), Snapshot(self.model)
        try:
            for index, (args, kwargs, answer) in enumerate(calls(self.make())):
                journal: list[Change] = []
                with self._noted(journal, args, kwargs) if forget(index, args, kwargs) else nullcontext():
                    try:
                        run.outputs.append(copied(self.model(*args, **kwargs)))
                    except Exception as error:
                        run.error = error
                        break
                taken = [change for change in journal if only in ("", kind_of(change.path))]
                for change in reversed(taken):
                    change.undo()
                run.taken.append([change.path for change in taken])
                answer(copied(answers[index]))
        finally:
            done.put_back()
        return run

    @contextmanager
    def _noted(self, journal: list[Change], args: Args, kwargs: Kwargs) -> Iterator[None]:
        """Note what blocks change that need not be computed."""
        begun: list[Snapshot] = []

        def before(*_: Any) -> None:
            begun.append(Snapshot(self.model, (args, kwargs)))

        def after(*_: Any) -> None:
            changes = begun.pop().changes()
            journal.extend(c for c in changes if c.path.startswith("model") or not c.numbers)

        required = self.adapter.required(self.blocks)
        hooks = []
        for block in (b for i, b in enumerate(self.blocks) if i not in required):
            hooks += [block.register_forward_pre_hook(before), block.register_forward_hook(after)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def held(self) -> State:
        """Tensors that the model holds besides its parameters."""
        return held_by(self.model)

    def given(self, args: Args, kwargs: Kwargs) -> State:
        """Tensors among the arguments of a call."""
        return tensors_in((args, kwargs), seen={id(module) for module in self.model.modules()})

    @contextmanager
    def _watched(self, run: Run, io: BlockIO | None) -> Iterator[None]:
        """Look into the blocks of every call of the model."""

        def before(index: int, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
            if run.blocks:
                run.blocks[-1].append(Seen(index, () if io is None else copied(io.read(args, kwargs))))

        def after(index: int, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
            if io is not None and run.blocks:
                run.blocks[-1][-1].after = copied(io.parse(output))

        hooks = []
        for index, block in enumerate(self.blocks):
            hooks.append(block.register_forward_pre_hook(partial(before, index), with_kwargs=True))
            hooks.append(block.register_forward_hook(partial(after, index), with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _located(adapter: Adapter, model: Any, args: Args, kwargs: Kwargs) -> Pass | None:
    """What `locate` says of a call; what goes wrong in there is told as such."""
    try:
        where: Any = adapter.locate(model, args, kwargs)
    except Exception as error:
        raise Failed(f"locate() raised {type(error).__name__}: {error}") from error
    if where is not None and not isinstance(where, Pass):
        raise Failed(f"locate() returned {where!r} ({type(where).__name__}): it must give a Pass, or None")
    return where


def calls(loop: Calls) -> Iterator[tuple[Args, Kwargs, Callable[[Any], None]]]:
    """The calls of a loop, each with a way to tell it what came out."""
    steps = iter(loop)
    send = getattr(steps, "send", None)
    answers: list[Any] = [None]
    try:
        call = next(steps)
        while True:
            args, kwargs = call
            yield tuple(args), dict(kwargs), partial(answers.__setitem__, 0)
            call = next(steps) if send is None else send(answers[0])
    except StopIteration:
        return
