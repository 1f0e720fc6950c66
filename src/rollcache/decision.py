"""Decisions as values, and the trace that stats, explanations, reports and tests all read."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import nan
from typing import Any, NamedTuple

from rollcache.passes import Cell, Pass, RollcacheError
from rollcache.tokens import Tokens


class Action(StrEnum):
    """What to do with a span."""

    COMPUTE = "compute"
    """Run the blocks and keep their residual."""
    REPLAY = "replay"
    """Add the stored residual instead."""
    PREDICT = "predict"
    """Add a combination of several stored residuals instead."""
    REPAIR = "repair"
    """Run the blocks for chosen tokens, and add the stored residual of the others."""


class Reason(StrEnum):
    """Why."""

    WARMUP = "warm-up"
    INVALIDATED = "state was invalidated in this chunk"
    ANCHOR = "anchor block"
    NOTHING_STORED = "nothing stored"
    NOT_FINITE = "evidence is not finite"
    PROTECTED = "commit protection"
    REQUIRED = "the model needs this pass computed"
    FIRST_STEP = "first-step protection"
    FRESH_NOISE = "the chunk starts from new noise"
    STALE = "replayed too often in a row"
    CONDITION = "the conditions moved"
    COSINE = "input is not similar enough"
    DEVIATION = "input deviates too much somewhere"
    SIMILAR = "similar"
    SCHEDULE = "the schedule says so"
    DRIFT = "it drifted too far"
    STEADY = "it drifted little"
    NO_ROOM = "there was no room for what a repair needs"


class Decision(NamedTuple):
    """An action with its reason and the numbers it was taken on; `nan` where a number was not needed.

    Attributes:
        action: what to do.
        reason: why.
        cosine: smallest cosine over the entries of the fingerprint.
        threshold: what `cosine` had to reach.
        deviation: largest deviation over the view groups.
        condition_distance: how far the conditions moved since the residual was computed.
        drift: what a method across steps measured.
        limit: what `drift` was held against.
        weights: of the stored residuals that are added, the newest first. One residual for `REPLAY`.
        tokens: what `REPAIR` computes.
        share: tokens that run through the blocks, as a share of all.
        level: name of the rung of a method that has several.
    """

    action: Action
    reason: Reason
    cosine: float = nan
    threshold: float = nan
    deviation: float = nan
    condition_distance: float = nan
    drift: float = nan
    limit: float = nan
    weights: tuple[float, ...] = (1.0,)
    tokens: Tokens | None = None
    share: float = nan
    level: str = ""


class Record(NamedTuple):
    """A decision and where it was taken.

    `blocks` counts the blocks from `block` on that it covers; `source` is the chunk whose residual was in question, if
    any.
    """

    chunk: int
    step: int
    block: int
    blocks: int
    branch: str
    role: str
    action: Action
    reason: Reason
    cosine: float
    threshold: float
    deviation: float
    condition_distance: float
    source: int | None
    rollout: Hashable
    drift: float = nan
    limit: float = nan
    share: float = nan
    level: str = ""

    def line(self) -> str:
        """One line of text, stable over machines: the unit of a golden trace."""
        last = self.block + self.blocks - 1
        blocks = f"{self.block}" if self.blocks == 1 else f"{self.block}-{last}"
        numbers = "" if self.cosine != self.cosine else f"  cos {self.cosine:.3f} / {self.threshold:.4g}"
        if self.drift == self.drift:
            numbers += f"  drift {self.drift:.4g} / {self.limit:.4g}"
        level = f" {self.level}" if self.level else ""
        return f"{self.chunk} {self.step} {self.branch} {blocks}: {self.action}{level} ({self.reason}){numbers}"


@dataclass(frozen=True, slots=True)
class Stats:
    """What a cache did. Block evaluations of denoise passes are counted as cells, whatever the span of a decision.

    Attributes:
        chunks: generation steps seen, those emitted without any pass included.
        passes: number of forwards by role.
        cells: denoise block evaluations after warm-up, the denominator of `skip_rate`.
        skipped: replayed or predicted ones among them.
        computed: computed ones among them.
        repaired: ones among them that were run for chosen tokens only.
        tokens: share of the token-block evaluations that were run: 1 for a computed cell, 0 for a skipped one.
        warmup_cells: block evaluations in warm-up chunks, not counted above.
        skip_rate: `1 - tokens`, which is `skipped / cells` where nothing is repaired (0 before any).
        by_step_block: fraction skipped or left out of repairs after warm-up, `[step][block]`, all branches together.
        reasons: cells after warm-up by reason.
        gate_seconds: host time spent on fingerprints, evidence and decisions; 0 unless `timing` is on.
        keep_seconds: host time spent on computing and storing residuals; likewise.
        replay_seconds: host time spent on adding residuals; likewise.
        bytes_predicted: what the cache will hold, from the shapes of the first passes.
        bytes_actual: what it holds.
    """

    chunks: int
    passes: dict[str, int]
    cells: int
    skipped: int
    computed: int
    warmup_cells: int
    skip_rate: float
    by_step_block: list[list[float]]
    reasons: dict[str, int]
    gate_seconds: float = 0.0
    keep_seconds: float = 0.0
    replay_seconds: float = 0.0
    bytes_predicted: int = 0
    bytes_actual: int = 0
    repaired: int = 0
    tokens: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary that `json.dump` takes."""
        return asdict(self)


