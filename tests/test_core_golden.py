"""A whole decision trace as text. When it changes, either the method changed or something broke.

`python tests/test_core_golden.py` writes it anew.
"""

from __future__ import annotations

from pathlib import Path

import torch

import rollcache
from rollcache import Condition, Segment, WindowReuse, XCache

GOLDEN = Path(__file__).parent / "golden"
POLICIES = {
    "xcache": XCache(),
    "xcache_paper": XCache.paper(),
    "xcache_literal": XCache.paper(refresh="always", first_step="strict", max_staleness=2),
    "window_reuse": WindowReuse(),
}


class Block(torch.nn.Module):
    """Arithmetic that gives the same on every machine to far more digits than a trace has."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + 0.2 * torch.sin(h * (1 + self.index) + h.mean(1, keepdim=True))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(i) for i in range(4))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h)
        return h


def trace(policy: XCache | WindowReuse) -> str:
    """Nine chunks of two steps, commits every fourth; an object appears in chunk 2, the action moves in chunk 6."""
    model = Model()
    handle = rollcache.enable(model, policy, blocks=model.blocks, kv_writes="commit_only")
    grid = torch.arange(24.0)
    noise = torch.sin(grid[:, None] * torch.tensor([0.7, 1.1, 1.9, 2.3]))[None]
    segments = [Segment.contiguous("front", 1, (2, 3, 4))]
    with torch.no_grad(), handle.rollout():
        for n in range(9):
            action = Condition("action", torch.tensor([10.0, 0.0 if n < 6 else 0.1]), torch.tensor([9.0, 0.3]))
            x = noise * (1 if n < 4 else -1)
            if n in (2, 3):
                x = x + 0.3 * (grid[None, :, None] == 11)
            with handle.chunk(conditions=[action], segments=segments, kv_update=n % 4 == 0):
                for _ in range(2):
                    handle.step()
                    x = x - 0.3 * model(x)
                if n % 4 == 3:
                    handle.commit()
                    model(x)
    return handle.trace.text()


def test_decision_traces_are_the_golden_ones() -> None:
    for name, policy in POLICIES.items():
        assert trace(policy) == (GOLDEN / f"{name}.txt").read_text(), name


if __name__ == "__main__":
    for name, policy in POLICIES.items():
        (GOLDEN / f"{name}.txt").write_text(trace(policy))
