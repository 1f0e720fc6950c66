"""FSC: the published routing, a naive reference with equal decisions, closed loops, and settings that cannot be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import inf, isfinite, nan, sqrt
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
from rollcache.policies.fsc import FSC, RiskProbe
from rollcache.policies.risk import by_rank, low_band
from rollcache.street.protocol import Protocol
from rollcache.street.rig import CELLS
from rollcache.street.world import Session, Start
from rollcache.tokens import Tokens

LEVELS = ["C0", "C1", "C2", "C3", "Full"]
SEGMENTS = (Segment.contiguous("front", 2, (3, 5, 4)), Segment.contiguous("rear", 1, (3, 3, 6), start=120))
LENGTH, WIDTH = 174, 8


def shifted(steps: int, shift: float) -> list[float]:
    """Noise levels of a flow trajectory."""
    return [shift * (1 - i / steps) / (1 + (shift - 1) * (1 - i / steps)) for i in range(steps)]


# the published routing


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        (FSC.quality(), [24, 4, 1, 3, 2]),
        (FSC.quality(risk_scale=1.4), [23, 4, 1, 4, 2]),
        (FSC.quality(risk_scale=1.9), [24, 4, 1, 4, 1]),
        (FSC.quality(warmup=5), [25, 4, 1, 3, 2]),
        (FSC.with_tail(), [26, 6, 0, 1, 0]),
    ],
)
def test_ideal_latents_are_routed_as_the_tables_say(config: FSC, counts: list[int]) -> None:
    """Counts of C0, C1, C2, C3, Full among the steps between anchors.

    Table 18 has 70/12/3/9/6 %, 68/10/4/12/6 % and 71/12/4/11/3 % for r of 1.65, 1.4 and 1.9; table 6 has C2 2.9,
    C3 8.6, Full 5.7 % with W=5, and 0, 3.0, 0 % with tail anchors. The trajectory is walked here through `route`.
    """
    levels, ages, reference, cost = [], [0] * 1000, 1.0, 0.0
    for step, s in enumerate(shifted(50, 8)):
        if step in config.exact:
            ages, reference, cost = [0] * 1000, s, cost + 1
            continue
        ages = sorted((a + 1 for a in ages), reverse=True)
        drift = sqrt(2) * abs(s - reference) / sqrt((1 - reference) ** 2 + reference**2)
        level = config.route(config.risk(drift, drift, sum(ages) / 1000), step)
        computed = round(1000 * config.share(level))
        ages[:computed] = [0] * computed
        cost += config.share(level)
        levels.append(level)
    assert [levels.count(i) for i in range(5)] == counts
    if config == FSC.quality():
        assert cost / 50 == pytest.approx(0.3925)  # table 1: 14.8 of 37.7 PFLOP
    names = config.levels_on_a_line(shifted(50, 8))
    assert [LEVELS.index(n) for i, n in enumerate(names) if i not in config.exact] == levels


def test_anchors_of_the_published_points() -> None:
    assert FSC.quality().exact == (*range(6), 6, 7, 8, 10, 13, 17, 21, 27, 32, 39)
    assert FSC.speed().exact == (*range(5), 5, 6, 7, 9, 12, 16, 21, 26, 32, 39)
    assert FSC.with_tail().exact[-3:] == (39, 44, 47)
    assert FSC.anchors_only().exact[6:] == (6, 7, 8, 9, 10, 12, 15, 18, 21, 25, 29, 34, 39)
    assert FSC.uniform().exact[6:] == (6, 10, 13, 17, 21, 24, 28, 32, 35, 39)
    assert FSC.sparse_to_dense().exact[6:] == (6, 13, 18, 24, 28, 32, 35, 37, 38, 39)
    assert FSC.reactive().exact == tuple(range(6))
    assert FSC.quality(25).exact == (*range(3), 3, 4, 7, 12, 19)
    assert FSC(at=(6, 20), tail=(30,)).exact == (*range(6), 6, 20, 30)
    assert FSC.preset("speed", 50) == FSC.speed()


def test_the_static_table_is_that_of_the_ideal_trajectory() -> None:
    table = FSC.static().table
    assert table is not None
    found = {name: [i for i, n in enumerate(table) if n == name and i not in FSC().exact] for name in LEVELS[1:]}
    assert found == {"C1": [37, 38, 42, 43], "C2": [44], "C3": [45, 46, 47], "Full": [48, 49]}


# bands


def test_the_low_band_is_the_mean_of_four_by_four_tokens_brought_back() -> None:
    segment = Segment.contiguous("a", 1, (1, 4, 8))
    x = torch.randn(1, 32, 3)
    low = low_band(x, (segment,)).view(4, 8, 3)
    for columns in (slice(0, 4), slice(4, 8)):
        torch.testing.assert_close(low[:, columns], x.view(4, 8, 3)[:, columns].mean((0, 1)).expand(4, 4, 3))


@given(h=st.integers(1, 9), w=st.integers(1, 9), views=st.integers(1, 2), frames=st.integers(1, 2))
@settings(max_examples=40, deadline=None)
def test_the_low_band_equals_loops_over_any_grid(h: int, w: int, views: int, frames: int) -> None:
    segment = Segment.contiguous("a", views, (frames, h, w))
    x = torch.randn(2, views * frames * h * w, 3, generator=torch.Generator().manual_seed(h * 10 + w))
    torch.testing.assert_close(low_band(x, (segment,)).double(), naive_low(x.double(), (segment,)))


def test_a_constant_has_no_high_band() -> None:
    x = torch.full((1, LENGTH, WIDTH), 3.0)
    assert torch.equal(low_band(x, SEGMENTS), x)


def test_tokens_of_equal_risk_are_ordered_by_age_and_then_by_position() -> None:
    risk, age = torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0, inf]), torch.tensor([0.0, 1.0, 3.0, 3.0, 2.0, 0.0])
    assert by_rank(risk, age).argsort(descending=True).tolist() == [5, 4, 1, 2, 3, 0]


# naive reference


def halve(grid: list[list[Tensor]]) -> list[list[Tensor]]:
    """Means of 2x2, the last row and column repeated."""
    rows, columns = len(grid), len(grid[0])
    out = []
    for i in range(0, rows, 2):
        row = []
        for j in range(0, columns, 2):
            four = [grid[min(i + a, rows - 1)][min(j + b, columns - 1)] for a in (0, 1) for b in (0, 1)]
            row.append((four[0] + four[1] + four[2] + four[3]) / 4)
        out.append(row)
    return out


def frames_of(segments: tuple[Segment, ...]) -> Iterator[tuple[Segment, list[int]]]:
    """Token indices of every camera and latent frame, row by row."""
    for s in segments:
        for v in range(s.views):
            for f in range(s.grid[0]):
                first = s.start + v * s.view_stride + f * s.frame_stride
                yield s, list(range(first, first + s.grid[1] * s.grid[2]))


def naive_low(x: Tensor, segments: tuple[Segment, ...]) -> Tensor:
    """Low band by loops over cells; x [B, L, Z]."""
    out = torch.zeros_like(x)
    for s, index in frames_of(segments):
        h, w = s.grid[1:]
        coarse = halve(halve([[x[:, index[i * w + j]] for j in range(w)] for i in range(h)]))
        for i in range(h):
            for j in range(w):
                out[:, index[i * w + j]] = coarse[i // 4][j // 4]
    return out


class Naive:
    """FSC after the specification, in double precision, one branch at a time."""

    def __init__(self, config: FSC) -> None:
        self.c = config
        self.state: dict[str, dict[str, Any]] = {}

    def expect(self, where: Pass, latent: Tensor) -> tuple[str, float, set[int]]:
        """The level, the risk, and the tokens of a repair. What it says is what it assumes was done."""
        c, s = self.c, where.step
        if where.branch in self.state and self.state[where.branch]["chunk"] != where.chunk:
            del self.state[where.branch]
        x = latent.double()
        if s in c.exact or where.branch not in self.state:
            self.anchor(where, x)
            return "anchor", nan, set()
        st = self.state[where.branch]
        st["age"] = [a + 1 for a in st["age"]]
        length = len(st["age"])
        ref_low, ref_high = st["low"], st["ref"] - st["low"]
        low = naive_low(x, where.segments)
        high = x - low
        d: dict[str, float] = {}
        token: dict[str, list[float]] = {}
        for name, now, ref in (("L", low, ref_low), ("H", high, ref_high)):
            d[name] = max(float((now[b] - ref[b]).norm()) / (float(ref[b].norm()) + 1e-6) for b in range(len(x)))
            token[name] = [0.0] * length
            for b in range(len(x)):
                rms = float(ref[b].square().mean().sqrt()) * sqrt(x.shape[2])
                distances = (now[b] - ref[b]).norm(dim=1)
                for i in range(length):
                    token[name][i] = max(token[name][i], float(distances[i]) / (rms + 1e-6))
        a = min(sum(st["age"]) / length / c.age_horizon, 1)
        rho = c.low_weight * d["L"] + c.high_weight * d["H"] + c.age_weight * a
        phi = 1.0
        if c.phase == "late_relax":
            phi = 1 + c.phase_gain * max(0.0, (s - c.steps / 2) / (c.steps - 1 - c.steps / 2))
        theta = list(c.thresholds)
        if c.collapsed:
            theta[1] = theta[2] = theta[0]
        theta = [t * c.risk_scale * phi for t in theta]
        level = len([t for t in theta if rho >= t])
        if c.low_gate and level < 4:
            fraction = sum(t >= theta[level] for t in token["L"]) / length
            level += fraction > c.low_share
        if c.repairs == "none" and level < 4:
            level = 0
        if c.table is not None:
            level = LEVELS.index(c.table[s])
        q = {0: 0.0, 4: 1.0} | {j: c.shares[j - 1] * c.share_scale for j in (1, 2, 3)}
        share = q[level]
        old = [] if c.max_age is None else [i for i in range(length) if st["age"][i] >= c.max_age]
        worn = c.max_replays is not None and st["replays"] >= c.max_replays
        if level < 4 and (worn or old) and c.table is None:
            level = max(level, 2) if c.repairs != "none" else 4
            most = max((len(set(old) & set(index)) / len(index) for _, index in frames_of(where.segments)), default=0)
            share = max(q[level], most)
            if len(old) > length / 2:
                share = 1.0
        if level and (share >= c.full_above):
            level = 4
        if level == 4:
            if c.coupled:
                self.anchor(where, x)
            st["age"], st["replays"] = [0] * length, 0
            return "Full", rho, set()
        if level == 0:
            st["replays"] += 1
            return "C0", rho, set()
        chosen: set[int] = set()
        key = []
        for i in range(length):
            risk = c.low_weight * token["L"][i] + c.high_weight * token["H"][i]
            risk += c.age_weight * min(st["age"][i] / c.age_horizon, 1)
            key.append((i not in old, -risk if i not in old else 0.0, -st["age"][i], i))
        for _, index in frames_of(where.segments):
            count = min(len(index), max(1, round(share * len(index))))
            chosen |= set(sorted(index, key=key.__getitem__)[:count])
        for i in chosen:
            st["age"][i] = 0
        st["replays"] = 0
        return LEVELS[level], rho, chosen

    def anchor(self, where: Pass, x: Tensor) -> None:
        low = naive_low(x, where.segments)
        new = {"chunk": where.chunk, "ref": x, "low": low, "age": [0] * x.shape[1], "replays": 0}
        self.state.setdefault(where.branch, {}).update(new)


class Seen(NamedTuple):
    """A pass as the policy saw it, and what was done."""

    where: Pass
    latent: Tensor
    decision: Decision


class Recorded:
    """Settings whose policy writes down every pass."""

    def __init__(self, config: Any) -> None:
        self.config, self.seen = config, list[Seen]()

    def build(self, blocks: int) -> Any:
        policy = self.config.build(blocks)
        conclude = policy.conclude

        def note(cell: Cell, decision: Decision, evidence: StackEvidence) -> None:
            self.seen.append(Seen(evidence.where, evidence.latent.clone(), decision))
            conclude(cell, decision, evidence)

        policy.conclude = note
        return policy

    def explain(self, record: Any) -> str:
        return str(self.config.explain(record))


class Flow(nn.Module):
    """A mixing stack that is called as a velocity model; `where` says where it is."""

    def __init__(self, segments: tuple[Segment, ...] = SEGMENTS) -> None:
        super().__init__()
        self.stack = mixing(3, WIDTH)
        self.segments = segments

    def forward(self, x: Tensor, where: Pass) -> Tensor:
        out: Tensor = self.stack(x)
        return out


FLOW = Adapter(
    blocks=lambda model: list(model.stack.blocks),
    locate=lambda model, args, kwargs: kwargs["where"],
    latent=lambda model, args, kwargs: args[0],
)


def flow_chunk(model: Flow, chunk: int, steps: int, branches: tuple[str, ...] = ("cond",), batch: int = 2) -> Tensor:
    """A chunk from noise to something, its velocity mostly that of a straight line."""
    g = torch.Generator().manual_seed(chunk)
    clean, x = (torch.randn(batch, LENGTH, WIDTH, generator=g) for _ in range(2))
    slope = x - clean
    sigmas = [*shifted(steps, 8), 0.0]
    for step in range(steps):
        velocity = slope
        for branch in branches:
            where = Pass(
                role=Role.DENOISE,
                chunk=chunk,
                step=step,
                branch=branch,
                segments=model.segments,
                time=sigmas[step],
                steps=steps,
            )
            velocity = velocity + 0.2 * model(x if branch == "cond" else -2 * x, where=where)
        x = x + (sigmas[step + 1] - sigmas[step]) * velocity
    return x


def agree(recorded: Recorded, config: FSC) -> Counter[str]:
    """The naive reference decides as what was recorded; counts the levels."""
    naive, levels = Naive(config), Counter[str]()
    for where, latent, decision in recorded.seen:
        level, rho, tokens = naive.expect(where, latent)
        levels[level] += 1
        place = f"chunk {where.chunk}, step {where.step} ({where.branch})"
        assert level == (decision.level or "anchor"), place
        if level == "C0" and isfinite(decision.drift):
            assert decision.drift < decision.limit, place
        if isfinite(decision.drift):
            assert decision.drift == pytest.approx(rho, rel=1e-4), place
        if level in LEVELS[1:4]:
            assert decision.tokens is not None
            rows = decision.tokens.rows(where.segments, torch.device("cpu")).tolist()
            assert set(rows) == tokens and len(rows) == len(tokens), place
            assert decision.share == pytest.approx(len(tokens) / latent.shape[1])
    return levels


VARIANTS: dict[str, dict[str, Any]] = {
    "quality": {},
    "ungated": {"low_gate": False},
    "strict gate": {"low_share": 0.02},
    "many repairs": {"risk_scale": 0.6},
    "late relax": {"phase": "late_relax", "phase_gain": 1.0},
    "old tokens": {
        "max_age": 3,
        "thresholds": (1e-6, 9.0, 9.0, 9.0),
        "shares": (0.5, 0.5, 0.5),
        "low_gate": False,
        "share_scale": 1.0,
        "age_weight": 0.0,
    },
    "more old tokens than C2 takes": {
        "max_age": 3,
        "thresholds": (1e-6, 9.0, 9.0, 9.0),
        "shares": (0.3, 0.3, 0.3),
        "share_scale": 1.0,
        "low_gate": False,
        "age_weight": 0.9,
        "age_horizon": 3,
    },
    "old tokens, more than half": {
        "max_age": 3,
        "thresholds": (1e-6, 9.0, 9.0, 9.0),
        "shares": (0.45, 0.45, 0.45),
        "share_scale": 1.0,
        "low_gate": False,
        "age_weight": 0.0,
    },
    "old tokens, all": {"max_age": 2, "risk_scale": 4.0},
    "worn": {"max_replays": 2, "risk_scale": 9.0},
    "worn, collapsed": {"max_replays": 1, "collapsed": True},
    "collapsed": {"collapsed": True},
    "coupled": {"coupled": True, "risk_scale": 0.8},
    "no repairs": {"repairs": "none", "risk_scale": 0.7},
    "no repairs, worn": {"repairs": "none", "max_replays": 2},
    "full above": {"full_above": 0.3},
    "uniform": {"schedule": "uniform"},
    "explicit": {"at": (3, 9), "tail": (17,)},
    "weights": {"low_weight": 0.1, "high_weight": 0.9, "age_weight": 0.4, "age_horizon": 3},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_decisions_and_tokens_are_those_of_the_naive_reference(name: str) -> None:
    config = FSC(**({"steps": 20, "repairs": "refresh"} | VARIANTS[name]))
    recorded, model = Recorded(config), Flow()
    rollcache.enable(model, recorded, adapter=FLOW)
    with torch.no_grad():
        for chunk in range(2):
            flow_chunk(model, chunk, 20)
    levels = agree(recorded, config)
    assert len(recorded.seen) == 40 and levels["C0"] + levels["C1"] + levels["C2"] + levels["C3"] > 0
    if name == "quality":
        assert all(levels[level] for level in LEVELS)
    if name in ("old tokens", "worn", "worn, collapsed"):
        assert Reason.STALE in {s.decision.reason for s in recorded.seen} and levels["C2"]


def test_the_static_table_decides_as_the_naive_reference() -> None:
    config = FSC.static(20, repairs="refresh", thresholds=(0.02, 0.05, 0.1, 0.5))
    recorded, model = Recorded(config), Flow()
    rollcache.enable(model, recorded, adapter=FLOW)
    with torch.no_grad():
        flow_chunk(model, 0, 20)
    assert len(agree(recorded, config)) >= 4
    assert {s.decision.reason for s in recorded.seen[1:]} == {Reason.SCHEDULE}


def test_branches_are_kept_apart() -> None:
    config = FSC(steps=20, repairs="refresh", risk_scale=0.8)
    recorded, model = Recorded(config), Flow()
    rollcache.enable(model, recorded, adapter=FLOW)
    with torch.no_grad():
        for chunk in range(2):
            flow_chunk(model, chunk, 20, ("cond", "uncond"))
    agree(recorded, config)
    by_branch = [[s.decision.drift for s in recorded.seen if s.where.branch == b] for b in ("cond", "uncond")]
    assert len(by_branch[0]) == len(by_branch[1]) == 40 and by_branch[0] != by_branch[1]


def street(config: Any, steps: int = 20, chunks: int = 2, kind: str = "chunked") -> tuple[list[Tensor], Any]:
    """Generation steps of the random street model; `None` is the bare one."""
    world = random_world()
    start = Start(torch.randn(8, CELLS, 24, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 4))
    handle = None if config is None else rollcache.enable(world.model, config)
    session = Session(world, start, Protocol.named(kind, steps=steps, shift=8.0))
    size = 2 * session.protocol.latents_per_chunk
    return [session.step(torch.zeros(size, 2)).latents for _ in range(chunks)], handle


def test_on_the_street_model_decisions_are_those_of_the_naive_reference() -> None:
    config = FSC(steps=12, repairs="refresh", risk_scale=0.8)
    recorded = Recorded(config)
    street(recorded, 12, 1)
    assert len(agree(recorded, config)) >= 3


def test_on_the_street_model_repairs_are_closer_to_the_truth_than_replays() -> None:
    plain, _ = street(None)
    repaired, handle = street(FSC(steps=20, repairs="refresh", risk_scale=0.8))
    replayed, bare = street(FSC(steps=20, repairs="none", risk_scale=inf))
    error = [sum(float((a - b).norm()) for a, b in zip(plain, other, strict=True)) for other in (repaired, replayed)]
    assert 0 < error[0] < error[1]
    assert handle.stats().repaired > 0 and 0 < handle.stats().skip_rate < bare.stats().skip_rate


def test_c0_may_predict_as_step_reuse_does_until_tokens_are_repaired() -> None:
    """Without repairs it is step reuse of the same order; after a repair the newest residual is replayed as it is."""
    config = FSC.anchors_only(20, order=1)
    ours, handle = street(config)
    same, other = street(rollcache.StepReuse(steps=20, anchors=config.exact, order=1))
    assert all(torch.equal(a, b) for a, b in zip(ours, same, strict=True))
    assert handle.stats().skip_rate == other.stats().skip_rate > 0
    assert Action.PREDICT in {r.action for r in handle.trace}
    _, handle = street(FSC(steps=20, repairs="refresh", risk_scale=0.8, order=1), chunks=1)
    repaired = False
    for record in handle.trace:
        repaired = record.action is Action.REPAIR or (repaired and record.action is not Action.COMPUTE)
        if record.level == "C0" and record.step > 1:
            assert record.action is (Action.REPLAY if repaired else Action.PREDICT)
    assert handle.stats().repaired
    with pytest.raises(ValueError, match="order must be 0, 1 or 2, got 3"):
        FSC(order=3)


@pytest.mark.skipif(ADAPTER.sparse is None, reason="the street adapter cannot repair sparsely yet")
def test_sparse_repairs_stay_close_to_refreshed_ones() -> None:
    """K/V of unchosen tokens are those of an earlier pass, so outputs differ a little, and then decisions may."""
    refreshed, _ = street(FSC(steps=20, repairs="refresh", risk_scale=0.8), chunks=1)
    sparse, handle = street(FSC(steps=20, repairs="sparse", risk_scale=0.8), chunks=1)
    assert handle.stats().repaired > 0
    assert float((refreshed[0] - sparse[0]).norm() / refreshed[0].norm()) < 0.1


# extremes


@pytest.mark.parametrize(
    "config",
    [
        FSC(steps=20, risk_scale=0.0, repairs="refresh"),
        FSC(steps=20, warmup=0, at=tuple(range(20)), repairs="refresh"),
        FSC(steps=20, max_age=1, repairs="refresh"),
        FSC(steps=20, repairs="refresh", table=("Full",) * 20),
        FSC.reactive(20, repairs="none", risk_scale=0.0),
    ],
)
def test_at_the_exact_end_nothing_changes_by_a_bit(config: FSC) -> None:
    model = Flow()
    with torch.no_grad():
        plain = [flow_chunk(model, chunk, 20) for chunk in range(2)]
        handle = rollcache.enable(model, config, adapter=FLOW)
        cached = [flow_chunk(model, chunk, 20) for chunk in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(plain, cached, strict=True))
    assert handle.stats().skip_rate == 0


def test_at_the_exact_end_the_street_model_does_not_change_by_a_bit() -> None:
    plain, _ = street(None, 8)
    cached, handle = street(FSC(steps=8, risk_scale=0.0, repairs="refresh"), 8)
    assert all(torch.equal(a, b) for a, b in zip(plain, cached, strict=True))
    assert handle.stats().skip_rate == 0


def test_without_a_limit_only_anchors_are_computed() -> None:
    config = FSC.anchors_only(20)
    _, handle = street(config)
    assert {r.step for r in handle.trace if r.action is Action.COMPUTE} == set(config.exact)
    assert {r.reason for r in handle.trace if r.action is Action.REPLAY} == {Reason.STEADY}


@given(
    risk=st.floats(0, 2),
    step=st.integers(0, 49),
    low=st.lists(st.floats(0, 3), min_size=5, max_size=5),
    scales=st.tuples(st.floats(0, 4), st.floats(0, 4)),
    gate=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_a_larger_scale_never_repairs_more(
    risk: float, step: int, low: list[float], scales: tuple[float, float], gate: bool
) -> None:
    """At one step, whatever the risk and the tokens' low drifts."""
    levels = []
    for scale in sorted(scales):
        config = FSC(risk_scale=scale, low_gate=gate, phase="late_relax")
        reach = [sum(d >= limit for d in low) / len(low) for limit in config.limits(step)]
        levels.append(config.route(risk, step, reach))
    assert levels[0] >= levels[1]


