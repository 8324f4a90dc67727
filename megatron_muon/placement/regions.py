"""Regions of a matrix: each kind has one name.

``Block``   rows of one TP rank's shard that form a rectangle of the matrix (``matrices.Block``)
``Run``     a flat interval of one block that one rank holds
``Share``   everything that one rank holds of one matrix: its runs
``Region``  rows times columns of the matrix
``Piece``   a region together with its place in the shard that stores it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megatron_muon.matrices import Block, LogicalMatrix, ShardedParameter


@dataclass(frozen=True, kw_only=True)
class ExchangeGroup:
    """The ranks that exchange matrices: TP x DP (x CP) of one pipeline stage.

    Attributes:
        tp: Tensor-parallel size.
        dp: Number of ranks that the distributed optimizer shards over (data x context parallel).
    """

    tp: int
    dp: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp

    def rank(self, *, tp_rank: int, dp_rank: int) -> int:
        """Rank in the group; TP neighbours are adjacent, as in Megatron's rank order."""
        return dp_rank * self.tp + tp_rank


@dataclass(frozen=True, kw_only=True)
class Region:
    """Rows times columns of a matrix.

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
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.rows, self.cols

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.cols

    @property
    def row_slice(self) -> slice:
        """Its rows, as an index."""
        return slice(self.row, self.row + self.rows)

    @property
    def col_slice(self) -> slice:
        """Its columns, as an index."""
        return slice(self.col, self.col + self.cols)


@dataclass(frozen=True, kw_only=True)
class Piece(Region):
    """A region as one shard stores it.

    Attributes:
        start: First element in the TP rank's row-major shard.
        stride: Elements from one row to the next in the shard.
    """

    start: int
    stride: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """A flat interval of a shard that is part of one block of a matrix.

    Attributes:
        start: First element in the TP rank's row-major shard.
        numel: Number of elements.
        block: The block that contains it.
    """

    start: int
    numel: int
    block: Block

    @property
    def position(self) -> int:
        """First element, counted from the start of the block."""
        return self.start - self.block.shard_row * self.block.cols

    @property
    def row_span(self) -> tuple[int, int]:
        """(first row in the matrix, rows) of all rows that it touches."""
        first, before = divmod(self.position, self.block.cols)
        return self.block.row + first, -(-(before + self.numel) // self.block.cols)


@dataclass(frozen=True, kw_only=True)
class Share:
    """Everything that one rank holds of one matrix.

    A range of the distributed optimizer starts and ends in the middle of a row. Where whole rows
    are needed (products with a factor) a share is *padded* with zeros to the rows that it touches;
    such a row belongs to two ranks, and products with it are partial sums.

    Attributes:
        rank: Rank in the exchange group.
        runs: Its runs, in the order of the shard.
        is_source: False for a further copy of a parameter that is replicated over TP: it receives
            updates and sends nothing.
    """

    rank: int
    runs: tuple[Run, ...]
    is_source: bool

    @cached_property
    def numel(self) -> int:
        """Elements that the rank holds, without padding."""
        return sum(run.numel for run in self.runs)

    @cached_property
    def row_spans(self) -> tuple[tuple[int, int], ...]:
        """(first row in the matrix, rows) of every run."""
        return tuple(run.row_span for run in self.runs)

    @cached_property
    def rows(self) -> int:
        """Rows of the padded share."""
        return sum(count for _, count in self.row_spans)

    @property
    def col(self) -> int:
        """First column in the matrix."""
        return self.runs[0].block.col

    @property
    def cols(self) -> int:
        """Columns, those of the shard."""
        return self.runs[0].block.cols

    @property
    def is_dense(self) -> bool:
        """True for one run of whole rows: nothing to pad."""
        return len(self.runs) == 1 and self.numel == self.rows * self.cols

    def pieces(self, region: Region | None = None) -> Iterator[Piece]:
        """The elements of the share (or those inside a region), in the order of storage.

        The order in which every message that carries them has them, row by row.
        """
        for run in self.runs:
            yield from _pieces(run, region)

    def padded_pieces(self) -> Iterator[Piece]:
        """``pieces``, with rows and columns counted in the padded share."""
        first = 0
        for run, (top, count) in zip(self.runs, self.row_spans, strict=True):
            for piece in _pieces(run, None):
                yield Piece(
                    row=first + piece.row - top,
                    rows=piece.rows,
                    col=piece.col - self.col,
                    cols=piece.cols,
                    start=piece.start,
                    stride=piece.stride,
                )
            first += count

    def elements_in(self, region: Region) -> int:
        """Number of elements inside a region; nothing is enumerated."""
        return sum(_elements_in(run, region) for run in self.runs)


def shares(
    matrix: LogicalMatrix, parameter: ShardedParameter, group: ExchangeGroup
) -> tuple[Share, ...]:
    """The shares of all ranks that hold a part of a matrix, ordered by rank.

    The sources hold it exactly once together; a matrix that is replicated over TP has further
    shares, one for each copy of a source.
    """
    by_rank: dict[int, list[Run]] = defaultdict(list)
    for block in matrix.blocks:
        first = block.shard_row * block.cols
        last = first + block.rows * block.cols
        for dp_rank, (range_start, range_stop) in enumerate(parameter.ranges):
            start, stop = max(first, range_start), min(last, range_stop)
            if stop > start:
                rank = group.rank(tp_rank=block.tp_rank, dp_rank=dp_rank)
                by_rank[rank].append(Run(start=start, numel=stop - start, block=block))
    copies = range(group.tp if matrix.replicated else 1)
    return tuple(
        Share(rank=rank + copy, runs=tuple(sorted(runs, key=_start)), is_source=copy == 0)
        for rank, runs in sorted(by_rank.items())
        for copy in copies
    )


def _start(run: Run) -> int:
    return run.start


def _pieces(run: Run, region: Region | None) -> Iterator[Piece]:
    """Cut a flat run into partial first row, whole rows, partial last row, inside the region."""
    width = run.block.cols
    done = 0
    while done < run.numel:
        row, col = divmod(run.position + done, width)
        left = run.numel - done
        whole_rows = left // width if col == 0 else 0
        piece = Piece(
            row=run.block.row + row,
            rows=whole_rows or 1,
            col=run.block.col + col,
            cols=width if whole_rows else min(width - col, left),
            start=run.start + done,
            stride=width,
        )
        done += piece.numel
        inside = piece if region is None else _intersection(piece, region)
        if inside is not None:
            yield inside


def _intersection(piece: Piece, region: Region) -> Piece | None:
    """What of a piece is inside a region, with rows and columns of the matrix."""
    row, col = max(piece.row, region.row), max(piece.col, region.col)
    rows = min(piece.row + piece.rows, region.row + region.rows) - row
    cols = min(piece.col + piece.cols, region.col + region.cols) - col
    if rows <= 0 or cols <= 0:
        return None
    skipped = (row - piece.row) * piece.stride + col - piece.col
    return Piece(
        row=row, rows=rows, col=col, cols=cols, start=piece.start + skipped, stride=piece.stride
    )


def _elements_in(run: Run, region: Region) -> int:
    block = run.block
    left = max(region.col - block.col, 0)
    right = min(region.col + region.cols - block.col, block.cols)
    if left >= right:
        return 0
    # Positions of the region's rows within the block; of those before a position, the columns.
    first = max(run.position, (region.row - block.row) * block.cols)
    end = min(run.position + run.numel, (region.row + region.rows - block.row) * block.cols)
    if first >= end:
        return 0
    return _before(end, block.cols, left, right) - _before(first, block.cols, left, right)


def _before(position: int, width: int, left: int, right: int) -> int:
    """Elements of columns left … right among the first ``position`` of a row-major block."""
    rows, col = divmod(position, width)
    return rows * (right - left) + min(max(col - left, 0), right - left)


def even_cuts(length: int, count: int) -> tuple[tuple[int, int], ...]:
    """``count`` intervals of 0 … length, as equal as possible; the longer ones come first."""
    each, longer = divmod(length, count)
    ends = [number * each + min(number, longer) for number in range(count + 1)]
    return tuple(pairwise(ends))


def panels(shape: tuple[int, int], count: int) -> tuple[Region, ...]:
    """Panels of an (m, n) matrix: whole columns where m <= n, otherwise whole rows."""
    m, n = shape
    cuts = even_cuts(max(m, n), count)
    if m <= n:
        return tuple(Region(row=0, rows=m, col=first, cols=end - first) for first, end in cuts)
    return tuple(Region(row=first, rows=end - first, col=0, cols=n) for first, end in cuts)


def merged(pieces: Sequence[tuple[Piece, int]]) -> Iterator[tuple[int, int, int, int, int]]:
    """Pieces and their places in a message, joined where both are contiguous.

    Args:
        pieces: (piece, first element in the message), in the order of the message.

    Yields:
        (start in the shard, rows, cols, stride, first element in the message); of what is
        contiguous in the shard rows is 1.
    """
    flat: tuple[int, int, int] | None = None  # start, numel, offset
    for piece, offset in pieces:
        is_flat = piece.rows == 1 or piece.cols == piece.stride
        if flat and is_flat and (flat[0] + flat[1], flat[2] + flat[1]) == (piece.start, offset):
            flat = (flat[0], flat[1] + piece.numel, flat[2])
            continue
        if flat:
            yield flat[0], 1, flat[1], 0, flat[2]
            flat = None
        if is_flat:
            flat = (piece.start, piece.numel, offset)
        else:
            yield piece.start, piece.rows, piece.cols, piece.stride, offset
    if flat:
        yield flat[0], 1, flat[1], 0, flat[2]
