"""Orth-Dion on whole matrices: low-rank orthogonalized updates with error feedback.

For every logical matrix X (m x n) with gradient G, rank r, momentum state M (m x n, zeros at
start), right factor V (n x r, standard normal at start), learning rate η, weight decay λ and
momentum factor μ::

    B = M + G
    P = B V                                  # project
    U = orth(P)                              # linalg.orthonormal_basis
    W = Bᵀ U                                 # pull_back
    M = B − (1 − μ) U Wᵀ                     # decay_captured: the residual is kept whole
    V = orth₊(W)                             # linalg.right_factor
    X = (1 − η λ) X − η · s · U Vᵀ           # descend

The new V is used in the update and starts the next step. ``right_factor`` chooses what orth₊ is:
QR with a positive diagonal (``qr``, the paper), the polar factor (``polar``), or columns scaled to
length 1 (``colnorm``, which is plain Dion). All three have the same U Uᵀ and the same M.

All of it happens on the matrix or, if m < n, on its transpose, by the whole matrix's shape: then V
is the smaller factor whatever the layout. Only s(m, n) sees the sides as they were.

Meanings of β elsewhere: the paper's box removes the captured part wholly and decays the residual by
β, and its β = 1 is μ = 0 here; other code writes M −= β U Wᵀ, and its β is 1 − μ.

Sources: Orth-Dion, arXiv:2605.16341; Dion, arXiv:2504.05295 and github.com/microsoft/dion, whose
form of the momentum this is.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_muon.linalg import (
    RIGHT_FACTORS,
    full_precision_matmul,
    orthonormal_basis,
    right_factor,
    update_scale,
)


@dataclass(frozen=True, kw_only=True)
class OrthDionRule:
    """Hyper-parameters that are the same for every matrix.

    Attributes:
        rank_fraction: Rank over the smaller side, in (0, 1].
        rank_multiple_of: The rank is rounded up to a multiple of this, but not above the sides.
        momentum: μ, in [0, 1).
        right_factor: One of ``linalg.RIGHT_FACTORS``.
        scale_mode: Name of s(m, n), see ``linalg.scales``.
        extra_scale_factor: Further factor on the update.
        rank_compensation: Multiply the update by √(min(m, n) / r), which gives it the root mean
            square of a full-rank update; its singular values are then above 1.
        state_dtype: Element type of M and V between steps. bf16 keeps V's columns orthonormal to
            1e-3 only.

    Raises:
        ValueError: A value out of its range.
    """

    rank_fraction: float
    rank_multiple_of: int = 1
    momentum: float = 0.95
    right_factor: str = "qr"
    scale_mode: str
    extra_scale_factor: float = 1.0
    rank_compensation: bool = False
    state_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not 0.0 < self.rank_fraction <= 1.0:
            raise ValueError(f"rank_fraction is {self.rank_fraction}; it must be in (0, 1].")
        if self.rank_multiple_of < 1:
            raise ValueError(f"rank_multiple_of is {self.rank_multiple_of}; it must be at least 1.")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum is {self.momentum}; it must be in [0, 1).")
        if self.right_factor not in RIGHT_FACTORS:
            raise ValueError(
                f"right_factor is {self.right_factor}; supported are {', '.join(RIGHT_FACTORS)}."
            )
        update_scale(self.scale_mode, 1, 1)

    def rank(self, m: int, n: int) -> int:
        """Returns r of a whole m x n matrix, at least 1 and at most min(m, n)."""
        smaller, multiple = min(m, n), self.rank_multiple_of
        # 0.1 * 30 is 3.0000000000000004 in float64: without rounding, rank 4.
        wanted = math.ceil(round(self.rank_fraction * smaller / multiple, 9))
        return min(smaller, multiple * max(1, wanted))

    def scale(self, m: int, n: int) -> float:
        """Returns the factor of U Vᵀ for a whole m x n matrix, before any transposition."""
        scale = self.extra_scale_factor * update_scale(self.scale_mode, m, n)
        if self.rank_compensation:
            scale *= math.sqrt(min(m, n) / self.rank(m, n))
        return scale


class DionFactors(NamedTuple):
    """Factors of one step on a batch of B oriented matrices m x n; float32 or float64."""

    u: Tensor
    """U (B, m, r): orthonormal columns, or zeros."""

    v: Tensor
    """V (B, n, r) of the update U Vᵀ."""

    kept: Tensor
    """V (B, n, r) of the next step: v, and full rank where directions of v were dropped."""

    w: Tensor
    """W (B, n, r) = Bᵀ U."""


def is_transposed(m: int, n: int) -> bool:
    """Whether a whole m x n matrix is worked on as its transpose: iff it is wider than tall."""
    return m < n


def oriented(matrices: Tensor, m: int, n: int) -> Tensor:
    """Returns a view of matrices (..., rows, columns), transposed iff whole ones (m x n) are.

    Applied to its own result it undoes itself. The rows and columns may be part of the matrix.
    """
    return matrices.mT if is_transposed(m, n) else matrices


def seeded_right_factor(name: str, n: int, r: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the V of the first step: standard normal, a function of its arguments alone.

    Neither torch's random state nor rank, device or layout have a part in it, and it disturbs none.
    Drawn in float64, whose path in torch does not depend on the processor's vector width.

    Args:
        name: Name of the logical matrix, the same on every rank and after a restart.
        n: Smaller side of the whole matrix.
        r: Rank.
        dtype: Element type of the result.

    Returns:
        V (n, r) on CPU.
    """
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(n, r, dtype=torch.float64, generator=generator).to(dtype)


