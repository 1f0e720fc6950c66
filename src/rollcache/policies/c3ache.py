"""C3ache: at every cacheable step reuse what the whole stack added at the same step of the last refreshed chunk.

Reused is the residual of the whole stack at denoising step k, R_k = h_L - h_0, from the last chunk that computed it.
h_0, the embedding of what is new, and the head always run:

    h_L = h_0 + R_k            where first <= k <= last, and the refresh was fewer than P chunks ago
    h_L = stack(h_0)           otherwise, and R_k is kept

There is no gate: nothing is compared, so nothing notices that the scene or the action changed.

Source: "C3ache", arXiv 2606.08962, on world action models; read were its abstract and community ports. Known from there
is the rule above. Settings of the ports, for want of the paper's own:

| backbone | steps | period | cacheable steps |
|---|---|---|---|
| Fast-WAM | 10 | 4 | 0 to 6 |
| LingBot-VA | 50 | 2 | 5 to 39 |
| Cosmos, edge | 4 | 2 | 0 and 1 |

At least one of the ports draws every chunk from one seed, so that all chunks share their noise. Without that this is
expected to be bad: the residual of a step answers to its noise, and where every chunk draws its own, the noise of an
old chunk is taken out of the new one. It is here as the baseline that a method across chunks has to beat.

Ours: a refresh is counted from the chunk whose residual is stored, so it stays due when a chunk was computed for
another reason. `period=1` computes everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollcache.decision import Action, Decision, Reason, Record
from rollcache.passes import Cell
from rollcache.policies.base import StackEvidence, StackPolicy
from rollcache.settings import check_count

_EXACT = Decision(Action.COMPUTE, Reason.SCHEDULE)


@dataclass(frozen=True, kw_only=True)
class C3ache:
    """Settings of C3ache.

    Branches and steps have residuals of their own. One tensor is kept for every step, cacheable or not. Passes that
    write K/V are computed. If the window leaves no step out, `Cache.skip_chunk` would emit chunks without any pass:
    where h_0 changes from chunk to chunk, leave a step out or do not ask it.

    Attributes:
        period: every how many chunks a residual is refreshed (P). The speed knob; 1 computes everything.
        first: first cacheable step.
        last: last cacheable step, itself included; None is the last of the chunk.
        warmup_chunks: chunks computed in full first.
    """

    period: int = 2
    first: int = 1
    last: int | None = None
    warmup_chunks: int = 1

    def __post_init__(self) -> None:
        check_count("period", self.period, 1)
        check_count("first", self.first)
        if self.last is not None:
            check_count("last", self.last)
            if self.last < self.first:
                raise ValueError(f"last ({self.last}) lies before first ({self.first}): no step would be cacheable.")
        check_count("warmup_chunks", self.warmup_chunks)

    def caches(self, step: int) -> bool:
        """Whether a step is cacheable."""
        return step >= self.first and (self.last is None or step <= self.last)

    def build(self, blocks: int) -> C3achePolicy:
        """See `PolicyConfig.build`."""
        return C3achePolicy(self, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        did = "replayed" if record.action is Action.REPLAY else "computed"
        if not self.caches(record.step):
            last = "the last" if self.last is None else self.last
            why = f": only steps {self.first} to {last} are cacheable"
        elif record.source is None:
            why = ""
        else:
            why = f": refreshed every {self.period} chunks, {record.chunk - record.source} since chunk {record.source}"
        return f"Chunk {record.chunk}, step {record.step}, whole stack ({record.branch}): {did}, {record.reason}{why}."


class C3achePolicy(StackPolicy):
    """C3ache in one rollout; remembers nothing of its own."""

    across = "chunks"

    def __init__(self, config: C3ache, blocks: int) -> None:
        """Settings, and the depth of the stack."""
        super().__init__(blocks)
        self.config = config
        self.warmup_chunks = config.warmup_chunks

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        """The window of steps, then the age of what is stored."""
        if not self.config.caches(cell.step) or evidence.age >= self.config.period:
            return _EXACT
        return Decision(Action.REPLAY, Reason.SCHEDULE)
