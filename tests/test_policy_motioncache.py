"""MotionCache: a naive reference with equal decisions and tokens, closed loops, and settings that cannot be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import inf, nan
from typing import Any, NamedTuple

import pytest
import torch
from dummies import mixing
from hypothesis import given, settings
from hypothesis import strategies as st
from street_doubles import random_world
from torch import Tensor, nn

import rollcache
from rollcache import Action, Adapter, Decision, Pass, Reason, Role, RollcacheError, Segment
from rollcache.adapters.street import ADAPTER
from rollcache.passes import Cell
from rollcache.policies.base import StackEvidence
from rollcache.policies.motioncache import WAN_1_3B, MotionCache
from rollcache.street.protocol import Protocol
from rollcache.street.rig import CELLS
from rollcache.street.world import Session, Start

SEGMENTS = (Segment.contiguous("front", 2, (3, 5, 4)), Segment.contiguous("rear", 1, (3, 3, 6), start=120))
LENGTH, WIDTH = 174, 8


class Seen(NamedTuple):
    """A pass as the policy saw it, and what was done."""

    where: Pass
    signal: Tensor
    output: Tensor
    replays: int
    decision: Decision


class Recorded:
    """Settings whose policy writes down every pass."""

    def __init__(self, config: MotionCache) -> None:
        self.config, self.seen = config, list[Seen]()

    def build(self, blocks: int) -> Any:
        policy = self.config.build(blocks)
        conclude = policy.conclude

        def note(cell: Cell, decision: Decision, evidence: StackEvidence) -> None:
            signal = evidence.modulated if self.config.signal == "modulated" else evidence.embedding
            assert evidence.output is not None
            kept = (signal.clone(), evidence.output.clone(), evidence.replays, decision)
            self.seen.append(Seen(evidence.where, *kept))
            conclude(cell, decision, evidence)

        policy.conclude = note  # type: ignore[method-assign]
        return policy

    def explain(self, record: Any) -> str:
        return self.config.explain(record)


class Flow(nn.Module):
    """A mixing stack that is called as a velocity model; `where` says where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = mixing(3, WIDTH)

    def forward(self, x: Tensor, where: Pass) -> Tensor:
        out: Tensor = self.stack(x)
        return out


FLOW = Adapter(
    blocks=lambda model: list(model.stack.blocks),
    locate=lambda model, args, kwargs: kwargs["where"],
    latent=lambda model, args, kwargs: args[0],
    embedding=lambda block, args, kwargs: args[0].mean(1),
)


def flow_chunk(
    model: Flow, chunk: int, steps: int, branches: tuple[str, ...] = ("cond",), frame: int | None = None
) -> Tensor:
    """A chunk of a batch of two, from noise to something."""
    g = torch.Generator().manual_seed(chunk)
    clean, x = (torch.randn(2, LENGTH, WIDTH, generator=g) for _ in range(2))
    slope = x - clean
    for step in range(steps):
        velocity = slope
        for branch in branches:
            where = Pass(
                role=Role.DENOISE,
                chunk=chunk,
                step=step,
                branch=branch,
                segments=SEGMENTS,
                steps=steps,
                frame=frame,
            )
            velocity = velocity + 0.2 * model(x if branch == "cond" else -2 * x, where=where)
        x = x - velocity / steps
    return x


def grids(segments: tuple[Segment, ...]) -> Iterator[list[list[list[int]]]]:
    """Token indices, one camera after the other, of every latent frame and cell; grouped by segment."""
    for s in segments:
        cameras = []
        for v in range(s.views):
            first = [s.start + v * s.view_stride + f * s.frame_stride for f in range(s.grid[0])]
            cameras.append([list(range(a, a + s.grid[1] * s.grid[2])) for a in first])
        yield cameras


