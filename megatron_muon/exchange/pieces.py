"""Views of pieces: of the flat range that they lie in, and of the message that they travel in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_muon.placement.program import Piece

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
