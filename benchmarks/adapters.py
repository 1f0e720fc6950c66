"""What is a cache worth on every family of models that has an adapter, of what it could be worth?

    OMP_NUM_THREADS=1 python benchmarks/adapters.py --json adapters.json --markdown adapters.md

Every family runs a loop like that of its pipeline with random weights, small enough for a CPU, on two copies of one
model: bare, and under a schedule that says in advance what is skipped. Calls take turns, so that each is timed next to
the bare call of the same step. The ceiling is what is left when the seconds of the skipped blocks, as measured in the
bare copy, are taken away; embedding, head and commit passes are in both. A third run skips nothing and must be the bare
model bit for bit. Nothing is said about quality: random weights have none. The attention of AnyFlow-FAR is dense under
its mask, in both copies.

On a machine that others use too, `--clock cpu` counts only the time in which this process ran.
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
import torch.nn.functional as nnf
import tyro
from diffusers.models.transformers import transformer_anyflow_far
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import rollcache
from rollcache import Action, StepReuse, XCache
from rollcache.bench.results import dump
from rollcache.measure import provenance, write_atomic

sys.path.append(str(Path(__file__).parent))

from adapter_families import FAMILIES, Family, Scale

Seconds = float

OPEN = XCache(min_cosine=-1, margin=1, max_deviation=None)
"""Replays everything but block 0 and the first chunk of its shape."""


class DenseAttention:
    """In the place of a flex attention, which without a compiler takes minutes on a CPU: the same mask, made dense."""

    def __init__(self) -> None:
        self.masks: dict[tuple[int, int], Tensor] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, scale: Any = None, **_: Any) -> Tensor:
        """Attention of [B, L, H, D]."""
        if attn_mask is not None:
            size = attn_mask.seq_lengths
            if size not in self.masks:  # one chunk more, other lengths
                self.masks[size] = create_mask(attn_mask.mask_mod, None, None, *size, device="cpu")
            attn_mask = self.masks[size]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return nnf.scaled_dot_product_attention(q, k, v, attn_mask, scale=scale).transpose(1, 2)


class Lane:
    """A family whose calls are made one by one.

    Attributes:
        seconds: by call, of every round.
        stack: likewise, what of that its blocks took.
        skipped: by call, the share of the blocks that was replayed.
        outputs: of the last round.
    """

    def __init__(self, family: Family, policy: Any, clock: Callable[[], Seconds]) -> None:
        self.family, self.clock = family, clock
        self.handle = None if policy is None else rollcache.enable(family.model, policy, adapter=family.adapter)
        self.seconds: list[list[Seconds]] = []
        self.stack: list[list[Seconds]] = []
        self.skipped: list[float] = []
        self.outputs: list[Tensor | None] = []
        self._inside = 0.0
        blocks = family.adapter.blocks(family.model)
        self.depth = len(blocks)
        if policy is None:
            blocks[0].register_forward_pre_hook(self._enter)
            blocks[-1].register_forward_hook(self._leave)

    def restart(self) -> None:
        """Stand before the first call of a new generation."""
        self._loop = self.family.calls()
        self._next: Any = next(self._loop)
        self._at, self.skipped, self.outputs = 0, [], []

    @property
    def over(self) -> bool:
        """Whether the generation has ended."""
        return self._next is None

    def advance(self) -> None:
        """Make the next call, timed."""
        args, kwargs = self._next
        known = 0 if self.handle is None else len(self.handle.trace)
        began = self.clock()
        output = self.family.model(*args, **kwargs)
        took = self.clock() - began
        if self._at == len(self.seconds):
            self.seconds.append([])
            self.stack.append([])
        self.seconds[self._at].append(took)
        self.stack[self._at].append(self._inside)
        new = [] if self.handle is None else list(self.handle.trace)[known:]
        self.skipped.append(sum(r.blocks for r in new if r.action is not Action.COMPUTE) / self.depth)
        self.outputs.append(output if isinstance(output, Tensor) else output[0])
        self._at += 1
        try:
            self._next = self._loop.send(output)
        except StopIteration:
            self._next = None

    def _enter(self, *_: object) -> None:
        self._inside = self.clock()

    def _leave(self, *_: object) -> None:
        self._inside = self.clock() - self._inside


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    families: tuple[str, ...] = tuple(FAMILIES)
    rounds: int = 3
    anchors: int = 2
    clock: Literal["wall", "cpu"] = "wall"
    json: Path | None = None
    markdown: Path | None = None
    scale: tyro.conf.OmitArgPrefixes[Scale] = field(default_factory=Scale)

    def __post_init__(self) -> None:
        if unknown := [name for name in self.families if name not in FAMILIES]:
            raise ValueError(f"unknown families: {', '.join(unknown)}; known are {', '.join(FAMILIES)}.")


@torch.inference_mode()
def race(lanes: Sequence[Lane], rounds: int, warmup: int = 1) -> None:
    """All lanes through some generations, call by call; who goes first turns. The first generation is not counted."""
    for n in range(warmup + rounds):
        for lane in lanes:
            lane.restart()
        while not lanes[0].over:
            for lane in lanes if lanes[0]._at % 2 == n % 2 else lanes[::-1]:
                lane.advance()
        if n < warmup:
            for lane in lanes:
                lane.seconds.clear()
                lane.stack.clear()


def reached(
    full: Sequence[Sequence[Seconds]],
    stack: Sequence[Sequence[Seconds]],
    cached: Sequence[Sequence[Seconds]],
    skipped: Sequence[float],
) -> dict[str, float]:
    """Speedup over a generation, its ceiling, and the ratio of the two, from the medians of every call over rounds.

    Args:
        full: seconds of every call at full compute.
        stack: what of that the blocks took.
        cached: seconds of the same calls under the cache.
        skipped: share of the blocks that each of them left out.
    """
    a, b, c = ([statistics.median(rounds) for rounds in lane] for lane in (full, stack, cached))
    left = sum(whole - share * blocks for whole, blocks, share in zip(a, b, skipped, strict=True))
    speedup, ceiling = sum(a) / sum(c), sum(a) / left
    return {"speedup": speedup, "ceiling": ceiling, "efficiency": speedup / ceiling}


def by_round(*lanes: Sequence[Sequence[Seconds]], skipped: Sequence[float]) -> list[float]:
    """Efficiency of every round by itself; `lanes` as of `reached`."""
    rounds = range(len(lanes[0][0]))
    return [reached(*([[call[r]] for call in lane] for lane in lanes), skipped)["efficiency"] for r in rounds]


def measure(name: str, settings: Settings) -> dict[str, Any]:
    """One row of the table."""
    clock = time.process_time if settings.clock == "cpu" else time.perf_counter
    scale, copies = settings.scale, [FAMILIES[name](settings.scale) for _ in range(3)]
    policy, never = (
        (OPEN, XCache(min_cosine=1))
        if copies[0].across == "chunks"
        else (StepReuse.uniform(scale.steps, settings.anchors), StepReuse.uniform(scale.steps, scale.steps))
    )
    bare, cached, exact = (Lane(copy, p, clock) for copy, p in zip(copies, (None, policy, never), strict=True))
    race([bare, cached], settings.rounds)
    race([exact], rounds=0)
    same = all(a is b is None or torch.equal(a, b) for a, b in zip(bare.outputs, exact.outputs, strict=True))
    assert cached.handle is not None and exact.handle is not None
    stats = cached.handle.stats()
    return {
        "family": name,
        "method": type(policy).__name__,
        "tokens": copies[0].tokens or scale.tokens,
        "exact": same and exact.handle.stats().skip_rate == 0,
        "calls": len(bare.seconds),
        "commits": stats.passes.get("commit", 0) // (settings.rounds + 1),
        "skipped": sum(cached.skipped) / len(cached.skipped),
        **reached(bare.seconds, bare.stack, cached.seconds, cached.skipped),
        "rounds": by_round(bare.seconds, bare.stack, cached.seconds, skipped=cached.skipped),
    }


HEADS = (
    "family",
    "method",
    "tokens",
    "never skips",
    "calls",
    "commits",
    "blocks skipped",
    "speedup",
    "ceiling",
    "efficiency",
    "of rounds",
)


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row in words, one for each of `HEADS`."""
    return (
        row["family"],
        row["method"],
        str(row["tokens"]),
        "bit for bit" if row["exact"] else "DIFFERS",
        str(row["calls"]),
        str(row["commits"]),
        f"{row['skipped']:.1%}",
        f"{row['speedup']:.2f}x",
        f"{row['ceiling']:.2f}x",
        f"{row['efficiency']:.3f}",
        f"{min(row['rounds']):.3f} to {max(row['rounds']):.3f}",
    )


