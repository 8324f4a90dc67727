"""Clocks that wait for the device; imports nothing of Megatron."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def clock(device: torch.device) -> float:
    """Seconds, after all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def median_ms(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median time of some work in milliseconds, after a first time that is not counted."""
    work()
    seconds = []
    for _ in range(rounds):
        start = clock(device)
        work()
        seconds.append(clock(device) - start)
    return 1e3 * statistics.median(seconds)
