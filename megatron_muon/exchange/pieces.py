"""Views of pieces and patches: of where they lie, and of the message that they travel in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_muon.placement.program import Patch, Piece

PackFunction = Callable[[Sequence[Piece], Sequence[torch.Tensor]], None]
"""Fills the buffer views (one per piece, shaped as ``piece_of``) with what the owners need."""

ApplyFunction = Callable[[Sequence[Piece], Sequence[torch.Tensor]], None]
"""Applies the updates (views, one per piece, shaped as ``piece_of``) to this rank's ranges."""


def piece_of(owned: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A piece of this rank's flat range: (numel,), or (rows, numel // rows) if it has several."""
    if piece.rows == 1:
        return owned[piece.start : piece.start + piece.numel]
    cols = piece.numel // piece.rows
    end = piece.start + (piece.rows - 1) * piece.stride + cols
    return owned[piece.start : end].unfold(0, cols, piece.stride)


def piece_buffers(buffer: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """The places of the pieces in a message, of the same shapes, each contiguous."""
    return [
        buffer[p.offset : p.offset + p.numel]
        if p.rows == 1
        else buffer[p.offset : p.offset + p.numel].view(p.rows, -1)
        for p in pieces
    ]


def patch_view(matrix: torch.Tensor, patch: Patch) -> torch.Tensor:
    """A patch of its matrix (m, n), or of a panel that its rows and columns count from."""
    return matrix[patch.row : patch.row + patch.rows, patch.col : patch.col + patch.cols]


def buffer_view(buffer: torch.Tensor, patch: Patch) -> torch.Tensor:
    """The place of a patch in a message, (rows, cols), contiguous."""
    numel = patch.rows * patch.cols
    return buffer[patch.offset : patch.offset + numel].view(patch.rows, patch.cols)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target, at once where the device can."""
    if targets:
        torch._foreach_copy_(targets, sources)