@given(shift=st.floats(1, 12), scales=st.tuples(st.floats(0, 6), st.floats(0, 6)))
@settings(max_examples=100, deadline=None)
def test_over_a_whole_trajectory_a_larger_scale_computes_less(shift: float, scales: tuple[float, float]) -> None:
    """Without the age of tokens, through which an early repair can spare a later one."""
    cost = []
    for scale in sorted(scales):
        config = FSC(risk_scale=scale, age_weight=0.0)
        cost.append(sum(config.share(LEVELS.index(n)) for n in config.levels_on_a_line(shifted(50, shift))))
    assert cost[0] >= cost[1]


# fail closed


class Driven:
    """A policy without a model: shows it latents, and does what it says."""

    def __init__(self, config: Any, segments: tuple[Segment, ...] = SEGMENTS) -> None:
        self.policy, self.segments = config.build(4), segments

    def __call__(self, chunk: int, step: int, latent: Tensor, forced: Decision | None = None) -> Decision:
        where = Pass(role=Role.DENOISE, chunk=chunk, step=step, segments=self.segments)
        evidence = StackEvidence(where, lambda name: {"latent": latent}[name], repairable=True)
        cell = Cell("cond", step, 0, 4)
        if step == 0:
            forced = Decision(Action.COMPUTE, Reason.NOTHING_STORED)
        decision: Decision = forced or self.policy.decide(cell, evidence)
        self.policy.conclude(cell, decision, evidence)
        return decision


