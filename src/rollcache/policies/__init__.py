"""Caching methods, one file each."""

from rollcache.fingerprint import Similarity
from rollcache.policies.base import Evidence, Policy, PolicyConfig
from rollcache.policies.step_reuse import StepReuse
from rollcache.policies.window_reuse import WindowReuse
from rollcache.policies.xcache import XCache

__all__ = ["Evidence", "Policy", "PolicyConfig", "Similarity", "StepReuse", "WindowReuse", "XCache"]
