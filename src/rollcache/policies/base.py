"""What a caching method is: a pure decision per cell, from evidence.

A method is two classes. Its *config* is a frozen dataclass that a user writes down; its *policy* is built from it for
every rollout and holds whatever the method remembers. Neither ever sees a model or a hidden state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import nan
from typing import Literal, Protocol

from rollcache.conditions import UNMOVED, Moved
from rollcache.decision import Decision, Record
from rollcache.fingerprint import Sampling, Similarity
from rollcache.passes import Cell, Pass

UNKNOWN = Similarity(nan, nan)


class Evidence:
    """What is known about a cell with a stored residual. What costs something is measured when a policy asks for it.

    Attributes:
        where: the pass under way.
        age: chunks since the residual was computed.
        replays: how many times in a row it was replayed.
    """

    def __init__(
        self,
        where: Pass,
        *,
        age: int = 1,
        replays: int = 0,
        measure: Callable[[], Similarity] = lambda: UNKNOWN,
        moved: Callable[[], Moved] = lambda: UNMOVED,
    ) -> None:
        """Bundle facts and the two measurements that may be taken."""
        self.where = where
        self.age = age
        self.replays = replays
        self._measure = measure
        self._moved = moved

    @property
    def similarity(self) -> Similarity:
        """Compares fingerprints."""
        return self._measure()

    @property
    def moved(self) -> Moved:
        """Compares conditions."""
        return self._moved()


class Policy(ABC):
    """A method in one rollout.

    The engine computes without asking: anchors (blocks in no span), warm-up chunks, passes of other roles than
    `DENOISE`, and cells for which nothing usable is stored.

    Attributes:
        across: what a stored residual is reused for. `chunks`: the same step of later chunks. `steps`: later steps of
            the same chunk; then one residual per span and branch is kept, and every chunk begins with none.
        spans: the blocks that may be replayed, as ranges in block order. One decision covers one span.
        warmup_chunks: chunks computed in full at the start of a rollout, and after everything that invalidates it.
        sampling: what fingerprints must show; None when `Evidence.similarity` is never asked for.
    """

    across: Literal["chunks", "steps"] = "chunks"
    spans: tuple[range, ...]
    warmup_chunks: int
    sampling: Sampling | None

    @abstractmethod
    def decide(self, cell: Cell, evidence: Evidence) -> Decision:
        """Decide about one cell. Has no effect: the same question gives the same answer."""

    def observe(self, cell: Cell, decision: Decision) -> None:  # noqa: B027
        """Learn that a decision about a cell was executed."""

    def reset(self) -> None:  # noqa: B027
        """Forget everything: a new rollout begins."""


class PolicyConfig(Protocol):
    """The settings of a method, immutable and printable."""

    def build(self, blocks: int) -> Policy:
        """A policy for one rollout of a model with so many blocks.

        Raises:
            RollcacheError: the settings do not fit that number of blocks.
        """
        ...

    def explain(self, record: Record) -> str:
        """One sentence on why a decision was taken, with the numbers and the limits they were held against."""
        ...