class Naive:
    """MotionCache after the released loop, token by token, in double precision; one branch."""

    def __init__(self, config: MotionCache) -> None:
        self.c = config
        self.chunk: int | None = None
        self.last: Tensor | None = None

    def expect(self, where: Pass, signal: Tensor, output: Tensor, replays: int) -> tuple[str, set[int]]:
        """What is done, and with which tokens. `output` is what came of it."""
        c, k = self.c, where.step
        if where.chunk != self.chunk:
            self.before = self.last
            self.chunk, self.sums, self.weights = where.chunk, [0.0] * output.shape[1], [1.0] * output.shape[1]
            self.updates, self.done, self.previous = 0, False, signal.double()
        did, tokens = self.decide(where, signal.double(), replays)
        self.previous = signal.double()
        if did == "all":
            self.sums = [0.0] * len(self.sums)
        for i in tokens:
            self.sums[i] = 0.0
        if k > c.warmup and did != "none":
            self.updates += 1
        if k >= c.warmup and self.updates >= c.chunk_updates:
            self.weigh(where, output.double())
        self.last = output.double()
        return did, tokens

    def decide(self, where: Pass, signal: Tensor, replays: int) -> tuple[str, set[int]]:
        c, k = self.c, where.step
        assert where.steps is not None
        if k <= c.warmup or c.threshold == 0 or (c.protect_last and k == where.steps - 1):
            return "all", set()
        if c.max_age is not None and replays >= c.max_age:
            return "all", set()
        change = float((signal - self.previous).abs().mean() / self.previous.abs().mean())
        d = change
        if c.coefficients is not None:
            d = sum(a * change**p for p, a in enumerate(reversed(c.coefficients)))
        if c.clamp:
            d = max(d, 0.0)
        self.sums = [a + d * w for a, w in zip(self.sums, self.weights, strict=True)]
        need = {i for i, a in enumerate(self.sums) if a >= c.threshold}
        if c.vote:
            voted = set()
            for cameras in grids(where.segments):
                for frames in cameras:
                    for position in zip(*frames, strict=True):
                        if sum(i in need for i in position) / len(position) > 0.5:
                            voted |= set(position)
            need = voted
        r = len(need) / len(self.sums)
        if r == 0 or r < c.min_share:
            return "none", set()
        chosen = set()
        for cameras in grids(where.segments):
            most = max(1, *(len(need & set(frame)) for frames in cameras for frame in frames))
            for frames in cameras:
                for frame in frames:
                    chosen |= set(sorted(frame, key=lambda i: (i not in need, -self.sums[i], i))[:most])
        return ("all", set()) if len(chosen) == len(self.sums) else ("some", chosen)

    def weigh(self, where: Pass, y: Tensor) -> None:
        before = None if where.frame is not None else self.before
        for cameras in grids(where.segments):
            for frames in cameras:
                rows = []
                for f, frame in enumerate(frames):
                    if f == 0 and before is None:
                        if len(frames) == 1:
                            rows.append([1.0] * len(frame))
                            continue
                        then, now, index, past = y, y, frames[1], frames[0]
                    else:
                        past = frames[-1] if f == 0 else frames[f - 1]
                        then, now, index = (before if f == 0 else y), y, frame  # type: ignore[assignment]
                    rows.append(
                        [
                            max(
                                float((now[b, i] - then[b, j]).abs().mean() / (then[b, j].abs().mean() + 1e-8))
                                for b in range(len(y))
                            )
                            for i, j in zip(index, past, strict=True)
                        ]
                    )
                for frame, row in zip(frames, rows, strict=True):
                    if len(frames) == 1 and before is None:
                        continue
                    low, high = min(row), max(row)
                    for i, delta in zip(frame, row, strict=True):
                        self.weights[i] = self.c.floor + (1 - self.c.floor) * (delta - low) / (high - low + 1e-8)


def agree(recorded: Recorded, branch: str = "cond") -> Counter[str]:
    """The naive reference decides as what was recorded; counts what was done."""
    naive, counts = Naive(recorded.config), Counter[str]()
    done = {Action.COMPUTE: "all", Action.REPLAY: "none", Action.REPAIR: "some"}
    for where, signal, output, replays, decision in recorded.seen:
        if where.branch != branch:
            continue
        did, tokens = naive.expect(where, signal, output, replays)
        counts[did] += 1
        place = f"chunk {where.chunk}, step {where.step}"
        assert did == done[decision.action], place
        if did == "some":
            assert decision.tokens is not None
            rows = decision.tokens.rows(where.segments, torch.device("cpu")).tolist()
            assert set(rows) == tokens and len(rows) == len(tokens), place
            assert decision.share == pytest.approx(len(tokens) / len(naive.sums))
    return counts


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "no gate": {"min_share": 0.0},
    "no vote": {"vote": False, "min_share": 0.0},
    "no vote, gate": {"vote": False},
    "low floor": {"floor": 0.0, "chunk_updates": 1, "min_share": 0.1},
    "no phase of the chunk": {"chunk_updates": 0, "min_share": 0.2},
    "young": {"max_age": 2, "threshold": 0.3},
    "last not exact": {"protect_last": False, "max_age": None},
    "polynomial": {"coefficients": (2.0, 0.5, -0.001)},
    "released": {"signal": "embedding", "coefficients": WAN_1_3B, "clamp": False, "protect_last": False},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_decisions_and_tokens_are_those_of_the_naive_reference(name: str) -> None:
    config = MotionCache(**({"repairs": "refresh", "warmup": 2, "chunk_updates": 2} | VARIANTS[name]))
    recorded, model = Recorded(config), Flow()
    rollcache.enable(model, recorded, adapter=FLOW)
    with torch.no_grad():
        for chunk in range(3):
            flow_chunk(model, chunk, 24)
    counts = agree(recorded)
    assert counts.total() == 72 and counts["none"]
    assert counts["some"] or name == "young"
    if name == "young":
        assert Reason.STALE in {s.decision.reason for s in recorded.seen}