@pytest.mark.parametrize("poison", [nan, inf, -inf])
def test_evidence_that_is_not_finite_computes(poison: float) -> None:
    drive = Driven(FSC(steps=5, warmup=1, at=(1,)))
    for step in (0, 1):
        drive(0, step, torch.ones(1, LENGTH, WIDTH))
    bad = torch.ones(1, LENGTH, WIDTH)
    bad[0, 17, 3] = poison
    decision = drive(0, 2, bad)
    assert (decision.action, decision.reason, decision.level) == (Action.COMPUTE, Reason.NOT_FINITE, "Full")
    assert drive(0, 3, torch.ones(1, LENGTH, WIDTH)).level == "C0"  # X_ref is still the sound one


def test_what_was_learnt_under_inference_mode_serves_without_it() -> None:
    drive = Driven(FSC(steps=12, risk_scale=0.5, max_age=3))
    x = torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    actions = set()
    for step in range(12):
        with torch.inference_mode(step % 2 == 0):
            actions.add(drive(0, step, x * (1 + 0.03 * step)).action)
    assert actions == {Action.COMPUTE, Action.REPAIR, Action.REPLAY}


@pytest.mark.parametrize("gate", [False, True])
def test_white_latents_on_a_line_are_routed_as_the_ideal_ones(gate: bool) -> None:
    """The whole policy, the gate included, on tensors: the tables' counts."""
    drive = Driven(FSC.quality(low_gate=gate), (Segment.contiguous("a", 1, (1, 34, 60)),))
    g = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(1, 2040, 64, generator=g) for _ in range(2))
    found = [drive(0, step, (1 - s) * clean + s * noise) for step, s in enumerate(shifted(50, 8))]
    levels = [d.level for i, d in enumerate(found) if i not in FSC.quality().exact]
    assert [levels.count(level) for level in LEVELS] == [24, 4, 1, 3, 2]


