"""What a lane computed and what it replayed: a compact record for result files, skip rates and the cost ceiling.

A chunk is written as one word per denoising step with one letter per block: `C` computed, `R` replayed, `P` computed
for part of the tokens. A chunk that was emitted without any pass of the transformer has no words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollcache.decision import Action
from rollcache.measure import Ceiling, PassTimes, ceiling

if TYPE_CHECKING:
    from rollcache.bench.lanes import Lane
    from rollcache.street.protocol import Protocol

COMPUTED, REPLAYED, PARTLY = "C", "R", "P"


@dataclass(frozen=True)
class Window:
    """The chunks that count for speed and skip: whole KV cycles after the first one.

    Attributes:
        first: first chunk that counts.
        stop: one past the last.
        commits: commit passes among them.
        whole: False when the rollout was too short for a whole cycle after the first; then all chunks after the first
            chunk count, and their time tells nothing about a cycle: there is no speedup.
    """

    first: int
    stop: int
    commits: int
    whole: bool

    @classmethod
    def of(cls, chunks: int, protocol: Protocol) -> Window:
        """The window of a rollout of `chunks` chunks.

        Raises:
            ValueError: fewer than two chunks.
        """
        every = protocol.kv_every
        if chunks < 2:
            generated = "1 chunk" if chunks == 1 else f"{chunks} chunks"
            raise ValueError(f"{generated} generated; at least 2 are needed, since the first is warm-up.")
        stop = chunks - chunks % every
        if stop >= 2 * every:
            return cls(every, stop, (stop - every) // every, True)
        return cls(1, chunks, sum(commits_in(n, protocol) for n in range(1, chunks)), False)

    @property
    def chunks(self) -> range:
        """The chunks that count."""
        return range(self.first, self.stop)

    def describe(self) -> str:
        """For captions."""
        what = "whole KV cycles after the first" if self.whole else "all chunks after the first"
        return f"chunks {self.first} to {self.stop - 1} ({what})"


def commits_in(chunk: int, protocol: Protocol) -> int:
    """Commit passes of one generation step."""
    if protocol.kind in ("receding", "sliding"):
        return int(chunk % protocol.kv_every == protocol.kv_every - 1)
    return int(chunk % protocol.kv_every == 0)


@dataclass(frozen=True)
class Decisions:
    """What one lane did.

    Attributes:
        words: per chunk, per step: one letter per block; an empty chunk has no steps.
        steps: denoising steps of the lane.
        depth: blocks of the transformer.
        reasons: cells by reason, whole rollout.
        left_out: share of the tokens that were left out, by (chunk, step) that was computed in part.
    """

    words: tuple[tuple[str, ...], ...]
    steps: int
    depth: int
    reasons: dict[str, int]
    left_out: Mapping[tuple[int, int], float] = field(default_factory=dict)

    @classmethod
    def of(cls, lane: Lane) -> Decisions:
        """Read the trace of a lane's cache, or what its loop did without one."""
        protocol = lane.session.protocol
        depth = len(lane.session.world.model.blocks)
        chunks = len(lane.passes)
        empty = {n for n, passes in enumerate(lane.passes) if passes <= commits_in(n, protocol)}
        grid = [[[COMPUTED] * depth for _ in range(protocol.steps)] for _ in range(chunks)]
        reasons: Counter[str] = Counter()
        left_out: dict[tuple[int, int], float] = {}
        for r in lane.handle.trace if lane.handle is not None else ():
            if r.role != "denoise" or not 0 <= r.chunk < chunks or r.chunk in empty:
                continue
            reasons[str(r.reason)] += r.blocks
            if r.action is not Action.COMPUTE:
                letter = PARTLY if r.action is Action.REPAIR else REPLAYED
                grid[r.chunk][r.step][r.block : r.block + r.blocks] = [letter] * r.blocks
            if r.action is Action.REPAIR:
                left_out[r.chunk, r.step] = 1 - r.share
        words = tuple(() if n in empty else tuple("".join(word) for word in step) for n, step in enumerate(grid))
        return cls(words, protocol.steps, depth, dict(reasons.most_common()), left_out)

    def skipped(self, window: Window) -> list[tuple[int, int, int]]:
        """Replayed cells (chunk, step, block) of the chunks that count, chunks without passes left out."""
        return [
            (n, t, b)
            for n in window.chunks
            for t, word in enumerate(self.words[n])
            for b, letter in enumerate(word)
            if letter == REPLAYED
        ]

    def empty(self, window: Window) -> list[int]:
        """Chunks that count and ran no denoise pass."""
        return [n for n in window.chunks if not self.words[n]]

    def ceiling(self, times: PassTimes, window: Window) -> Ceiling:
        """The most that this skip allows; its skip rate is skipped / denoise cells of the chunks that count."""
        return ceiling(
            times,
            chunks=window.stop,
            steps=self.steps,
            skipped=self.skipped(window),
            parts={(n, t, b): x for (n, t), x in self.left_out.items() for b in range(self.depth)},
            empty_chunks=self.empty(window),
            commits=window.commits,
            warmup=window.first,
        )

    def by_step_block(self, window: Window) -> list[list[float]]:
        """Share of a cell that was skipped in the chunks that count, [step][block]."""
        count = len(window.chunks)
        return [
            [sum(self._left_out(n, t, b) for n in window.chunks) / count for b in range(self.depth)]
            for t in range(self.steps)
        ]

    def by_phase(self, window: Window, cycle: int) -> list[float]:
        """Share of cells skipped per position in the KV cycle."""
        rates = []
        for phase in range(cycle):
            chunks = [n for n in window.chunks if n % cycle == phase]
            cells = [self._left_out(n, t, b) for n in chunks for t in range(self.steps) for b in range(self.depth)]
            rates.append(sum(cells) / len(cells) if cells else 0.0)
        return rates

    def _left_out(self, n: int, t: int, b: int) -> float:
        """Share of the tokens that a cell was not computed for."""
        letter = self.words[n][t][b] if self.words[n] else REPLAYED
        return {COMPUTED: 0.0, REPLAYED: 1.0, PARTLY: self.left_out.get((n, t), 0.0)}[letter]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a result file."""
        return {
            "letters": {COMPUTED: "computed", REPLAYED: "replayed", PARTLY: "computed in part"},
            "chunks": [list(words) for words in self.words],
            "reasons": self.reasons,
        }
