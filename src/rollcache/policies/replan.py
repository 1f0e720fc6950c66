"""Replan: keep the plan of a window, amend what is emitted now, or plan the window anew. Our own method.

In a receding-window loop every generation step denoises one window from the same noise and emits one latent frame of
it. The first step of a cycle computes the window: its later frames are a *plan*, made under the conditions known then.
What a later step must compute depends on d, how far the conditions have moved since:

| level | when | what is run | what it costs |
|---|---|---|---|
| keep | d <= `amend_above` | nothing: the plan is emitted | 0 |
| amend | `amend_above` < d <= `replan_above` | the tokens of the emitted frame | 1 of F frames |
| replan | d > `replan_above` | the window, under the conditions of now | F of F frames |

Amended tokens attend, at every denoising step t and block b, to the K/V of the whole window: their own rows are fresh,
the others are those that the last pass at the same (t, b) left. That is close for small movements only: under the old
conditions the other frames pull the new one back.

Nothing like it is published: FSC repairs tokens between the denoising steps of one chunk, X-Cache replays blocks
between chunks. The combination works because a changed action concerns the frames to come, and costs only those.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import Literal

from rollcache.decision import Action, Decision, Reason, Record
from rollcache.passes import Cell, RollcacheError
from rollcache.policies.base import StackEvidence, StackPolicy
from rollcache.policies.xcache import Protect, warn_unprotected
from rollcache.settings import check_choice, check_count, check_range
from rollcache.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class Replan:
    """Settings of Replan.

    Needs a loop that tells which latent frame a chunk emits (`Pass.frame`), a token layout (`Pass.segments`), declared
    conditions, and the same noise in all chunks of a KV cycle: a chunk with `Pass.fresh_noise` is computed in full. So
    is one whose latent starts a cycle, unless `protect="pass"`. A loop that can emit from its last window may ask
    `Cache.skip_chunk` before it runs any pass.

    Attributes:
        amend_above: conditions that moved by more than this many of their `scale` since the plan was made: the emitted
            frame is computed again.
        replan_above: that moved by more than this: the window is. Equal to `amend_above` there is no amending, and what
            is left is `WindowReuse`; infinite there is no replanning.
        max_kept: kept or amended chunks in a row after which the window is computed. None is no limit.
        warmup_chunks: chunks computed in full first.
        protect: as in `XCache`.
        repairs: `sparse` runs the chosen tokens alone; `refresh` runs all and keeps the chosen ones, for models whose
            adapter cannot run them alone. It saves nothing but the kept chunks.
    """

    amend_above: float = 0.03
    replan_above: float = 0.3
    max_kept: int | None = None
    warmup_chunks: int = 1
    protect: Protect = "chunk"
    repairs: Literal["sparse", "refresh"] = "sparse"

    def __post_init__(self) -> None:
        check_range("amend_above", self.amend_above, 0)
        check_range("replan_above", self.replan_above, 0)
        if self.replan_above < self.amend_above:
            raise ValueError(
                f"replan_above ({self.replan_above:g}) lies below amend_above ({self.amend_above:g}): a small movement "
                "would cost more than a large one."
            )
        if self.max_kept is not None:
            check_count("max_kept", self.max_kept)
        check_count("warmup_chunks", self.warmup_chunks)
        check_choice("protect", self.protect, Protect)
        check_choice("repairs", self.repairs, Literal["sparse", "refresh"])
        warn_unprotected(self.protect)

    def build(self, blocks: int) -> ReplanPolicy:
        """See `PolicyConfig.build`."""
        return ReplanPolicy(self, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        did = record.level or ("replayed" if record.action is Action.REPLAY else "computed in full")
        moved = record.condition_distance
        numbers = (
            f" (moved {moved:.3g}; amend above {self.amend_above:g}, replan above {self.replan_above:g})"
            if isfinite(moved)
            else ""
        )
        return (
            f"Chunk {record.chunk}, step {record.step}, whole stack ({record.branch}): {did}, {record.reason}{numbers}."
        )


class ReplanPolicy(StackPolicy):
    """Replan in one rollout; remembers nothing of its own."""

    across = "chunks"
    repairs = True

    def __init__(self, config: Replan, blocks: int) -> None:
        """Settings, and the depth of the stack."""
        super().__init__(blocks)
        self.config = config
        self.backend = config.repairs
        self.warmup_chunks = config.warmup_chunks

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        """Schedule, then how far the conditions moved."""
        config, where = self.config, evidence.where
        if config.protect == "chunk" and where.kv_update:
            return Decision(Action.COMPUTE, Reason.PROTECTED)
        if where.fresh_noise:
            return Decision(Action.COMPUTE, Reason.FRESH_NOISE)
        if where.frame is None or not where.segments:
            raise RollcacheError(
                "Replan must know which latent frame a chunk emits (Pass.frame) and how its tokens lie "
                "(Pass.segments): the loop or the adapter must say it."
            )
        if config.max_kept is not None and evidence.replays >= config.max_kept:
            return Decision(Action.COMPUTE, Reason.STALE)
        distance = evidence.moved.distance
        if not isfinite(distance):
            reason = Reason.CONDITION if distance == inf else Reason.NOT_FINITE
            return Decision(Action.COMPUTE, reason, condition_distance=distance)
        if distance <= config.amend_above:
            return Decision(Action.REPLAY, Reason.SIMILAR, condition_distance=distance, level="keep")
        if distance > config.replan_above:
            return Decision(Action.COMPUTE, Reason.CONDITION, condition_distance=distance, level="replan")
        tokens = Tokens.whole_frames((where.frame,), where.segments)
        share = tokens.share(where.segments)
        return Decision(
            Action.REPAIR, Reason.CONDITION, condition_distance=distance, tokens=tokens, share=share, level="amend"
        )
