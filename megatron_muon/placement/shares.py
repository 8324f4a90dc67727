"""What each rank holds of a matrix, as whole rows of its shard: the form that factors multiply."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_muon.matrices import Block, LogicalMatrix
from megatron_muon.placement.segments import Rectangle, Segment, rectangles


@dataclass(frozen=True, kw_only=True)
class SharePiece:
    """A contiguous run of the rank's shard, and its place in the padded rows.

    Attributes:
        start: First element in the TP rank's row-major shard.
        numel: Number of elements.
        offset: First element in the padded (rows, cols) matrix.
    """

    start: int
    numel: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of one matrix, padded with zeros to whole rows of its columns.

    A range of the distributed optimizer starts and ends in the middle of a row; both rows then are
    shared with another rank, and products with them are partial sums.

    Attributes:
        rank: Rank in the exchange group.
        runs: (first row, rows) in the logical matrix of every run of rows.
        rows: Number of rows of all runs.
        col: First column in the logical matrix.
        cols: Number of columns.
        pieces: What the rank really holds of them, one piece a run.
        is_source: False for a further copy of a parameter replicated over TP.
    """

    rank: int
    runs: tuple[tuple[int, int], ...]
    rows: int
    col: int
    cols: int
    pieces: tuple[SharePiece, ...]
    is_source: bool

    @property
    def numel(self) -> int:
        """Elements that the rank holds, without padding."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def is_dense(self) -> bool:
        """Whether it is one run of whole rows: nothing to pad."""
        return len(self.pieces) == 1 and self.numel == self.rows * self.cols


def shares(
    matrix: LogicalMatrix, gathers: tuple[Segment, ...], scatters: tuple[Segment, ...]
) -> tuple[Share, ...]:
    """The shares of all ranks that hold a part of a matrix, ordered by rank.

    Args:
        matrix: The matrix.
        gathers: The runs that are its source.
        scatters: The runs that receive its update: the source, and every further copy.
    """
    sources = {segment.rank for segment in gathers}
    by_rank: dict[int, list[Segment]] = defaultdict(list)
    for segment in scatters:
        by_rank[segment.rank].append(segment)
    return tuple(
        _share(rank, sorted(by_rank[rank], key=lambda s: s.start), rank in sources)
        for rank in sorted(by_rank)
    )


def _share(rank: int, held: list[Segment], is_source: bool) -> Share:
    runs, pieces, rows = [], [], 0
    for segment in held:
        block = segment.block
        position = segment.start - block.shard_row * block.cols
        first, before = divmod(position, block.cols)
        count = -(-(before + segment.numel) // block.cols)
        runs.append((block.row + first, count))
        pieces.append(
            SharePiece(start=segment.start, numel=segment.numel, offset=rows * block.cols + before)
        )
        rows += count
    return Share(
        rank=rank,
        runs=tuple(runs),
        rows=rows,
        col=held[0].block.col,
        cols=held[0].block.cols,
        pieces=tuple(pieces),
        is_source=is_source,
    )


@dataclass(frozen=True, kw_only=True)
class ShareBlock:
    """Elements of a share that are contiguous and a rectangle of its padded rows.

    Attributes:
        start: First element in the TP rank's row-major shard.
        row: First row, of those of the share.
        rows: Number of rows.
        col: First column, of those of the share.
        cols: Number of columns.
    """

    start: int
    row: int
    rows: int
    col: int
    cols: int


def share_blocks(share: Share) -> Iterator[ShareBlock]:
    """A share's pieces, cut into whole rows and the parts of a row before and after them."""
    for piece in share.pieces:
        done = 0
        while done < piece.numel:
            row, col = divmod(piece.offset + done, share.cols)
            left = piece.numel - done
            whole = 0 if col else left // share.cols
            cols = share.cols if whole else min(share.cols - col, left)
            rows = max(1, whole)
            yield ShareBlock(start=piece.start + done, row=row, rows=rows, col=col, cols=cols)
            done += rows * cols


def source_rectangles(share: Share) -> Iterator[Rectangle]:
    """Where the pieces of a share, sent one after another, lie in the logical matrix."""
    first, sent = 0, 0
    for (row, rows), piece in zip(share.runs, share.pieces, strict=True):
        block = Block(tp_rank=0, shard_row=0, rows=rows, row=row, col=share.col, cols=share.cols)
        run = Segment(
            rank=share.rank,
            start=piece.offset - first * share.cols,
            numel=piece.numel,
            block=block,
        )
        for rectangle in rectangles(run):
            yield replace(rectangle, offset=sent + rectangle.offset)
        first += rows
        sent += piece.numel
