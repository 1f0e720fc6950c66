"""Chosen tokens of the street transformer: against the dense pass, against loops written by hand, and in the engine."""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st
from street_doubles import noise_frames, random_world
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rollcache
from rollcache import Action, Reason
from rollcache.bench.takes import plan_take
from rollcache.decision import Decision, Record
from rollcache.passes import Cell, Segment
from rollcache.policies.base import StackEvidence, StackPolicy
from rollcache.street.describe import FEATURES, Described
from rollcache.street.dit import StreetDiT, WindowKV
from rollcache.street.protocol import Protocol
from rollcache.street.rig import CELLS, RIG
from rollcache.street.rows import StreetRows
from rollcache.street.scenery import ATTRIBUTES
from rollcache.street.world import Session, Start, World
from rollcache.tokens import Tokens

F, Z = 4, 24
VIEWS = sum(len(g.cameras) for g in RIG)
ROWS = StreetRows()


def model_of(dtype: str = "float32") -> StreetDiT:
    model = random_world(dtype).model
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for block in model.blocks[::2]:  # what is told must count
            torch.nn.init.normal_(block.answer.weight, std=0.2)
    return model


def segments(model: StreetDiT) -> tuple[Segment, ...]:
    return tuple(Segment(*row) for row in model.layout)


def inputs(seed: int, batch: int = 1, told: bool = True, time: float = 8.0, t: float = 0.6) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=g)

    corner = draw(F, VIEWS, 5, 2).tanh()
    rectangle = torch.stack((corner[..., 0], corner[..., 0] + 0.2, corner[..., 1], corner[..., 1] + 0.3), -1)
    described = Described(draw(F, VIEWS, 5, FEATURES), rectangle, draw(F, VIEWS, 5) > -0.5, draw(F, ATTRIBUTES))
    return {
        "z": draw(F, CELLS, Z),
        "t": torch.full((batch, 1), t),
        "action": draw(F, 4),
        "context": draw(1, CELLS, Z),
        "known": torch.ones(batch, 1),
        "time": torch.full((batch, 1), time),
        "told": described if told else None,
    }


@dataclass
class Seen:
    """What entered and left the stack in one dense pass, and the K/V that it left."""

    hidden: Tensor
    ctx: Any
    output: Tensor
    slots: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict)


def dense(model: StreetDiT, given: dict[str, Any], kv: WindowKV | None) -> Seen:
    seen: dict[str, Any] = {}
    slots: dict[Any, tuple[Tensor, ...]] = {}

    def before(block: Any, args: Any) -> None:
        seen["args"] = args
        ROWS.capture(args, {}, slots)

    def after(block: Any, args: Any, output: Any) -> None:
        seen["output"] = output

    hooks = [model.blocks[0].register_forward_pre_hook(before), model.blocks[-1].register_forward_hook(after)]
    model(**given, kv=kv)
    for hook in hooks:
        hook.remove()
    return Seen(*seen["args"], seen["output"], slots)


def repair(model: StreetDiT, seen: Seen, tokens: Tokens, slots: dict[Any, tuple[Tensor, ...]]) -> Tensor:
    rows = tokens.rows(segments(model), seen.hidden.device)
    inside = seen.hidden.index_select(1, rows)
    call = (seen.hidden, seen.ctx)
    return ROWS.run(list(model.blocks), inside, tokens, segments(model), call, {}, slots)


def filled(model: StreetDiT, windows: int = 2, batch: int = 1) -> WindowKV:
    kv = WindowKV(2)
    for w in range(windows):
        model(**inputs(90 + w, batch, time=4.0 * w, t=0.0), kv=kv, commit=True)
    return kv


def choose(model: StreetDiT, seed: int, share: float, frames: tuple[int, ...] = (0, 1, 2, 3)) -> Tokens:
    g = torch.Generator().manual_seed(seed)
    return Tokens.top(tuple(torch.rand(s.views, F, s.cells, generator=g) for s in segments(model)), share, frames)