def test_in_a_receding_loop_the_first_frame_has_no_predecessor() -> None:
    """The chunk before denoised the same window."""
    config = MotionCache(repairs="refresh", warmup=1, chunk_updates=1, min_share=0.0)
    both = []
    for frame in (None, 1):
        recorded, model = Recorded(config), Flow()
        rollcache.enable(model, recorded, adapter=FLOW)
        with torch.no_grad():
            for chunk in range(2):
                flow_chunk(model, chunk, 24, frame=frame)
        agree(recorded)
        both.append([s.decision.share for s in recorded.seen if s.where.chunk == 1])
    assert str(both[0]) != str(both[1])


def test_branches_are_kept_apart() -> None:
    config = MotionCache(repairs="refresh", warmup=2, chunk_updates=1, min_share=0.0)
    recorded, model = Recorded(config), Flow()
    rollcache.enable(model, recorded, adapter=FLOW)
    with torch.no_grad():
        for chunk in range(2):
            flow_chunk(model, chunk, 16, ("cond", "uncond"))
    assert agree(recorded)["some"] and agree(recorded, "uncond")["some"]


def street(config: Any, steps: int = 14, chunks: int = 2) -> tuple[list[Tensor], Any]:
    """Chunks of the random street model; `None` is the bare one."""
    world = random_world()
    start = Start(torch.randn(8, CELLS, 24, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 4))
    handle = None if config is None else rollcache.enable(world.model, config)
    session = Session(world, start, Protocol.named("chunked", steps=steps))
    return [session.step(torch.zeros(8, 2)).latents for _ in range(chunks)], handle


STREET = {"warmup": 2, "chunk_updates": 1, "threshold": 0.25, "min_share": 0.1}


def test_on_the_street_model_decisions_are_those_of_the_naive_reference() -> None:
    recorded = Recorded(MotionCache(repairs="refresh", **STREET))
    street(recorded)
    assert len(agree(recorded)) == 3


def test_on_the_street_model_more_is_saved_at_a_larger_error() -> None:
    plain, _ = street(None)
    errors, rates = [], []
    for threshold in (0.1, 1.0):
        cached, handle = street(MotionCache(repairs="refresh", **(STREET | {"threshold": threshold})))
        errors.append(sum(float((a - b).norm()) for a, b in zip(plain, cached, strict=True)))
        rates.append(handle.stats().skip_rate)
    assert 0 < errors[0] < errors[1] and 0 < rates[0] < rates[1]


@pytest.mark.skipif(ADAPTER.sparse is None, reason="the street adapter cannot repair sparsely yet")
def test_sparse_repairs_stay_close_to_refreshed_ones() -> None:
    """K/V of unchosen tokens are those of an earlier pass, so outputs differ a little."""
    refreshed, _ = street(MotionCache(repairs="refresh", **STREET), chunks=1)
    sparse, handle = street(MotionCache(repairs="sparse", **STREET), chunks=1)
    assert handle.stats().repaired > 0
    assert float((refreshed[0] - sparse[0]).norm() / refreshed[0].norm()) < 0.1


# extremes


@pytest.mark.parametrize("config", [MotionCache(threshold=0.0), MotionCache.released(threshold=0.0)])
def test_at_threshold_0_nothing_changes_by_a_bit(config: MotionCache) -> None:
    plain, _ = street(None, 8)
    cached, handle = street(config if ADAPTER.sparse else MotionCache(threshold=0.0, repairs="refresh"), 8)
    assert all(torch.equal(a, b) for a, b in zip(plain, cached, strict=True))
    assert handle.stats().skip_rate == 0


