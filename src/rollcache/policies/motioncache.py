"""MotionCache (arXiv 2605.01725): tokens that move accumulate distance faster, and are computed more often.

Every token adds up the distance between steps, times a weight; where the sum reaches a threshold the token is computed
and its sum starts anew. Warm-up steps are computed, then the whole chunk has one sum for a few updates, then the
weights follow the difference between latent frames of what leaves the stack.

The released code was read at ywlq/MotionCache@a8d2a47 (its SkyReels-V2 half; the MAGI-1 half differs). `released` has
its settings. Different from it in any case: a repair computes the same number of tokens in every camera and latent
frame, so the tokens that are due are filled up, in each, with those whose sum is highest, to as many as the fullest of
that segment has.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor

from rollcache.decision import Action, Decision, Reason, Record
from rollcache.passes import Cell, RollcacheError
from rollcache.policies.base import StackEvidence, StackPolicy
from rollcache.policies.signals import polynomial, relative_change
from rollcache.settings import check_choice, check_count, check_range
from rollcache.tokens import Tokens, unfold

WAN_1_3B = (-5.21862437e4, 9.23041404e3, -5.28275948e2, 1.36987616e1, -4.99875664e-2)
"""TeaCache's fit for Wan 2.1 1.3B, which the released code uses for every model; highest power first."""

_EXACT = Decision(Action.COMPUTE, Reason.SCHEDULE)
_EPS = 1e-8

Parts = tuple[Tensor, ...]
"""A number per token, per segment [views, F, cells]."""


