"""Step reuse: anchors compute, every other denoising step adds what the stack would have added, as far as known.

The simplest of the methods that work across the steps of a chunk: no signal, no gate, only a schedule. At order 0 a
step adds what the last anchor's whole stack added (the baseline of all of them). At order 1 or 2 it adds the value, at
its own noise level, of the line or parabola through the residuals of the last two or three anchors:

    R(sigma) = sum_i w_i R(sigma_i),   w_i = prod_{j != i} (sigma - sigma_j) / (sigma_i - sigma_j).

Extrapolation over noise levels is SCOPE's and TaylorSeer's idea; that it belongs between anchors which are evenly
spread over noise levels, and not over step indices, is measured here (docs/steps.md). `schedules.py` has the schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rollcache.decision import Action, Decision, Reason, Record
from rollcache.passes import Cell
from rollcache.policies import schedules
from rollcache.policies.base import StackEvidence, StackPolicy
from rollcache.policies.extrapolation import over_levels
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
        order: 0 replays the last anchor's residual; 1 and 2 extrapolate the last two or three over noise levels, for
            which every pass must tell its own (`Pass.time`). So many more residuals are kept.
    """

    steps: int
    anchors: tuple[int, ...]
    order: int = 0

    @classmethod
    def uniform(cls, steps: int, exact: int, order: int = 0) -> StepReuse:
        """`exact` of `steps` steps, evenly spread."""
        return cls(steps=steps, anchors=schedules.uniform(steps, exact), order=order)

    @classmethod
    def dense_to_sparse(cls, steps: int = 50, warmup: int = 6, anchors: int = 10, **changes: Any) -> StepReuse:
        """FSC's anchors without its repairs (its ablation "anchors only"); see `schedules.dense_to_sparse`."""
        return cls(steps=steps, anchors=schedules.dense_to_sparse(steps, warmup, anchors, **changes))

    @classmethod
    def sparse_to_dense(cls, steps: int = 50, warmup: int = 6, anchors: int = 10) -> StepReuse:
        """The same gaps in the opposite order."""
        return cls(steps=steps, anchors=schedules.sparse_to_dense(steps, warmup, anchors))

    @classmethod
    def even_in_sigma(cls, sigmas: Sequence[float], exact: int, order: int = 0) -> StepReuse:
        """`exact` steps evenly spread over the noise levels `sigmas` of a chunk's steps."""
        return cls(steps=len(sigmas), anchors=schedules.even_in_sigma(sigmas, exact), order=order)

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 1)
        check_count("order", self.order)
        if self.order > 2:
            raise ValueError(f"order must be 0, 1 or 2, got {self.order}.")
        if not isinstance(self.anchors, Iterable):
            raise TypeError(f"anchors are the steps that are computed, such as (0, 2), got {self.anchors!r}.")
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
        did = {Action.REPLAY: "replayed", Action.PREDICT: "predicted"}.get(record.action, "computed")
        last = max((a for a in self.anchors if a <= record.step), default=0)
        since = (
            "" if record.action is Action.COMPUTE else f", from step {last}{f' ({record.level})' * bool(record.level)}"
        )
        return (
            f"Chunk {record.chunk}, step {record.step}, whole stack ({record.branch}): {did}, {record.reason}{since}."
        )


class StepReusePolicy(StackPolicy):
    """Step reuse in one rollout; remembers nothing of its own."""

    def __init__(self, config: StepReuse, blocks: int) -> None:
        """Settings, and the depth of the stack."""
        super().__init__(blocks)
        self.steps = config.steps
        self.history = config.order + 1
        self._exact = frozenset(config.anchors)

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        """The schedule decides."""
        if cell.step in self._exact:
            return _ANCHOR
        weights = over_levels(f"StepReuse(order={self.history - 1})", evidence)
        if len(weights) == 1:
            return _REPLAY
        return Decision(Action.PREDICT, Reason.SCHEDULE, weights=weights, level=f"order {len(weights) - 1}")
