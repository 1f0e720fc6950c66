"""Two methods on one model: one decides about whole passes, the other about the blocks of those that are computed."""

from __future__ import annotations

from dataclasses import dataclass

from rollcache.decision import Decision, Record
from rollcache.passes import Cell, RollcacheError
from rollcache.policies.base import Evidence, Policy, PolicyConfig, StackPolicy


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """A method across steps, and a method block by block inside the passes that the first one computes.

    A pass that is replayed, predicted or repaired is noted once; of a computed one its blocks are noted. So nothing is
    counted twice. What the inner method replays inside an anchor makes that anchor an approximation.

    Attributes:
        passes: settings of the method that decides about whole passes, e.g. `FSC()`.
        blocks: settings of the method that decides about blocks, e.g. `XCache()`.
    """

    passes: PolicyConfig
    blocks: PolicyConfig

    def build(self, blocks: int) -> StackedPolicy:
        """See `PolicyConfig.build`."""
        outer, inner = self.passes.build(blocks), self.blocks.build(blocks)
        if not isinstance(outer, StackPolicy):
            raise RollcacheError(f"passes={type(self.passes).__name__} decides about blocks, not about whole passes.")
        if isinstance(inner, StackPolicy | StackedPolicy):
            raise RollcacheError(f"blocks={type(self.blocks).__name__} decides about whole passes, not about blocks.")
        return StackedPolicy(outer, inner)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        whole = record.blocks > 1 or record.level or record.drift == record.drift
        return (self.passes if whole else self.blocks).explain(record)


class StackedPolicy(Policy):
    """Both methods in one rollout; the engine asks each in its place."""

    def __init__(self, outer: StackPolicy, inner: Policy) -> None:
        """Bundle them."""
        self.outer, self.inner = outer, inner
        self.spans = inner.spans
        self.warmup_chunks = inner.warmup_chunks
        self.sampling = inner.sampling

    def decide(self, cell: Cell, evidence: Evidence) -> Decision:
        """The block-wise method decides about blocks."""
        return self.inner.decide(cell, evidence)

    def observe(self, cell: Cell, decision: Decision) -> None:
        """Likewise."""
        self.inner.observe(cell, decision)

    def reset(self) -> None:
        """Forget everything."""
        self.outer.reset()
        self.inner.reset()


def split(policy: Policy) -> tuple[StackPolicy | None, Policy | None]:
    """The part of a method that decides about whole passes, and the part that decides about blocks."""
    if isinstance(policy, StackedPolicy):
        return policy.outer, policy.inner
    return (policy, None) if isinstance(policy, StackPolicy) else (None, policy)