def test_the_gate_raises_where_part_of_the_picture_drifts_in_the_low_band() -> None:
    """A third of the tokens moves as one: too little for the mean, too much for those tokens."""
    levels = []
    for share in (0.4, 0.3):
        drive = Driven(FSC(steps=3, warmup=1, at=(1,), low_share=share), (Segment.contiguous("a", 1, (1, 12, 8)),))
        x = torch.ones(1, 96, 2)
        drive(0, 0, x), drive(0, 1, x)
        moved = x.clone()
        moved[:, :32] += 0.2
        levels.append(drive(0, 2, moved))
    assert [d.level for d in levels] == ["C0", "C1"]
    assert levels[1].drift < levels[1].limit and levels[1].reason is Reason.DRIFT
    rows = levels[1].tokens.rows((Segment.contiguous("a", 1, (1, 12, 8)),), torch.device("cpu"))  # type: ignore[union-attr]
    assert len(rows) == 12 and int(rows.max()) < 32


def test_a_new_chunk_begins_anew() -> None:
    drive = Driven(FSC(steps=4, warmup=1, at=(1,), max_replays=1, repairs="none"))
    x = torch.randn(1, LENGTH, WIDTH)
    first = [drive(0, step, x) for step in range(4)]
    second = [drive(1, step, 5 * x) for step in range(4)]
    assert [d.level for d in first[1:]] == [d.level for d in second[1:]] == ["anchor", "C0", "Full"]
    assert first[2].drift == pytest.approx(second[2].drift)


