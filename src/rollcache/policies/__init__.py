"""Caching methods, one file each."""

from rollcache.fingerprint import Similarity
from rollcache.policies.base import Evidence, Policy, PolicyConfig, StackEvidence, StackPolicy
from rollcache.policies.replan import Replan
from rollcache.policies.stacked import Stacked
from rollcache.policies.step_reuse import StepReuse
from rollcache.policies.window_reuse import WindowReuse
from rollcache.policies.xcache import XCache

__all__ = [
    "Evidence",
    "Policy",
    "PolicyConfig",
    "Replan",
    "Similarity",
    "StackEvidence",
    "StackPolicy",
    "Stacked",
    "StepReuse",
    "WindowReuse",
    "XCache",
]
