"""Orth-Dion on whole oriented matrices, in one process, out of ``linalg``'s own factors."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_muon.linalg import (
    RIGHT_FACTORS,
    full_precision_matmul,
    orthonormal_basis,
    right_factor,
)

FP64, FP32 = torch.float64, torch.float32
MU = 0.95
KINDS = pytest.mark.parametrize("kind", RIGHT_FACTORS)
ISOMETRIES = pytest.mark.parametrize("kind", ["qr", "polar"])


class DionFactors(NamedTuple):
    """Factors of one step on a batch of B matrices m x n, m >= n."""

    u: Tensor
    """U (B, m, r): orthonormal columns, or zeros."""

    v: Tensor
    """V (B, n, r) of the update U Vᵀ."""

    kept: Tensor
    """V (B, n, r) of the next step: v, and full rank where directions of v were dropped."""

    w: Tensor
    """W (B, n, r) = Bᵀ U."""


def dion_update(b: Tensor, v: Tensor, kind: str) -> DionFactors:
    """U = orth(B V), W = Bᵀ U, and the right factor of W."""
    with full_precision_matmul():
        u = orthonormal_basis(b @ v)
        w = b.mT @ u
    factor = right_factor(w, v, kind)
    return DionFactors(u, factor.update, factor.kept, w)


def decay_captured(b: Tensor, u: Tensor, w: Tensor, momentum: float) -> Tensor:
    """M = B − (1 − μ) U Wᵀ."""
    with full_precision_matmul():
        return b - (1.0 - momentum) * (u @ w.mT)


def step(
    m: Tensor, grad: Tensor, v: Tensor, kind: str, *, momentum: float = MU
) -> tuple[Tensor, ...]:
    """One step of batches: new M, U, V of the update, kept V."""
    b = m + grad
    factors = dion_update(b, v, kind)
    return decay_captured(b, factors.u, factors.w, momentum), factors.u, factors.v, factors.kept


def generator(seed: int = 0) -> torch.Generator:
    """Random numbers of their own."""
    return torch.Generator().manual_seed(seed)


def random(shape: tuple[int, ...], *, dtype: torch.dtype = FP64, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, dtype=FP64, generator=generator(seed)).to(dtype)


def rotation(m: int, n: int, *, seed: int) -> Tensor:
    """A matrix (m, n) with orthonormal columns."""
    return torch.linalg.qr(random((m, n), seed=seed))[0]


def decaying(m: int, n: int, power: float, *, seed: int = 0) -> Tensor:
    """A matrix (m, n) with m ≥ n and singular values i^-power."""
    sigma = torch.arange(1, n + 1, dtype=FP64) ** -power
    return (rotation(m, n, seed=seed) * sigma) @ rotation(n, n, seed=seed + 1).T


def polar(x: Tensor) -> Tensor:
    """The polar factor, all singular values 1."""
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    return u @ vt


def spectral(x: Tensor) -> float:
    """The largest singular value of any matrix of a batch."""
    return float(torch.linalg.matrix_norm(x.double(), ord=2).max())
