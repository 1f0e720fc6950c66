"""Marks for loops without an adapter: the loop says where it is, and saying it wrong raises.

```python
with cache.rollout():
    for n, action in enumerate(actions):
        with cache.chunk(conditions=[Condition("action", action)], kv_update=n % 4 == 3):
            for t in range(steps):
                cache.step()
                x = denoise(x, model(x, t))
            if n % 4 == 3:
                cache.commit()
                model(x, 0)
```
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from numbers import Integral
from threading import Thread, current_thread
from typing import Any, Generic, ParamSpec, TypeVar

from rollcache.adapters.spec import Args, Kwargs
from rollcache.passes import Condition, Pass, Role, RollcacheError, Segment, check_items

P = ParamSpec("P")
T = TypeVar("T")


class _Once(AbstractContextManager[T], Generic[T]):
    """A context that is over once it was left; entering it again says so."""

    def __init__(self, verb: str, context: AbstractContextManager[T]) -> None:
        self._verb = verb
        self._context = context
        self._entered = False

    def __enter__(self) -> T:
        if self._entered:
            raise RollcacheError(
                f"one {self._verb}() was entered twice: write `with cache.{self._verb}():` anew for every {self._verb}."
            )
        self._entered = True
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)


def _once(generator: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Make a method a context manager, as `contextmanager` does."""
    managed = contextmanager(generator)

    @wraps(generator)
    def begin(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Once(generator.__name__, managed(*args, **kwargs))

    return begin


class Marks:
    """Where a hand-written loop is. Every pass needs one fresh mark, `step` or `commit` (or `prefill`).

    A mark is for the thread that made it: a model call in another one never uses it up.
    """

    def __init__(self) -> None:
        """Outside of any rollout."""
        self.last_chunk: Callable[[Hashable], int] = lambda key: -1
        """Where a rollout stopped; -1 for one that is new, was reset, or had to make room."""
        self._rollouts = 0
        self._rollout: Hashable | None = None
        self._chunk = -1
        self._inside = False
        self._settings: dict[str, Any] = {}
        self._step = -1
        self._last: dict[str, int] = {}  # step of each branch
        self._committed: set[str] = set()
        self._mark: Pass | None = None
        self._thread: Thread | None = None  # that made the mark

    @_once
    def rollout(self, key: Hashable | None = None, *, resume: bool = False) -> Iterator[None]:
        """One continuous generation, which begins at chunk 0 and reuses nothing of another one.

        Args:
            key: name of the rollout; by default one that nothing else has. One that was used before starts over at
                chunk 0; chunks that are numbered on by hand, `chunk(index)`, go on where they were left.
            resume: go on where the rollout `key` was left, for loops that leave it between chunks, as several rollouts
                that take turns on one model do. A key that is new, was reset, or had to make room begins at chunk 0.
        """
        if resume and key is None:
            raise RollcacheError("rollout(resume=True) needs the key of the rollout that goes on.")
        if self._rollout is not None:
            raise RollcacheError(
                f"rollout() inside rollout {self._rollout!r}: leave the first one before. Several that take turns "
                "leave theirs after each chunk, and come back with rollout(key, resume=True)."
            )
        self._rollouts += 1
        self._rollout = ("rollout", self._rollouts) if key is None else key
        self._chunk = self.last_chunk(self._rollout) if resume else -1
        try:
            yield
        finally:
            self._rollout, self._mark = None, None

    @_once
    def chunk(
        self,
        index: int | None = None,
        *,
        conditions: Sequence[Condition] = (),
        segments: Sequence[Segment] = (),
        kv_update: bool = False,
        fresh_noise: bool = False,
        steps: int | None = None,
        frame: int | None = None,
    ) -> Iterator[Pass]:
        """One generation step. Yields its position, which `Cache.replays_chunk` and `Cache.skip_chunk` take.

        Args:
            index: index of the chunk; by default one more than the last. In one rollout it only grows; to start over,
                leave the rollout and enter another.
            conditions: see `Pass`.
            segments: see `Pass`.
            kv_update: see `Pass`.
            fresh_noise: see `Pass`.
            steps: see `Pass`.
            frame: see `Pass`.
        """
        if self._rollout is None:
            raise RollcacheError("chunk() outside of a rollout: write `with cache.rollout():` around the loop.")
        if self._inside:
            raise RollcacheError("chunk() inside a chunk: leave the first one before.")
        if index is not None and _checked("chunk", index) <= self._chunk:
            raise RollcacheError(
                f"chunk({index}) after chunk {self._chunk}: the index only grows in a rollout; to start over, leave "
                "the rollout and enter another."
            )
        check_items("chunk(conditions=...)", conditions, Condition)
        check_items("chunk(segments=...)", segments, Segment)
        self._chunk = self._chunk + 1 if index is None else int(index)
        self._settings = {
            "rollout": self._rollout,
            "chunk": self._chunk,
            "conditions": tuple(conditions),
            "segments": tuple(segments),
            "kv_update": kv_update,
            "fresh_noise": fresh_noise,
            "steps": steps,
            "frame": frame,
        }
        self._inside, self._step, self._last, self._committed = True, -1, {}, set()
        try:
            yield Pass(role=Role.DENOISE, **self._settings)
            if self._mark is not None:
                raise RollcacheError(f"the chunk ended, but the model was not called after {_verb(self._mark)}.")
        finally:
            self._inside, self._mark = False, None

    def step(
        self, index: int | None = None, *, branch: str = "cond", kv_write: bool = False, time: float | None = None
    ) -> None:
        """The next pass is a denoising step.

        Args:
            index: index of the step; by default the next one, or the same as before for a branch that has not had it
                yet. In one branch of a chunk it only grows.
            branch: see `Pass`.
            kv_write: see `Pass`.
            time: see `Pass`.
        """
        self._check("step")
        if self._committed:
            raise RollcacheError("step() after commit() in one chunk: the commit pass must come last.")
        last = self._last.get(branch, -1)
        if index is None:
            index = self._step if self._step > last else self._step + 1
        index = _checked("step", index)
        if index <= last:
            raise RollcacheError(
                f"step({index}) after step {last} of this chunk ({branch}): the index only grows; another chunk begins "
                "with `with cache.chunk():`."
            )
        self._step = self._last[branch] = index
        self._set(Pass(role=Role.DENOISE, step=index, branch=branch, kv_write=kv_write, time=time, **self._settings))

    def commit(self, *, branch: str = "cond") -> None:
        """The next pass writes the clean K/V of this chunk.

        Args:
            branch: whose K/V, for loops in which each branch has its own; `*` if all branches share one.
        """
        self._check("commit")
        if branch in self._committed:
            raise RollcacheError(f"commit() twice in one chunk ({branch}).")
        self._set(Pass(role=Role.COMMIT, branch=branch, **self._settings))
        self._committed.add(branch)

    def prefill(self) -> None:
        """The next pass encodes given context."""
        self._check("prefill")
        self._set(Pass(role=Role.PREFILL, **self._settings))

    def locate(self, model: Any, args: Args, kwargs: Kwargs) -> Pass:
        """The mark of the pass that begins now; every mark serves once."""
        mark, thread = self._mark, self._thread
        if mark is None:
            raise RollcacheError(
                "the model was called without a mark: call cache.step() or cache.commit() before each pass, inside "
                "`with cache.rollout(): with cache.chunk():`."
            )
        if thread is not None and thread is not current_thread():
            raise RollcacheError(
                f"the model was called in thread {current_thread().name!r} after {_verb(mark)} in thread "
                f"{thread.name!r}: make the mark where the model is called, and let one thread at a time use a model."
            )
        self._mark = self._thread = None
        return mark

    def _set(self, mark: Pass) -> None:
        self._mark, self._thread = mark, current_thread()

    def _check(self, verb: str) -> None:
        if not self._inside:
            raise RollcacheError(
                f"{verb}() outside of a chunk: write `with cache.chunk():` around the passes of a chunk."
            )
        if self._mark is not None:
            raise RollcacheError(f"{verb}() after {_verb(self._mark)}, but the model was not called in between.")


def _verb(mark: Pass) -> str:
    return "step()" if mark.role is Role.DENOISE else f"{mark.role.value}()"


def _checked(verb: str, index: Any) -> int:
    """An index that the loop says, as a plain integer; those of NumPy are welcome, tensors would wait for a device."""
    if isinstance(index, bool) or not isinstance(index, Integral) or index < 0:
        raise RollcacheError(f"{verb}() takes an index, an integer of at least 0, got {index!r}.")
    return int(index)
