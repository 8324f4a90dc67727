"""Products of batches of matrices with symmetric results.

On CPU a large product is computed by block rows up to the diagonal and mirrored, which saves up to
half of its FLOPs. On CUDA a kernel (``linalg.kernels``) does the same, if available; otherwise it
is a plain product.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import torch
from torch import Tensor

from megatron_muon.linalg.kernels import symmetric_kernel

# Rows of a block. Fewer rows save more FLOPs, but run slower than a large product.
BLOCK_ROWS = 128


def small_side_first(device: torch.device) -> bool:
    """Return True if the transpose of tall matrices should be contiguous.

    Kernels for symmetric products read whole rows of the smaller side. BLAS supports both layouts,
    so that tall matrices need no transposition.
    """
    return device.type != "cpu"


@lru_cache(maxsize=256)
def block_rows(m: int, device: torch.device) -> tuple[tuple[int, int], ...]:
    """Return (first, end) of the block rows of a symmetric m×m product."""
    count = max(1, m // BLOCK_ROWS) if device.type == "cpu" else 1
    cuts = [m * i // count for i in range(count + 1)]
    return tuple(itertools.pairwise(cuts))


def symmetric_product_flops(m: int, n: int, device: torch.device) -> int:
    """Return the FLOPs of a symmetric m×m product over n on ``device``."""
    return sum(2 * n * (end - start) * end for start, end in block_rows(m, device))


def temporary_bytes(m: int, n: int, device: torch.device, dtype: torch.dtype) -> int:
    """Return the temporary bytes of X Xᵀ for an m×n matrix, as a kernel allocates its result."""
    kernel = symmetric_kernel(device, dtype)
    return m * m * dtype.itemsize if kernel is not None and kernel.supports_shape(m, n) else 0


def gram(x: Tensor, out: Tensor) -> None:
    """Compute ``out`` (B, m, m) = X Xᵀ of x (B, m, n)."""
    kernel = symmetric_kernel(x.device, x.dtype)
    if kernel is not None and kernel.supports(x):
        for one, result in zip(x, out, strict=True):
            kernel(one, None, alpha=1.0, beta=0.0, out=result)
        return
    rows = block_rows(x.shape[-2], x.device)
    if len(rows) == 1:
        torch.bmm(x, x.mT, out=out)
        return
    for one, result in zip(x, out, strict=True):
        for start, end in rows:
            torch.mm(one[start:end], one[:end].T, out=result[start:end, :end])
    _mirror(out, rows)


def square_plus(a: Tensor, *, alpha: float, beta: float, out: Tensor) -> None:
    """Compute ``out`` (B, m, m) = beta A + alpha A² of symmetric a, without shared memory."""
    kernel = symmetric_kernel(a.device, a.dtype)
    if kernel is not None and kernel.supports(a):
        for one, result in zip(a, out, strict=True):
            kernel(one, one, alpha=alpha, beta=beta, out=result)
        return
    rows = block_rows(out.shape[-1], out.device)
    if len(rows) == 1:
        torch.baddbmm(a, a, a, beta=beta, alpha=alpha, out=out)
        return
    # By matrix: a strided batch is slower than its matrices here.
    for one, result in zip(a, out, strict=True):
        for start, end in rows:
            torch.addmm(
                one[start:end, :end],
                one[start:end],
                one[:, :end],
                beta=beta,
                alpha=alpha,
                out=result[start:end, :end],
            )
    _mirror(out, rows)


def symmetric_mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Compute ``out`` = A B of commuting symmetric a, b (B, m, m), without shared memory."""
    rows = block_rows(out.shape[-1], out.device)
    if len(rows) == 1:
        torch.bmm(a, b, out=out)
        return
    for left, right, result in zip(a, b, out, strict=True):
        for start, end in rows:
            torch.mm(left[start:end], right[:, :end], out=result[start:end, :end])
    _mirror(out, rows)


def _mirror(out: Tensor, rows: tuple[tuple[int, int], ...]) -> None:
    """Copy the blocks below the diagonal to above it."""
    for start, end in rows[1:]:
        out[:, :start, start:end].copy_(out[:, start:end, :start].mT)
