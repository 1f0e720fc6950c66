"""What an adapter says about a model and its calls, held against what is seen when nothing is skipped."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from rollcache.adapters.rehearse import (
    ALWAYS,
    NEVER,
    Calls,
    Rehearsal,
    Run,
    calls,
    differing,
    is_same,
    tensors_in,
)
from rollcache.adapters.spec import Adapter
from rollcache.cache import enable
from rollcache.passes import Pass, Role


class Skipped(Exception):
    """There is nothing to check."""


class Failed(Exception):
    """The adapter is wrong about something."""


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
            breaks = sorted(handle._engine.breaks)
        for i, (a, b) in enumerate(zip(self.bare.outputs, run.outputs, strict=True)):
            if not is_same(a, b):
                raise Failed(f"call {i} ({said(run.passes[i])}) does not give what the bare model gives")
            if wrong := differing(self.bare.after[i], run.after[i]):
                raise Failed(f"call {i} ({said(run.passes[i])}) leaves another {wrong[0]} than the bare model")
        self.passes = run.passes
        if breaks:
            return (
                f"bit for bit; the model changes the hidden state before blocks {breaks}: whole passes cannot be reused"
            )
        return "bit for bit"

    def positions(self) -> str:
        """Chunks never fall, steps count from 0."""
        chunk: dict[Any, int] = {}
        step: dict[Any, int] = {}
        roles: Counter[str] = Counter()
        for i, where in enumerate(self.passes):
            if where is None:
                continue
            roles[where.role.value] += 1
            last = chunk.get(where.rollout, -1)
            if where.chunk < max(last, 0):
                raise Failed(f"call {i} ({said(where)}) comes after chunk {last} of rollout {where.rollout!r}")
            chunk[where.rollout] = where.chunk
            if where.role is not Role.DENOISE:
                continue
            key = (where.rollout, where.chunk, where.branch)
            due = step.get(key, -1) + 1
            if where.step != due and (where.step or due < 2):
                raise Failed(f"call {i} ({said(where)}): step {due} of this chunk and branch was due")
            step[key] = where.step
        if not roles["denoise"]:
            raise Failed("locate() finds no denoise pass: every call is " + (", ".join(roles) or "let through"))
        self.chunks = len({(w.rollout, w.chunk) for w in self.passes if w and w.role is Role.DENOISE})
        branches = sorted({w.branch for w in self.passes if w is not None})
        return (
            f"{self.chunks} chunks, {', '.join(f'{n} {r}' for r, n in roles.items())}, branches {', '.join(branches)}"
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
        for i, where in enumerate(self.passes):
            if where is not None and where.role is not Role.PREFILL:
                last[where.rollout, where.chunk] = i
        ends = list(last.values())[: None if writes == "last_step" else -1]
        for i in ends:
            if not exact[i]:
                raise Failed(
                    f"call {i} ({said(self.passes[i])}) ends a chunk under kv_writes={writes!r}, but it is no commit "
                    "pass and has no kv_write"
                )
        return f"{len(ends)} chunks end with one"

    def writes(self) -> str:
        """Denoise passes write K/V only where the adapter says so."""
        written: list[tuple[int, str]] = []
        returned: dict[Any, set[str]] = {}
        for i, where in enumerate(self.passes):
            if where is None or where.role is not Role.DENOISE or where.kv_write:
                continue
            written += [(i, path) for path in self._written(self.bare, i)]
            here = (where.rollout, where.chunk, where.branch)
            more = tensors_in((self.bare.outputs[i],)).keys() - returned.setdefault(here, set())
            if more and returned[here]:
                raise Failed(f"call {i} ({said(where)}) returns more than those before: is it a commit pass?")
            returned[here] |= more
        if self.adapter.kv_writes in ("every_forward", "last_step"):
            return "denoise passes write K/V, as declared" if written else "no denoise pass was seen to write K/V"
        if written:
            i, path = written[0]
            raise Failed(
                f"call {i} ({said(self.passes[i])}) writes to {path}, although kv_writes={self.adapter.kv_writes!r}: "
                "is it a commit pass?"
            )
        return "no denoise pass writes"

    def _written(self, run: Run, call: int) -> list[str]:
        """Tensors among the arguments that a call wrote to, but for what enters block 0, which may write over it."""
        hidden = run.blocks[call][0].before
        changed = differing(run.before[call], run.after[call])
        return [path for path in changed if not any(is_same(run.before[call][path], h) for h in hidden)]

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
