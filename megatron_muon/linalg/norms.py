"""Norms of batches of matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the largest |element| of each matrix of x (B, m, n), as (B, 1, 1); nan propagates.

    On CPU torch's vector norm of order inf is many times slower than both extremes.
    """
    if x.device.type != "cpu":
        largest: Tensor = torch.linalg.vector_norm(x, ord=torch.inf, dim=(-2, -1), keepdim=True)
        return largest
    over = (-2, -1)
    return torch.maximum(x.amax(dim=over, keepdim=True), x.amin(dim=over, keepdim=True).neg_())


def frobenius_norm(x: Tensor) -> Tensor:
    """Return the Frobenius norm of each matrix of x (B, m, n), as (B, 1, 1).

    Lines contiguous in memory are reduced first: a single fp32 sum of a million squares loses two
    digits, in all singular values alike.
    """
    first, second = (-1, -2) if x.stride(-1) == 1 else (-2, -1)
    wide = torch.promote_types(x.dtype, torch.float32)
    lines = torch.linalg.vector_norm(x, dim=first, keepdim=True, dtype=wide)
    norm: Tensor = torch.linalg.vector_norm(lines, dim=second, keepdim=True)
    return norm
