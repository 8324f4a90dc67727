"""Splits a flat range of a row-major tensor into boxes, the storage units of DCP.

The distributed optimizer gives a rank a range of elements that may start and end within a row. Of a
matrix that is the rest of one row, whole rows, and the beginning of another row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of a row-major tensor whose elements are contiguous, from element ``start`` on."""

    start: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Split a half-open flat range into the fewest boxes, in order.

    There are at most ``2 * len(shape) - 1``: three for a matrix, one for a vector.
    """
    if start >= stop:
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # all within one row
        yield from _within(shape, first - 1, start, stop)
        return
    if start < first * row:
        yield from _within(shape, first - 1, start, first * row)
    if first < last:
        yield Box(
            start=first * row,
            offset=(first, *(0 for _ in shape[1:])),
            shape=(last - first, *shape[1:]),
        )
    if last * row < stop:
        yield from _within(shape, last, last * row, stop)


def _within(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a range within one index of the first axis."""
    before = index * math.prod(shape[1:])
    for box in boxes(shape[1:], start - before, stop - before):
        yield Box(start=before + box.start, offset=(index, *box.offset), shape=(1, *box.shape))
