"""What an adapter promises for the case that blocks and passes are skipped, tried out."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor

from rollcache.adapters.check_calls import CallChecks, Skipped, said
from rollcache.adapters.rehearse import ALWAYS, Blocks, Failed, Passes, Rehearsal, Run, calls
from rollcache.adapters.state import Snapshot, apart, copied, differing, is_same
from rollcache.cache import enable
from rollcache.decision import Action
from rollcache.passes import Pass, Role, RollcacheError


class SkipChecks(CallChecks):
    """Checks under decisions to skip."""

    def residuals(self) -> str:
        """A skipped block adds what it added when it was last computed, block by block and as a whole stack."""
        counts = {"across chunks": 0, "across steps": 0}
        for kind, run in (("across chunks", self.skipping), ("across steps", self.whole)):
            if run is not None:
                counts[kind] = self._follow(run, kind == "across steps")
        if not sum(counts.values()):
            raise Failed("nothing was ever replayed: does every chunk begin a new rollout, and has it only one step?")
        return ", ".join(f"{n} replayed {kind}" for kind, n in counts.items())

    @cached_property
    def skipping(self) -> Run:
        """A rollout in which every block is replayed that may be."""
        return self.rehearsal.play(ALWAYS, self.bare.outputs)

    @cached_property
    def whole(self) -> Run | None:
        """A rollout in which whole passes are replayed; None where the adapter forbids it."""
        try:
            return self.rehearsal.play(Passes(), self.bare.outputs)
        except RollcacheError as refused:
            if "cannot be used with" not in str(refused):
                raise
            return None

    @cached_property
    def partly(self) -> list[Run]:
        """Rollouts in which the same blocks are computed in every pass: the first, and every other one."""
        blocks = frozenset(range(len(self.rehearsal.blocks)))
        others = (blocks - {0}, blocks - set(range(0, len(blocks), 2)), blocks - set(range(1, len(blocks), 2)))
        wanted = dict.fromkeys(p for p in others if p - self.adapter.required(self.rehearsal.blocks))
        return [self.rehearsal.play(Blocks(pattern), self.bare.outputs) for pattern in wanted]

    def _follow(self, run: Run, across_steps: bool) -> int:
        """Redo the arithmetic of a run. Returns the number of replayed block evaluations."""
        added: dict[Any, tuple[Tensor, ...]] = {}
        count = 0
        for i, (where, seen, records) in enumerate(zip(run.passes, run.blocks, run.records, strict=True)):
            if where is None or where.role is not Role.DENOISE:
                continue
            actions = {r.block + b: r.action for r in records for b in range(r.blocks)}
            h = tuple(t.double() for t in seen[0].before)
            for at in seen:
                key = (where.rollout, where.branch, at.block, None if across_steps else where.step)
                if at.block in self.breaks:
                    h = tuple(t.double() for t in at.before)
                if actions[at.block] is Action.COMPUTE:
                    if (far := apart(tuple(t.to(b.dtype) for t, b in zip(h, at.before, strict=True)), at.before)) > 1:
                        raise Failed(f"call {i} ({said(where)}): what enters block {at.block} is off by {far:.2g}")
                    added[key] = tuple(a.double() - b.double() for a, b in zip(at.after, at.before, strict=True))
                    h = tuple(t.double() for t in at.after)
                else:
                    h = tuple(a + r for a, r in zip(h, added[key], strict=True))
                    count += 1
            if (far := apart(tuple(t.to(a.dtype) for t, a in zip(h, seen[-1].after, strict=True)), seen[-1].after)) > 1:
                raise Failed(f"call {i} ({said(where)}): what leaves the last block is off by {far:.2g} roundings")
        return count

    def kv(self) -> str:
        """Whatever denoise passes left behind, commit passes are exact and so is the K/V after them."""
        count = 0
        for run in (r for r in (self.skipping, self.whole, *self.partly) if r is not None):
            lone: set[str] = set()
            chunks = set()
            for i, where in enumerate(run.passes):
                if where is None or (where.role is Role.DENOISE and not where.kv_write):
                    continue
                count += 1
                new = [p for p in self.bare.after[i].keys() ^ run.after[i].keys() if p not in lone and "[#" not in p]
                lone.update(new)
                chunks.update([(where.rollout, where.chunk)] if new else [])
                if len(chunks) > 1:  # what is filled once in a rollout is no K/V of chunks
                    which = "missing" if min(new) in self.bare.after[i] else "there only with skips"
                    raise Failed(
                        f"after call {i} ({said(where)}) {min(new)} is {which}: see always_compute and first_pass_exact"
                    )
                if wrong := differing(self.bare.after[i], run.after[i]):
                    raise Failed(
                        f"after call {i} ({said(where)}) {wrong[0]} is not what it is without skips: see "
                        "always_compute and first_pass_exact"
                    )
                if not is_same(self.bare.outputs[i], run.outputs[i]):
                    raise Failed(f"call {i} ({said(where)}) is not exact: what it reads was left by skipped passes")
        if self.adapter.kv_writes == "never":
            return "none is written"
        if not count:
            raise Skipped("the rollout has no pass that writes K/V")
        return f"exact after each of {count} passes that write"

    def stand_ins(self) -> str:
        """A pass that is repeated with some blocks replayed gives what it gave: aux, encoder and K/V are in order."""
        wanted = [i for i, w in enumerate(self.passes) if w is not None and w.role is Role.DENOISE and not w.kv_write]
        last = {(w.branch, w.step): i for i in wanted if (w := self.passes[i]) is not None}
        if self.adapter.first_pass_exact:
            last = {key: i for key, i in last.items() if key[1]}
        chosen = sorted(last.values())[-4:]
        depth = len(self.rehearsal.blocks)
        lone = range(depth) if depth <= 6 else (0, 1, depth // 2, depth - 1)
        everything = frozenset(range(depth))
        patterns = [everything, everything - {0}, frozenset(range(0, depth, 2)), frozenset(range(1, depth, 2))]
        patterns += [frozenset({b}) for b in lone]
        count = 0
        for index, (args, kwargs, answer) in enumerate(calls(self.make())):
            where = self.passes[index]
            if index in chosen and where is not None:
                for pattern in patterns:
                    count += self._repeat(args, kwargs, where, pattern, index)
            answer(self.model(*args, **kwargs))
        return f"{count} passes repeated with some blocks replayed"

    def _repeat(self, args: Any, kwargs: Any, where: Pass, pattern: frozenset[int], index: int) -> int:
        """One pass computed, and again with blocks replayed."""
        if not pattern - self.adapter.required(self.rehearsal.blocks):
            return 0
        here = [where]
        fixed = replace(self.adapter, locate=lambda *_: here[0], first_pass_exact=False, kv_writes="commit_only")
        held = Snapshot(self.model)
        outputs = []
        with enable(self.model, Blocks(pattern), adapter=fixed) as handle:
            for chunk in range(3):  # blocks that write in place are found out in the first one
                try:
                    again = deepcopy((args, kwargs))
                except Exception as error:
                    raise Skipped(f"the arguments cannot be copied ({error}), so no pass can be repeated") from error
                here[0] = replace(where, chunk=chunk)
                outputs.append(copied(self.model(*again[0], **again[1])))
                held.put_back()
            last = [r for r in handle.trace if r.chunk == 2]
        blocks = sorted(pattern)
        if all(r.action is not Action.REPLAY for r in last):
            reasons = ", ".join({str(r.reason) for r in last if r.block in pattern})
            raise Failed(f"call {index} ({said(where)}): repeated, but blocks {blocks} are not replayed: {reasons}")
        if (far := apart(outputs[2], outputs[0])) > 1:
            raise Failed(
                f"call {index} ({said(where)}): with blocks {blocks} replayed, its output is off by {far:.2g} "
                "roundings: see BlockIO.aux and always_compute"
            )
        return 1

    def shapes(self) -> str:
        """A chunk whose hidden state has another shape is computed in full."""
        shape: dict[Any, Any] = {}
        begun: dict[Any, Any] = {}
        changes = 0
        for i, where in enumerate(self.skipping.passes):
            if where is None or where.role is not Role.DENOISE:
                continue
            key = (where.rollout, where.branch)
            now = [t.shape for t in self.skipping.blocks[i][0].before]
            if shape.get(key, now) != now:
                changes += 1
                begun[key] = where.chunk
            shape[key] = now
            if begun.get(key) == where.chunk and any(r.action is Action.REPLAY for r in self.skipping.records[i]):
                raise Failed(f"call {i} ({said(where)}) replays, although this chunk has another shape")
        if not changes:
            raise Skipped("all chunks have the same shape: let one be longer if your loop does that")
        return f"{changes} changes, each computed"

    def batch(self) -> str:
        """Another batch size under the same cache."""
        if "batch" not in self.options:
            raise Skipped("make_inputs takes no batch=")
        other = self.rehearsal.bare(batch=2)
        return self._after(other, {"batch": 2}, "with another batch size")

    def second(self) -> str:
        """A new generation reuses nothing of the one before."""
        return self._after(self.bare, {}, "of the second rollout")

    def _after(self, bare: Run, options: dict[str, Any], what: str) -> str:
        """Run the rollout, then another one, under one cache: the other one is decided as if it were alone."""
        declared = replace(self.adapter, io=replace(self.adapter.io, in_place=True))  # else the first one finds it out
        rehearsal, two, passes = Rehearsal(self.model, declared, self.make), Run(), Run()
        with rehearsal.cached(ALWAYS, passes) as handle:
            rehearsal.play_on(handle, Run(), self.bare.outputs)
            rehearsal.play_on(handle, two, bare.outputs, **options)
        alone = rehearsal.play(ALWAYS, bare.outputs, **options)
        for i, (a, b) in enumerate(zip(two.records, alone.records, strict=True)):
            if [r.action for r in a] != [r.action for r in b]:
                raise Failed(f"call {i} {what} is decided otherwise than alone: locate() does not see a new rollout")
            if not is_same(two.outputs[i], alone.outputs[i]):
                raise Failed(f"call {i} {what} gives something else than alone")
        return f"{len(two.outputs)} calls as if alone"

    def branches(self) -> str:
        """Branches are told apart by what they are, not by their order."""
        if len({w.branch for w in self.passes if w is not None}) < 2:
            raise Skipped("the rollout has one branch")
        if "reverse" not in self.options:
            raise Skipped("make_inputs takes no reverse=")
        bare = self.rehearsal.bare(self.adapter.io, reverse=True)
        turned = self.rehearsal.play(ALWAYS, bare.outputs, reverse=True)
        where_in = {(w.chunk, w.role, w.step, w.branch): i for i, w in enumerate(turned.passes) if w is not None}
        for i, w in enumerate(self.skipping.passes):
            if w is None:
                continue
            j = where_in.get((w.chunk, w.role, w.step, w.branch))
            if j is None or not is_same(self.skipping.outputs[i], turned.outputs[j]):
                raise Failed(f"call {i} ({said(self.passes[i])}) depends on the order of the branches")
        return "either order gives the same"

    def exception(self) -> str:
        """After an exception nothing of the rollout is trusted."""
        denoise = [(i, w) for i, w in enumerate(self.passes) if w is not None and w.role is Role.DENOISE]
        begun = (denoise[0][1].rollout, denoise[0][1].chunk)
        later = [(i, w) for i, w in denoise if (w.rollout, w.chunk) != begun]
        if not later:
            raise Skipped("the rollout has one chunk")
        index, where = later[0]
        run = self.rehearsal.play(ALWAYS, self.bare.outputs, interrupt=index)
        chunks = sorted({w.chunk for _, w in later if w.rollout == where.rollout})[:2]
        for i, w in later[1:]:
            same = w.rollout == where.rollout and w.chunk in chunks
            if same and any(r.action is not Action.COMPUTE for r in run.records[i]):
                raise Failed(f"call {i} ({said(w)}) replays what was stored before the exception in call {index}")
        return f"what follows call {index} is computed until the chunk after it is over"

    def sparse(self) -> str:
        """Running all tokens as chosen ones equals running the pass."""
        if self.adapter.sparse is None:
            raise Skipped("the adapter cannot run chosen tokens alone")
        if not all(w.segments for w in self.passes if w is not None and w.role is Role.DENOISE):
            raise Failed("without segments no tokens can be chosen")
        run = self.rehearsal.play(Passes(repair=True), self.bare.outputs)
        repaired = [i for i, r in enumerate(run.records) if any(x.action is Action.REPAIR for x in r)]
        if not repaired:
            raise Skipped("every chunk has one step")
        for i in repaired:
            if (far := apart(run.outputs[i], self.bare.outputs[i])) > 1:
                raise Failed(f"call {i} ({said(self.passes[i])}): with all tokens repaired, off by {far:.2g} roundings")
        return f"{len(repaired)} passes equal the full ones"
