"""What a chunk looks like from the inside: the trajectory that all errors are measured on.

`Recorder` hands out every denoise pass of any model with an adapter, at full compute or under another method:

    seen = []
    with rollcache.enable(model, Recorder(hand=seen.append)):
        ...  # denoise one chunk
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rollcache.decision import Action, Decision, Reason, Record
from rollcache.passes import Cell, RollcacheError
from rollcache.policies.base import PolicyConfig, StackEvidence, StackPolicy

_COMPUTE = Decision(Action.COMPUTE, Reason.SCHEDULE)


@dataclass(frozen=True)
class Seen:
    """One denoise pass.

    Attributes:
        step: from 0.
        branch: classifier-free-guidance branch.
        time: noise level sigma, if the adapter tells it.
        computed: whether the stack ran.
        hidden: what entered the stack [B, L, C].
        output: what left it [B, L, C].
        latent: noisy latent of every token [B, L, Z]; None where the recorder was told to leave it out.
    """

    step: int
    branch: str
    time: float | None
    computed: bool
    hidden: Tensor
    output: Tensor
    latent: Tensor | None

    @property
    def residual(self) -> Tensor:
        """What the stack added [B, L, C], in float32."""
        return self.output.float() - self.hidden.float()


@dataclass(frozen=True)
class Trajectory:
    """A chunk at full compute.

    Attributes:
        sigmas: noise levels [N + 1], falling to 0.
        latents: before every step, and at the end: N + 1 tensors of one shape.
        seen: N passes.
    """

    sigmas: tuple[float, ...]
    latents: tuple[Tensor, ...]
    seen: tuple[Seen, ...]

    @property
    def steps(self) -> int:
        """N."""
        return len(self.seen)

    def velocity(self, step: int) -> Tensor:
        """What the model said at a step, from the Euler step that was taken."""
        return (self.latents[step] - self.latents[step + 1]) / (self.sigmas[step] - self.sigmas[step + 1])


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """Settings of the recorder.

    Attributes:
        hand: called after every denoise pass. The tensors are copies.
        method: what decides about the passes, a method across steps; None computes all of them.
        latents: also hand out the latent; needs an adapter that shows it.
    """

    hand: Callable[[Seen], object]
    method: PolicyConfig | None = None
    latents: bool = False

    def build(self, blocks: int) -> RecorderPolicy:
        """See `PolicyConfig.build`."""
        inner = None if self.method is None else self.method.build(blocks)
        if inner is not None and not isinstance(inner, StackPolicy):
            raise RollcacheError(f"method={type(self.method).__name__} decides about blocks, not about whole passes.")
        return RecorderPolicy(self, blocks, inner)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        if self.method is not None:
            return self.method.explain(record)
        return f"Chunk {record.chunk}, step {record.step}, whole stack ({record.branch}): computed and recorded."


class RecorderPolicy(StackPolicy):
    """The recorder in one rollout."""

    def __init__(self, config: Recorder, blocks: int, inner: StackPolicy | None) -> None:
        """Settings, the depth of the stack, and the method that decides."""
        super().__init__(blocks)
        self._config, self._inner = config, inner
        if inner is not None:
            self.across, self.warmup_chunks = inner.across, inner.warmup_chunks
            self.steps, self.history = inner.steps, inner.history
            self.repairs, self.backend = inner.repairs, inner.backend

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        """As the method does."""
        return _COMPUTE if self._inner is None else self._inner.decide(cell, evidence)

    def conclude(self, cell: Cell, decision: Decision, evidence: StackEvidence) -> None:
        """Hand the pass out."""
        if self._inner is not None:
            self._inner.conclude(cell, decision, evidence)
        assert evidence.output is not None
        self._config.hand(
            Seen(
                step=cell.step,
                branch=cell.branch,
                time=evidence.where.time,
                computed=decision.action is Action.COMPUTE,
                hidden=evidence.hidden.clone(),
                output=evidence.output.clone(),
                latent=evidence.latent.clone() if self._config.latents else None,
            )
        )

    def reset(self) -> None:
        """Likewise."""
        if self._inner is not None:
            self._inner.reset()
