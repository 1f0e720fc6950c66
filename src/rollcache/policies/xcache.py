"""X-Cache (arXiv 2604.20289): a residual per block and step, gated by the similarity of the block's input.

Names follow the paper: tau_floor is `min_cosine`, m is `margin`, alpha is `ema_alpha`, tau_dev is `max_deviation`, F_n
and B_n are `front_blocks` and `back_blocks`, W is `warmup_chunks`, M is `max_staleness`, K is `fingerprint_tokens`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Any, Literal

from rollcache.decision import Action, Decision, Reason, Record
from rollcache.fingerprint import Sampling
from rollcache.passes import Cell, RollcacheError, RollcacheWarning
from rollcache.policies.base import Evidence, Policy
from rollcache.settings import check_choice, check_count, check_range

Protect = Literal["chunk", "pass", "off"]
FirstStep = Literal["off", "on", "strict", "auto"]


@dataclass(frozen=True, kw_only=True)
class XCache:
    """Settings of X-Cache. The defaults are ours, measured on the receding-window loop; `XCache.paper()` has Table 1.

    Where the paper contradicts itself or says nothing there is an option or a documented choice:
    `docs/xcache-ambiguities.md`.

    Attributes:
        min_cosine: floor of the similarity threshold, in [-1, 1] (tau_floor, Eq. 9). Inside a KV cycle the cosine of
            unchanged blocks is above .9999; at the paper's .97 a brake or a steer goes unnoticed. 1 never replays.
        margin: how far the threshold stays below the running mean (m, Eq. 9).
        ema_alpha: weight of the newest similarity in the running mean (alpha, Eq. 8); 0 keeps the first one.
        max_deviation: the largest change in units of the mean magnitude must stay below this (tau_dev, Eq. 6). None is
            off.
        front_blocks: blocks that are always computed at the front (F_n). One lets the gate of block 1 see what the
            adapter does not declare as a condition; 0 is about 18 % faster and safe only if every condition is
            declared.
        back_blocks: blocks that are always computed at the back (B_n).
        span_blocks: consecutive blocks under one decision, taken at the input of the first. 1 is the paper's; more
            divide the cost of the gate and the memory, and replay or compute such a span as a whole.
        warmup_chunks: chunks computed in full first (W), counted anew after a change of shape.
        max_staleness: replays in a row after which a block is computed (M). None is no limit.
        first_step: step 0 of every chunk: `off` gates it like the others, `on` computes it, `strict` replays it only
            from `strict_cosine` on, `auto` computes it if the chunk starts from noise that the one before did not use.
        strict_cosine: see `first_step`.
        protect: `chunk` computes every step of a chunk whose latent will be committed; `pass` only the passes that
            write K/V for good; `off` not even denoise passes that do (a commit pass of its own is exact whatever is set
            here).
        fingerprint_tokens: sampled tokens per camera (K).
        min_frames: latent frames that are sampled at least. 1 is the literal proportional split.
        deviation: `element` (Eq. 6) or `token`, the largest mean change of a token.
        refresh: `on_compute` compares with the input that the stored residual belongs to; `always` with the last
            chunk's input (Eq. 5 read literally), which slow drift passes unseen. Conditions likewise.
        ema_on_forced: steps that were computed for another reason than similarity also enter the running mean.
        condition_cosine: the raw cosine of the conditions is one more entry of the minimum, as in the paper.
        condition_tol: compute when a condition moved by more than this many of its `scale`. None is off.
    """

    min_cosine: float = 0.9995
    margin: float = 0.02
    ema_alpha: float = 0.3
    max_deviation: float | None = 2.0
    front_blocks: int = 1
    back_blocks: int = 0
    span_blocks: int = 1
    warmup_chunks: int = 1
    max_staleness: int | None = None
    first_step: FirstStep = "off"
    strict_cosine: float = 0.999
    protect: Protect = "chunk"
    fingerprint_tokens: int = 32
    min_frames: int = 2
    deviation: Literal["element", "token"] = "element"
    refresh: Literal["on_compute", "always"] = "on_compute"
    ema_on_forced: bool = False
    condition_cosine: bool = False
    condition_tol: float | None = 0.05

    @classmethod
    def paper(cls, **changes: Any) -> XCache:
        """The defaults of Table 1 and the literal reading of the equations, with `changes`."""
        literal = {
            "min_cosine": 0.97,
            "min_frames": 1,
            "ema_on_forced": True,
            "condition_cosine": True,
            "condition_tol": None,
        }
        return cls(**(literal | changes))

    def __post_init__(self) -> None:
        check_range("min_cosine", self.min_cosine, -1, 1)
        check_range("strict_cosine", self.strict_cosine, -1, 1)
        check_range("margin", self.margin, 0)
        check_range("ema_alpha", self.ema_alpha, 0, 1)
        check_range("max_deviation", self.max_deviation, 0, optional=True)
        check_range("condition_tol", self.condition_tol, 0, optional=True)
        check_count("front_blocks", self.front_blocks)
        check_count("back_blocks", self.back_blocks)
        check_count("span_blocks", self.span_blocks, 1)
        check_count("warmup_chunks", self.warmup_chunks)
        check_count("fingerprint_tokens", self.fingerprint_tokens, 1)
        check_count("min_frames", self.min_frames, 1)
        if self.max_staleness is not None:
            check_count("max_staleness", self.max_staleness)
        check_choice("first_step", self.first_step, FirstStep)
        check_choice("protect", self.protect, Protect)
        check_choice("deviation", self.deviation, Literal["element", "token"])
        check_choice("refresh", self.refresh, Literal["on_compute", "always"])
        warn_unprotected(self.protect)

    def build(self, blocks: int) -> XCachePolicy:
        """See `PolicyConfig.build`."""
        if self.front_blocks + self.back_blocks >= blocks:
            raise RollcacheError(
                f"front_blocks={self.front_blocks} and back_blocks={self.back_blocks} leave none of {blocks} blocks to "
                "replay: lower them."
            )
        return XCachePolicy(self, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        return explain(record, self.max_deviation, self.condition_tol)


class XCachePolicy(Policy):
    """X-Cache in one rollout: remembers the running mean of the similarity of every cell."""

    def __init__(self, config: XCache, blocks: int) -> None:
        """Gate every block that is no anchor."""
        self.config = config
        self.warmup_chunks = config.warmup_chunks
        stop, size = blocks - config.back_blocks, config.span_blocks
        self.spans = tuple(range(b, min(b + size, stop)) for b in range(config.front_blocks, stop, size))
        self.sampling = Sampling(
            tokens=config.fingerprint_tokens,
            min_frames=config.min_frames,
            deviation=config.deviation,
            refresh_on_replay=config.refresh == "always",
        )
        self._ema: dict[Cell, float] = {}

    def decide(self, cell: Cell, evidence: Evidence) -> Decision:
        """Forced checks, then similarity, then deviation (Eq. 5 to 7)."""
        config = self.config
        distance = nan
        forced = self._forced(cell, evidence)
        if config.condition_tol is not None and (forced is None or config.ema_on_forced):
            distance = evidence.moved.distance
            if forced is None and (distance == inf or not distance <= config.condition_tol):
                forced = Reason.CONDITION if distance == distance else Reason.NOT_FINITE
        if forced is not None and not config.ema_on_forced:
            return Decision(Action.COMPUTE, forced, condition_distance=distance)
        cosine, deviation = evidence.similarity
        if config.condition_cosine:
            raw = evidence.moved.cosine
            cosine = raw if not raw >= cosine else cosine
        threshold = self._threshold(cell)
        if forced is not None:
            reason = forced
        elif not (isfinite(cosine) and isfinite(deviation)):
            reason = Reason.NOT_FINITE
        elif cosine < threshold:
            reason = Reason.COSINE
        elif config.max_deviation is not None and deviation >= config.max_deviation:
            reason = Reason.DEVIATION
        else:
            return Decision(Action.REPLAY, Reason.SIMILAR, cosine, threshold, deviation, distance)
        return Decision(Action.COMPUTE, reason, cosine, threshold, deviation, distance)

    def observe(self, cell: Cell, decision: Decision) -> None:
        """Move the running mean (Eq. 8): after the decision, starting from the first similarity."""
        if isfinite(decision.cosine):
            alpha = self.config.ema_alpha
            mean = self._ema.get(cell, decision.cosine)
            self._ema[cell] = alpha * decision.cosine + (1 - alpha) * mean

    def reset(self) -> None:
        """Forget the running means."""
        self._ema.clear()

    def _forced(self, cell: Cell, evidence: Evidence) -> Reason | None:
        """Why the schedule wants this cell computed, if it does."""
        config, where = self.config, evidence.where
        if config.protect != "off" and (where.kv_write or (where.kv_update and config.protect == "chunk")):
            return Reason.PROTECTED
        if cell.step == 0 and (config.first_step == "on" or (config.first_step == "auto" and where.fresh_noise)):
            return Reason.FIRST_STEP
        if config.max_staleness is not None and evidence.replays >= config.max_staleness:
            return Reason.STALE
        return None

    def _threshold(self, cell: Cell) -> float:
        """tau(t, b), Eq. 9. At 1 nothing passes: rounding must not decide whether a gate is closed."""
        config = self.config
        if config.min_cosine == 1:
            return inf
        if cell.step == 0 and config.first_step == "strict":
            return config.strict_cosine
        mean = self._ema.get(cell)
        return config.min_cosine if mean is None else max(config.min_cosine, mean - config.margin)


def explain(record: Record, max_deviation: float | None, condition_tol: float | None) -> str:
    """The sentence of `PolicyConfig.explain` for policies with these tests."""
    facts = []
    if record.cosine == record.cosine:
        sign = "<" if record.cosine < record.threshold else ">="
        facts.append(f"cosine {record.cosine:.5f} {sign} {record.threshold:.5f}")
    if record.deviation == record.deviation:
        limit = (
            "" if max_deviation is None else f" {'>=' if record.deviation >= max_deviation else '<'} {max_deviation:g}"
        )
        facts.append(f"deviation {record.deviation:.3g}{limit}")
    if record.condition_distance == record.condition_distance and condition_tol is not None:
        sign = "<=" if inf > record.condition_distance <= condition_tol else ">"
        facts.append(f"conditions moved by {record.condition_distance:.3g} {sign} {condition_tol:g}")
    since = "" if record.source is None else f", compared with chunk {record.source}"
    last = record.block + record.blocks - 1
    blocks = f"block {record.block}" if record.blocks == 1 else f"blocks {record.block} to {last}"
    did = "replayed" if record.action is Action.REPLAY else "computed"
    return (
        f"Chunk {record.chunk}, step {record.step}, {blocks} ({record.branch}): {did}, {record.reason}"
        f"{': ' if facts else ''}{', '.join(facts)}{since if facts else ''}."
    )


def warn_unprotected(protect: Protect) -> None:
    """Say what is lost without commit protection."""
    if protect == "off":
        warnings.warn(
            'protect="off" lets approximated latents and K/V into the cache of later chunks, where errors add up; '
            "use it for ablations only.",
            RollcacheWarning,
            stacklevel=4,
        )
