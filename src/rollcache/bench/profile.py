"""How alike are the block inputs of neighbouring generation steps at full compute? The first question about any model.

Forward hooks take the fingerprint that the gates compare, at every block of every denoise pass, and compare it with the
one of the generation step before. Nothing is cached or skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rollcache.fingerprint import Sampler, Sampling
from rollcache.measure import structural_skip
from rollcache.passes import Segment

if TYPE_CHECKING:
    from rollcache.street.protocol import Protocol, Where

FLOORS = (0.9, 0.97, 0.99, 0.999, 0.9995)


@dataclass
class Profiler:
    """Watches a bare model; use as a context manager around full-compute generation.

    Attributes:
        model: a transformer with `blocks`, `layout` and the keyword `where`.
        cosine: (chunk, step, block) -> cosine with the generation step before, smallest entry.
        deviation: the same for the largest deviation.
        change: the same for the relative change of the residual, |r - r_before| / |r|.
    """

    model: nn.Module
    cosine: dict[tuple[int, int, int], float] = field(default_factory=dict)
    deviation: dict[tuple[int, int, int], float] = field(default_factory=dict)
    change: dict[tuple[int, int, int], float] = field(default_factory=dict)
    depth: int = 0
    _where: Where | None = None
    _sampler: Sampler | None = None
    _prints: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _residuals: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _hooks: list[Any] = field(default_factory=list)

    def __enter__(self) -> Profiler:
        blocks: Any = self.model.blocks
        self.depth = len(blocks)
        self._hooks = [self.model.register_forward_pre_hook(self._enter, with_kwargs=True)]
        self._hooks += [block.register_forward_hook(self._block(i)) for i, block in enumerate(blocks)]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._prints, self._residuals, self._sampler = [], {}, {}, None

    def _enter(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._where = kwargs.get("where")

    def _block(self, index: int) -> Any:
        def hook(block: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            where = self._where
            if where is None or where.role != "denoise":
                return
            self._note(where, index, args[0], output)

        return hook

    def _note(self, where: Where, block: int, h: Tensor, out: Tensor) -> None:
        if self._sampler is None:
            segments = tuple(Segment(*entry) for entry in self.model.layout)  # type: ignore[union-attr]
            self._sampler = Sampler((h,), segments, Sampling())
        now, residual = self._sampler((h,)), (out - h).float()
        cell, key = (where.step, block), (where.chunk, where.step, block)
        if cell in self._prints:
            cosine, deviation = similarity(self._prints[cell], now, self._sampler)
            self.cosine[key], self.deviation[key] = cosine, deviation
            size = residual.norm()
            self.change[key] = float((residual - self._residuals[cell]).norm() / size) if size > 0 else 0.0
        self._prints[cell], self._residuals[cell] = now, residual

    def result(self, protocol: Protocol) -> Profile:
        """Sort what was seen by position in the KV cycle.

        Raises:
            ValueError: fewer than two generation steps were seen.
        """
        if not self.cosine:
            raise ValueError("a profile needs at least two generation steps.")
        phases = protocol.kv_every

        def by_phase(values: dict[tuple[int, int, int], float]) -> list[list[list[float | None]]]:
            grid: list[list[list[list[float]]]] = [
                [[[] for _ in range(self.depth)] for _ in range(protocol.steps)] for _ in range(phases)
            ]
            for (n, t, b), value in values.items():
                grid[n % phases][t][b].append(value)
            return [[[_mean(cell) for cell in row] for row in phase] for phase in grid]

        inside = sorted(v for (n, _, b), v in self.cosine.items() if (n % phases or phases == 1) and b > 0)
        return Profile(
            phases=phases,
            steps=protocol.steps,
            depth=self.depth,
            chunks=1 + len({n for n, _, _ in self.cosine}),
            cosine=by_phase(self.cosine),
            deviation=by_phase(self.deviation),
            change=by_phase(self.change),
            quantiles={
                name: _quantile(inside, q) for name, q in (("min", 0), ("p10", 0.1), ("median", 0.5), ("p75", 0.75))
            },
            above={str(floor): sum(v >= floor for v in inside) / max(1, len(inside)) for floor in FLOORS},
            structural=structural_skip(self.depth, exact_every=phases if phases > 1 else None),
        )


@dataclass(frozen=True)
class Profile:
    """Similarity of neighbouring generation steps at full compute.

    Attributes:
        phases: generation steps per KV cycle; phase 0 follows a change of noise.
        steps: denoising steps.
        depth: blocks.
        chunks: generation steps seen.
        cosine: mean cosine of the block inputs with the step before, [phase][step][block].
        deviation: mean of the largest deviation, likewise.
        change: mean relative change of the residual, likewise.
        quantiles: of the cosines inside a cycle (phase 1 and later; all when each chunk commits), without block 0.
        above: share of those cosines that reach a floor.
        structural: largest skip rate that one front anchor and an exact first step of the cycle allow.
    """

    phases: int
    steps: int
    depth: int
    chunks: int
    cosine: list[list[list[float | None]]]
    deviation: list[list[list[float | None]]]
    change: list[list[list[float | None]]]
    quantiles: dict[str, float]
    above: dict[str, float]
    structural: float

    def phase_mean(self, values: list[list[list[float | None]]], phase: int) -> float | None:
        """Mean over steps and all blocks but the first (its input is no output of a block)."""
        return _mean([v for row in values[phase] for v in row[1:] if v is not None])

    def verdict(self) -> str:
        """Will caching help? One sentence from the measured similarity."""
        share = self.above["0.97"]
        if share >= 0.9:
            return (
                f"{share:.0%} of the block inputs inside a KV cycle are within cosine 0.97 of the step before: caching "
                f"can approach its structural ceiling of {self.structural:.0%} skipped cells; what decides is fidelity "
                "when the conditions move."
            )
        if share >= 0.2:
            return (
                f"{share:.0%} of the block inputs inside a KV cycle are within cosine 0.97 of the step before: caching "
                "helps in part; look at which steps and blocks are alike."
            )
        return (
            f"Only {share:.0%} of the block inputs are within cosine 0.97 of the step before: a cache across "
            "generation steps will not help under this protocol (fresh noise per step is the usual cause)."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a result file."""
        per_phase = range(self.phases)
        return {
            "phases": self.phases,
            "steps": self.steps,
            "depth": self.depth,
            "chunks": self.chunks,
            "cosine": _rounded(self.cosine),
            "deviation": _rounded(self.deviation),
            "residual_change": _rounded(self.change),
            "phase_cosine": [self.phase_mean(self.cosine, j) for j in per_phase],
            "phase_residual_change": [self.phase_mean(self.change, j) for j in per_phase],
            "phase_deviation": [self.phase_mean(self.deviation, j) for j in per_phase],
            "quantiles": self.quantiles,
            "share_above_floor": self.above,
            "structural_skip": self.structural,
            "verdict": self.verdict(),
        }


