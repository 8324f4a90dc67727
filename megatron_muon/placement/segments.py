"""Which flat ranges of which rank hold a logical matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_muon.matrices import Block, LogicalMatrix, ShardedParameter


@dataclass(frozen=True, kw_only=True)
class ExchangeGroup:
    """The ranks among which matrices travel: TP x DP (x CP) of one pipeline stage.

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
class Segment:
    """A contiguous flat run of one rank's shard that is part of one block of a logical matrix.

    Attributes:
        rank: Rank in the exchange group that holds the run.
        start: First element in the TP rank's row-major shard.
        numel: Number of elements.
        block: The block that the run lies in.
    """

    rank: int
    start: int
    numel: int
    block: Block


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    """A piece of a segment that is a rectangle of the logical matrix.

    Attributes:
        offset: First element within the segment.
        rows: Number of rows.
        cols: Number of columns.
        row: First row in the logical matrix.
        col: First column in the logical matrix.
    """

    offset: int
    rows: int
    cols: int
    row: int
    col: int


def segments(
    matrix: LogicalMatrix, parameter: ShardedParameter, group: ExchangeGroup
) -> tuple[Segment, ...]:
    """The runs that together hold the matrix exactly once, ordered by rank and position."""
    found = []
    for block in matrix.blocks:
        block_start = block.shard_row * block.cols
        block_stop = block_start + block.rows * block.cols
        for dp_rank, (range_start, range_stop) in enumerate(parameter.ranges):
            start, stop = max(block_start, range_start), min(block_stop, range_stop)
            if stop > start:
                rank = group.rank(tp_rank=block.tp_rank, dp_rank=dp_rank)
                found.append(Segment(rank=rank, start=start, numel=stop - start, block=block))
    return tuple(sorted(found, key=lambda s: (s.rank, s.start)))


def copies(
    source: tuple[Segment, ...], matrix: LogicalMatrix, group: ExchangeGroup
) -> tuple[Segment, ...]:
    """The runs that receive the update: the sources, and for a replicated matrix every copy."""
    if not matrix.replicated:
        return source
    return tuple(
        Segment(rank=s.rank + tp_rank, start=s.start, numel=s.numel, block=s.block)
        for tp_rank in range(group.tp)
        for s in source
    )


def rectangles(segment: Segment) -> Iterator[Rectangle]:
    """Cut a flat run into at most three rectangles: partial first row, whole rows, partial last."""
    block = segment.block
    width = block.cols
    position = segment.start - block.shard_row * width
    offset, left = 0, segment.numel
    while left:
        row, col = divmod(position, width)
        if col == 0 and left >= width:
            rows, cols = left // width, width
        else:
            rows, cols = 1, min(width - col, left)
        yield Rectangle(
            offset=offset, rows=rows, cols=cols, row=block.row + row, col=block.col + col
        )
        offset += rows * cols
        position += rows * cols
        left -= rows * cols
