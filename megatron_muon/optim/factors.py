"""Rows of low-rank factors that belong to one holder's share, and what they are multiplied to.

Shape letters as in ``orth_dion``: U is (long, r), V (short, r); a share has whole rows of its
columns, in the orientation of the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from megatron_muon.placement import FactorShape, Share

Spans = Sequence[tuple[int, int]]
"""(first row, rows) of every interval of rows of a factor."""


def u_spans(shape: FactorShape, share: Share) -> Spans:
    """Rows of U that a share meets."""
    return ((share.col, share.cols),) if shape.transposed else share.row_spans


def v_spans(shape: FactorShape, share: Share) -> Spans:
    """Rows of V that a share meets."""
    return share.row_spans if shape.transposed else ((share.col, share.cols),)


class LowRank(NamedTuple):
    """An update and what it captured, as products: U Vᵀ = A Rᵀ and U Wᵀ = U Cᵀ Vᵀ = B Rᵀ."""

    update: torch.Tensor
    """A, in rows of the matrix."""

    captured: torch.Tensor
    """B, in rows of the matrix."""

    right: torch.Tensor
    """R, in columns of the matrix."""


def low_rank(
    shape: FactorShape,
    u: torch.Tensor,
    v: torch.Tensor,
    core: torch.Tensor,
    out: torch.Tensor | None = None,
) -> LowRank:
    """The products in the orientation of the matrix, from U, V and C (or some rows of U and V).

    Args:
        shape: Orientation of the factors.
        u: Rows of U.
        v: Rows of V.
        core: C (r, r), with W = V C.
        out: Where the captured factor goes.
    """
    if shape.transposed:
        return LowRank(v, torch.mm(v, core, out=out), u)
    return LowRank(u, torch.mm(u, core.T, out=out), v)


def take_rows(slot: torch.Tensor, factor: torch.Tensor, spans: Spans) -> None:
    """Copy rows of a factor into a slot of a message."""
    for target, source in _rows(slot, factor, spans):
        target.copy_(source)


def add_rows(factor: torch.Tensor, slot: torch.Tensor, spans: Spans) -> None:
    """Add the rows of a slot to those of a factor: partial sums of several holders."""
    for source, target in _rows(slot, factor, spans):
        target.add_(source)


def _rows(
    slot: torch.Tensor, factor: torch.Tensor, spans: Spans
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rows, first = slot.view(-1, factor.shape[1]), 0
    for start, count in spans:
        yield rows[first : first + count], factor[start : start + count]
        first += count


def gather_rows(factor: torch.Tensor, spans: Spans) -> torch.Tensor:
    """Rows of a factor, one interval after another; a view where there is one interval."""
    parts = [factor[start : start + count] for start, count in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
