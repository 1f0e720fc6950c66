"""Does a signal know about an error? Rank correlation, and how well a limit on the signal finds large errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return (ends - (counts - 1) / 2)[inverse]


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None where one of the two does not vary or there are fewer than two pairs."""
    if len(x) != len(y):
        raise ValueError(f"{len(x)} values cannot be paired with {len(y)}.")
    if len(x) < 2 or len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


def roc(score: Sequence[float], positive: Sequence[bool]) -> tuple[list[float], list[float]]:
    """False and true positive rates when everything with a score of at least a falling limit is called positive."""
    order = np.argsort(np.asarray(score, float), kind="stable")[::-1]
    s, p = np.asarray(score, float)[order], np.asarray(positive, bool)[order]
    last = np.append(s[1:] != s[:-1], True)  # equal scores are called together
    true, false = p.cumsum()[last], (~p).cumsum()[last]
    return [0.0, *(false / max(false[-1], 1)).tolist()], [0.0, *(true / max(true[-1], 1)).tolist()]


def auc(score: Sequence[float], positive: Sequence[bool]) -> float | None:
    """Area under that curve: the chance that a positive scores above a negative, ties half. None without both kinds."""
    count = sum(positive)
    if count in (0, len(positive)):
        return None
    r = ranks(score)[np.asarray(positive, bool)].sum()
    return float((r - count * (count + 1) / 2) / (count * (len(positive) - count)))


def deciles(score: Sequence[float], error: Sequence[float], parts: int = 10) -> list[tuple[float, float, float]]:
    """(mean, median, 95th percentile) of the error in equal parts of the scores, the lowest first."""
    order = np.argsort(np.asarray(score, float), kind="stable")
    sorted_errors = np.asarray(error, float)[order]
    return [
        (float(p.mean()), float(np.median(p)), float(np.quantile(p, 0.95)))
        for p in np.array_split(sorted_errors, parts)
        if len(p)
    ]
