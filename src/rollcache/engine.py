"""Wraps the blocks of a model on the instance, and runs every denoise pass under the decisions of a policy.

The engine knows no method's name, and nothing about a model but what its adapter says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rollcache.adapters.spec import Adapter
from rollcache.conditions import Moved, Snapshot
from rollcache.decision import Reason, Trace
from rollcache.fingerprint import Hidden, Sampler, Sampling
from rollcache.hook import Hook, find_hook, is_ours
from rollcache.passes import EVERY_BRANCH, Pass, Role, RollcacheError, Segment
from rollcache.policies.base import PolicyConfig
from rollcache.policies.stacked import split
from rollcache.rollout import Rollout, log
from rollcache.stack_walk import StackWalk, check_repairs
from rollcache.store import Budget, Reduce
from rollcache.walk import Walk
from rollcache.weights import Weights

PROBE = Sampling(tokens=16)
"""What is looked at to find blocks that write in place, under policies that take no fingerprints."""

IDLE_CHUNKS = 8
"""When this chunk begins and nothing was replayed, the log says so."""


@dataclass(slots=True)
class Clock:
    """Host seconds spent by the cache: deciding (fingerprints, evidence, policy), storing residuals, adding them."""

    gate: float = 0.0
    keep: float = 0.0
    replay: float = 0.0

    def kept(self, seconds: float) -> None:
        """Move time from deciding to storing."""
        self.gate -= seconds
        self.keep += seconds

    def replayed(self, seconds: float) -> None:
        """Move time from deciding to adding."""
        self.gate -= seconds
        self.replay += seconds


class Engine:
    """One model with its hooks, its rollouts and the trace of what was decided.

    Attributes:
        breaks: blocks before which the model changes the hidden state; runs do not cross them.
        in_place: blocks that write into their input; it is cloned for them.
        required: blocks that the model needs computed; no span holds them.
        spans: the blocks that may be replayed, as ranges in block order: those of the policy, without `required`.
        stack: the blocks that methods of whole passes see as one.
        recycles: a tensor that went into a block was overwritten later in the pass, as blocks with shared buffers do.
        span_at: index of the span that begins at a block.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: PolicyConfig,
        adapter: Adapter,
        *,
        memory_budget: int | None,
        storage_dtype: torch.dtype | None,
        max_rollouts: int,
        trace_capacity: int,
        reduce: Reduce | None,
        lookahead: bool,
    ) -> None:
        """Wrap `model`. Leaves it untouched when anything is wrong."""
        self.model = model
        self.policy = policy
        self.adapter = adapter
        self.blocks = list(adapter.blocks(model))
        self.depth = len(self.blocks)
        _check_blocks(model, self.blocks)
        self.required = adapter.required(self.blocks)
        self.budget = Budget(memory_budget, strict=reduce is not None)
        self.dtype = storage_dtype
        self.max_rollouts = max_rollouts
        self.reduce = None if reduce is None else partial(_reduced, reduce)
        self.lookahead = lookahead
        self.trace = Trace(self.depth, trace_capacity)
        self.clock = Clock()
        self.breaks: set[int] = set()
        self.recycles = False
        self.in_place: set[int] = set(range(self.depth)) if adapter.io.in_place else set()
        built = policy.build(self.depth)
        outer, _ = split(built)
        if outer is not None:
            check_repairs(outer, adapter.sparse, model, reduce is not None)
            if self.required and outer.repairs and outer.backend == "sparse":
                raise RollcacheError("tokens cannot be repaired alone where a block must always be computed for all.")
        self.spans = tuple(piece for span in built.spans for piece in _pieces(span, self.required))
        pieces = _pieces(range(self.depth), self.required)
        if not self.spans or (outer is not None and len(pieces) != 1):
            raise RollcacheError(
                f"{type(policy).__name__} cannot be used with {type(model).__name__}, of whose {self.depth} blocks "
                f"{sorted(self.required)} must always be computed: use a method that decides block by block."
            )
        self.stack = pieces[0]
        self.span_at = {s.start: i for i, s in enumerate(self.spans)}
        self.rollouts: OrderedDict[Hashable, Rollout] = OrderedDict()
        self._stale: dict[Hashable, tuple[int | None, set[str]]] = {}  # of rollouts that had to make room
        self._samplers: dict[object, Sampler] = {}
        self._passes = 0
        self._busy = False
        self._walk: Walk | StackWalk | None = None
        self._weights = Weights(self.blocks)
        self._hooks: list[Hook] = []
        try:
            for index, block in enumerate(self.blocks):
                self._hooks.append(Hook(block, self._block_runner(index)))
            self._hooks.append(Hook(model, self._forward))
        except BaseException:
            self.remove()
            raise

    @property
    def enabled(self) -> bool:
        """Whether the model is wrapped."""
        return bool(self._hooks)

    def remove(self) -> None:
        """Unwrap everything and forget all rollouts."""
        for hook in reversed(self._hooks):
            hook.remove()
        self._hooks.clear()
        self._samplers.clear()
        self.reset()

    def reset(self, rollout: Hashable | None = None) -> None:
        """Forget one rollout, or all of them (None)."""
        keys = [*self.rollouts, *self._stale] if rollout is None else [rollout]
        for key in keys:
            self._stale.pop(key, None)
            state = self.rollouts.pop(key, None)
            if state is not None:
                state.clear("it was reset")

    def state(self, key: Hashable) -> Rollout:
        """The state of a rollout; the one that was used longest ago makes room."""
        state = self.rollouts.get(key)
        if state is None:
            state = Rollout(self.policy.build(self.depth), self.budget, self.dtype)
            state.chunk, state.dirty = self._stale.pop(key, (None, set()))
            self.rollouts[key] = state
            if len(self.rollouts) > self.max_rollouts:
                self._make_room(next(iter(self.rollouts)))
        self.rollouts.move_to_end(key)
        return state

    def _make_room(self, key: Hashable) -> None:
        """Forget a rollout, but for K/V that it left stale."""
        chunk, dirty = self.rollouts[key].chunk, self.rollouts[key].dirty
        self.reset(key)
        if dirty:
            self._stale[key] = (chunk, dirty)

    def last_chunk(self, key: Hashable) -> int:
        """Index of the chunk at which a rollout stands, -1 before its first."""
        state = self.rollouts.get(key)
        chunk = self._stale.get(key, (None,))[0] if state is None else state.chunk
        return -1 if chunk is None else chunk

    def fork(self, source: Hashable, target: Hashable) -> None:
        """Copy the state of a rollout."""
        if source not in self.rollouts:
            raise RollcacheError(
                f"no rollout {source!r} to fork (known: {', '.join(map(repr, self.rollouts)) or 'none'})."
            )
        self.reset(target)
        copied = deepcopy(self.rollouts[source], {id(self.budget): self.budget})
        self.state(target)
        if self.budget.admit(copied.bytes):  # else the target starts empty
            self.rollouts[target] = copied

    def sampler(self, hidden: Hidden, segments: tuple[Segment, ...], sampling: Sampling | None) -> Sampler:
        """The sampler for hidden states like this one, planned once."""
        key = (tuple((h.shape, h.device) for h in hidden), segments, sampling)
        sampler = self._samplers.get(key)
        if sampler is None:
            if len(self._samplers) >= 32:  # shapes that change all the time must not pile up
                self._samplers.clear()
            sampler = self._samplers[key] = Sampler(hidden, segments, sampling or PROBE)
        return sampler

    def distance(self, snapshot: Snapshot, where: Pass) -> Moved:
        """How far the conditions of a pass are from a snapshot: the largest movement that any rank saw."""
        moved = snapshot.moved(where.conditions)
        if self.reduce is None:
            return moved
        mine = torch.tensor([moved.distance, 1 - moved.cosine])
        distance, turned = self.reduce(torch.nan_to_num(mine, nan=float("inf"), posinf=float("inf"))).tolist()
        return Moved(distance, 1 - turned)

    def touch_weights(self) -> None:
        """The weights are no longer those of the stored residuals."""
        self._weights.touch()

    def weights(self) -> object:
        """See `Weights.token`."""
        return self._weights.token()

    def sample_weights(self) -> object:
        """See `Weights.sample`."""
        return self._weights.sample()

    def _block_runner(self, index: int) -> Callable[[Callable[..., Any], Any, Any], Any]:
        def run(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if self._walk is None:
                if not self._busy:
                    self._check_hook()
                return original(*args, **kwargs)
            return self._walk.block(index, original, args, kwargs)

        return run

    def _forward(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One forward of the model."""
        if self._busy:
            raise RollcacheError(
                "the model was called while it runs, from inside its own forward or from another thread; rollcache "
                "cannot follow that."
            )
        where = self.adapter.locate(self.model, args, kwargs)
        if where is None:
            return original(*args, **kwargs)
        if not isinstance(where, Pass):
            raise RollcacheError(
                f"locate() of the adapter must give a Pass, or None to let a call through; it gave {where!r}."
            )
        if torch.is_grad_enabled():
            raise RollcacheError(
                "rollcache is for inference: call the model under torch.no_grad() or torch.inference_mode()."
            )
        self._busy = True
        try:
            self._walk = self._enter(where, args, kwargs)
            output = original(*args, **kwargs)
            if self._walk is not None:
                self._walk.finish()
            self._clean(where)
            return output
        except BaseException:
            self._invalidate(where)
            raise
        finally:
            self._walk, self._busy = None, False

    def _check_hook(self) -> None:
        """A block runs, and nobody saw the pass begin: it was called by itself, or the hook on the model is gone."""
        if self._hooks and vars(self.model).get("forward") is not self._hooks[-1]:
            raise RollcacheError(
                f"{type(self.model).__name__} runs without its cache: something that had replaced its forward before "
                "the cache was enabled took that back, and the cache with it (pipe.enable_model_cpu_offload() does so "
                "at the end of every call). disable() this cache, and enable one before offloading is set up."
            )

    def _enter(self, where: Pass, args: Any, kwargs: Any) -> Walk | StackWalk | None:
        """Account for a pass. Returns the walk of a denoise pass; passes of other roles run untouched."""
        self.trace.passes[where.role.value] += 1
        if where.role is not Role.DENOISE:
            return None
        rollout = self.state(where.rollout)
        if rollout.enter(where, self.weights):
            self.trace.chunks += 1
            self._tell_if_idle()
        self._passes += 1
        exact = rollout.is_first(where) and self._begins_exact(args, kwargs)
        blocks = None if rollout.inner is None else Walk(self, rollout, where, self._passes, exact)
        if rollout.outer is None:
            return blocks
        return StackWalk(self, rollout, rollout.outer, where, (args, kwargs), blocks, exact)

    def _clean(self, where: Pass) -> None:
        """After a pass that wrote K/V for good, what it wrote is no longer stale."""
        state = self.rollouts.get(where.rollout)
        if state is None or not (where.role is Role.COMMIT or where.kv_write):
            return
        state.dirty -= state.dirty if where.branch == EVERY_BRANCH else {where.branch}

    def _begins_exact(self, args: Any, kwargs: Any) -> bool:
        """Whether the first pass of a chunk must be computed."""
        says = self.adapter.first_pass_exact
        return says(self.model, args, kwargs) if callable(says) else says

    def _tell_if_idle(self) -> None:
        """Once, after a few chunks: nothing is ever replayed, and why."""
        reasons = self.trace.reasons
        reused = {Reason.SIMILAR, Reason.STEADY, Reason.SCHEDULE}
        if self.trace.chunks == IDLE_CHUNKS and not reused & reasons.keys():
            told = {why for rollout in self.rollouts.values() for why in rollout.told}
            again = f"every chunk was a first one ({', '.join(sorted(told)) or 'of another rollout'})"
            why = reasons.most_common(1)[0][0] if reasons else again
            across_chunks = all(r.policy.across == "chunks" for r in self.rollouts.values())
            hint = f" {self.adapter.hint}" if self.adapter.hint and across_chunks else ""
            log.warning("rollcache: nothing was replayed in %d chunks, mostly: %s.%s", IDLE_CHUNKS - 1, why, hint)

    def _invalidate(self, where: Pass) -> None:
        """Fail closed: after an exception nothing of the rollout is trusted."""
        state = self.rollouts.get(where.rollout)
        if state is not None:
            state.clear("a pass raised an exception")


def _reduced(reduce: Reduce, mine: Tensor) -> Tensor:
    """What the user's reduction gives, which must be a tensor."""
    worst = reduce(mine)
    if not isinstance(worst, Tensor) or worst.shape != mine.shape:
        raise RollcacheError(
            f"reduce= must return the elementwise maximum over the ranks as a tensor {list(mine.shape)}, it returned "
            f"{list(worst.shape) if isinstance(worst, Tensor) else worst!r}; torch.distributed.all_reduce writes into "
            "its argument and returns nothing: return that argument."
        )
    return worst


def _pieces(span: range, required: frozenset[int]) -> list[range]:
    """What is left of consecutive blocks without some of them, as ranges in block order."""
    pieces: list[range] = []
    for block in span:
        if block in required:
            continue
        adjoins = bool(pieces) and pieces[-1].stop == block
        start = pieces.pop().start if adjoins else block
        pieces.append(range(start, block + 1))
    return pieces


def _check_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Refuse what cannot be wrapped, naming it."""
    blocks = list(blocks)
    if not blocks:
        raise RollcacheError(f"{type(model).__name__} has no blocks to cache.")
    if len({id(b) for b in blocks}) != len(blocks):
        raise RollcacheError("one module stands twice among the blocks; the two could not be told apart.")
    if "_orig_mod" in model._modules:
        raise RollcacheError("the model was compiled as a whole; compile its blocks one by one instead.")
    inside = {id(m) for m in model.modules()}
    for module in (model, *blocks):
        name = type(module).__name__
        if not isinstance(module, nn.Module):
            raise TypeError(f"blocks must be modules, got {name}.")
        if id(module) not in inside:
            raise RollcacheError(f"block {name} is no part of {type(model).__name__}: pass the model's own blocks.")
        if module._compiled_call_impl is not None:
            raise RollcacheError(
                f"{name} was compiled in place, which would trace into the cache. Compile the blocks as "
                "blocks[i] = torch.compile(blocks[i]) and enable the cache afterwards."
            )
        if find_hook(module) is not None or is_ours(vars(module).get("__getstate__")):
            raise RollcacheError(
                f"{name} already has a cache: disable it first, or use the handle that enable() returned."
            )