@dataclass(frozen=True, kw_only=True)
class MotionCache:
    """Settings of MotionCache. The knob is `threshold`: 0 is exact, larger is faster, to about .2.

    Attributes:
        threshold: sum of distances at which a token is computed (tau).
        warmup: steps that are exact after step 0 (W).
        chunk_updates: computed steps of the phase in which all tokens have weight 1 (P1).
        floor: weight of the token of a camera and latent frame that moves least; that of the one that moves most is 1.
            Per camera is our choice; the released code has one.
        vote: a cell of a camera is computed in all latent frames if it is due in more than half of them, else in none.
        min_share: fewer tokens than this share are not worth a repair: nothing is computed, and the sums grow on
            (rho_min).
        signal: what the distance of two steps is measured on: the `modulated` input of block 0, or the `embedding` of
            the timestep, which knows nothing of the content.
        coefficients: polynomial that the relative change becomes a distance by, the highest power first. None leaves it
            as it is.
        clamp: distances below 0 count as 0. The Wan polynomial is negative below a relative change of .0043.
        protect_last: the last step of a chunk is exact. Ours.
        max_age: steps in a row without computing all, after which all are computed. None is no limit. Ours; without it
            a token that is never due together with others is never computed.
        steps: denoising steps of a chunk (N), for `protect_last` in loops that do not tell.
        repairs: `sparse` runs chosen tokens alone; `refresh` runs all and keeps the chosen ones.
    """

    threshold: float = 0.1
    warmup: int = 4
    chunk_updates: int = 6
    floor: float = 0.6
    vote: bool = True
    min_share: float = 0.4
    signal: Literal["modulated", "embedding"] = "modulated"
    coefficients: tuple[float, ...] | None = None
    clamp: bool = True
    protect_last: bool = True
    max_age: int | None = 10
    steps: int | None = None
    repairs: Literal["sparse", "refresh"] = "sparse"

    @classmethod
    def released(cls, **changes: Any) -> MotionCache:
        """As the released code does it on SkyReels-V2, without any of our safeguards."""
        literal: dict[str, Any] = {
            "signal": "embedding",
            "coefficients": WAN_1_3B,
            "clamp": False,
            "protect_last": False,
            "max_age": None,
        }
        return cls(**(literal | changes))

    def __post_init__(self) -> None:
        check_range("threshold", self.threshold, 0)
        check_count("warmup", self.warmup)
        check_count("chunk_updates", self.chunk_updates)
        check_range("floor", self.floor, 0, 1)
        check_range("min_share", self.min_share, 0, 1)
        check_choice("signal", self.signal, Literal["modulated", "embedding"])
        check_choice("repairs", self.repairs, Literal["sparse", "refresh"])
        if self.max_age is not None:
            check_count("max_age", self.max_age, 1)
        if self.coefficients is not None:
            object.__setattr__(self, "coefficients", tuple(self.coefficients))
            if not self.coefficients or not all(isfinite(c) for c in self.coefficients):
                raise ValueError(f"coefficients must be finite numbers, got {self.coefficients}.")
        if self.steps is not None:
            check_count("steps", self.steps, 1)
            if self.warmup >= self.steps:
                raise ValueError(f"warmup={self.warmup} leaves none of {self.steps} steps: lower it.")

    def distance(self, change: Tensor) -> Tensor:
        """What a relative change between two steps, a scalar, adds to the sum of a token of weight 1."""
        on_device: Any = change  # a number would cost a host synchronisation of its own
        d: Any = change if self.coefficients is None else polynomial(self.coefficients, on_device)
        return torch.as_tensor(d.clamp(min=0) if self.clamp else d)

    def build(self, blocks: int) -> MotionCachePolicy:
        """See `PolicyConfig.build`."""
        return MotionCachePolicy(self, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        did = {Action.COMPUTE: "computed", Action.REPLAY: "replayed"}.get(
            record.action, f"{record.share:.1%} of the tokens computed"
        )
        numbers = ""
        if record.drift == record.drift:
            sign = ">=" if record.drift >= record.limit else "<"
            numbers = f": {record.drift:.1%} of the tokens are due, {sign} {record.limit:.1%}"
        return (
            f"Chunk {record.chunk}, step {record.step}, whole stack ({record.branch}): {did}, {record.reason}{numbers}."
        )


@dataclass
class _State:
    """What MotionCache remembers of one branch in one chunk.

    Attributes:
        chunk: which.
        sums: of distances, of every token.
        weights: of every token; None while all have weight 1.
        signal: of the last step.
        updates: computed steps of the phase of one sum.
        last: what left the stack in the last latent frame, per segment [views, 1, cells, B, C].
    """

    chunk: int
    sums: Parts
    weights: Parts | None = None
    signal: Tensor | None = None
    updates: int = 0
    last: Parts | None = None


class MotionCachePolicy(StackPolicy):
    """MotionCache in one rollout."""

    repairs = True

    def __init__(self, config: MotionCache, blocks: int) -> None:
        """Settings, and the depth of the stack."""
        super().__init__(blocks)
        self.config = config
        self.steps = config.steps
        self.backend = config.repairs
        self._states: dict[str, _State] = {}
        self._before: dict[str, Parts | None] = {}  # `_State.last` of the chunk before

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        """Warm-up, then the tokens that are due."""
        config, where = self.config, evidence.where
        if cell.step <= config.warmup or config.threshold == 0:
            return _EXACT
        steps = where.steps if where.steps is not None else config.steps
        if config.protect_last and (steps is None or cell.step >= steps - 1):
            return _EXACT
        if config.max_age is not None and evidence.replays >= config.max_age:
            return Decision(Action.COMPUTE, Reason.STALE)
        state = self._states[cell.branch]
        sums, due, numbers = self._look(state, evidence)
        change, share, *counts = numbers
        evidence.memo["sums"] = sums
        if not isfinite(change):
            return Decision(Action.COMPUTE, Reason.NOT_FINITE)
        reached: dict[str, Any] = {"drift": share, "limit": config.min_share}
        if share == 0 or (share < config.min_share and share < 1):
            return Decision(Action.REPLAY, Reason.STEADY, **reached)
        tokens = _fullest(sums, due, [max(1, round(n)) for n in counts])
        computed = tokens.share(where.segments)
        if computed >= 1:
            return Decision(Action.COMPUTE, Reason.DRIFT, **reached)
        return Decision(Action.REPAIR, Reason.DRIFT, tokens=tokens, share=computed, **reached)

    def conclude(self, cell: Cell, decision: Decision, evidence: StackEvidence) -> None:
        """Sums of computed tokens start anew; weights follow what left the stack."""
        config, where = self.config, evidence.where
        state = self._states.get(cell.branch)
        if state is None or state.chunk != where.chunk or cell.step == 0:
            state = self._begin(cell, evidence)
        if decision.action is Action.COMPUTE:
            state.sums = tuple(torch.zeros_like(s) for s in state.sums)
        else:
            state.sums = evidence.memo["sums"]
            if decision.action is Action.REPAIR:
                assert decision.tokens is not None
                state.sums = _cleared(state.sums, decision.tokens)
        if cell.step > config.warmup and decision.action is not Action.REPLAY:
            state.updates += 1
        if cell.step >= config.warmup:
            state.signal = self._signal(evidence).detach().clone()
        assert evidence.output is not None
        frames = unfold(evidence.output.detach().transpose(0, 1), where.segments)
        if cell.step >= config.warmup and state.updates >= config.chunk_updates:
            before = None if where.frame is not None else self._before.get(cell.branch)
            state.weights = tuple(
                _weights(part, None if before is None else before[i], config.floor) for i, part in enumerate(frames)
            )
        state.last = tuple(part[:, -1:].clone() for part in frames)

    def reset(self) -> None:
        """Forget everything."""
        self._states.clear()
        self._before.clear()

    def _begin(self, cell: Cell, evidence: StackEvidence) -> _State:
        """A chunk begins."""
        config, where = self.config, evidence.where
        if not where.segments:
            raise RollcacheError(
                f"{self.name} compares latent frames camera by camera, and this pass has no token layout: give its "
                "segments."
            )
        if any(s.tensor for s in where.segments):
            raise RollcacheError(f"{self.name} needs a hidden state that is one tensor: use another method here.")
        if config.protect_last and where.steps is None and config.steps is None:
            raise RollcacheError(
                f"{self.name} keeps the last step of a chunk exact, and the loop does not tell how many there are: "
                "give steps=, or set protect_last=False."
            )
        old = self._states.get(cell.branch)
        if old is not None and old.chunk != where.chunk:
            self._before[cell.branch] = old.last
        device = evidence.hidden.device
        sums = tuple(torch.zeros(s.views, s.grid[0], s.cells, device=device) for s in where.segments)
        state = self._states[cell.branch] = _State(where.chunk, sums)
        return state

    def _signal(self, evidence: StackEvidence) -> Tensor:
        return evidence.modulated if self.config.signal == "modulated" else evidence.embedding

    def _look(self, state: _State, evidence: StackEvidence) -> tuple[Parts, Parts, list[float]]:
        """The new sums and which tokens are due, and with one host synchronisation these numbers.

        The distance; the share of tokens that are due; per segment, the largest number that is due in one camera and
        latent frame.
        """
        config = self.config
        assert state.signal is not None
        distance = config.distance(relative_change(self._signal(evidence), state.signal))
        weights: tuple[Any, ...] = state.weights or (1.0,) * len(state.sums)
        sums = tuple(a + distance * w for a, w in zip(state.sums, weights, strict=True))
        due = tuple(~(a < config.threshold) for a in sums)  # NaN is due
        if config.vote:
            due = tuple((d.float().mean(1, keepdim=True) > 0.5).expand_as(d) for d in due)
        share = torch.stack([d.sum() for d in due]).sum() / sum(d.numel() for d in due)
        counts = [d.sum(2).amax() for d in due]
        return sums, due, evidence.numbers(torch.stack([distance, share, *(c.float() for c in counts)]))


def _weights(y: Tensor, before: Tensor | None, floor: float) -> Tensor:
    """Weights [views, F, cells] from what left the stack [views, F, cells, B, C].

    delta_f = mean_c|y_f - y_(f-1)| / mean_c|y_(f-1)|, of a batch the largest, brought to [floor, 1] in every camera and
    latent frame. The first frame is compared with the last one of the chunk before; without one it takes the weights of
    the second.
    """
    y = y.float()
    chain = y if before is None else torch.cat((before.float(), y), 1)
    if chain.shape[1] == 1:
        return torch.ones(y.shape[:3], device=y.device)
    change = (chain[:, 1:] - chain[:, :-1]).abs().mean(4) / (chain[:, :-1].abs().mean(4) + _EPS)
    change = change.amax(3)
    if before is None:
        change = torch.cat((change[:, :1], change), 1)
    low, high = change.amin(2, keepdim=True), change.amax(2, keepdim=True)
    return floor + (1 - floor) * (change - low) / (high - low + _EPS)


def _fullest(sums: Parts, due: Parts, counts: list[int]) -> Tokens:
    """So many cells in every camera and latent frame of a segment: those that are due, then the highest sums."""
    cells = []
    for a, d, count in zip(sums, due, counts, strict=True):
        score = torch.where(d, torch.inf, a)
        cells.append(score.argsort(dim=2, descending=True, stable=True)[:, :, :count].sort(2).values)
    return Tokens(tuple(range(sums[0].shape[1])), tuple(cells))


def _cleared(sums: Parts, tokens: Tokens) -> Parts:
    """The sums, with those of computed tokens at 0. All latent frames take part in a repair."""
    return tuple(a if c is None else a.scatter(2, c, 0.0) for a, c in zip(sums, tokens.cells, strict=True))
