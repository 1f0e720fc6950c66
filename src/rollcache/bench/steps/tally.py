"""What a run decided, pass by pass: counts for prices, and a word per chunk for readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollcache.decision import Action, Record
from rollcache.policies.base import StackPolicy
from rollcache.policies.stacked import StackedPolicy

if TYPE_CHECKING:
    from rollcache.bench.lanes import Lane

LETTERS = {Action.COMPUTE: "C", Action.REPLAY: "-", Action.PREDICT: "p", Action.REPAIR: "r"}
RUNGS = {"C0": "-", "C1": "1", "C2": "2", "C3": "3", "Full": "F", "anchor": "C"}


@dataclass(frozen=True)
class Tally:
    """Denoise passes of a run by what was done; each decision is about a whole pass.

    Attributes:
        chunks: chunks.
        commits: commit passes.
        computed: passes with all tokens.
        skipped: replayed and predicted ones.
        repairs: share of the tokens of every repaired one.
        levels: passes by rung of the method, or by action where it has none.
        reasons: passes by reason.
        words: per chunk one letter a step: C computed, - replayed, p predicted, r repaired; of a method with rungs
            1, 2, 3 for its repairs and F for a full repair.
        dense: repairs ran all tokens and kept some.
    """

    chunks: int
    commits: int
    computed: int
    skipped: int
    repairs: tuple[float, ...]
    levels: dict[str, int]
    reasons: dict[str, int]
    words: tuple[str, ...]
    dense: bool = False

    @classmethod
    def of(cls, lane: Lane) -> Tally:
        """Read the trace of a lane's cache, or what its loop did without one."""
        chunks, steps = len(lane.passes), lane.session.protocol.steps
        commits = sum(lane.passes) - chunks * steps
        if lane.handle is None:
            count = chunks * steps
            named = {"compute": count}
            return cls(chunks, commits, count, 0, (), named, {"no cache": count}, ("C" * steps,) * chunks)
        built = lane.plan.policy.build(len(lane.session.world.model.blocks))
        outer = built.outer if isinstance(built, StackedPolicy) else built
        dense = isinstance(outer, StackPolicy) and outer.backend == "refresh"
        return cls.read(lane.handle.trace, chunks=chunks, commits=commits, steps=steps, dense=dense)

    @classmethod
    def read(cls, records: Iterable[Record], *, chunks: int, commits: int, steps: int, dense: bool = False) -> Tally:
        """Of the records of whole passes; those of blocks make one computed pass together."""
        grid = [["C"] * steps for _ in range(chunks)]
        levels: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        repairs, skipped = [], 0
        seen: set[tuple[int, int]] = set()
        for r in records:
            if r.role != "denoise" or not 0 <= r.chunk < chunks or (r.chunk, r.step) in seen:
                continue
            seen.add((r.chunk, r.step))
            levels[r.level or str(r.action)] += 1
            reasons[str(r.reason)] += 1
            grid[r.chunk][r.step] = RUNGS.get(r.level, LETTERS[r.action])
            if r.action is Action.REPAIR:
                repairs.append(r.share)
            elif r.action is not Action.COMPUTE:
                skipped += 1
        computed = chunks * steps - skipped - len(repairs)
        words = tuple("".join(word) for word in grid)
        found = (dict(levels.most_common()), dict(reasons.most_common()))
        return cls(chunks, commits, computed, skipped, tuple(repairs), *found, words, dense)

    @property
    def exact(self) -> float:
        """Passes' worth of tokens that ran through the blocks: exact-equivalent steps of the whole run."""
        return self.computed + sum(1.0 if self.dense else q for q in self.repairs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a result file."""
        total = self.computed + self.skipped + len(self.repairs)
        return {
            "levels": self.levels,
            "shares": {name: count / total for name, count in self.levels.items()},
            "reasons": self.reasons,
            "words": list(self.words),
            "exact_steps_per_window": self.exact / self.chunks,
            "repair_shares": list(self.repairs),
        }
