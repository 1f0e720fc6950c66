"""FSC's risk against the error that it stands for: what would replaying this step have cost?

FSC's anchors run, every other step is replayed and its risk noted, as `RiskProbe` does. The oracle then computes the
stack at the very latents that the run went through: E(s) = |h_replayed - h| / |h|.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollcache.bench.calibrate.splice import Splice
from rollcache.bench.calibrate.window import Window, record
from rollcache.policies.fsc import FSC, RiskProbe


@dataclass(frozen=True)
class Judged:
    """A replayed step.

    Attributes:
        step: which.
        risk: FSC's rho.
        error: E.
    """

    step: int
    risk: float
    error: float


def judge(window: Window, config: FSC) -> tuple[Judged, ...]:
    """All steps between the anchors of `config`, in one window."""
    probe = RiskProbe(config=config)
    run = record(window, probe)
    found = []
    risks = iter(probe.risks)
    with Splice(window.world.model) as splice:
        for seen in run.seen:
            if seen.computed:
                continue
            window.velocity(run.latents[seen.step], seen.step)
            assert splice.left is not None
            exact = splice.left.float()
            found.append(Judged(seen.step, next(risks), float((seen.output.float() - exact).norm() / exact.norm())))
    return tuple(found)
