"""The clock of a study: one that other work on the machine disturbs as little as possible."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def clock(device: torch.device) -> Callable[[], float]:
    """A function that tells seconds.

    On one thread of a processor these are seconds of that thread, which do not pass while other processes have the
    core. Threads that wait for each other cannot be counted like that: with several it is the time of day, and on an
    accelerator the time of day after it has finished.
    """
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
