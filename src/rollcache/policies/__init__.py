"""Caching methods, one file each."""

from rollcache.policies.base import Evidence, Policy, PolicyConfig, Similarity
from rollcache.policies.window_reuse import WindowReuse
from rollcache.policies.xcache import XCache

__all__ = ["Evidence", "Policy", "PolicyConfig", "Similarity", "WindowReuse", "XCache"]