@dataclass(slots=True)
class Trace:
    """The last `capacity` records and the totals over all of them, in memory that does not grow with the rollout.

    Iterating yields the records that are kept, oldest first.
    """

    blocks: int
    capacity: int = 65536
    chunks: int = 0
    passes: Counter[str] = field(default_factory=Counter)
    warmup_cells: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)
    _records: deque[Record] = field(init=False)
    _cells: Counter[tuple[int, int, int, Action]] = field(default_factory=Counter)  # (step, start, stop, action)
    _left_out: dict[tuple[int, int, int], float] = field(default_factory=dict)  # (step, start, stop): cells

    def __post_init__(self) -> None:
        self._records = deque(maxlen=self.capacity)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def note(self, where: Pass, cell: Cell, decision: Decision, source: int | None, warmup: bool) -> None:
        """Record one executed decision."""
        branch, step, start, stop = cell
        d, blocks = decision, stop - start
        action, reason = d.action, d.reason
        place = (where.chunk, step, start, blocks, branch, where.role.value)
        numbers = (d.cosine, d.threshold, d.deviation, d.condition_distance)
        more = (d.drift, d.limit, d.share, d.level)
        self._records.append(Record(*place, action, reason, *numbers, source, where.rollout, *more))
        if warmup:
            self.warmup_cells += blocks
        else:
            self.reasons[reason] += blocks
            self._cells[step, start, stop, action] += 1
            run = 1.0 if action is Action.COMPUTE else d.share if action is Action.REPAIR else 0.0
            self._left_out[step, start, stop] = self._left_out.get((step, start, stop), 0.0) + 1 - run

    def find(
        self, chunk: int, step: int, block: int, branch: str | None = None, rollout: Hashable | None = None
    ) -> Record:
        """The latest record about one block; of any branch and rollout unless they are given.

        Raises:
            RollcacheError: it never was decided, or the record is no longer kept.
        """
        for r in reversed(self._records):
            here = (r.chunk, r.step) == (chunk, step) and 0 <= block - r.block < r.blocks
            if here and branch in (None, r.branch) and rollout in (None, r.rollout):
                return r
        if self._records and chunk < self._records[0].chunk:
            oldest = self._records[0].chunk
            raise RollcacheError(f"chunk {chunk} is no longer in the trace (oldest: {oldest}); raise trace_capacity.")
        raise RollcacheError(f"no decision about chunk {chunk}, step {step}, block {block}, branch {branch or 'any'}.")

    def text(self) -> str:
        """The kept records as lines, see `Record.line`."""
        return "".join(r.line() + "\n" for r in self._records)

    def stats(self) -> Stats:
        """Totals over everything recorded, kept or not."""
        steps = 1 + max((step for step, *_ in self._cells), default=-1)
        seen = [[0] * self.blocks for _ in range(steps)]
        left_out = [[0.0] * self.blocks for _ in range(steps)]
        totals: Counter[Action] = Counter()
        for (step, start, stop, action), count in self._cells.items():
            totals[action] += count * (stop - start)
            for block in range(start, stop):
                seen[step][block] += count
        for (step, start, stop), amount in self._left_out.items():
            for block in range(start, stop):
                left_out[step][block] += amount
        cells, skipped = totals.total(), totals[Action.REPLAY] + totals[Action.PREDICT]
        skip_rate = sum(map(sum, left_out)) / cells if cells else 0.0
        return Stats(
            chunks=self.chunks,
            passes=dict(self.passes),
            cells=cells,
            skipped=skipped,
            computed=totals[Action.COMPUTE],
            repaired=totals[Action.REPAIR],
            tokens=1 - skip_rate,
            warmup_cells=self.warmup_cells,
            skip_rate=skip_rate,
            by_step_block=[
                [r / n if n else 0.0 for r, n in zip(*rows, strict=True)] for rows in zip(left_out, seen, strict=True)
            ],
            reasons={str(reason): count for reason, count in self.reasons.most_common()},
        )
