"""What the cache itself costs: the gate per decision, storing, replaying, and what look-ahead and merging buy.

Every row compares two ways to run the same pass, alternating in one process, and prints the median of the paired ratios
with the quartiles. Times are host time, on the CPU by default: `python benchmarks/gate_cost.py [--json out.json]`.
The stack has the size of the embedded street world's transformer: 12 blocks, width 192, 7 cameras of 4 latent frames.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import rollcache
from rollcache import Segment, WindowReuse, XCache
from rollcache.policies import PolicyConfig

FRAMES = 4
GROUPS = (("front", 2, 6, 12), ("sides", 4, 6, 10), ("rear", 1, 6, 12))
PER_FRAME = sum(views * h * w for _, views, h, w in GROUPS)


class Block(nn.Module):
    """A plain transformer block: attention inside every camera-frame-sized slice of tokens, and an MLP."""

    def __init__(self, width: int, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        """Hidden state [B, L, C] to hidden state."""
        x = nn.functional.layer_norm(h, h.shape[-1:]).unflatten(1, (FRAMES, PER_FRAME)).flatten(0, 1)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        h = h + 0.1 * self.proj(a).unflatten(0, (-1, FRAMES)).flatten(1, 2)
        return h + 0.1 * self.down(nn.functional.gelu(self.up(nn.functional.layer_norm(h, h.shape[-1:]))))


class Stack(nn.Module):
    """The blocks, one after the other."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, h: Tensor) -> Tensor:
        """Hidden state [B, L, C] to hidden state."""
        for block in self.blocks:
            h = block(h)
        return h


def segments() -> list[Segment]:
    """The street rig: three view groups, interleaved frame by frame."""
    out, start = [], 0
    for name, views, h, w in GROUPS:
        out.append(Segment(name, views, (FRAMES, h, w), start, h * w, PER_FRAME))
        start += views * h * w
    return out


class Runner:
    """A model with a cache on it, warm. `protected` chunks are computed and stored without a gate."""

    def __init__(
        self, model: Stack, x: Tensor, policy: PolicyConfig, protected: bool = False, **settings: bool
    ) -> None:
        self.model, self.x, self.protected = deepcopy(model), x, protected
        self.cache = rollcache.enable(self.model, policy, blocks=self.model.blocks, kv_writes="commit_only", **settings)
        self.chunk = 0
        for _ in range(3):
            self.run()

    def run(self) -> None:
        """One chunk of one step."""
        with self.cache.rollout("bench"), self.cache.chunk(self.chunk, segments=segments(), kv_update=self.protected):
            self.cache.step()
            self.model(self.x)
        self.chunk += 1

    def spent(self) -> list[float]:
        """Microseconds per block so far: deciding, storing, adding."""
        s = self.cache.stats()
        return [1e6 * t / len(self.model.blocks) for t in (s.gate_seconds, s.keep_seconds, s.replay_seconds)]


@dataclass
class Row:
    """One line of the table. Times in microseconds per block."""

    case: str
    against: str
    ratio: float
    low: float
    high: float
    gate: float
    keep: float
    add: float


def seconds(call: Callable[[], object], device: str) -> float:
    """Duration of a call, all of its kernels included."""
    began = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def compare(case: str, against: str, runner: Runner, other: Callable[[], object], pairs: int, device: str) -> Row:
    """Ratio of a cached pass to something else, `pairs` times alternating."""
    ratios, parts = [], []
    for _ in range(pairs):
        b = seconds(other, device)
        before = runner.spent()
        ratios.append(seconds(runner.run, device) / b)
        parts.append([y - x for x, y in zip(before, runner.spent(), strict=True)])
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Row(case, against, middle, low, high, *(statistics.median(p) for p in zip(*parts, strict=True)))


def measure(depth: int, width: int, pairs: int, device: str) -> tuple[list[Row], float]:
    """All rows, and the milliseconds of a bare block."""
    torch.manual_seed(0)
    model = Stack(depth, width).to(device).requires_grad_(False)
    x = torch.randn(1, FRAMES * PER_FRAME, width, device=device)
    residual = torch.randn_like(x)
    shut, eager = XCache(min_cosine=1, front_blocks=0), XCache(front_blocks=0)

    def run(policy: PolicyConfig, **settings: bool) -> Runner:
        return Runner(model, x, policy, **settings)

    def bare() -> None:
        model(x)

    def addition() -> None:
        torch.add(x, residual)

    cases = [
        ("protected chunk: all computed and stored", "bare pass", run(eager, protected=True), bare),
        ("gate shut: all compared, computed, stored", "bare pass", run(shut), bare),
        ("gate shut, block by block", "bare pass", run(shut, lookahead=False), bare),
        ("X-Cache at its ceiling (1 anchor)", "bare pass", run(XCache()), bare),
        ("all replayed", "bare pass", run(eager), bare),
        ("all replayed", "block by block", run(eager), run(eager, lookahead=False).run),
        ("all replayed", "one addition", run(eager), addition),
        ("window reuse, replayed", "one addition", run(WindowReuse()), addition),
    ]
    rows = [compare(*case, pairs, device) for case in cases]
    return rows, 1e3 * statistics.median(seconds(bare, device) for _ in range(3)) / depth


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write the table there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.no_grad():
        rows, block = measure(args.depth, args.width, args.pairs, args.device)
    print(f"{args.depth} blocks, width {args.width}, {FRAMES * PER_FRAME} tokens, {block:.2f} ms per block, ", end="")
    print(f"{args.threads} thread(s), torch {torch.__version__}, {platform.processor() or platform.machine()}")
    print("ratio: median of paired runs (quartiles); decide, store, add: microseconds of host time per block")
    print(f"{'case':44}{'against':16}{'ratio':>8}{'':>18}{'decide':>8}{'store':>8}{'add':>8}")
    for r in rows:
        spread = f"({r.low:.3f}-{r.high:.3f})"
        print(f"{r.case:44}{r.against:16}{r.ratio:8.3f}{spread:>18}{r.gate:8.0f}{r.keep:8.0f}{r.add:8.0f}")
    if args.json:
        args.json.write_text(json.dumps({"block_ms": block, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
