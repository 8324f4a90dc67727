"""Segments of a schedule, between which A = X Xᵀ is recomputed, and their FLOPs.

See ``newton_schulz``.
"""

from __future__ import annotations

from typing import Final

import torch

from megatron_muon.linalg.coefficients import Schedule
from megatron_muon.linalg.products import symmetric_product_flops

Segments = tuple[Schedule, ...]
"""A schedule, split where A is recomputed."""

# Rounding errors of A in weak directions of X grow by a² with each step that updates A instead of
# recomputing it. Up to this growth the error stays within the bound of ``newton_schulz``; in fp16
# more than 100 lets singular values grow beyond the range of the next steps (quintic).
_LARGEST_GROWTH: Final = 300.0
_LARGEST_GROWTH_FP16: Final = 100.0


def newton_schulz_flops(
    m: int, n: int, segments: Segments, device: torch.device | None = None
) -> int:
    """Returns the floating-point operations of an iteration on one m×n matrix.

    A segment of L steps has one product over n for A, one for X, and 4L − 3 of m³.

    Args:
        m: Rows.
        n: Columns.
        segments: The segmented schedule.
        device: Device, which determines the savings of symmetric products; CPU by default.
    """
    small, large = sorted((m, n))
    where = device or torch.device("cpu")
    square = symmetric_product_flops(small, small, where)
    once = symmetric_product_flops(small, large, where) + 2 * small**2 * large
    return sum(once + (4 * len(segment) - 3) * square for segment in segments)


def cheapest_segments(
    m: int, n: int, schedule: Schedule, compute_dtype: torch.dtype, device: torch.device
) -> Segments:
    """Returns the schedule in the form with the fewest FLOPs for an m×n matrix.

    The choice depends on counts only, so a restarted run computes the same bits. In bf16 it is
    always the standard form: with 8 bits updating A can diverge (deepseekv4).
    """
    standard = standard_segments(schedule)
    if compute_dtype == torch.bfloat16:
        return standard
    candidates = (standard, carried_segments(schedule, compute_dtype))
    return min(candidates, key=lambda segments: newton_schulz_flops(m, n, segments, device))


def standard_segments(schedule: Schedule) -> Segments:
    """Returns the standard form: A is recomputed in every step."""
    return tuple((step,) for step in schedule)


def carried_segments(schedule: Schedule, compute_dtype: torch.dtype = torch.float32) -> Segments:
    """Returns the longest segments with error growth within ``_LARGEST_GROWTH``."""
    largest = _LARGEST_GROWTH_FP16 if compute_dtype == torch.float16 else _LARGEST_GROWTH
    found: list[Schedule] = []
    current: list[tuple[float, float, float]] = []
    growth = 1.0
    for step in schedule:
        if current and growth * current[-1][0] ** 2 > largest:
            found.append(tuple(current))
            current, growth = [], 1.0
        elif current:
            growth *= current[-1][0] ** 2
        current.append(step)
    return (*found, tuple(current)) if current else tuple(found)
