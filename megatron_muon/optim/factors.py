"""Low-rank factors and the share that one holder has of a matrix: rows, products, sums.

Shape letters as in ``orth_dion``: U is (long, r), V (short, r); a share has whole rows of its
columns, in the orientation of the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from megatron_muon.placement import FactorShape, Piece, Share

Spans = Sequence[tuple[int, int]]
"""(first row, rows) of every interval of rows of a factor."""


def u_spans(shape: FactorShape, share: Share) -> Spans:
    """Rows of U that a share meets."""
    return ((share.col, share.cols),) if shape.transposed else share.row_spans


def v_spans(shape: FactorShape, share: Share) -> Spans:
    """Rows of V that a share meets."""
    return share.row_spans if shape.transposed else ((share.col, share.cols),)


def paired_rows(
    slot: torch.Tensor, factor: torch.Tensor, spans: Spans
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of a slot of a message, and the rows of a factor that they stand for."""
    rows, first = slot.view(-1, factor.shape[1]), 0
    for start, count in spans:
        yield rows[first : first + count], factor[start : start + count]
        first += count


class HeldElements(NamedTuple):
    """The elements of a share: pieces in rows and columns of the padded share, and their values."""

    share: Share
    values: Sequence[tuple[Piece, torch.Tensor]]

    @classmethod
    def of(cls, share: Share, flat: torch.Tensor, range_start: int) -> HeldElements:
        """Those of a flat range that starts at ``range_start`` of the shard; views."""
        return cls(
            share,
            [
                (piece, flat[piece.start - range_start :][: piece.numel].view(piece.rows, -1))
                for piece in share.padded_pieces()
            ],
        )

    def times(self, factor: torch.Tensor) -> torch.Tensor:
        """B F, for F with a row for every column of the share."""
        found = factor.new_empty(self.share.rows, factor.shape[1])
        for piece, values in self.values:
            # No two pieces are in one row.
            torch.mm(values, factor[piece.col_slice], out=found[piece.row_slice])
        return found

    def transposed_times(self, factor: torch.Tensor) -> torch.Tensor:
        """Bᵀ F, for F with a row for every row of the share."""
        found = factor.new_zeros(self.share.cols, factor.shape[1])
        for piece, values in self.values:
            found[piece.col_slice].addmm_(values.T, factor[piece.row_slice])
        return found

    def add_product(self, left: torch.Tensor, right: torch.Tensor, factor: float) -> None:
        """B ← B + factor · L Rᵀ, with rows of L and R for rows and columns of the share."""
        for piece, values in self.values:
            values.addmm_(left[piece.row_slice], right[piece.col_slice].T, alpha=factor)


class LowRank(NamedTuple):
    """An update and what it captured, as products: U Vᵀ = A Rᵀ and U Wᵀ = U Cᵀ Vᵀ = B Rᵀ."""

    update: torch.Tensor
    """A, in rows of the matrix."""

    captured: torch.Tensor
    """B, in rows of the matrix."""

    right: torch.Tensor
    """R, in columns of the matrix."""


def low_rank(shape: FactorShape, u: torch.Tensor, v: torch.Tensor, core: torch.Tensor) -> LowRank:
    """The products in the orientation of the matrix, from U, V and C (or some rows of U and V).

    Args:
        shape: Orientation of the factors.
        u: Rows of U.
        v: Rows of V.
        core: C (r, r), with W = V C.
    """
    return LowRank(v, v @ core, u) if shape.transposed else LowRank(u, u @ core.mT, v)


def factor_slots(
    shape: FactorShape, share: Share, slot: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where an update message of a whole matrix has rows of U, rows of V, and C."""
    u, v = shape.u_rows(share) * shape.rank, shape.v_rows(share) * shape.rank
    return slot[:u], slot[u : u + v], slot[u + v :]
