"""`rollcache support`: which models have an adapter, and which methods make sense there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Support:
    """Print which models have an adapter, how their loops look to a cache, and which methods make sense there."""

    out: Path | None = None
    """Write the page to this file instead."""

    @classmethod
    def default(cls, words: Sequence[str]) -> Support:
        """To the terminal."""
        return cls()

    def run(self) -> int:
        """Run it; returns the exit code."""
        from rollcache.bench.support import page
        from rollcache.measure import write_atomic

        if self.out is not None:
            write_atomic(self.out, page())
            return 0
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(page()))
        return 0
