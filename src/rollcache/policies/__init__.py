"""Caching methods, one file each."""

from rollcache.fingerprint import Similarity
from rollcache.policies.base import Evidence, Policy, PolicyConfig, StackEvidence, StackPolicy
from rollcache.policies.c3ache import C3ache
from rollcache.policies.easycache import EasyCache
from rollcache.policies.flowcache import FlowCache
from rollcache.policies.fsc import FSC, RiskProbe
from rollcache.policies.magcache import MagCache, MagnitudeProbe
from rollcache.policies.motioncache import MotionCache
from rollcache.policies.replan import Replan
from rollcache.policies.scope import Scope
from rollcache.policies.seacache import SeaCache
from rollcache.policies.stacked import Stacked
from rollcache.policies.step_reuse import StepReuse
from rollcache.policies.taylorseer import TaylorSeer
from rollcache.policies.teacache import TeaCache
from rollcache.policies.window_reuse import WindowReuse
from rollcache.policies.xcache import XCache

__all__ = [
    "FSC",
    "C3ache",
    "EasyCache",
    "Evidence",
    "FlowCache",
    "MagCache",
    "MagnitudeProbe",
    "MotionCache",
    "Policy",
    "PolicyConfig",
    "Replan",
    "RiskProbe",
    "Scope",
    "SeaCache",
    "Similarity",
    "StackEvidence",
    "StackPolicy",
    "Stacked",
    "StepReuse",
    "TaylorSeer",
    "TeaCache",
    "WindowReuse",
    "XCache",
]