def choices(model: StreetDiT) -> list[Tokens]:
    some = choose(model, 3, 0.15, (1, 3))
    return [
        choose(model, 0, 0.1),
        choose(model, 1, 0.4, (2,)),
        some,
        Tokens(some.frames, (some.cells[0], None, some.cells[2])),
        Tokens.whole_frames((1,), segments(model)),
        Tokens.whole_frames((0, 1), segments(model)),
        Tokens.whole_frames((0, 3), segments(model)),
        choose(model, 4, 0.001),
    ]


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "told", "windows"), [(1, True, 2), (1, False, 0), (2, True, 1)])
@pytest.mark.parametrize("whole", [True, False])
def test_all_tokens_are_the_dense_pass(dtype: str, batch: int, told: bool, windows: int, whole: bool) -> None:
    """To 1e-5 of the largest number in float32; in bfloat16 to one rounding of its products, 2 % of it."""
    model = model_of(dtype)
    kv = filled(model, windows, batch) if windows else None
    stale, seen = dense(model, inputs(1, batch, told), kv), dense(model, inputs(2, batch, told), kv)
    tokens = Tokens.whole_frames((0, 1, 2, 3), segments(model)) if whole else choose(model, 0, 1.0)
    out = repair(model, seen, tokens, stale.slots)
    rows = tokens.rows(segments(model), out.device)
    limit = 1e-5 if dtype == "float32" else 2e-2
    expected = seen.output.index_select(1, rows)
    assert (out - expected).abs().max() < limit * expected.abs().max()
    assert (stale.output - seen.output).abs().max() > 0.1


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("which", range(8))
def test_with_exact_kv_any_subset_is_its_rows_of_the_dense_pass(which: int, batch: int) -> None:
    model = model_of()
    kv, tokens = filled(model, 2, batch), choices(model)[which]
    seen = dense(model, inputs(2, batch), kv)
    held = copy.deepcopy(seen.slots)
    out = repair(model, seen, tokens, seen.slots)
    expected = seen.output.index_select(1, tokens.rows(segments(model), out.device))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    for key, tensors in held.items():
        torch.testing.assert_close(seen.slots[key], tensors, atol=1e-5, rtol=1e-5)