class Driven:
    """A policy without a model: shows it signals and outputs, and does what it says."""

    def __init__(self, config: MotionCache, segments: tuple[Segment, ...] = SEGMENTS, steps: int | None = 30) -> None:
        self.policy, self.segments, self.steps, self.replays = config.build(4), segments, steps, 0
        self.syncs = 0

    def numbers(self, x: Tensor) -> list[float]:
        self.syncs += 1
        return [float(v) for v in x.tolist()]

    def __call__(self, step: int, signal: Tensor, output: Tensor | None = None, chunk: int = 0) -> Decision:
        where = Pass(role=Role.DENOISE, chunk=chunk, step=step, segments=self.segments, steps=self.steps)
        seen = {"modulated": signal, "hidden": signal, "embedding": signal}
        evidence = StackEvidence(
            where, seen.__getitem__, numbers=self.numbers, repairable=True, replays=self.replays if step else 0
        )
        cell = Cell("cond", step, 0, 4)
        decision = self.policy.decide(cell, evidence) if step else Decision(Action.COMPUTE, Reason.NOTHING_STORED)
        evidence.output = signal if output is None else output
        self.policy.conclude(cell, decision, evidence)
        self.replays = 0 if decision.action is Action.COMPUTE else self.replays + 1
        return decision


def signals(growth: float) -> list[Tensor]:
    """Thirty steps whose relative change is `growth`."""
    return [torch.full((1, LENGTH, 2), (1 + growth) ** step) for step in range(30)]


@given(thresholds=st.tuples(st.floats(0, 0.6), st.floats(0, 0.6)), growth=st.floats(0.001, 0.3))
@settings(max_examples=60, deadline=None)
def test_a_larger_threshold_computes_less(thresholds: tuple[float, float], growth: float) -> None:
    """In the phase of one sum; afterwards a gated step may let several repairs fall together."""
    cost = []
    for threshold in sorted(thresholds):
        drive = Driven(MotionCache(threshold=threshold, chunk_updates=99, max_age=None))
        cost.append(sum(drive(i, x).action is Action.COMPUTE for i, x in enumerate(signals(growth))))
    assert cost[0] >= cost[1]


def test_a_token_that_moves_is_computed_more_often() -> None:
    """Growth .03 a step, tau .1: with weight 1 every 4th step is computed, with the floor of .6 every 6th."""
    segment = (Segment.contiguous("a", 1, (2, 1, 4)),)
    drive = Driven(MotionCache(warmup=0, chunk_updates=0, min_share=0.0, max_age=None, protect_last=False), segment)
    output = torch.ones(1, 8, 2)
    output[0, 6:] = 3  # cells 2 and 3 of the second frame
    often = Counter[int]()
    for i in range(25):
        decision = drive(i, torch.full((1, 8, 2), 1.03**i), output)
        rows = [] if decision.tokens is None else decision.tokens.rows(segment, torch.device("cpu")).tolist()
        often.update(range(8) if i and decision.action is Action.COMPUTE else rows)
    assert [often[i] for i in range(4)] == [4, 4, 6, 6] == [often[i + 4] for i in range(4)]


@pytest.mark.parametrize("poison", [nan, inf])
def test_a_signal_that_is_not_finite_computes(poison: float) -> None:
    drive = Driven(MotionCache(warmup=0))
    good = torch.ones(1, LENGTH, 2)
    bad = good.clone()
    bad[0, 5, 1] = poison
    assert drive(0, good).reason is Reason.NOTHING_STORED
    assert drive(1, good).action is Action.REPLAY
    decision = drive(2, bad)
    assert (decision.action, decision.reason) == (Action.COMPUTE, Reason.NOT_FINITE)


def test_weights_that_are_not_finite_compute() -> None:
    drive = Driven(MotionCache(warmup=0, chunk_updates=0))
    x = torch.ones(1, LENGTH, 2)
    drive(0, x, x * nan)
    assert drive(1, x * 1.001, x).action is Action.COMPUTE


def test_no_token_is_older_than_max_age() -> None:
    drive = Driven(MotionCache(warmup=0, max_age=3, threshold=99.0, protect_last=False))
    actions = [drive(i, x).action for i, x in enumerate(signals(0.01))]
    assert [i for i, a in enumerate(actions) if a is Action.COMPUTE] == list(range(0, 30, 4))


def test_the_last_step_is_exact_and_a_new_chunk_begins_anew() -> None:
    drive = Driven(MotionCache(warmup=1, threshold=99.0, max_age=None, steps=30), steps=None)
    for chunk in range(2):
        actions = [drive(i, x, chunk=chunk).action for i, x in enumerate(signals(0.01))]
        assert [i for i, a in enumerate(actions) if a is Action.COMPUTE] == [0, 1, 29]


