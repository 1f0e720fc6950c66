"""Step reuse: anchors compute, every other denoising step adds what the last anchor's whole stack added.

The simplest of the methods that work across the steps of a chunk, and the baseline of all of them: no signal, no gate,
only a schedule. `schedules.py` has the published ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollcache.decision import Action, Decision, Reason, Record
from rollcache.passes import Cell
from rollcache.policies import schedules
from rollcache.policies.base import StackEvidence, StackPolicy
from rollcache.settings import check_count

_ANCHOR = Decision(Action.COMPUTE, Reason.SCHEDULE)
_REPLAY = Decision(Action.REPLAY, Reason.SCHEDULE)


@dataclass(frozen=True, kw_only=True)
class StepReuse:
    """Settings of step reuse.

    The residual that is reused is that of the whole stack, the last block's output minus the first one's input; the
    head, with the present timestep, always runs. Every chunk begins anew. Passes that write K/V are computed.

    Attributes:
        steps: denoising steps of a chunk (N).
        anchors: the steps that are computed, rising from 0.
    """

    steps: int
    anchors: tuple[int, ...]

    @classmethod
    def uniform(cls, steps: int, exact: int) -> StepReuse:
        """`exact` of `steps` steps, evenly spread."""
        return cls(steps=steps, anchors=schedules.uniform(steps, exact))

    @classmethod
    def dense_to_sparse(cls, steps: int = 50, warmup: int = 6, anchors: int = 10, **changes: Any) -> StepReuse:
        """FSC's anchors without its repairs (its ablation "anchors only"); see `schedules.dense_to_sparse`."""
        return cls(steps=steps, anchors=schedules.dense_to_sparse(steps, warmup, anchors, **changes))

    @classmethod
    def sparse_to_dense(cls, steps: int = 50, warmup: int = 6, anchors: int = 10) -> StepReuse:
        """The same gaps in the opposite order."""
        return cls(steps=steps, anchors=schedules.sparse_to_dense(steps, warmup, anchors))

    @classmethod
    def even_in_sigma(cls, sigmas: Sequence[float], exact: int) -> StepReuse:
        """`exact` steps evenly spread over the noise levels `sigmas` of a chunk's steps."""
        return cls(steps=len(sigmas), anchors=schedules.even_in_sigma(sigmas, exact))

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 1)
        object.__setattr__(self, "anchors", tuple(self.anchors))
        for anchor in self.anchors:
            check_count("an anchor", anchor)
        if self.anchors[:1] != (0,):
            raise ValueError(
                f"anchors begin with {self.anchors[:1]}; nothing is stored before step 0, so it must be 0."
            )
        if any(b <= a for a, b in zip(self.anchors, self.anchors[1:], strict=False)):
            raise ValueError(f"anchors must rise strictly, got {self.anchors}.")
        if self.anchors[-1] >= self.steps:
            raise ValueError(f"anchor {self.anchors[-1]} lies past the last of {self.steps} steps, {self.steps - 1}.")

    def build(self, blocks: int) -> StepReusePolicy:
        """See `PolicyConfig.build`."""
        return StepReusePolicy(self, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        did = "replayed" if record.action is Action.REPLAY else "computed"
        last = max((a for a in self.anchors if a <= record.step), default=0)
        since = f", from step {last}" if record.action is Action.REPLAY else ""
        return (
            f"Chunk {record.chunk}, step {record.step}, whole stack ({record.branch}): {did}, {record.reason}{since}."
        )


class StepReusePolicy(StackPolicy):
    """Step reuse in one rollout; remembers nothing of its own."""

    def __init__(self, config: StepReuse, blocks: int) -> None:
        """Settings, and the depth of the stack."""
        super().__init__(blocks)
        self.steps = config.steps
        self._exact = frozenset(config.anchors)

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        """The schedule decides."""
        return _ANCHOR if cell.step in self._exact else _REPLAY
