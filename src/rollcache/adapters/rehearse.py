"""Runs of a short rollout for `check_adapter`: with and without a cache, watched, with decisions that are given.

A rehearsal never feeds an approximation back into the loop: whatever the cached model returns, the loop is told what
the bare model returned. So every call has the arguments of the bare run, and what differs is due to the cache alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rollcache.adapters.spec import Adapter, Args, BlockIO, Kwargs
from rollcache.cache import Cache, enable
from rollcache.decision import Action, Decision, Reason, Record
from rollcache.fingerprint import Hidden
from rollcache.passes import Cell, Pass
from rollcache.policies.base import Evidence, Policy, StackEvidence, StackPolicy
from rollcache.tokens import Tokens

Call = tuple[Args, Kwargs]
Calls = Iterable[Call] | Generator[Call, Any, None]
State = dict[str, Tensor]

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
            run.passes[-1] = where = self.adapter.locate(model, args, kwargs)
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
            run.before.append(copied(tensors_in((args, kwargs))))
            run.blocks.append([])
            if index == interrupt:
                self._interrupt(args, kwargs)
                output = None
            else:
                output = self.model(*args, **kwargs)
            run.outputs.append(copied(output))
            run.after.append(copied(tensors_in((args, kwargs)) | self.held()))
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

    def held(self) -> State:
        """Tensors that the model holds besides its parameters."""
        found = {}
        for path, module in self.model.named_modules():
            for name, value in (*module._buffers.items(), *vars(module).items()):
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    found[f"model.{path}.{name}".replace("..", ".")] = value
        return found

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


def tensors_in(value: Any, path: str = "", seen: set[int] | None = None) -> State:
    """All tensors that can be reached from a value, by the way there; not through modules."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        return {path: value}
    if id(value) in seen or isinstance(value, nn.Module | type) or callable(value):
        return {}
    seen.add(id(value))
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        parts = ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        parts = ((f"[{i}]", part) for i, part in enumerate(value))
    elif hasattr(value, "__dict__"):
        parts = ((f".{key}", part) for key, part in vars(value).items())
    found: State = {}
    for name, part in parts:
        found |= tensors_in(part, path + name, seen)
    return found


def copied(value: Any) -> Any:
    """Tensors of a nested value, cloned; everything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copied, value))
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return value


def is_same(a: Any, b: Any) -> bool:
    """Whether two nested values hold the same tensors, bit for bit; not-a-number is equal to itself."""
    ours, theirs = tensors_in((a,)), tensors_in((b,))
    return ours.keys() == theirs.keys() and not differing(ours, theirs)


def differing(a: State, b: State) -> list[str]:
    """Where two states differ, among the tensors that both have."""
    return [path for path in a if path in b and not _equal(a[path], b[path])]


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def apart(a: Any, b: Any) -> float:
    """The largest difference of two nested values, in units of what rounding may do: above 1 is no rounding."""
    ours, theirs = tensors_in((a,)), tensors_in((b,))
    if ours.keys() != theirs.keys():
        return float("inf")
    worst = 0.0
    for path, x in ours.items():
        y = theirs[path]
        if x.shape != y.shape:
            return float("inf")
        if _equal(x, y) or not x.numel():
            continue
        eps = torch.finfo(y.dtype).eps if y.is_floating_point() else 0.0
        scale = max(float(y.abs().max()), 1e-6) * min(256 * eps, 0.05)
        distance = float((x.double() - y.double()).abs().max())
        worst = max(worst, distance / scale if distance == distance and scale else float("inf"))
    return worst
