"""`check_adapter`: does an adapter say the truth about a model? In the spirit of Gymnasium's `check_env`.

A short rollout is run again and again, bare and under a cache whose decisions are given, and what an adapter promises
is held against what is seen. It proves nothing about any method: only that methods may trust this adapter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rollcache.adapters.check_calls import Skipped
from rollcache.adapters.check_skips import SkipChecks
from rollcache.adapters.registry import find
from rollcache.adapters.rehearse import Calls, Failed
from rollcache.adapters.spec import Adapter, marked
from rollcache.adapters.state import Snapshot
from rollcache.passes import RollcacheError

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """What came of one check.

    Attributes:
        name: of the check.
        status: `skipped` if the rollout showed nothing to check, or something that the check needs failed.
        why: what was seen.
    """

    name: str
    status: Status
    why: str


@dataclass(frozen=True)
class AdapterReport:
    """What came of all checks; printed, one line a check.

    Attributes:
        model: name of the model's class.
        findings: in the order of the checks.
    """

    model: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The checks that failed."""
        return tuple(f for f in self.findings if f.status == "failed")

    def __getitem__(self, name: str) -> Finding:
        """The finding of a check."""
        return next(f for f in self.findings if f.name == name)

    def __str__(self) -> str:
        count = Counter(f.status for f in self.findings)
        head = f"adapter of {self.model}: " + ", ".join(f"{count[s]} {s}" for s in ("passed", "failed", "skipped"))
        width = max(len(f.name) for f in self.findings)
        return "\n".join([head, *(f"  {f.status:7}  {f.name:{width}}  {f.why}" for f in self.findings)])

    def raise_for_failures(self) -> None:
        """Raise if a check failed.

        Raises:
            RollcacheError: with the whole report.
        """
        if not self.passed:
            raise RollcacheError(str(self))


def check_adapter(
    model: nn.Module, make_inputs: Callable[..., Calls], *, adapter: Adapter | None = None
) -> AdapterReport:
    """Run a short rollout of a model in many ways, and check what its adapter says against what is seen.

    Use a small random model on the CPU: the rollout is run some thirty times. The model is left as it was.

    Args:
        model: the model, without a cache on it.
        make_inputs: gives the calls `(args, kwargs)` of the model in one rollout, in order, as an iterable; better as a
            generator, written like the loop itself, with `out = yield args, kwargs` where the loop calls the model.
            Three chunks or more, and more than the window of K/V holds, so that it is seen to move; with everything
            that belongs to a chunk: all steps, all branches, commit passes. It is called for every run, and must each
            time begin a new generation with the same numbers: its own seed, fresh K/V. More is checked if it takes one
            of these keywords: `batch`, the batch size; `reverse`, to call the branches of a step in the opposite
            order.
        adapter: by default that of the exact class or the structure of the model, as `enable` finds it.

    Returns:
        What was found. Nothing is raised, whatever is wrong with the adapter.

    Raises:
        RollcacheError: there is no adapter, or one that leaves it to marks where a call is.
    """
    found = find(model) if adapter is None else adapter
    if found.locate is marked:
        raise RollcacheError("an adapter without locate() says nothing about calls that could be checked.")
    held = Snapshot(model)
    with torch.no_grad():
        try:
            return AdapterReport(type(model).__name__, tuple(_examine(SkipChecks(model, found, make_inputs))))
        finally:
            held.put_back()


def _examine(its: SkipChecks) -> Iterator[Finding]:
    """All checks in order. Those that need a failed one are skipped."""
    failed: set[str] = set()
    for name, check, needs in (
        ("reproducible", its.reproducible, ()),
        ("blocks", its.listed, ("reproducible",)),
        ("exact when nothing is skipped", its.exact, ("reproducible", "blocks")),
        ("positions", its.positions, ("exact when nothing is skipped",)),
        ("commit passes", its.commits, ("exact when nothing is skipped", "positions")),
        ("K/V writes", its.writes, ("exact when nothing is skipped",)),
        ("residuals", its.residuals, ("positions",)),
        ("K/V after skipped passes", its.kv, ("positions",)),
        ("what a skipped block returns", its.stand_ins, ("exact when nothing is skipped",)),
        ("blocks that write in place", its.in_place, ("exact when nothing is skipped",)),
        ("shapes that change", its.shapes, ("positions",)),
        ("another batch size", its.batch, ("positions",)),
        ("order of branches", its.branches, ("positions",)),
        ("a second rollout", its.second, ("positions",)),
        ("an exception half-way", its.exception, ("positions",)),
        ("what methods may look at", its.shown, ("exact when nothing is skipped",)),
        ("repair of all tokens", its.sparse, ("exact when nothing is skipped",)),
        ("detached", its.detached, ()),
    ):
        missing = [need for need in needs if need in failed]
        if missing:
            failed.add(name)
            yield Finding(name, "skipped", f"needs: {missing[0]}")
            continue
        try:
            yield Finding(name, "passed", check())
        except Skipped as skipped:
            yield Finding(name, "skipped", str(skipped))
        except Failed as wrong:
            failed.add(name)
            yield Finding(name, "failed", str(wrong))
        except Exception as error:
            failed.add(name)
            yield Finding(name, "failed", f"{type(error).__name__}: {error}")
