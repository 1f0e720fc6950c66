"""What an adapter says about a model and its calls, held against what is seen when nothing is skipped."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from rollcache.adapters.rehearse import ALWAYS, NEVER, Calls, Failed, Forgetful, Rehearsal, Run, calls
from rollcache.adapters.spec import Adapter, Args, Kwargs
from rollcache.adapters.state import differing, is_same, kind_of, tensors_in
from rollcache.cache import enable
from rollcache.passes import EVERY_BRANCH, Pass, Role


class Skipped(Exception):
    """There is nothing to check."""


class CallChecks:
    """Checks of what an adapter says about a model and its calls, and what earlier ones saw for later ones."""

    def __init__(self, model: nn.Module, adapter: Adapter, make_inputs: Callable[..., Calls]) -> None:
        self.model = model
        self.adapter = adapter
        self.make = make_inputs
        self.comparable = False  # runs can be compared with each other
        self.options = set(inspect.signature(make_inputs).parameters)

    def reproducible(self) -> str:
        """Everything else compares runs with each other."""
        self.rehearsal = Rehearsal(self.model, self.adapter, self.make)
        self.plain = self.rehearsal.bare()
        again = self.rehearsal.bare()
        if not self.plain.outputs:
            raise Failed("make_inputs yields no call")
        if not all(map(is_same, self.plain.outputs, again.outputs)) or len(again.outputs) != len(self.plain.outputs):
            raise Failed("two runs of the bare model differ: let make_inputs seed its numbers and begin with fresh K/V")
        self.comparable = True
        return f"{len(self.plain.outputs)} calls"

    def listed(self) -> str:
        """The blocks, all of them, in the order of the calls."""
        blocks = self.rehearsal.blocks
        names = {id(module): name for name, module in self.model.named_modules()}
        if strange := [type(b).__name__ for b in blocks if id(b) not in names]:
            raise Failed(f"{strange[0]} is no part of the model")
        for name, container in self.model.named_modules():
            if isinstance(container, nn.ModuleList | nn.Sequential):
                inside = [b for b in container if any(b is c for c in blocks)]
                kinds = {type(b) for b in inside}
                for i, sibling in enumerate(container):
                    if type(sibling) in kinds and not any(sibling is c for c in blocks):
                        raise Failed(f"{name}.{i} ({type(sibling).__name__}) stands among the blocks and is not listed")
        expected = list(range(len(blocks)))
        orders = [[seen.block for seen in call] for call in self.plain.blocks]
        wrong = next((o for o in orders if sorted(o) == expected and o != expected), None)
        if wrong is not None:
            raise Failed(f"the blocks are listed in another order than the model calls them in, which is {wrong}")
        if expected not in orders:
            raise Failed(f"no call runs the {len(blocks)} blocks once each; the first one runs {orders[0]}")
        return f"{len(blocks)} blocks"

    def exact(self) -> str:
        """A cache that never skips changes nothing by a bit."""
        self.bare = self.rehearsal.bare(self.adapter.io)
        run = Run()
        with self.rehearsal.cached(NEVER, run) as handle:
            self.rehearsal.play_on(handle, run, None)
            self.found_in_place = set(handle._engine.in_place)
            self.breaks = set(handle._engine.breaks)
        for i, (a, b) in enumerate(zip(self.bare.outputs, run.outputs, strict=True)):
            if not is_same(a, b):
                raise Failed(f"call {i} ({said(run.passes[i])}) does not give what the bare model gives")
            if wrong := differing(self.bare.after[i], run.after[i]):
                raise Failed(f"call {i} ({said(run.passes[i])}) leaves another {wrong[0]} than the bare model")
        self.passes = run.passes
        if self.breaks:
            return (
                f"bit for bit; the model changes the hidden state before blocks {sorted(self.breaks)}: whole passes "
                "cannot be reused"
            )
        return "bit for bit"

    def positions(self) -> str:
        """Chunks never fall, steps count from 0, and steps are not taken for chunks."""
        chunk: dict[Any, int] = {}
        step: dict[Any, int] = {}
        roles: Counter[str] = Counter()
        for i, where in enumerate(self.passes):
            if where is None:
                continue
            roles[where.role.value] += 1
            last = chunk.get(where.rollout, where.chunk)  # given frames may come before chunk 0
            if where.chunk < last:
                raise Failed(f"call {i} ({said(where)}) comes after chunk {last} of rollout {where.rollout!r}")
            chunk[where.rollout] = where.chunk
            if where.role is not Role.DENOISE:
                continue
            key = (where.rollout, where.chunk, where.branch)
            due = step.get(key, -1) + 1
            if due and not where.step:
                raise Failed(
                    f"call {i} ({said(where)}): chunk {where.chunk} begins twice; step {due} of this chunk and branch "
                    "was due, or another chunk"
                )
            if where.step != due:
                raise Failed(f"call {i} ({said(where)}): step {due} of this chunk and branch was due")
            step[key] = where.step
        if not roles["denoise"]:
            raise Failed("locate() finds no denoise pass: every call is " + (", ".join(roles) or "let through"))
        self._times()
        self.chunks = len({(w.rollout, w.chunk) for w in self.passes if w and w.role is Role.DENOISE})
        if self.chunks < 3:
            raise Failed(f"the rollout has {self.chunks} of what locate() calls a chunk: let it have three or more")
        branches = sorted({w.branch for w in self.passes if w is not None})
        return (
            f"{self.chunks} chunks, {', '.join(f'{n} {r}' for r, n in roles.items())}, branches {', '.join(branches)}"
        )

    def _times(self) -> None:
        """Chunks begin with noise: what goes on from a lower level than the chunk before is a step of it."""
        last: dict[Any, Pass] = {}
        falls: list[tuple[int, Pass, Pass]] = []
        for i, where in enumerate(self.passes):
            if where is None or where.role is not Role.DENOISE or where.time is None:
                continue
            before = last.get((where.rollout, where.branch))
            last[where.rollout, where.branch] = where
            if before is None or before.time is None:
                continue
            if before.chunk == where.chunk and where.time > before.time:
                return  # this loop counts time upwards
            if before.chunk != where.chunk and where.time < before.time:
                falls.append((i, before, where))
        for i, before, where in falls:
            raise Failed(
                f"call {i} ({said(where)}) begins a chunk at time {where.time:.4g}, which is lower than the "
                f"{before.time:.4g} that chunk {before.chunk} ended with: is it a step of that chunk?"
            )

    def commits(self) -> str:
        """Where every forward writes K/V, or the last one does, something must be exact at the end of a chunk."""
        writes = self.adapter.kv_writes
        exact = [w is not None and (w.role is Role.COMMIT or w.kv_write) for w in self.passes]
        if writes == "never":
            if any(exact):
                raise Failed(f"call {exact.index(True)} is a commit pass, but kv_writes='never'")
            return "none, as kv_writes='never' says"
        if writes == "commit_only":
            if not any(exact):
                raise Skipped("the rollout has no commit pass")
            return f"{sum(exact)}, found by their role"
        last: dict[Any, int] = {}
        final: dict[Any, int] = {}
        for i, where in enumerate(self.passes):
            if where is not None and where.role is not Role.PREFILL:
                here = (
                    [k for k in last if k[:2] == (where.rollout, where.chunk)] if where.branch == EVERY_BRANCH else []
                )
                last |= dict.fromkeys(here or [(where.rollout, where.chunk, where.branch)], i)
                final[where.rollout] = where.chunk
        ends = {key: i for key, i in last.items() if writes == "last_step" or key[1] != final[key[0]]}
        for (_, _, branch), i in ends.items():
            if not exact[i]:
                raise Failed(
                    f"call {i} ({said(self.passes[i])}) ends a chunk of branch {branch!r} under kv_writes={writes!r}, "
                    "but it is no commit pass and has no kv_write: every branch needs one of its own"
                )
        return f"{len(ends)} chunks end with one, counted by branch"

    def writes(self) -> str:
        """Denoise passes write K/V only where the adapter says so."""
        written: dict[int, str] = {}
        returned: dict[Any, set[str]] = {}
        for i, where in enumerate(self.passes):
            if where is None or where.role is not Role.DENOISE or where.kv_write:
                continue
            if paths := self._written(self.bare, i):
                written[i] = paths[0]
            here = (where.rollout, where.chunk, where.branch)
            more = tensors_in((self.bare.outputs[i],)).keys() - returned.setdefault(here, set())
            if more and returned[here]:
                raise Failed(f"call {i} ({said(where)}) returns more than those before: is it a commit pass?")
            returned[here] |= more
        if self.adapter.denoising_writes:
            seen = written or any(map(self._left, self._skippable()))
            return "denoise passes write K/V, as declared" if seen else "no denoise pass was seen to write K/V"
        if written:
            i = min(written)
            raise Failed(
                f"call {i} ({said(self.passes[i])}) writes to {written[i]}, although "
                f"kv_writes={self.adapter.kv_writes!r}: is it a commit pass?"
            )
        self._forget()
        return "no later pass reads what a denoise pass wrote"

    def _written(self, run: Run, call: int) -> list[str]:
        """Tensors among the arguments that a call wrote to, but for what enters block 0, which may write over it."""
        hidden = run.blocks[call][0].before
        changed = differing(run.before[call], run.after[call])
        return [path for path in changed if not any(is_same(run.before[call][path], h) for h in hidden)]

    def _left(self, call: int) -> bool:
        """Whether a call left something new in its arguments, or anything in the model."""
        run = self.bare
        if any(path not in run.before[call] for path in run.after[call] if not path.startswith("model")):
            return True
        was, now = ({p: t for p, t in run.after[i].items() if p.startswith("model")} for i in (call - 1, call))
        return was.keys() != now.keys() or bool(differing(was, now))

    def _skippable(self) -> dict[int, bool]:
        """Denoise passes whose blocks methods may skip; whether they are the first one of their chunk."""
        found: dict[int, bool] = {}
        rollouts = set()
        last: dict[Any, int] = {}
        for i, where in enumerate(self.passes):
            if where is None or where.role is not Role.DENOISE:
                continue
            key = (where.rollout, where.branch)
            if key in rollouts and not where.kv_write:
                found[i] = last[key] != where.chunk
            rollouts.add(key)
            last[key] = where.chunk
        return found

    def _forget(self) -> None:
        """Nothing that blocks leave behind in passes that may be skipped is needed by a later call."""
        skippable = self._skippable()
        says = self.adapter.first_pass_exact

        def forget(call: int, args: Args, kwargs: Kwargs) -> bool:
            if not skippable.get(call, False):
                return call in skippable
            return not (says(self.model, args, kwargs) if callable(says) else says)

        found = self.rehearsal.forgetful(self.bare.outputs, forget)
        reader = self._missed(found)
        if reader is None:
            return
        for kind in dict.fromkeys(kind_of(path) for paths in found.taken for path in paths):
            alone = self.rehearsal.forgetful(self.bare.outputs, forget, kind)
            first = self._missed(alone)
            if first is not None:
                found, reader = alone, first
                break
        writer = max(i for i, paths in enumerate(found.taken[:reader]) if paths)
        error = f" (else {type(found.error).__name__}: {found.error})" if reader == len(found.outputs) else ""
        raise Failed(
            f"call {writer} ({said(self.passes[writer])}) leaves {found.taken[writer][0]}, which call {reader} "
            f"({said(self.passes[reader])}) needs{error}, although kv_writes={self.adapter.kv_writes!r}: is it a "
            "commit pass?"
        )

    def _missed(self, run: Forgetful) -> int | None:
        """The first call that gives something else, or nothing."""
        for i, output in enumerate(run.outputs):
            if not is_same(output, self.bare.outputs[i]):
                return i
        return len(run.outputs) if run.error is not None else None

    def in_place(self) -> str:
        """Found out by itself; declared it costs no chunk."""
        declared = self.adapter.io.in_place
        if self.found_in_place and not declared:
            return f"blocks {sorted(self.found_in_place)} do, which is noticed; BlockIO(in_place=True) saves a chunk"
        return "declared" if declared else "none"

    def shown(self) -> str:
        """The tensors that some methods look at have the shapes that they rely on."""
        adapter = self.adapter
        names = [n for n in ("latent", "modulated", "embedding") if getattr(adapter, n) is not None]
        if not names:
            raise Skipped("the adapter shows nothing besides the hidden state")
        index = next(i for i, w in enumerate(self.passes) if w is not None and w.role is Role.DENOISE)
        entered: list[Any] = []
        first = self.rehearsal.blocks[0]
        for i, (args, kwargs, answer) in enumerate(calls(self.make())):
            hook = first.register_forward_pre_hook(lambda _, a, k: entered.append((a, k)), with_kwargs=True)
            before = deepcopy((args, kwargs)) if i == index else None
            output = self.model(*args, **kwargs)
            hook.remove()
            if before is not None:
                hidden = self.bare.blocks[i][0].before[0]
                call = adapter.io.replaced(self.bare.blocks[i][0].before, *entered[-1])
                flat = hidden.flatten(1, -2)
                for name in names:
                    seen = getattr(adapter, name)(*((self.model, *before) if name == "latent" else (first, *call)))
                    _check_shown(name, seen, flat)
                return ", ".join(names)
            answer(output)
        raise AssertionError("unreachable")

    def detached(self) -> str:
        """A cache that was taken away leaves nothing."""
        modules = list(self.model.modules())
        before = [dict(vars(m)) for m in modules]
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules]
        with enable(self.model, ALWAYS, adapter=self.adapter):
            pass
        for module, was, counts in zip(modules, before, hooks, strict=True):
            now = vars(module)
            changed = [k for k in now.keys() | was.keys() if now.get(k) is not was.get(k)]
            if changed or counts != (len(module._forward_hooks), len(module._forward_pre_hooks)):
                raise Failed(f"{type(module).__name__} keeps {', '.join(changed) or 'a hook'}")
        left = [type(m).__name__ for m in modules if "forward" in vars(m) and "rollcache" in type(m.forward).__module__]
        if left:
            raise Failed(f"{left[0]} is still wrapped")
        if self.comparable:
            again = self.rehearsal.bare()
            if not all(map(is_same, self.plain.outputs, again.outputs)):
                raise Failed("after all these runs, the bare model gives something else")
        return "the model is what it was, bit for bit"


def said(where: Pass | None) -> str:
    """What `locate` said about a call."""
    if where is None:
        return "let through"
    branch = "" if where.branch == "cond" else f", {where.branch}"
    step = f", step {where.step}" if where.role is Role.DENOISE else ""
    return f"{where.role.value}, chunk {where.chunk}{step}{branch}"


def _check_shown(name: str, seen: Any, hidden: Tensor) -> None:
    """`latent` is [B, L, Z], `modulated` [B, L, C], `embedding` any tensor."""
    if not isinstance(seen, Tensor):
        raise Failed(f"{name} gives {type(seen).__name__}, no tensor")
    wanted = {"latent": hidden.shape[:2], "modulated": hidden.shape}.get(name)
    got = seen.shape[:2] if name == "latent" else seen.shape
    if wanted is not None and got != wanted:
        raise Failed(f"{name} has shape {list(seen.shape)}, the hidden state {list(hidden.shape)}")
