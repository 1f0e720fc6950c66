"""TaylorSeer: compute every N-th step, and continue the trajectory of the residual through the last computed ones.

Predicted is the residual of the whole stack, as a weighted sum of the `order` + 1 that were computed last in this
chunk. The schedule is fixed: `warmup` steps, then every `interval`-th after the last computed one. With F_1, F_2, F_3
the computed residuals, the newest first, at positions x_1, x_2, x_3 (step indices, or noise levels), and x the present
one, the prediction is the polynomial through them, in Newton's form:

    F(x) = F_1 + (x - x_1) F[1,2] + (x - x_1)(x - x_2) F[1,2,3]
    F[i,j] = (F_i - F_j) / (x_i - x_j),   F[1,2,3] = (F[1,2] - F[2,3]) / (x_1 - x_3)

and as weights, in Lagrange's: F(x) = sum_i F_i * prod over j != i of (x - x_j) / (x_i - x_j). That is exact for
polynomials of that order, whatever the gaps. Where fewer residuals are stored than it takes, the order is lower.

Source: "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers", arXiv 2503.06923; repository
Shenyi-Z/TaylorSeer; the hook `taylorseer_cache` of diffusers. Two things are different there.

Their factors are D_0 = F, D_(k+1) = (D_k now - D_k at the computed step before) / (gap between these two), and the
prediction is sum_k (x - x_1)^k / k! * D_k. Up to order 1 that is the same. At order 2 the derivative is that at the
middle of the last gaps, taken for the one at x_1: with even gaps the weight of the second difference is s^2/2 instead
of s(s+1)/2, s = (x - x_1) / gap, so a parabola is not met. `form="published"` gives their weights.

They predict the output of every attention and every feed-forward module; here the sum of all of them is predicted.
For a pass that is predicted from end to end the two are equal: what modules add to the hidden state is predicted with
the same weights for all, and a weighted sum of sums is the sum of weighted sums. That is so where the module's gated
output is what is predicted. Implementations that predict it before the gate, and gate it with the present timestep's,
differ by how much the gate changed. The memory does differ: `order` + 1 tensors a branch here, as many a module there.

Settings that are published: the diffusers hook has interval 5, warm-up 3, order 1; the project page shows interval 4,
order 2 for HiDream-Full at 4.0x; the abstract claims 4.99x on FLUX and 5.00x on HunyuanVideo, over 50 steps. Ours:
noise levels as positions (`in_sigma`), and exact last steps (`tail`). `interval=1` computes everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollcache.decision import Action, Decision, Reason, Record
from rollcache.passes import Cell, RollcacheError
from rollcache.policies.base import StackEvidence, StackPolicy
from rollcache.policies.extrapolation import Form, distinct, extrapolation
from rollcache.settings import check_choice, check_count

_EXACT = Decision(Action.COMPUTE, Reason.SCHEDULE)
_REPLAY = Decision(Action.REPLAY, Reason.SCHEDULE)


@dataclass(frozen=True, kw_only=True)
class TaylorSeer:
    """Settings of TaylorSeer.

    Every chunk begins anew, and branches have residuals of their own. Passes that write K/V are computed.

    Attributes:
        steps: denoising steps of a chunk.
        interval: from one computed step to the next (N). The speed knob; 1 computes everything.
        warmup: steps that are computed at the start of a chunk.
        order: of the polynomial: 0 reuses, 1 continues a line, 2 a parabola.
        in_sigma: continue it in noise level instead of step index; needs a loop that tells them (`Pass.time`).
        tail: steps that are computed at its end.
        form: `newton` is exact for polynomials, `published` is the paper's sum; they differ at order 2 only.
    """

    steps: int
    interval: int = 5
    warmup: int = 3
    order: int = 1
    in_sigma: bool = False
    tail: int = 0
    form: Form = "newton"

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 1)
        check_count("interval", self.interval, 1)
        check_count("warmup", self.warmup)
        check_count("tail", self.tail)
        if self.warmup + self.tail > self.steps:
            raise ValueError(
                f"warmup={self.warmup} and tail={self.tail} are more than the {self.steps} steps of a chunk."
            )
        check_count("order", self.order)
        if self.order > 2:
            raise ValueError(f"order must be 0, 1 or 2, got {self.order}.")
        check_choice("form", self.form, Form)

    def build(self, blocks: int) -> TaylorSeerPolicy:
        """See `PolicyConfig.build`."""
        return TaylorSeerPolicy(self, blocks)

    def explain(self, record: Record) -> str:
        """See `PolicyConfig.explain`."""
        did = {Action.REPLAY: "replayed", Action.PREDICT: "predicted"}.get(record.action, "computed")
        level = f" to {record.level}" if record.level else ""
        return (
            f"Chunk {record.chunk}, step {record.step}, whole stack ({record.branch}): {did}{level}, {record.reason}: "
            f"the first {self.warmup} of {self.steps} steps are computed, then one in {self.interval}."
        )


class TaylorSeerPolicy(StackPolicy):
    """TaylorSeer in one rollout; remembers nothing of its own."""

    def __init__(self, config: TaylorSeer, blocks: int) -> None:
        """Settings, and the depth of the stack."""
        super().__init__(blocks)
        self.config = config
        self.steps = config.steps
        self.history = config.order + 1

    def decide(self, cell: Cell, evidence: StackEvidence) -> Decision:  # type: ignore[override]
        """The schedule decides; the positions give the weights."""
        config, step = self.config, cell.step
        if step < config.warmup or step >= config.steps - config.tail:
            return _EXACT
        if step - evidence.stored[0].step >= config.interval:
            return _EXACT
        weights = self._weights(step, evidence)
        if len(weights) == 1:
            return _REPLAY
        return Decision(Action.PREDICT, Reason.SCHEDULE, weights=weights, level=f"order {len(weights) - 1}")

    def _weights(self, step: int, evidence: StackEvidence) -> tuple[float, ...]:
        if not self.config.order:
            return (1.0,)
        at: float | None = step
        found: list[float | None] = [s.step for s in evidence.stored]
        if self.config.in_sigma:
            at, found = evidence.where.time, [s.time for s in evidence.stored]
        known = [x for x in (at, *found) if x is not None]
        if at is None or len(known) <= len(found):
            raise RollcacheError(
                "TaylorSeer(in_sigma=True) needs the noise level of every pass: step(time=...), or an adapter that "
                "tells Pass.time."
            )
        return extrapolation(at, distinct(known[1:]), self.config.form)