def similarity(then: Tensor, now: Tensor, sampler: Sampler) -> tuple[float, float]:
    """What the gates compare, literally: smallest cosine over entries, largest deviation over view groups.

    Args:
        then: an earlier fingerprint [1, N, C].
        now: the fingerprint of the same cell [1, N, C].
        sampler: which rows belong to which entry; its first `groups` entries are the sampled tokens.
    """
    cosines, deviations = [], []
    for e, (start, stop) in enumerate(sampler.entries):
        a, b = then[:, start:stop].flatten(), now[:, start:stop].flatten()
        size = float(a.norm() * b.norm())
        cosines.append(float(a @ b) / size if size > 0 else float(not a.any() and not b.any()))
        if e < sampler.groups:
            deviations.append(float((b - a).abs().max() / (a.abs().mean() + 1e-6)))
    return min(cosines), max(deviations)


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [v for v in values if v is not None and math.isfinite(v)]
    return sum(numbers) / len(numbers) if numbers else None


def _quantile(values: list[float], q: float) -> float:
    if not values:
        return math.nan
    return float(torch.quantile(torch.tensor(values, dtype=torch.float64), q))


def _rounded(values: list[list[list[float | None]]]) -> list[list[list[float | None]]]:
    return [[[None if v is None else round(v, 6) for v in row] for row in phase] for phase in values]