def models(scale: Scale) -> str:
    """What all rows have in common."""
    return f"{scale.depth} blocks, width {scale.width}, {scale.steps} steps a chunk, random weights"


def table(rows: Sequence[Mapping[str, Any]], scale: Scale) -> Table:
    """Speedups beside their ceilings."""
    out = Table(box=box.SIMPLE_HEAD, title=models(scale))
    for i, head in enumerate(HEADS):
        out.add_column(head, justify="left" if i < 2 else "right")
    for row in rows:
        out.add_row(*cells(row))
    return out


NOTES = """\
*tokens*: of a chunk. *never skips*: every output of every call, under a method that leaves nothing out, beside the bare
model. *calls*: of a generation, *commits* among them, which are always exact; *blocks skipped* counts all of them.
*ceiling*: what is left without the measured seconds of the skipped blocks. *efficiency*: speedup by ceiling, from
medians over the rounds; *of rounds*: the lowest and the highest of single rounds. Across steps, a schedule says which
steps are left out; across chunks, a gate that is always open, so that everything is but block 0 and what has to be
exact. Nothing is said about quality: random weights have none."""


def page(rows: Sequence[Mapping[str, Any]], settings: Settings, found: Mapping[str, Any]) -> str:
    """The table in Markdown, with what a reader needs to repeat it.

    Args:
        rows: of `measure`.
        settings: what was measured.
        found: of `provenance`.
    """
    machine, versions = found["machine"], {**found["versions"], "diffusers": diffusers.__version__}
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    packages = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "diffusers", "rollcache"))
    seconds = "seconds of the clock" if settings.clock == "wall" else "seconds of this process on the processor"
    omp = [f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"] if "OMP_NUM_THREADS" in os.environ else []
    command = shlex.join([*omp, "python", "benchmarks/adapters.py", *sys.argv[1:]])
    caption = (
        f"{models(settings.scale)}, {found['dtype']}; {machine['cpu']}, {threads} on {machine['cores']} "
        f"cores, {machine['system']}; {packages}; {seconds}, medians of {settings.rounds} rounds after one that does "
        "not count."
    )
    lines = [HEADS, ["---", "---", *["---:"] * (len(HEADS) - 2)], *map(cells, rows)]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"# Speedup beside its ceiling, for every adapter\n\nMade by `{command}`.\n\n{caption}\n\n{body}\n\n{NOTES}\n"
    )


def main(settings: Settings) -> int:
    """Run, print, store after every row. Fails when a run that skips nothing is not the bare model."""
    transformer_anyflow_far.dispatch_attention_fn = DenseAttention()
    found, rows = provenance(settings, dtype=torch.float32), []
    narrator = Console(stderr=True)
    for n, name in enumerate(settings.families, 1):
        narrator.print(f"{n} of {len(settings.families)}: {name}", highlight=False)
        rows.append(measure(name, settings))
        if settings.json is not None:
            write_atomic(settings.json, dump({"runs": rows, "provenance": found}))
        if settings.markdown is not None:
            write_atomic(settings.markdown, page(rows, settings, found))
    Console(width=None if sys.stdout.isatty() else 120).print(table(rows, settings.scale))
    return 0 if all(r["exact"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
