"""Largest errors, for tests."""

from __future__ import annotations

import math
from typing import Any


def worst_of(*errors: Any) -> float:
    """Return the largest error; infinite if one is NaN, which ``max`` would ignore."""
    return max(math.inf if math.isnan(error) else error for error in map(float, errors))
