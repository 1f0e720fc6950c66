"""Whole-window reuse: replay the whole pass unless the conditions moved. The rule X-Cache must be measured against."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, nan

from rollcache.decision import Action, Decision, Reason, Record
from rollcache.fingerprint import Sampling
from rollcache.passes import Cell
from rollcache.policies.base import Evidence, Policy
from rollcache.policies.xcache import Protect, explain, warn_unprotected
from rollcache.settings import check_choice, check_count, check_range


@dataclass(frozen=True, kw_only=True)
class WindowReuse:
    """Settings of whole-window reuse. No anchors, no gate per block.

    Only a window that starts from the same noise can be reused, so a chunk with `Pass.fresh_noise` is computed (with
    `min_cosine` the fingerprint decides).

    A loop that can emit from its last window may ask `Cache.replays_chunk` before it runs any pass at all.

    Attributes:
        condition_tol: compute when a condition moved by more than this many of its `scale` since the chunk that was
            computed last. .03 for quality, .3 for speed. Without conditions nothing but the schedule is left.
        min_cosine: also compare fingerprints of the input of the stack, in [-1, 1]; 1 never replays. None is off.
        warmup_chunks: chunks computed in full first.
        max_staleness: replays in a row after which the stack is computed. None is no limit.
        protect: as in `XCache`.
        fingerprint_tokens: sampled tokens per camera, with `min_cosine`.
        min_frames: latent frames that are sampled at least, with `min_cosine`.
    """

    condition_tol: float = 0.05
    min_cosine: float | None = None
    warmup_chunks: int = 1
    max_staleness: int | None = None
    protect: Protect = "chunk"
    fingerprint_tokens: int = 32
    min_frames: int = 2

    def __post_init__(self) -> None:
        check_range("condition_tol", self.condition_tol, 0)
        check_range("min_cosine", self.min_cosine, -1, 1, optional=True)
        check_count("warmup_chunks", self.warmup_chunks)
        check_count("fingerprint_tokens", self.fingerprint_tokens, 1)
        check_count("min_frames", self.min_frames, 1)
        if self.max_staleness is not None:
            check_count("max_staleness", self.max_staleness)
        check_choice("protect", self.protect, Protect)
        warn_unprotected(self.protect)

    def build(self, blocks: int) -> WindowReusePolicy:
        """See `PolicyConfig.build`."""
        return WindowReusePolicy(self, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        return explain(record, None, self.condition_tol)


class WindowReusePolicy(Policy):
    """Whole-window reuse in one rollout; remembers nothing of its own."""

    def __init__(self, config: WindowReuse, blocks: int) -> None:
        """One span: the whole stack."""
        self.config = config
        self.spans = (range(blocks),)
        self.warmup_chunks = config.warmup_chunks
        self.sampling = (
            None
            if config.min_cosine is None
            else Sampling(tokens=config.fingerprint_tokens, min_frames=config.min_frames)
        )

    def decide(self, cell: Cell, evidence: Evidence) -> Decision:
        """Schedule, then conditions, then (if wanted) the fingerprint."""
        config, where = self.config, evidence.where
        if config.protect != "off" and (where.kv_write or (where.kv_update and config.protect == "chunk")):
            return Decision(Action.COMPUTE, Reason.PROTECTED)
        if where.fresh_noise and config.min_cosine is None:
            return Decision(Action.COMPUTE, Reason.FRESH_NOISE)
        if config.max_staleness is not None and evidence.replays >= config.max_staleness:
            return Decision(Action.COMPUTE, Reason.STALE)
        distance = evidence.moved.distance
        if distance == inf or not distance <= config.condition_tol:
            reason = Reason.CONDITION if distance == distance else Reason.NOT_FINITE
            return Decision(Action.COMPUTE, reason, condition_distance=distance)
        if config.min_cosine is None:
            return Decision(Action.REPLAY, Reason.SIMILAR, condition_distance=distance)
        cosine = evidence.similarity.cosine
        passed = cosine >= config.min_cosine < 1
        reason = Reason.SIMILAR if passed else Reason.COSINE if isfinite(cosine) else Reason.NOT_FINITE
        action = Action.REPLAY if passed else Action.COMPUTE
        return Decision(action, reason, cosine, config.min_cosine, nan, distance)
