"""Rows and elements of Orth-Dion's factors that belong to one holder's share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_muon.placement.factors import FactorShape
from megatron_muon.placement.shares import Share, source_rectangles

Spans = Sequence[tuple[int, int]]
"""(first row, rows) of every run of rows of a factor."""


def u_spans(shape: FactorShape, share: Share) -> Spans:
    """Rows of U that a share meets."""
    return ((share.col, share.cols),) if shape.transposed else share.runs


def v_spans(shape: FactorShape, share: Share) -> Spans:
    """Rows of V that a share meets."""
    return share.runs if shape.transposed else ((share.col, share.cols),)


def update_parts(
    scheme: str, shape: FactorShape, share: Share, slot: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The slot of an update message as U (empty in the factor scheme), V, core."""
    u = shape.u_len(share) * shape.rank if scheme == "matrix" else 0
    v = shape.v_len(share) * shape.rank
    return slot[:u], slot[u : u + v], slot[u + v :]


def update_factors(
    shape: FactorShape, u: torch.Tensor, v: torch.Tensor, core: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, B and R, so that U Vᵀ = A Rᵀ and U Wᵀ = U Cᵀ Vᵀ = B Rᵀ in the matrix's orientation."""
    if shape.transposed:
        return v, v @ core, u
    return u, u @ core.T, v


def products(
    shape: FactorShape, u: torch.Tensor, v: torch.Tensor, core: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """U Vᵀ and U Wᵀ in the matrix's own orientation, contiguous."""
    for_update, for_captured, right = update_factors(shape, u, v, core)
    return for_update @ right.T, for_captured @ right.T


def take_elements(slot: torch.Tensor, product: torch.Tensor, share: Share) -> None:
    """Copy a share's elements of a whole matrix into a slot, piece after piece."""
    for block in source_rectangles(share):
        target = slot[block.offset : block.offset + block.rows * block.cols]
        target.view(block.rows, block.cols).copy_(
            product[block.row : block.row + block.rows, block.col : block.col + block.cols]
        )


def take_rows(slot: torch.Tensor, factor: torch.Tensor, spans: Spans) -> None:
    """Copy rows of a factor into a slot, run after run."""
    rows = slot.view(-1, factor.shape[1])
    first = 0
    for start, count in spans:
        rows[first : first + count].copy_(factor[start : start + count])
        first += count


def add_rows(factor: torch.Tensor, part: torch.Tensor, spans: Spans) -> None:
    """Add the rows of a slot to those of a factor: partial sums of several holders."""
    rows = part.view(-1, factor.shape[1])
    first = 0
    for start, count in spans:
        factor[start : start + count].add_(rows[first : first + count])
        first += count
