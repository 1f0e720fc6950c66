"""The public names. They are imported together, and torch with them, when the first one is used."""

from __future__ import annotations

from rollcache.adapters import Adapter, BlockIO
from rollcache.cache import Cache, disable, enable, summary
from rollcache.decision import Action, Decision, Reason, Record, Stats, Trace
from rollcache.passes import Cell, Condition, Pass, Role, RollcacheError, RollcacheWarning, Segment
from rollcache.policies import (
    Evidence,
    Policy,
    PolicyConfig,
    Replan,
    Similarity,
    Stacked,
    StackEvidence,
    StackPolicy,
    StepReuse,
    WindowReuse,
    XCache,
)
from rollcache.tokens import Tokens

__all__ = [
    "Action",
    "Adapter",
    "BlockIO",
    "Cache",
    "Cell",
    "Condition",
    "Decision",
    "Evidence",
    "Pass",
    "Policy",
    "PolicyConfig",
    "Reason",
    "Record",
    "Replan",
    "Role",
    "RollcacheError",
    "RollcacheWarning",
    "Segment",
    "Similarity",
    "StackEvidence",
    "StackPolicy",
    "Stacked",
    "Stats",
    "StepReuse",
    "Tokens",
    "Trace",
    "WindowReuse",
    "XCache",
    "disable",
    "enable",
    "summary",
]
