"""Replan: keep the plan of a window, amend what is emitted now, or replan what is still to come. Our own method.

In a receding-window loop every generation step denoises one window from the same noise and emits one latent frame of
it. The first step of a cycle computes the window: its later frames are a *plan*, made under the conditions known then.
What a later step j of F must compute depends on how far the conditions have moved since:

| level | when (d = how far the conditions moved) | what is run | what it costs |
|---|---|---|---|
| keep | d <= `amend_above` | nothing: the plan is emitted | 0 |
| amend | `amend_above` < d <= `replan_above` | the tokens of the emitted frame | 1 of F frames |
| replan | `replan_above` < d <= `full_above` | also `back` frames before and all after it | F - j + back of F |
| full | d > `full_above` | the window | F of F |

Chosen tokens attend, at every denoising step t and block b, to the K/V of the whole window: their own rows are fresh,
the others are those that the pass before left at the same (t, b). Frames that were emitted long ago are not computed
again: only their neighbours would see it. A replan renews the plan: conditions are compared with it from then on.

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

LEVELS = ("keep", "amend", "replan", "full")


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
        replan_above: that moved by more than this: so are all frames after it, and `back` before it. Equal to
            `amend_above` there is no amending.
        full_above: that moved by more than this: the whole window is computed. Equal to `replan_above` there is no
            replanning; infinite there is always.
        back: frames before the emitted one that a replan computes again. They were emitted, but the new frames attend
            to them, and under the old conditions they would pull the new ones back.
        max_kept: kept, amended or replanned chunks in a row after which the window is computed. None is no limit.
        warmup_chunks: chunks computed in full first.
        protect: as in `XCache`.
        repairs: `sparse` runs the chosen tokens alone; `refresh` runs all and keeps the chosen ones, for models whose
            adapter cannot run them alone. It saves nothing but the kept chunks.
    """

    amend_above: float = 0.05
    replan_above: float = 0.05
    full_above: float = 0.3
    back: int = 1
    max_kept: int | None = None
    warmup_chunks: int = 1
    protect: Protect = "chunk"
    repairs: Literal["sparse", "refresh"] = "sparse"

    def __post_init__(self) -> None:
        check_range("amend_above", self.amend_above, 0)
        check_range("replan_above", self.replan_above, 0)
        check_range("full_above", self.full_above, 0)
        check_count("back", self.back)
        for name, limit, below in (
            ("replan_above", self.replan_above, self.amend_above),
            ("full_above", self.full_above, self.replan_above),
        ):
            if limit < below:
                raise ValueError(
                    f"{name} ({limit:g}) lies below the limit before it ({below:g}): a small movement would cost more "
                    "than a large one."
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
            f" (moved {moved:.3g}; amend above {self.amend_above:g}, replan above {self.replan_above:g}, full above "
            f"{self.full_above:g})"
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
        if distance > config.full_above:
            return Decision(Action.COMPUTE, Reason.CONDITION, condition_distance=distance, level="full")
        replan = distance > config.replan_above
        first = max(0, where.frame - config.back) if replan else where.frame
        last = where.segments[0].grid[0] if replan else where.frame + 1
        tokens = Tokens.whole_frames(tuple(range(first, last)), where.segments)
        share = tokens.share(where.segments)
        if share == 1:
            return Decision(Action.COMPUTE, Reason.CONDITION, condition_distance=distance, level="full")
        return Decision(
            Action.REPAIR,
            Reason.CONDITION,
            condition_distance=distance,
            tokens=tokens,
            share=share,
            level="replan" if replan else "amend",
            renew=replan,
        )
