"""X-Cache and whole-window reuse as their texts say it: one block after the other, each on its own measured input.

Written from the paper, in float64, without a glance at how the library does it. Slow and plain on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollcache import Condition, Segment, XCache


def tokens_of(segment: Segment, view: int, counts: tuple[int, int, int]) -> list[int]:
    """Sampled token indices of one camera, given how many indices every axis gets."""
    axes = []
    for length, count in zip(segment.grid, counts, strict=True):
        if count == 1:
            axes.append([length // 2])
        else:
            axes.append([int(i * (length - 1) / (count - 1) + 0.5) for i in range(count)])
    width = segment.grid[2]
    base = segment.start + view * segment.view_stride
    return [base + f * segment.frame_stride + h * width + w for f in axes[0] for h in axes[1] for w in axes[2]]


def all_tokens(segment: Segment, view: int) -> list[int]:
    """Every token index of one camera."""
    return tokens_of(segment, view, segment.grid)


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two flattened vectors; two zero vectors are equal, one alone resembles nothing."""
    a, b = a.flatten().double(), b.flatten().double()
    na, nb = float(a.norm()), float(b.norm())
    if na < 1e-6 or nb < 1e-6:
        return 1.0 if na < 1e-6 and nb < 1e-6 else 0.0
    return float(a @ b) / (na * nb)


@dataclass
class Outcome:
    """What happened to one block."""

    block: int
    skipped: bool
    cosine: float | None
    threshold: float
    deviation: float | None


class NaiveXCache:
    """The gate of section 2 of the paper, with the options of `XCache` written out one by one."""

    def __init__(
        self, config: XCache, depth: int, segments: Sequence[Segment], counts: Callable[[Segment], Any]
    ) -> None:
        self.config, self.depth, self.segments, self.counts = config, depth, segments, counts
        self.store: dict[tuple[int, int], dict[str, Any]] = {}
        self.ema: dict[tuple[int, int], float] = {}
        self.chunks_seen = 0
        self.chunk: int | None = None

    def fingerprint(self, tensors: Sequence[Tensor]) -> dict[str, list[list[Tensor]]]:
        """For every view group, per batch row: sampled tokens, and the token mean of every camera."""
        spatial, means = [], []
        for s in self.segments:
            h = tensors[s.tensor].flatten(1, -2).double()
            picked = [i for v in range(s.views) for i in tokens_of(s, v, self.counts(s))]
            spatial.append([row[picked] for row in h])
            means.append([torch.stack([row[all_tokens(s, v)].mean(0) for v in range(s.views)]) for row in h])
        return {"spatial": spatial, "means": means}

    def compare(self, now: dict[str, Any], then: dict[str, Any]) -> tuple[float, float]:
        """Smallest cosine over all entries and batch rows, largest deviation over groups and rows."""
        cosines, deviations = [], []
        for kind in ("spatial", "means"):
            for group_now, group_then in zip(now[kind], then[kind], strict=True):
                for a, b in zip(group_now, group_then, strict=True):
                    cosines.append(cosine(a, b))
                    if kind == "spatial":
                        change = (a - b).abs()
                        largest = change.mean(-1).max() if self.config.deviation == "token" else change.max()
                        deviations.append(float(largest / (b.abs().mean() + 1e-6)))
        return min(cosines), max(deviations)

    def run(
        self,
        blocks: Sequence[Callable[..., Any]],
        hidden: list[Tensor],
        *extra: Any,
        chunk: int,
        step: int,
        conditions: Sequence[Condition] = (),
        kv_update: bool = False,
        fresh_noise: bool = False,
    ) -> tuple[list[Tensor], list[Outcome]]:
        """One denoise pass over a hidden state that is a list of tensors."""
        c = self.config
        if chunk != self.chunk:
            self.chunk, self.chunks_seen = chunk, self.chunks_seen + 1
        warming = self.chunks_seen <= c.warmup_chunks
        outcomes = []
        for b, block in enumerate(blocks):
            if b < c.front_blocks or b >= self.depth - c.back_blocks:
                hidden = block(hidden, *extra)
                outcomes.append(Outcome(b, False, None, float("nan"), None))
                continue
            key = (step, b)
            stored = self.store.get(key)
            now = self.fingerprint(hidden)
            forced = warming or stored is None or (kv_update and c.protect == "chunk")
            forced |= step == 0 and (c.first_step == "on" or (c.first_step == "auto" and fresh_noise))
            s = d = None
            tau = c.min_cosine
            if stored is not None and not warming:
                forced |= c.max_staleness is not None and stored["skips"] >= c.max_staleness
                if c.condition_tol is not None:
                    forced |= not self.distance(conditions, stored["conditions"]) <= c.condition_tol
                if not forced or c.ema_on_forced:
                    s, d = self.compare(now, stored["fingerprint"])
                    if c.condition_cosine:
                        raw = [cosine(a.value, b) for a, b in zip(conditions, stored["conditions"], strict=True)]
                        s = min([s, *raw])
                    if key in self.ema:
                        tau = max(c.min_cosine, self.ema[key] - c.margin)
                    if step == 0 and c.first_step == "strict":
                        tau = c.strict_cosine
                    self.ema[key] = c.ema_alpha * s + (1 - c.ema_alpha) * self.ema.get(key, s)
            closed = c.min_cosine == 1  # rounding must not open a gate that is shut
            passed = s is not None and not closed and s >= tau and (c.max_deviation is None or d < c.max_deviation)
            if passed and not forced:
                hidden = [h + r for h, r in zip(hidden, stored["residual"], strict=True)]
                stored["skips"] += 1
                if c.refresh == "always":
                    stored["fingerprint"] = now
                    stored["conditions"] = [x.value.clone() for x in conditions]
            else:
                out = block(hidden, *extra)
                self.store[key] = {
                    "residual": [o - h for o, h in zip(out, hidden, strict=True)],
                    "fingerprint": now,
                    "conditions": [x.value.clone() for x in conditions],
                    "skips": 0,
                }
                hidden = out
            outcomes.append(Outcome(b, passed and not forced, s, tau, d))
        return hidden, outcomes

    @staticmethod
    def distance(now: Sequence[Condition], then: Sequence[Tensor]) -> float:
        """Largest change in units of its scale; without one, the relative change of the vector."""
        worst = 0.0
        for condition, old in zip(now, then, strict=True):
            change = condition.value.double() - old.double()
            if condition.scale is not None:
                worst = max(worst, float((change / condition.scale.double()).abs().max()))
            elif float(change.norm()) >= 1e-6:
                worst = max(worst, float(change.norm()) / max(float(old.double().norm()), 1e-300))
        return worst
