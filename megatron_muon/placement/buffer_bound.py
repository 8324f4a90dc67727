"""The bound on exchange buffers, as it is typed, and the least that works where it is too small."""

from __future__ import annotations

from collections.abc import Callable
from decimal import ROUND_UP, Context, Decimal

from megatron_muon.matrices import LogicalMatrix

MIB = 2**20


class BufferTooSmallError(ValueError):
    """The bound on buffers cannot be kept.

    Attributes:
        largest: The largest matrix.
        needed: Bytes with which the same owners and slots would do.
    """

    def __init__(self, largest: LogicalMatrix, needed: int, text: str = "") -> None:
        super().__init__(text)
        self.largest = largest
        self.needed = needed


def buffer_bytes_of(mebibytes: float) -> int:
    """Bytes of what is typed."""
    return int(mebibytes * MIB)


def typed(buffer_bytes: int) -> str:
    """The shortest number of MiB that stands for so many bytes, which is what was typed."""
    for digits in range(1, 18):
        found = float(f"{buffer_bytes / MIB:.{digits}g}")
        if buffer_bytes_of(found) == buffer_bytes:
            break
    return f"{found:.15g}"


def rounded_up(buffer_bytes: int) -> str:
    """MiB that hold so many bytes, with three significant digits."""
    return f"{Context(prec=3, rounding=ROUND_UP).divide(Decimal(buffer_bytes), MIB).normalize():f}"


def planned_within[P](plan_with: Callable[[int], P], buffer_bytes: int) -> P:
    """A plan within the bound, or what to type.

    Args:
        plan_with: Plans with a bound in bytes, or raises ``BufferTooSmallError``.
        buffer_bytes: The bound.

    Raises:
        BufferTooSmallError: With the flag, the largest matrix and a value that was tried: with
            more memory more waves of split matrices are under way, so what one plan needs may not
            do for the next.
    """
    try:
        return plan_with(buffer_bytes)
    except BufferTooSmallError as error:
        largest, needed = error.largest, error.needed
    while True:
        advised = rounded_up(needed)
        bound = buffer_bytes_of(float(advised))
        try:
            plan_with(bound)
            break
        except BufferTooSmallError as error:
            needed = max(error.needed, bound + 1)
    raise BufferTooSmallError(
        largest,
        needed,
        f"--matrix-exchange-buffer-mb {typed(buffer_bytes)} is too small: the largest matrix is "
        f"{largest.name} ({largest.shape[0]}x{largest.shape[1]}), and the exchange needs {advised} "
        f"MiB at least; type --matrix-exchange-buffer-mb {advised}",
    )
