"""How a check tells what it found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Figures = dict[str, Any]
"""Name to a number or a short text; what stands beside ``ok``."""

Run = Callable[[torch.device], Figures]
"""A check; on several ranks each is called, and rank 0's figures are kept."""


class Differs(AssertionError):
    """What was computed is not what it must be."""


class NotPossible(RuntimeError):
    """The hardware, or what is installed, cannot do it."""


def require(holds: bool, what: str) -> None:
    """Raise ``Differs`` where something does not hold."""
    if not holds:
        raise Differs(what)