def test_what_is_kept_of_a_pass_is_a_copy() -> None:
    """A loop may write the next step into the same tensors."""
    found = []
    for reuse in (False, True):
        drive = Driven(MotionCache(warmup=0, chunk_updates=0, threshold=0.15, vote=False, min_share=0.0))
        signal, output = torch.ones(1, LENGTH, 2), torch.ones(1, LENGTH, 2)
        g = torch.Generator().manual_seed(0)
        for chunk in range(2):
            for step in range(6):
                new = 1 + torch.rand(1, LENGTH, 2, generator=g)
                signal = signal.mul_(1.1) if reuse else signal * 1.1
                output = output.copy_(new) if reuse else new
                decision = drive(step, signal, output, chunk)
                found.append((decision.action, str(decision.share)))
    assert found[:12] == found[12:] and Action.REPAIR in dict(found)


def test_one_host_synchronisation_a_pass() -> None:
    drive = Driven(MotionCache(warmup=3, max_age=None))
    for i, x in enumerate(signals(0.02)):
        drive(i, x)
    assert drive.syncs == 26 - 1  # not at the last step, which is exact


# settings


def test_what_the_method_cannot_do_without_is_said_at_the_first_pass() -> None:
    x = torch.ones(1, LENGTH, 2)
    with pytest.raises(RollcacheError, match="this pass has no token layout: give its segments"):
        Driven(MotionCache(), ())(0, x)
    with pytest.raises(RollcacheError, match="MotionCache needs a hidden state that is one tensor"):
        Driven(MotionCache(), (Segment.contiguous("a", 1, (1, 4, 4), tensor=1),))(0, x)
    with pytest.raises(RollcacheError, match=r"give steps=, or set protect_last=False"):
        Driven(MotionCache(), steps=None)(0, x)
    Driven(MotionCache.released(), steps=None)(0, x)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"threshold": -0.1}, "threshold must be at least 0"),
        ({"threshold": nan}, "threshold must be at least 0"),
        ({"warmup": -1}, "warmup must be an integer of at least 0"),
        ({"warmup": 4, "steps": 4}, "warmup=4 leaves none of 4 steps"),
        ({"floor": 1.2}, r"floor must be in \[0, 1\]"),
        ({"min_share": 2}, r"min_share must be in \[0, 1\]"),
        ({"signal": "latent"}, "signal must be one of 'modulated', 'embedding'"),
        ({"coefficients": ()}, "coefficients must be finite numbers"),
        ({"coefficients": (nan,)}, "coefficients must be finite numbers"),
        ({"max_age": 0}, "max_age must be an integer of at least 1"),
        ({"repairs": "none"}, "repairs must be one of 'sparse', 'refresh'"),
    ],
)
def test_settings_that_cannot_be_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MotionCache(**wrong)


def test_sparse_repairs_are_refused_where_no_adapter_can_and_nothing_is_attached() -> None:
    model = Flow()
    with pytest.raises(RollcacheError, match="set repairs='refresh'"):
        rollcache.enable(model, MotionCache(), adapter=FLOW)
    assert "forward" not in vars(model) and "forward" not in vars(model.stack.blocks[0])


def test_the_released_settings() -> None:
    config = MotionCache.released()
    assert (config.signal, config.clamp, config.protect_last, config.max_age) == ("embedding", False, False, None)
    distance = [float(config.distance(torch.tensor(x, dtype=torch.float64))) for x in (0.0, 0.01, 0.02, 0.05, 0.08)]
    assert distance == pytest.approx([-0.05, 0.043, 0.078, 0.142, 0.253], abs=5e-4)
    assert float(MotionCache(coefficients=WAN_1_3B).distance(torch.tensor(0.0))) == 0


def test_explanations_give_shares_and_limits() -> None:
    model = Flow()
    config = MotionCache(repairs="refresh", warmup=2, chunk_updates=1, min_share=0.2, vote=False)
    handle = rollcache.enable(model, config, adapter=FLOW)
    with torch.no_grad():
        flow_chunk(model, 0, 24)
    text = [handle.explain(0, step, 0) for step in range(24)]
    assert text[1] == "Chunk 0, step 1, whole stack (cond): computed, the schedule says so."
    assert any("replayed, it drifted little: 0.0% of the tokens are due, < 20.0%." in line for line in text)
    assert any("% of the tokens computed, it drifted too far: " in line and ">= 20.0%." in line for line in text)
