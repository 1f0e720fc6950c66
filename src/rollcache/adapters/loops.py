"""Where a sampling loop is, from nothing but the calls of its model.

Pipelines say neither chunk nor step. What they do say is certain enough to count by:

- Inside a chunk the noise level of no latent frame rises, and that of one falls from step to step; the tokens stay the
  same. A step that does not follow in this sense begins a chunk.
- All guidance branches of a step are called with one and the same timestep tensor, and each once. A branch is known
  again by its prompt tensor, and the first one that is called is the conditional one. One tensor that is prompt and
  negative prompt at once makes two branches.
- Another timestep tensor at the same levels, as of a wrapper that copies all arguments, is another branch if its prompt
  was not called in this step. If it was, a chunk begins, as one does with every call of a one-step model without
  guidance.

The last two leave room for doubt: chunks of one step look like branches of one where they share a timestep tensor, or
where each has a prompt of its own; so does a video that begins after one that was broken off in its first step. An
adapter that passes `latents` removes it, since the branches of a step are given the same. In any case no step gets more
than three branches by such calls: the next one begins a chunk. A one-step loop should make a timestep tensor for every
chunk, and announce its videos with `generation`.

Writes to a tensor are seen by its version. Tensors made under `torch.inference_mode` have none and are compared by
their values at every call, which is one host synchronisation for the timestep and one for the prompt.

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

MOST = 3
"""Branches of a step, as far as calls may be taken for one that could begin a chunk just as well."""

ANNOUNCE = (
    "No argument of this model tells that two chunks are of one video: write "
    "`with rollcache.adapters.loops.generation(pipe.transformer):` around the call of the pipeline."
)
"""Hint for methods across chunks on models of which that is so."""

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


class Seen(NamedTuple):
    """A tensor as it was when it was last looked at.

    Attributes:
        tensor: the object.
        version: see `_version`.
        copy: of its values.
    """

    tensor: Tensor
    version: int
    copy: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Seen:
        """Look at a tensor."""
        return cls(tensor, _version(tensor), tensor.detach().clone())

    def again(self, tensor: Tensor) -> Seen:
        """The same values in a tensor that may be another one."""
        return Seen(tensor, _version(tensor), self.copy)

    def is_same(self, tensor: Tensor) -> bool:
        """Whether this is the object, with no write to it that was counted."""
        return tensor is self.tensor and self.version == _version(tensor)

    def has_values_of(self, tensor: Tensor) -> bool:
        """Whether a tensor holds the values that were seen. A host synchronisation, unless nobody can have written."""
        if self.is_same(tensor) and not tensor.is_inference():
            return True
        seen = self.copy
        alike = seen.shape == tensor.shape and seen.device == tensor.device and seen.dtype == tensor.dtype
        return alike and torch.equal(seen, tensor)


class Watched:
    """Counts the calls at which tensors that should stay the same, such as the prompt of a branch, did not.

    They are compared with a copy of what was seen, if they are other objects, were written to, or count no writes.
    """

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._known: tuple[Seen, ...] = ()
        self._set(0)

    def seen(self, tensors: tuple[Tensor, ...]) -> Condition:
        """Look at the tensors of a call."""
        known = self._known
        if len(known) == len(tensors) and all(map(Seen.has_values_of, known, tensors)):
            self._known = tuple(map(Seen.again, known, tensors))
            return self.condition
        self._known = tuple(map(Seen.of, tensors))
        if known:
            self._set(self._changes + 1)
        return self.condition

    def is_same(self, first: Tensor) -> bool:
        """See `Seen`, of the first of the tensors."""
        return bool(self._known) and self._known[0].is_same(first)

    def has_values_of(self, first: Tensor) -> bool:
        """See `Seen`, of the first of the tensors."""
        return bool(self._known) and self._known[0].has_values_of(first)

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
        latents: Tensor | None = None,
        levels: Callable[[Tensor], Levels] | None = None,
    ) -> Spot:
        """Take note of a call.

        Args:
            timestep: as the model was called with it.
            prompt: tensors that tell the branches of a step apart, and that stay the same from step to step.
            chunk: index of the chunk, for loops that say it.
            layout: how many tokens there are and where; with others another chunk begins.
            latents: what is denoised. Where a call could be a branch of the step or begin a chunk, it is a branch only
                if they are those of the step; read in that case only.
            levels: timesteps as numbers; by default `levels_of`.
        """
        place = (chunk, layout)
        same = self._mark is timestep and self._version == _version(timestep) and self._place == place
        now = self._now if same and not timestep.is_inference() else (levels or self._levels)(timestep)
        if place != self._place or now != self._now or not self._is_branch(prompt[0], same, latents):
            self._step(place, now, latents)
        self._took(timestep)
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
        self._latents: Seen | None = None
        self._chunk = self._index = -1
        self._now: Levels = ()
        self._first: Levels = ()
        self._seen: set[str] = set()
        self._prompts: dict[str, Tensor] = {}
        self._watched: dict[str, Watched] = {}

    def _took(self, timestep: Tensor) -> None:
        self._mark, self._version = timestep, _version(timestep)

    def _is_branch(self, prompt: Tensor, same: bool, latents: Tensor | None) -> bool:
        """Whether a call at the levels of the step under way belongs to it; `same`: with the same timestep tensor."""
        called = [self._watched[name] for name in self._seen]
        if same and not any(watched.is_same(prompt) for watched in called):
            return True
        if len(called) >= MOST or (not same and any(watched.has_values_of(prompt) for watched in called)):
            return False
        return self._latents is None or latents is None or self._latents.has_values_of(latents)

    def _step(self, place: tuple[int | None, Hashable], levels: Levels, latents: Tensor | None) -> None:
        """A step begins, perhaps the first of a chunk."""
        if self._chunk >= 0 and place == self._place and _moved_on(self._now, levels):
            self._index += 1
        else:
            self._chunk = self._numbered(place[0])
            self._index, self._first, self._prompts = 0, levels, {}
        self._place, self._now, self._seen = place, levels, set()
        self._latents = None if latents is None else Seen.of(latents)

    def _branch(self, prompt: Tensor) -> str:
        """Name of the branch that is called with this prompt: as before in the chunk, or the next one of the step."""
        known = [name for name, last in self._prompts.items() if last is prompt]
        names = chain(known, BRANCHES, (f"branch {i}" for i in count(len(BRANCHES))))
        branch = next(name for name in names if name not in self._seen)
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


def _version(tensor: Tensor) -> int:
    """Counts writes to a tensor; those to tensors of `inference_mode` are counted by nobody."""
    return 0 if tensor.is_inference() else tensor._version