def test_what_the_engine_computes_of_itself_is_an_anchor_unless_it_lacked_room() -> None:
    drive = Driven(FSC(steps=9, warmup=1, at=(1,), age_weight=0.0, risk_scale=inf, max_age=9))
    x = torch.ones(1, LENGTH, WIDTH)
    drive(0, 0, x), drive(0, 1, x)
    drive(0, 2, 2 * x, Decision(Action.COMPUTE, Reason.NO_ROOM, level="C1"))
    assert drive(0, 3, 2 * x).drift == pytest.approx(0.45)  # still compared with x; constant, so all in the low band
    drive(0, 4, 2 * x, Decision(Action.COMPUTE, Reason.CONDITION))
    assert drive(0, 5, 2 * x).drift == 0


def test_the_camera_and_frame_with_most_old_tokens_says_how_many_are_computed() -> None:
    """One latent frame of three was left out: all of it is too old, so a repair would have to compute all frames."""
    drive = Driven(FSC(steps=9, warmup=1, at=(1,), max_age=2))
    x = torch.ones(1, LENGTH, WIDTH)
    drive(0, 0, x), drive(0, 1, x)
    drive(0, 2, x, Decision(Action.REPAIR, Reason.DRIFT, tokens=Tokens.whole_frames((0, 1), SEGMENTS), level="C1"))
    decision = drive(0, 3, x)
    assert (decision.action, decision.reason, decision.level) == (Action.COMPUTE, Reason.STALE, "Full")


