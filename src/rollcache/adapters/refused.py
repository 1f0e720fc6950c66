"""Models that `enable` refuses by name, with the reason. The analysis is in docs/backbones/refused.md."""

from __future__ import annotations

from typing import Any, NoReturn

from rollcache.passes import RollcacheError

PAGE = "docs/backbones/refused.md"


def magi(model: Any) -> NoReturn:
    """MAGI-1's `VideoDiTModel`.

    Raises:
        RollcacheError: always.
    """
    raise RollcacheError(
        f"{type(model).__name__} (MAGI-1) denoises up to four chunks at four noise levels in one pass, and its clean "
        f"K/V are written by passes that denoise as well: no pass has one chunk and one step. See {PAGE}."
    )


def worldplay(model: Any) -> NoReturn:
    """HY-WorldPlay's `HunyuanVideo_1_5_DiffusionTransformer`.

    Raises:
        RollcacheError: always.
    """
    raise RollcacheError(
        f"{type(model).__name__} (HY-WorldPlay) has no adapter: its exact passes cost as much as all steps of a chunk, "
        f"and its cameras are absolute poses, which no two chunks share. {PAGE} says how one would tell its passes."
    )
