"""Where a sampling loop is, from nothing but the calls of its model.

Pipelines say neither chunk nor step. What they do say is certain enough to count by:

- All guidance branches of a step are called with one and the same timestep tensor; every step makes a new one. Each
  branch has its prompt; the first one that is called is the conditional one.
- Inside a chunk the noise level of no latent frame rises, and that of one falls; the tokens stay the same. A step that
  does not follow in this sense begins a chunk.

A chunk begins with nothing stored, so one that begins too often costs speed and no quality. Whether two chunks belong
to one video is not told by any argument. Without `generation` every chunk is therefore a rollout of its own: methods
across steps do not care, and methods across chunks reuse nothing until the loop announces its generations. Models
whose loop hands on a K/V cache tell their generations by its identity.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from rollcache.passes import Condition, RollcacheError
from rollcache.settings import check_count

BRANCHES = ("cond", "uncond")
"""Names of the branches of a step, in the order in which pipelines call them."""

TIMESTEPS = 1000.0
"""Training timesteps of all these models: a timestep is this times sigma."""

_SCALE = torch.tensor([0.001])  # any change of a watched tensor is a thousand times this

Levels = tuple[float, ...]


class Spot(NamedTuple):
    """Where one call of the model is.

    Attributes:
        chunk: index in the generation.
        step: index in the chunk.
        branch: see `BRANCHES`.
        levels: timestep of every latent frame, or the one of all.
        first: those of the chunk's first step.
        conditions: what stays the same in a generation; it moves when it does not.
    """

    chunk: int
    step: int
    branch: str
    levels: Levels
    first: Levels
    conditions: tuple[Condition, ...]


class Watched:
    """Counts the calls at which tensors that should stay the same, such as the prompt of a branch, did not.

    The same object that nobody wrote to is not looked at; only a new object is compared with a copy of the old one,
    which costs a host synchronisation.
    """

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._known: tuple[tuple[Tensor, int], ...] = ()
        self._set(0)

    def seen(self, tensors: tuple[Tensor, ...]) -> Condition:
        """Look at the tensors of a call."""
        now = tuple((t, _version(t)) for t in tensors)
        if not self._known:
            self._known = now
        elif not _are_same(self._known, now):
            old, self._known = self._known, now
            if not _are_equal(old, now):
                self._set(self._changes + 1)
        return self.condition

    def _set(self, changes: int) -> None:
        self._changes = changes
        value = torch.tensor([1.0 + changes])
        self.condition = Condition("prompt", value, _SCALE, in_cosine=False)


class Loop:
    """Follows the sampling loops that call one model, one after another.

    Attributes:
        steps: calls a chunk in each branch, where a generation was announced with them.
    """

    def __init__(self, model: nn.Module) -> None:
        """Before the first call."""
        self._name = type(model).__name__
        self.steps: int | None = None
        self._announced = False
        self._owner: ref[Any] | None = None
        self._forget()
        _LOOPS[model] = self

    def at(
        self,
        timestep: Tensor,
        prompt: tuple[Tensor, ...],
        *,
        chunk: int | None = None,
        layout: Hashable = None,
        levels: Callable[[Tensor], Levels] | None = None,
    ) -> Spot:
        """Take note of a call.

        Args:
            timestep: as the model was called with it.
            prompt: tensors that tell the branches of a step apart, and that stay the same from step to step.
            chunk: index of the chunk, for loops that say it.
            layout: how many tokens there are and where; with others another chunk begins.
            levels: timesteps as numbers; by default `levels_of`.
        """
        place = (chunk, layout)
        if self._mark is not timestep or self._version != _version(timestep) or self._place != place:
            self._step(timestep, place, (levels or self._levels)(timestep))
        branch = self._branch(prompt[0])
        watched = self._watched.setdefault(branch, Watched())
        return Spot(self._chunk, self._index, branch, self._now, self._first, (watched.seen(prompt),))

    @property
    def chunk(self) -> int:
        """Index of the chunk under way in its generation, 0 before the first."""
        return max(0, self._chunk)

    def owned_by(self, owner: object) -> None:
        """The generation under way is that of a K/V cache; another object begins another generation."""
        if self._owner is None or self._owner() is not owner:
            self._forget()
            self._owner = ref(owner)

    @contextmanager
    def generation(self, steps: int | None) -> Iterator[None]:
        """See the function of this name."""
        if self._announced:
            raise RollcacheError("generation() inside a generation: leave the first one before.")
        self._forget()
        self._announced, self.steps = True, steps
        try:
            yield
        finally:
            self._announced, self.steps = False, None
            self._forget()

    def _forget(self) -> None:
        """Stand before a generation."""
        self._owner = None
        self._mark: Tensor | None = None
        self._version = 0
        self._place: tuple[int | None, Hashable] = (None, None)
        self._chunk = self._index = -1
        self._now: Levels = ()
        self._first: Levels = ()
        self._seen: set[str] = set()
        self._prompts: dict[str, Tensor] = {}
        self._watched: dict[str, Watched] = {}

    def _step(self, timestep: Tensor, place: tuple[int | None, Hashable], levels: Levels) -> None:
        """A step begins, perhaps the first of a chunk."""
        if self._chunk >= 0 and place == self._place and _moved_on(self._now, levels):
            self._index += 1
        else:
            self._chunk = self._numbered(place[0])
            self._index, self._first, self._prompts = 0, levels, {}
        self._mark, self._version, self._place = timestep, _version(timestep), place
        self._now, self._seen = levels, set()

    def _branch(self, prompt: Tensor) -> str:
        """Name of the branch that is called with this prompt: as before in the chunk, or the next one of the step."""
        known = [name for name, last in self._prompts.items() if last is prompt]
        names = chain(known, BRANCHES, (f"branch {i}" for i in count(len(BRANCHES))))
        branch = next(name for name in names if name in known or name not in self._seen)
        self._seen.add(branch)
        self._prompts[branch] = prompt
        return branch

    def _numbered(self, chunk: int | None) -> int:
        """Number of a chunk that begins; one that is not larger than that of the last begins a new rollout."""
        if chunk is None:
            return self._chunk + 1 if self._announced else 0
        last = self._place[0]
        return 0 if last is None or chunk < last else self._chunk + (chunk > last)

    def _levels(self, timestep: Tensor) -> Levels:
        return levels_of(timestep, self._name)


_LOOPS: WeakKeyDictionary[nn.Module, Loop] = WeakKeyDictionary()


@contextmanager
def generation(model: nn.Module, steps: int | None = None) -> Iterator[None]:
    """One video: the chunks of one pipeline call are those of one rollout, and the next call begins another.

    ```python
    with generation(pipe.transformer):
        video = pipe(prompt)
    ```

    Args:
        model: the transformer, with a cache on it.
        steps: how often every chunk calls it in each branch, for methods that treat the last steps in another way.
    """
    if steps is not None:
        check_count("steps", steps, 1)
    loop = _LOOPS.get(model)
    if loop is None:
        raise RollcacheError(
            f"generation() is for models whose adapter counts the calls of a pipeline, and {type(model).__name__} has "
            "none: enable a cache on the transformer first."
        )
    with loop.generation(steps):
        yield


def levels_of(timestep: Tensor, name: str = "the model") -> Levels:
    """Timesteps of the latent frames [B, F], or of the whole call [B] or [], as numbers. One host synchronisation."""
    rows: list[Any] = timestep.detach().float().flatten(0, -2 if timestep.ndim > 1 else -1).tolist()
    rows = rows if timestep.ndim > 1 else [[level] for level in rows]
    if any(row != rows[0] for row in rows):
        raise RollcacheError(
            f"{name} was called with samples at different timesteps, which one decision cannot serve: generate them "
            "one by one."
        )
    return tuple(rows[0])


def one_level(timestep: Tensor) -> Levels:
    """The timestep that all tokens [B, L] share. One host synchronisation."""
    low, high = torch.stack(timestep.detach().float().aminmax()).tolist()
    if low != high:
        raise RollcacheError(
            f"the tokens of one call have timesteps from {low:g} to {high:g}, but this model denoises a block at one "
            "noise level."
        )
    return (low,)


def _moved_on(before: Levels, now: Levels) -> bool:
    """Whether a step can follow another one in a chunk."""
    return len(before) == len(now) and before != now and all(a >= b for a, b in zip(before, now, strict=True))


def _are_same(before: tuple[tuple[Tensor, int], ...], now: tuple[tuple[Tensor, int], ...]) -> bool:
    pairs = zip(before, now, strict=False)
    return len(before) == len(now) and all(a is b and va == vb for (a, va), (b, vb) in pairs)


def _are_equal(before: tuple[tuple[Tensor, int], ...], now: tuple[tuple[Tensor, int], ...]) -> bool:
    """Whether other tensors hold the same values; one that was written to does not."""
    pairs = zip(before, now, strict=False)
    return len(before) == len(now) and all(
        va == vb if a is b else a.shape == b.shape and a.device == b.device and torch.equal(a, b)
        for (a, va), (b, vb) in pairs
    )


def _version(tensor: Tensor) -> int:
    """Counts writes to a tensor; those to tensors of `inference_mode` are counted by nobody."""
    return 0 if tensor.is_inference() else tensor._version