def test_the_reference_is_a_copy() -> None:
    drive = Driven(FSC(steps=4, warmup=1, at=(1,), age_weight=0.0))
    x = torch.ones(1, LENGTH, WIDTH)
    drive(0, 0, x), drive(0, 1, x)
    x *= 1.1
    assert drive(0, 2, x).drift == pytest.approx(0.045, rel=1e-3)


def test_one_host_synchronisation_a_pass() -> None:
    policy = FSC(steps=4, warmup=1, at=(1,), max_age=3, risk_scale=0.1).build(4)
    calls = []

    def numbers(x: Tensor) -> list[float]:
        calls.append(len(x))
        return [float(v) for v in x.tolist()]

    for step in range(4):
        where = Pass(role=Role.DENOISE, chunk=0, step=step, segments=SEGMENTS)
        latent = torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
        evidence = StackEvidence(where, lambda _, latent=latent: latent, numbers=numbers)  # type: ignore[misc]
        cell = Cell("cond", step, 0, 4)
        decision = policy.decide(cell, evidence) if step else Decision(Action.COMPUTE, Reason.NOTHING_STORED)
        policy.conclude(cell, decision, evidence)
    assert len(calls) == 2


def test_repairs_need_a_token_layout_and_say_so_at_the_first_pass() -> None:
    x = torch.ones(1, LENGTH, WIDTH)
    with pytest.raises(RollcacheError, match=r"FSC repairs tokens camera by camera.* or set repairs='none'"):
        Driven(FSC(steps=4), ())(0, 0, x)
    drive = Driven(FSC(steps=4, warmup=1, at=(1,), repairs="none"), ())
    assert [drive(0, step, x).level for step in range(4)] == ["", "anchor", "C0", "C0"]
    with pytest.raises(RollcacheError, match="FSC needs a hidden state that is one tensor"):
        Driven(FSC(steps=4), (Segment.contiguous("a", 1, (1, 4, 4), tensor=1),))(0, 0, x)