@torch.no_grad()
def project(b: Tensor, v: Tensor) -> Tensor:
    """Returns P = B V (..., m, r) of B (..., m, n) and V (..., n, r), at least in float32.

    A sum over n: shards that cut n give terms of it, shards that cut m give rows.
    """
    return _product(b, v)


@torch.no_grad()
def pull_back(b: Tensor, u: Tensor) -> Tensor:
    """Returns W = Bᵀ U (..., n, r) of B (..., m, n) and U (..., m, r), at least in float32.

    A sum over m: shards that cut m give terms of it, shards that cut n give rows.
    """
    return _product(b.mT, u)


@torch.no_grad()
def decay_captured(b: Tensor, u: Tensor, w: Tensor, momentum: float) -> Tensor:
    """Returns M = B − (1 − μ) U Wᵀ (..., m, n), in B's dtype; elementwise in the rows and columns.

    Args:
        b: B (..., m, n), or any block of it. Not modified.
        u: U (..., m, r), the block's rows.
        w: W (..., n, r), the block's columns.
        momentum: μ.
    """
    captured = _product(u, w.mT)
    return (b.to(captured.dtype) - (1.0 - momentum) * captured).to(b.dtype)


@torch.no_grad()
def descend(
    x: Tensor, u: Tensor, v: Tensor, *, lr: float, weight_decay: float, scale: float
) -> Tensor:
    """Returns (1 − η λ) X − η s U Vᵀ (..., m, n), in X's dtype; elementwise in rows and columns.

    Args:
        x: X (..., m, n), oriented like the factors, or any block of it. Not modified.
        u: U (..., m, r), the block's rows.
        v: V (..., n, r) of the update, the block's columns.
        lr: η.
        weight_decay: λ; not multiplied by s.
        scale: s, see ``OrthDionRule.scale``.
    """
    update = _product(u, v.mT)
    return ((1.0 - lr * weight_decay) * x.to(update.dtype) - lr * scale * update).to(x.dtype)


@torch.no_grad()
def dion_update(b: Tensor, v: Tensor, kind: str) -> DionFactors:
    """One step's factors for whole matrices.

    Args:
        b: B = M + G (B, m, n), oriented: m ≥ n. Not modified.
        v: V (B, n, r) of the step before. Not modified.
        kind: One of ``linalg.RIGHT_FACTORS``.

    Returns:
        U, V of the update, V of the next step, W. With a B of zeros the first two are zeros and V
        stays; with an inf or nan in B they and W are nan, and V stays.

    Raises:
        ValueError: Shapes that do not fit, or an unknown kind.
    """
    u = orthonormal_basis(project(b, v))
    w = pull_back(b, u)
    factor = right_factor(w, v, kind)
    return DionFactors(u, factor.update, factor.kept, w)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A B in the wider of their dtypes, at least float32, never TF32."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    with full_precision_matmul():
        return a.to(dtype) @ b.to(dtype)
