"""Panels: a matrix cut along its longer side, one part for each of the ranks that share it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_muon.placement.segments import Segment, rectangles

Cut = tuple[int, int]
"""(first, end) of rows or columns."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Whole rows, or whole columns, of a logical matrix.

    Attributes:
        row: First row.
        rows: Number of rows.
        col: First column.
        cols: Number of columns.
    """

    row: int
    rows: int
    col: int
    cols: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.cols


@dataclass(frozen=True, kw_only=True)
class PanelRun:
    """A rectangle of a panel, as the shard of one rank stores it.

    Attributes:
        start: First element in the TP rank's row-major shard.
        rows: Number of rows.
        cols: Number of columns.
        stride: Elements from one row to the next in the shard.
        row: First row in the panel.
        col: First column in the panel.
    """

    start: int
    rows: int
    cols: int
    stride: int
    row: int
    col: int


def even_cuts(length: int, count: int) -> tuple[Cut, ...]:
    """``count`` intervals of 0 … length, as equal as possible; the longer ones come first."""
    each, longer = divmod(length, count)
    cuts, first = [], 0
    for number in range(count):
        end = first + each + (number < longer)
        cuts.append((first, end))
        first = end
    return tuple(cuts)


def panels(shape: tuple[int, int], count: int) -> tuple[Panel, ...]:
    """Panels of an (m, n) matrix: of columns where m <= n, otherwise of rows."""
    m, n = shape
    if m <= n:
        return tuple(
            Panel(row=0, rows=m, col=first, cols=end - first) for first, end in even_cuts(n, count)
        )
    return tuple(
        Panel(row=first, rows=end - first, col=0, cols=n) for first, end in even_cuts(m, count)
    )


def panel_runs(segment: Segment, panel: Panel) -> Iterator[PanelRun]:
    """What a run holds of a panel, at most three rectangles, in the order of storage.

    Both ends of a message send and receive them in this order, each row by row.
    """
    for rectangle in rectangles(segment):
        first = max(rectangle.row, panel.row)
        end = min(rectangle.row + rectangle.rows, panel.row + panel.rows)
        left = max(rectangle.col, panel.col)
        right = min(rectangle.col + rectangle.cols, panel.col + panel.cols)
        if first >= end or left >= right:
            continue
        skipped = (first - rectangle.row) * rectangle.cols + left - rectangle.col
        yield PanelRun(
            start=segment.start + rectangle.offset + skipped,
            rows=end - first,
            cols=right - left,
            stride=rectangle.cols,
            row=first - panel.row,
            col=left - panel.col,
        )


def panel_elements(segment: Segment, panel: Panel) -> int:
    """Elements of a panel that a run holds; without enumerating anything."""
    block = segment.block
    left = max(panel.col - block.col, 0)
    right = min(panel.col + panel.cols - block.col, block.cols)
    if left >= right:
        return 0
    position = segment.start - block.shard_row * block.cols
    # Positions of the panel's rows within the block; of those before a position, the columns.
    first = max(position, (panel.row - block.row) * block.cols)
    end = min(position + segment.numel, (panel.row + panel.rows - block.row) * block.cols)
    if first >= end:
        return 0
    return _before(end, block.cols, left, right) - _before(first, block.cols, left, right)


def _before(position: int, width: int, left: int, right: int) -> int:
    """Elements of columns left … right among the first ``position`` of a row-major block."""
    rows, col = divmod(position, width)
    return rows * (right - left) + min(max(col - left, 0), right - left)