def test_a_table_without_repairs_replays_where_it_names_them() -> None:
    drive = Driven(FSC(steps=5, warmup=1, at=(1,), repairs="none", table=("C0", "C0", "C2", "Full", "C0")))
    x = torch.ones(1, LENGTH, WIDTH)
    assert [drive(0, step, x).level for step in range(5)] == ["", "anchor", "C0", "Full", "C0"]


# calibration


def test_a_probe_records_what_recalibration_needs() -> None:
    probe = RiskProbe(config=FSC.quality(repairs="refresh"))
    model = Flow()
    handle = rollcache.enable(model, probe, adapter=FLOW)
    with torch.no_grad():
        for chunk in range(3):
            flow_chunk(model, chunk, 50)
    assert len(probe.risks) == 3 * 34 and handle.stats().repaired == 0
    found = FSC.quality(repairs="refresh", low_gate=False).recalibrated(probe.risks)
    assert replace(found, thresholds=FSC().thresholds) == FSC.quality(repairs="refresh", low_gate=False)
    counts = Counter(found.route(risk, 0) for risk in probe.risks)
    assert [round(counts[level] / 3) for level in range(5)] == [24, 4, 1, 3, 2]
    assert "C0, replayed, it drifted little: risk" in handle.explain(0, 12, 0)


