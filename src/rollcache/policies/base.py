"""What a caching method is: a pure decision per cell, from evidence.

A method is two classes. Its *config* is a frozen dataclass that a user writes down; its *policy* is built from it for
every rollout and holds whatever the method remembers. Neither ever sees a model. A `Policy` decides block by block (or
span by span) from fingerprints; a `StackPolicy` decides once a pass about the whole stack, and may look at the tensors
that the adapter shows it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import nan
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

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


class Stored(NamedTuple):
    """A stored residual of the whole stack, as a policy sees it.

    Attributes:
        chunk: when it was computed.
        step: likewise.
        time: noise level of that pass, if the adapter tells it.
        residual: output minus input of the stack [B, L, C], in the storage dtype. Never to be written to.
    """

    chunk: int
    step: int
    time: float | None
    residual: Tensor


class StackEvidence(Evidence):
    """What is known before, and after, one pass of the whole stack. Everything is made when a policy asks for it.

    Attributes:
        where: the pass under way.
        age: chunks since the newest stored residual was computed.
        replays: how many passes in a row were not computed.
        stored: stored residuals, the newest first; at most `StackPolicy.history`.
        repairable: whether the K/V that a sparse repair needs is there.
        memo: for a policy, to keep between `decide` and `conclude` what it measured.
        output: hidden state [B, L, C] that left the stack; None before.
    """

    def __init__(
        self,
        where: Pass,
        show: Callable[[str], Tensor],
        *,
        numbers: Callable[[Tensor], list[float]] = lambda x: x.tolist(),
        stored: tuple[Stored, ...] = (),
        repairable: bool = False,
        age: int = 0,
        replays: int = 0,
        moved: Callable[[], Moved] = lambda: UNMOVED,
    ) -> None:
        """Bundle facts, and ways to look."""
        super().__init__(where, age=age, replays=replays, moved=moved)
        self.stored = stored
        self.repairable = repairable
        self.output: Tensor | None = None
        self.memo: dict[str, Any] = {}
        self.numbers = numbers
        """Scalars [n] as numbers: the largest that any rank has. One host synchronisation."""
        self._show = show
        self._shown: dict[str, Tensor] = {}

    @property
    def hidden(self) -> Tensor:
        """Hidden state [B, L, C] that enters the stack."""
        return self._see("hidden")

    @property
    def latent(self) -> Tensor:
        """Noisy latent of every token [B, L, Z]."""
        return self._see("latent")

    @property
    def modulated(self) -> Tensor:
        """What block 0 attends with: its input, normalised, scaled and shifted [B, L, C]."""
        return self._see("modulated")

    @property
    def embedding(self) -> Tensor:
        """Embedding of the timestep (and whatever is added to it) that modulates the blocks; any shape."""
        return self._see("embedding")

    def _see(self, name: str) -> Tensor:
        if name not in self._shown:
            self._shown[name] = self._show(name)
        return self._shown[name]


class StackPolicy(Policy):
    """A method that decides once a pass about the whole stack, in one rollout.

    The engine computes without asking: passes that write K/V (`kv_write`), warm-up chunks, and passes for which nothing
    usable is stored. Across steps it also computes when a condition moved in the middle of a chunk.

    Attributes:
        steps: denoising steps of a chunk that the method is set up for; None takes any number.
        history: computed residuals that are kept.
        repairs: whether it ever decides to `REPAIR`.
        backend: how repairs are done. `sparse` runs the chosen tokens alone, and needs an adapter that can; `refresh`
            runs all and keeps the chosen ones.
    """

    across: Literal["chunks", "steps"] = "steps"
    warmup_chunks = 0
    sampling = None
    steps: int | None = None
    history: int = 1
    repairs: bool = False
    backend: Literal["sparse", "refresh"] = "sparse"

    def __init__(self, blocks: int) -> None:
        """One span: the whole stack."""
        self.spans = (range(blocks),)

    @property
    def name(self) -> str:
        """What a user calls the method."""
        return type(self).__name__.removesuffix("Policy")

    @abstractmethod
    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        """Decide about one pass. Has no effect but on `evidence.memo`."""

    def conclude(self, cell: Cell, decision: Decision, evidence: StackEvidence) -> None:
        """The pass is over, and this was done: learn from it. Called after every denoise pass of the model."""


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
