"""Settings out of range are named where they are given."""

from __future__ import annotations

from math import isfinite
from typing import Any, get_args


def check_range(name: str, value: float | None, low: float, high: float = float("inf"), optional: bool = False) -> None:
    """Raise `ValueError` unless `low <= value <= high`."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        bounds = f"in [{low:g}, {high:g}]" if isfinite(high) else f"at least {low:g}"
        raise ValueError(f"{name} must be {bounds}{' or None' if optional else ''}, got {value!r}.")


def check_count(name: str, value: int, low: int = 0) -> None:
    """Raise `ValueError` unless `value` is an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}.")


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise `ValueError` unless `value` is one of a `Literal`."""
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, got {value!r}.")
