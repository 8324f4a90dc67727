"""Small shares of many matrices, whose products with factors are computed as one batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from megatron_muon.exchange import copy_all
from megatron_muon.placement import FactorShape, Scheme, Share
from megatron_muon.placement.program import FlatPiece, HeldMatrix

MOST_ELEMENTS = 1 << 25
"""Of the shares of a batch, of factors and of products together."""


def batches(held: Sequence[tuple[Scheme, Share]]) -> Iterator[list[int]]:
    """Positions of shares that are computed together: they have the same columns and factors.

    Where others have copies each share is computed alone: they may have other shares beside it,
    and products of another batch may differ in their last bits.
    """
    alike: dict[tuple[FactorShape, int], list[int]] = defaultdict(list)
    for position, (scheme, share) in enumerate(held):
        assert scheme.factors is not None, "the plan is one of another optimizer"
        if all(other.is_source for other in scheme.shares):
            alike[scheme.factors, share.cols].append(position)
        else:
            yield [position]
    for (shape, cols), positions in alike.items():
        # Neighbours have about as many rows, so that little is padded.
        positions.sort(key=lambda position: -held[position][1].rows)
        start = 0
        while start < len(positions):
            rows = held[positions[start]][1].rows
            each = rows * cols + 3 * (rows + cols) * shape.rank
            count = max(1, MOST_ELEMENTS // each)
            yield positions[start : start + count]
            start += count


def multiplied_bytes(
    held: Sequence[tuple[Scheme, Share]], positions: Sequence[int], wide: int
) -> int:
    """Memory that the product of a batch with a factor takes: shares, factor and product."""
    rows, cols, rank = _sizes(held, positions)
    return len(positions) * (_elements(rows, cols, positions) + (rows + cols) * rank) * wide


def applied_bytes(held: Sequence[tuple[Scheme, Share]], positions: Sequence[int], wide: int) -> int:
    """Memory that products of factors take: elements, U, V, C and one of them times C."""
    rows, cols, rank = _sizes(held, positions)
    factors = (2 * rows + cols + rank) * rank
    return len(positions) * (_elements(rows, cols, positions) + factors) * wide


def _sizes(held: Sequence[tuple[Scheme, Share]], positions: Sequence[int]) -> tuple[int, int, int]:
    scheme, first = held[positions[0]]
    assert scheme.factors is not None
    return first.rows, first.cols, scheme.factors.rank


def _elements(rows: int, cols: int, positions: Sequence[int]) -> int:
    """Of a share one by one nothing is copied."""
    return rows * cols if len(positions) > 1 else 0


class HeldBatch:
    """Shares that are computed together, padded with rows of zeros.

    Attributes:
        entries: The shares; the first one has the most rows.
        shape: Shape of the factors.
        size: (shares, rows, columns) of the batch.
    """

    def __init__(self, entries: Sequence[HeldMatrix]) -> None:
        first, shape = entries[0], entries[0].scheme.factors
        assert shape is not None, "the plan is one of another optimizer"
        self.entries = entries
        self.shape = shape
        self.size = (len(entries), first.share.rows, first.share.cols)

    def elements(self, batch: torch.Tensor) -> tuple[list[FlatPiece], list[torch.Tensor]]:
        """Elements of this rank's ranges, and their places in the batch."""
        pieces, places = [], []
        for entry, values in zip(self.entries, batch, strict=True):
            for piece in entry.share.padded_pieces():
                pieces.append(
                    FlatPiece(
                        matrix=entry.index,
                        parameter=entry.parameter,
                        start=piece.start - entry.range_start,
                        rows=1,
                        cols=piece.numel,
                        stride=0,
                        offset=0,
                    )
                )
                places.append(values[piece.row_slice, piece.col_slice].view(-1))
        return pieces, places

    def stacked(self, slots: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Rows of factors, one slot of a message for each share, padded with rows of zeros."""
        parts = [slot.view(-1, self.shape.rank) for slot in slots]
        heights = {len(part) for part in parts}
        size = (len(parts), max(heights), self.shape.rank)
        make = torch.empty if len(heights) == 1 else torch.zeros
        found = make(size, dtype=dtype, device=parts[0].device)
        copy_all([whole[: len(part)] for whole, part in zip(found, parts, strict=True)], parts)
        return found