class Naive:
    """The blocks for some tokens of one batch element, one token and head after the other, from `dit.py`'s docstrings.

    `held` has K and V [L, heads, d] of every block: those of the last time that each token was run.
    """

    def __init__(self, model: StreetDiT) -> None:
        self.model = model
        self.held = [[torch.full((F * CELLS, b.heads, 16), math.nan) for _ in "kv"] for b in model.blocks]
        self.where = [
            (g, v, camera, r, c)
            for g, (group, first) in enumerate(zip(RIG, (0, 2, 6), strict=True))
            for v, camera in enumerate(range(first, first + len(group.cameras)))
            for r in range(group.grid[0])
            for c in range(group.grid[1])
        ]

    def turn(self, x: Tensor, frame: int, cell: int, time: float) -> Tensor:
        """Rotate [heads, d] by (time, row, column): half of the pairs for time, a quarter for each of the others."""
        _, _, _, row, column = self.where[cell]
        angle = torch.cat(
            [
                at * longest ** -torch.linspace(0, 1, n)
                for at, n, longest in ((time + frame, 4, 64.0), (row, 2, 16.0), (column, 2, 16.0))
            ]
        )
        a, b = x[:, :8], x[:, 8:]
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)

    def run(self, seen: Seen, rows: list[int], kv: WindowKV | None, time: float) -> Tensor:
        x = seen.hidden[0, rows]
        frame, cell = [r // CELLS for r in rows], [r % CELLS for r in rows]
        for b, block in enumerate(self.model.blocks):
            mod = block.mod_out(nnf.silu(block.mod_in(seen.ctx.c[0])))[frame].chunk(6, -1)
            a = nnf.layer_norm(x, x.shape[-1:]) * (1 + mod[1]) + mod[0]
            q, k, v = (t.unflatten(-1, (block.heads, -1)) for t in block.qkv(a).chunk(3, -1))
            q = nnf.layer_norm(q, (16,)) * block.q_scale
            k = nnf.layer_norm(k, (16,)) * block.k_scale
            if b % 2 == 0:
                q, k = (
                    torch.stack([self.turn(t[i], frame[i], cell[i], time) for i in range(len(rows))]) for t in (q, k)
                )
            self.held[b][0][rows], self.held[b][1][rows] = k, v
            out = torch.stack([self.attend(b, q[i], frame[i], cell[i], kv) for i in range(len(rows))])
            x = x + mod[2] * block.proj(out)
            if b % 2 == 0:
                x = x + block.answer(
                    torch.stack([self.ask(block, x[i], frame[i], cell[i], seen) for i in range(len(x))])
                )
            a = nnf.layer_norm(x, x.shape[-1:]) * (1 + mod[4]) + mod[3]
            x = x + mod[5] * block.down(nnf.gelu(block.up(a)))
        return x

    def attend(self, b: int, q: Tensor, frame: int, cell: int, kv: WindowKV | None) -> Tensor:
        """A token to its camera in all latent frames and the committed K/V, or to all cells of its latent frame."""
        k, v = self.held[b]
        g, view, camera, *_ = self.where[cell]
        if b % 2:
            at = [frame * CELLS + p for p in range(CELLS)]
        else:
            at = [f * CELLS + p for f in range(F) for p in range(CELLS) if self.where[p][2] == camera]
        cached = kv.read(b, g) if kv is not None and b % 2 == 0 else None
        out = []
        for head in range(len(q)):
            keys, values = k[at, head], v[at, head]
            if cached is not None:
                keys, values = torch.cat((keys, cached[0][view, head])), torch.cat((values, cached[1][view, head]))
            out.append((keys @ q[head] / 4).softmax(0) @ values)
        return torch.cat(out)

    def ask(self, block: Any, x: Tensor, frame: int, cell: int, seen: Seen) -> Tensor:
        """A token to what its camera sees, less to what is far from its cell."""
        g, view, camera, row, column = self.where[cell]
        q = block.ask(nnf.layer_norm(x, x.shape)).unflatten(0, (block.heads, -1))
        k, v = block.told(seen.ctx.told[0, frame, camera]).chunk(2, -1)
        far = seen.ctx.far[g][0, frame, view, 0, row * RIG[g].grid[1] + column]
        out = []
        for head in range(block.heads):
            part = slice(16 * head, 16 * head + 16)
            score = nnf.layer_norm(k[:, part], (16,)) @ nnf.layer_norm(q[head], (16,)) / 4
            out.append((score - block.fade[head].exp() * far).softmax(0) @ v[:, part])
        return torch.cat(out)


@pytest.mark.parametrize("committed", [True, False])
def test_stale_slots_give_what_loops_written_by_hand_give(committed: bool) -> None:
    """Repairs one after the other with other inputs, each seeing the rows of those before it, also across a commit."""
    model = model_of()
    kv = filled(model) if committed else None
    naive, every = Naive(model), list(range(F * CELLS))
    stale = dense(model, inputs(1), kv)
    torch.testing.assert_close(naive.run(stale, every, kv, 8.0), stale.output[0], atol=1e-4, rtol=1e-4)
    for i, tokens in enumerate(choices(model)[:5]):
        if committed and i == 3:
            model(**inputs(50, time=8.0, t=0.0), kv=kv, commit=True)
        seen = dense(model, inputs(2 + i, time=8.0 + i, t=0.5 - 0.1 * i), kv)
        rows = tokens.rows(segments(model), seen.hidden.device)
        out = repair(model, seen, tokens, stale.slots)
        expected = naive.run(seen, rows.tolist(), kv, 8.0 + i)
        torch.testing.assert_close(out[0], expected, atol=1e-4, rtol=1e-4)
        assert (out[0] - seen.output[0, rows]).abs().max() > 1e-2, "stale K/V should matter"


def test_committed_kv_is_never_touched_and_slots_are_no_part_of_the_model() -> None:
    model = model_of()
    kv = filled(model)
    before = copy.deepcopy((kv.entries, {key: kv.read(*key) for key in kv.entries[0]}))
    stale, seen = dense(model, inputs(1), kv), dense(model, inputs(2), kv)
    for tokens in choices(model):
        repair(model, seen, tokens, stale.slots)
    held = copy.deepcopy(stale.slots)
    after = (kv.entries, {key: kv.read(*key) for key in kv.entries[0]})
    torch.testing.assert_close(after, before, atol=0, rtol=0)
    model(**inputs(3), kv=kv)
    model(**inputs(4), kv=kv, commit=True)
    assert all(torch.equal(a, b) for key in held for a, b in zip(held[key], stale.slots[key], strict=True))
    assert seen.ctx.tap is seen.slots and seen.ctx.tap is not stale.slots


def test_a_pass_that_writes_its_kv_leaves_copies() -> None:
    model, kv = model_of(), WindowKV(2)
    slots: dict[Any, Any] = {}
    hook = model.blocks[0].register_forward_pre_hook(lambda block, args: ROWS.capture(args, {}, slots))
    model(**inputs(0), kv=kv, commit=True)
    hook.remove()
    theirs = {t.data_ptr() for kv_ in kv.entries[0].values() for t in kv_}
    assert not theirs & {t.data_ptr() for tensors in slots.values() for t in tensors}


def test_a_repair_under_no_grad_may_follow_a_pass_under_inference_mode() -> None:
    model = model_of()
    with torch.inference_mode():
        kv = filled(model)
        stale = dense(model, inputs(1), kv)
    seen = dense(model, inputs(2), kv)
    out = [repair(model, seen, tokens, stale.slots) for tokens in choices(model)]
    with torch.inference_mode():
        stale = dense(model, inputs(1), kv)
        again = [repair(model, seen, tokens, stale.slots) for tokens in choices(model)]
    assert all(torch.equal(a, b) for a, b in zip(out, again, strict=True))


def test_under_autocast_repairs_run_as_the_dense_pass_does() -> None:
    """Also through the engine, which turns autocast off where it measures."""
    model = model_of()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kv = filled(model)
        seen, tokens = dense(model, inputs(2), kv), choices(model)[2]
    out = repair(model, seen, tokens, seen.slots)
    rows = tokens.rows(segments(model), out.device)
    assert seen.ctx.rope[0].dtype is torch.bfloat16
    assert (out - seen.output[:, rows]).abs().max() < 2e-2 * out.abs().max()
    world = random_world()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, records, _ = rollout(world, Repairs(at=frozenset({1}), choose=share(0.2)), steps=2)
    assert [r.action for r in records] == [Action.COMPUTE, Action.REPAIR] * 2


def test_what_is_told_is_looked_up_only_while_it_is_the_same() -> None:
    """The K/V of what is told is taken from the slots as long as it is told again, value by value."""
    model = model_of()
    stale, same = dense(model, inputs(1), None), dense(model, inputs(1), None)
    told = inputs(1)
    told["told"].features[0, 1, 0] += 3.0
    other = dense(model, told, None)
    tokens = Tokens.whole_frames((1,), segments(model))
    out = [repair(model, seen, tokens, copy.deepcopy(stale.slots)) for seen in (same, other)]
    rows = tokens.rows(segments(model), out[0].device)
    torch.testing.assert_close(out[0], same.output[:, rows], atol=1e-5, rtol=1e-5)
    fresh = dict(other.slots)
    torch.testing.assert_close(repair(model, other, tokens, fresh), other.output[:, rows], atol=1e-5, rtol=1e-5)
    assert (out[1] - out[0]).abs().max() > 1e-3


class NoWaiting(TorchDispatchMode):
    """Refuses what makes the host wait for an accelerator: reading values, and copying numbers from the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "lift_fresh"), (
            name
        )
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("which", range(8))
def test_no_repair_makes_the_host_wait(which: int) -> None:
    """Off the CPU nothing that was told is remembered, and then nothing is compared."""
    model = model_of()
    kv, tokens = filled(model), choices(model)[which]
    seen = dense(model, inputs(2), kv)
    seen.slots.pop("told")
    rows = tokens.rows(segments(model), seen.hidden.device)
    inside, call = seen.hidden.index_select(1, rows), (seen.hidden, seen.ctx)
    with NoWaiting():
        out = ROWS.run(list(model.blocks), inside, tokens, segments(model), call, {}, seen.slots)
    torch.testing.assert_close(out, seen.output[:, rows], atol=1e-5, rtol=1e-5)


def test_passes_over_several_windows_leave_nothing() -> None:
    model = model_of()
    slots: dict[Any, Any] = {}
    parts = [inputs(w, time=4.0 * w) for w in range(2)]
    given = {k: None if k == "told" else torch.cat([p[k] for p in parts], 1) for k in parts[0]}
    hook = model.blocks[0].register_forward_pre_hook(lambda block, args: ROWS.capture(args, {}, slots))
    model(**given)
    hook.remove()
    assert not slots


@dataclass(frozen=True, kw_only=True)
class Repairs:
    """Repairs `choose(evidence)` at some steps, and computes the others."""

    at: frozenset[int]
    choose: Callable[[StackEvidence], Tokens | None]
    backend: str = "sparse"
    across: str = "steps"

    def build(self, blocks: int) -> RepairsPolicy:
        return RepairsPolicy(self, blocks)

    def explain(self, record: Record) -> str:
        return record.line()


class RepairsPolicy(StackPolicy):
    repairs = True

    def __init__(self, config: Repairs, blocks: int) -> None:
        super().__init__(blocks)
        self.config, self.across, self.backend = config, config.across, config.backend  # type: ignore[assignment]

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        here = cell.step if self.across == "steps" else evidence.where.chunk
        if here not in self.config.at:
            return Decision(Action.COMPUTE, Reason.SCHEDULE)
        tokens = self.config.choose(evidence)
        if tokens is None:
            return Decision(Action.REPLAY, Reason.SCHEDULE)
        share = tokens.share(evidence.where.segments)
        return Decision(Action.REPAIR, Reason.SCHEDULE, tokens=tokens, share=share)


@pytest.fixture(scope="module")
def world() -> World:
    world = random_world()
    torch.manual_seed(1)
    for block in world.model.blocks:
        torch.nn.init.normal_(block.mod_out.weight, std=0.5)
    return world


def start() -> Start:
    return Start(torch.randn(8, CELLS, Z, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 4))


def rollout(world: World, policy: Repairs | None, kind: str = "chunked", chunks: int = 2, steps: int = 4) -> Any:
    """Latents of a rollout, and per denoise pass the hidden state that left the stack."""
    protocol = Protocol.named(kind, steps=steps)
    session = Session(world, start(), protocol)
    handle = None if policy is None else rollcache.enable(world.model, policy)
    stacks: list[Tensor] = []
    hook = world.model.blocks[-1].register_forward_hook(lambda block, args, out: stacks.append(out.clone()))
    try:
        latents = [session.step(torch.full((session.frames_per_step, 2), 0.1)).latents for _ in range(chunks)]
        records = [] if handle is None else list(handle.trace)
    finally:
        hook.remove()
        if handle is not None:
            handle.disable()
    return latents, records, stacks


def share(q: float, seed: int = 0, frames: tuple[int, ...] = (0, 1, 2, 3)) -> Callable[[StackEvidence], Tokens]:
    def pick(evidence: StackEvidence) -> Tokens:
        g = torch.Generator().manual_seed(seed + evidence.where.step)
        scores = tuple(torch.rand(s.views, F, s.cells, generator=g) for s in evidence.where.segments)
        return Tokens.top(scores, q, frames)

    return pick


@pytest.mark.parametrize("backend", ["sparse", "refresh"])
def test_repairing_all_tokens_is_full_compute(world: World, backend: str) -> None:
    plain, _, _ = rollout(world, None)
    policy = Repairs(at=frozenset({1, 3}), choose=share(1.0), backend=backend)
    cached, records, _ = rollout(world, policy)
    assert [r.action for r in records] == [Action.COMPUTE, Action.REPAIR] * 4
    for a, b in zip(plain, cached, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["sparse", "refresh"])
@pytest.mark.parametrize("q", [0.1, 0.5])
def test_chosen_rows_are_computed_and_the_others_replayed(world: World, backend: str, q: float) -> None:
    """The first repair of a chunk: untouched rows add the residual of the anchor, chosen ones do not."""
    steps, held = 2, {}

    def watch(evidence: StackEvidence) -> Tokens:
        tokens = share(q)(evidence)
        held.update(hidden=evidence.hidden.clone(), residual=evidence.stored[0].residual.clone(), tokens=tokens)
        held["rows"] = tokens.rows(evidence.where.segments, torch.device("cpu"))
        return tokens

    _, records, stacks = rollout(world, Repairs(at=frozenset({1}), choose=watch, backend=backend), "chunked", 1, steps)
    _, _, plain = rollout(world, None, "chunked", 1, steps)
    windows = len(stacks) - steps - 1  # prefill passes
    out, exact = stacks[windows + 1][0], plain[windows + 1][0]
    replayed = (held["hidden"] + held["residual"])[0]
    chosen = torch.zeros(F * CELLS, dtype=torch.bool)
    chosen[held["rows"]] = True
    assert records[1].action is Action.REPAIR and records[1].share == pytest.approx(chosen.float().mean().item())
    assert torch.equal(out[~chosen], replayed[~chosen])
    moved = (replayed - exact).square().mean(-1).sqrt()
    wrong = (out - exact).square().mean(-1).sqrt()
    if backend == "refresh":
        torch.testing.assert_close(out[chosen], exact[chosen], atol=1e-4, rtol=1e-4)
    else:
        assert 0 < wrong[chosen].mean() < 0.5 * moved[chosen].mean()


def test_the_two_backends_agree_where_nothing_moved_and_differ_by_stale_kv(world: World) -> None:
    """Across chunks: the second of two equal chunks of a receding cycle repairs with K/V that is up to date."""

    def run(backend: str, frames: tuple[int, ...], kind: str) -> Any:
        def pick(evidence: StackEvidence) -> Tokens:
            return Tokens.whole_frames(frames, evidence.where.segments)

        across = "chunks" if kind == "receding" else "steps"
        return rollout(world, Repairs(at=frozenset({1}), choose=pick, backend=backend, across=across), kind, 2)

    (sparse, records, _), (refresh, _, _) = run("sparse", (1,), "receding"), run("refresh", (1,), "receding")
    assert {r.action for r in records if r.chunk == 1} == {Action.REPAIR}
    for a, b in zip(sparse, refresh, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    (sparse, *_), (refresh, *_) = run("sparse", (1,), "chunked"), run("refresh", (1,), "chunked")
    gap = (sparse[0] - refresh[0]).abs().max()
    assert gap > 1e-4


@pytest.mark.parametrize("backend", ["sparse", "refresh"])
def test_a_receding_window_repairs_the_frame_it_emits_and_replays_the_rest(world: World, backend: str) -> None:
    """Actions are the same in every chunk, so frames that are repaired come out as under full compute."""

    def emitted(evidence: StackEvidence) -> Tokens:
        assert evidence.where.frame is not None
        return Tokens.whole_frames((evidence.where.frame,), evidence.where.segments)

    policy = Repairs(at=frozenset({1, 2, 3, 5, 6, 7}), choose=emitted, backend=backend, across="chunks")
    plain, _, _ = rollout(world, None, "receding", 8)
    cached, records, _ = rollout(world, policy, "receding", 8)
    assert [r.action for r in records if r.step == 0] == [Action.COMPUTE, *[Action.REPAIR] * 3] * 2
    assert {r.share for r in records if r.action is Action.REPAIR} == {0.25}
    for a, b in zip(plain, cached, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


@given(q=st.floats(0.02, 1.0), seed=st.integers(0, 99), frames=st.sets(st.integers(0, 3), min_size=1))
@settings(max_examples=25, deadline=None)
def test_rows_outside_the_choice_keep_their_kv(q: float, seed: int, frames: set[int]) -> None:
    model = model_of()
    with torch.no_grad():
        stale, seen = dense(model, inputs(1), None), dense(model, inputs(2), None)
        before = copy.deepcopy(stale.slots)
        tokens = choose(model, seed, q, tuple(sorted(frames)))
        repair(model, seen, tokens, stale.slots)
    changed = (stale.slots[1][0] != before[1][0]).any(-1).any(-1).flatten()
    assert torch.equal(changed.nonzero()[:, 0], tokens.rows(segments(model), changed.device).sort().values)
    here = [(stale.slots[0, g][1] != before[0, g][1]).any(-1).any(1) for g in range(len(RIG))]  # [V, F*cells]
    assert sum(int(x.sum()) for x in here) == tokens.count(segments(model))
    for x, s in zip(here, segments(model), strict=True):
        assert not x.unflatten(1, (F, s.cells))[:, [f for f in range(F) if f not in frames]].any()


@pytest.fixture(scope="module")
def benchmark() -> Any:
    path = Path(__file__).parent.parent / "benchmarks" / "sparse.py"
    spec = importlib.util.spec_from_file_location("sparse", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sparse"] = module
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_s_arithmetic(benchmark: Any) -> None:
    assert benchmark.ideal(50, 16, 0.1) == pytest.approx(50 / 19.4)
    assert benchmark.ideal(50, 16, 0.0, floor=0.1) == pytest.approx(50 / 19.4)
    assert benchmark.ideal(50, 16, 1.0, floor=0.1) == 1
    found = benchmark.measured([2.0] * 8, [2.0, 1.0, 1.0, 1.0] * 2, (0,), 4)
    assert found == {"exact": 1, "other": 0.5, "speedup": 1.6, "low": 1.6, "high": 1.6, "total": 1.6}


def test_the_benchmark_runs_and_repairs_what_it_says(benchmark: Any) -> None:
    settings = benchmark.Settings(steps=4, warmup=1, anchors=1, shares=(0.1, 0.5), windows=1)
    world = random_world(depth=2)
    take = plan_take("urban", chunks=2, protocol=Protocol.named("chunked", steps=4)).make(world, noise_frames)
    found = benchmark.study(world, take, settings)
    assert [r["how"] for r in found] == ["replay", "repair", "repair"]
    assert [r["share"] for r in found] == pytest.approx([0.0, 0.1, 0.5], abs=0.02)
    assert all(r["ideal"] >= r["ideal_floor"] > 1 for r in found)
    assert benchmark.table(found, settings).row_count == 3