def test_too_few_risks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 finite risks are too few"):
        FSC().recalibrated([0.1, 0.2, nan, inf])


# settings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 12, "warmup": 6, "anchors": 10}, r"cannot place 16 exact steps \(6 of them warm-up\) among 12"),
        ({"schedule": "random"}, "schedule must be one of 'dense_to_sparse'"),
        ({"thresholds": (0.1, 0.2, 0.3, -0.4)}, "one of thresholds must be at least 0, got -0.4"),
        ({"thresholds": (0.0, 0.2, 0.3, 0.4)}, "thresholds must be positive and rise"),
        ({"thresholds": (0.1, 0.3, 0.2, 0.4)}, "thresholds must be positive and rise"),
        ({"thresholds": (0.1, nan, 0.2, 0.4)}, "one of thresholds must be at least 0, got nan"),
        ({"thresholds": (0.1, 0.3)}, "thresholds must be 4 numbers, got 2"),
        ({"shares": (0.3, 0.2, 0.4)}, "shares must be positive and rise"),
        ({"shares": (0.3, 0.4, 1.4)}, r"shares must be in \(0, 1\]"),
        ({"at": (6, 50)}, "step 50 of at lies past the last of 50 steps, 49"),
        ({"tail": (44, 50)}, "step 50 of tail lies past the last of 50 steps, 49"),
        ({"tail": (20,)}, "warm-up, anchors and tail must rise strictly"),
        ({"at": (3, 9)}, "warm-up, anchors and tail must rise strictly"),
        ({"at": (3, 9), "warmup": 0}, "nothing is stored before step 0"),
        ({"at": (), "warmup": 0}, "nothing is stored before step 0"),
        ({"at": (7,), "anchors": 3}, "not both"),
        ({"coupled": True, "anchors": 3}, "coupled has no anchors"),
        ({"coupled": True, "warmup": 60}, "a warm-up of 60 steps does not fit into 50"),
        ({"risk_scale": -1}, "risk_scale must be at least 0"),
        ({"low_share": 1.5}, r"low_share must be in \[0, 1\]"),
        ({"phase": "early"}, "phase must be one of"),
        ({"repairs": "dense"}, "repairs must be one of 'sparse', 'refresh', 'none'"),
        ({"max_age": 0}, "max_age must be an integer of at least 1"),
        ({"table": ("C0",) * 49}, "table must name the level of each of 50 steps, got 49"),
        ({"table": ("C9",) * 50}, "table names the level 'C9'; the levels are C0, C1, C2, C3, Full"),
        ({"steps": 0}, "steps must be an integer of at least 1"),
    ],
)
def test_settings_that_cannot_be_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FSC(**wrong)


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(ValueError, match="preset must be one of 'quality', 'speed', got 'turbo'"):
        FSC.preset("turbo")


def test_sparse_repairs_are_refused_where_no_adapter_can_and_nothing_is_attached() -> None:
    model = Flow()
    with pytest.raises(RollcacheError, match="set repairs='refresh'"):
        rollcache.enable(model, FSC(steps=20), adapter=FLOW)
    assert "forward" not in vars(model) and "forward" not in vars(model.stack.blocks[0])
    assert FSC(repairs="none").build(3).repairs is False
    assert FSC(repairs="refresh").build(3).backend == "refresh"


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 8, 13, 25, 30, 100])
def test_every_preset_fits_any_number_of_steps(steps: int) -> None:
    for preset in (FSC.quality, FSC.speed, FSC.uniform, FSC.sparse_to_dense, FSC.reactive, FSC.static, FSC.one_level):
        config = preset(steps)
        assert config.exact[0] == 0 and config.exact[-1] < steps
    if steps >= 8:
        assert FSC.anchors_only(steps).exact and FSC.with_tail(steps).exact


def test_explanations_give_level_numbers_and_limits() -> None:
    config = FSC(steps=20, repairs="refresh", risk_scale=0.6)
    model = Flow()
    handle = rollcache.enable(model, config, adapter=FLOW)
    with torch.no_grad():
        flow_chunk(model, 0, 20)
    text = [handle.explain(0, step, 0) for step in range(20)]
    assert text[1] == "Chunk 0, step 1, whole stack (cond): computed, the schedule says so."
    assert any("C0, replayed, it drifted little: risk" in line and " < " in line for line in text)
    assert any("% of the tokens computed, it drifted too far: risk" in line for line in text)
    assert any("Full, computed, it drifted too far" in line for line in text)
