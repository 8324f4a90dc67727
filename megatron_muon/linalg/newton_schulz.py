"""Orthogonalization of a batch of matrices by the quintic Newton-Schulz iteration.

Shape letters: B matrices, each m×n as input and output; inside, the smaller side comes first.

With X₀ = x/‖x‖_F, m ≤ n, each step (a, b, c) of a schedule is, with A = X Xᵀ and Z = bA + cA²::

    X ← (aI + Z) X

so that x = U diag(σ) Vᵀ becomes U diag(p(σ/‖x‖_F)) Vᵀ, p the composition of the polynomials
aσ + bσ³ + cσ⁵. A *segment* of L steps computes A once from X, updates it as a polynomial of itself,
and applies the result to X at its end only (the Gram form)::

    Q = aI + Z,   then   A ← (aI + Z) A (aI + Z),  Q ← (aI + Z) Q   for each further step;   X ← Q X

Segments of one step are the standard form. All products but Q X have symmetric results
(``linalg.products``).

Sources: Keller Jordan, "Muon" (2024); Gram Newton-Schulz with restarts: Dao-AILab,
gram-newton-schulz (2026). The restart rule is our own.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Final

import torch
from torch import Tensor

from megatron_muon.linalg.coefficients import Schedule
from megatron_muon.linalg.norms import frobenius_norm, largest_magnitude
from megatron_muon.linalg.precision import full_precision_matmul
from megatron_muon.linalg.products import (
    gram,
    small_side_first,
    square_plus,
    symmetric_mm,
    temporary_bytes,
)
from megatron_muon.linalg.segments import Segments, cheapest_segments
from megatron_muon.linalg.workspace import Workspace

_COMPUTE_DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_MAX_TEMPORARY_BYTES: Final = 1 << 25
_MULTIPLE: Final = 128


@torch.no_grad()
def newton_schulz(
    x: Tensor,
    schedule: Schedule,
    *,
    compute_dtype: torch.dtype,
    out: Tensor | None = None,
    segments: Segments | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """Moves all singular values of each matrix towards 1, preserving the singular vectors.

    The matrices of a batch are independent. A matrix of zeros results in zeros; a matrix with an
    inf or nan results in nan throughout, without effect on other matrices. There are no host reads.

    Relative error (Frobenius) against the polynomial p on the singular values, for any matrix: at
    most 8 u S, with u the unit roundoff (6e-8 in float32) and S the largest slope of p on [0, 1],
    listed in ``linalg.coefficients``. The worst are matrices of rank one: in the null directions of
    x rounding errors are amplified like small singular values. In 16 bits 8 u S exceeds 1 for most
    sets: directions weaker than u become noise of full strength. Normal random matrices with sides
    of 32 and more are much more accurate: 1e-12 in float64, 1e-4 in float32; errors of all sets,
    forms and dtypes are listed in docs/newton-schulz-errors.md.

    Args:
        x: (B, m, n) or (m, n), any floating dtype, any strides. Not modified.
        schedule: Triples (a, b, c), see ``coefficient_schedule``.
        compute_dtype: float64, float32, float16 or bfloat16: dtype of the iterates and of the
            products. float32 is true fp32 regardless of torch's TF32 settings. The normalization is
            computed in x's dtype or float32, whichever is wider, before any rounding.
        out: Result tensor with x's shape, dtype and device; may be x itself.
        segments: The segmented schedule; None for ``cheapest_segments``.
        workspace: Temporary memory; if it is reused nothing is allocated.

    Returns:
        ``out``, or a new contiguous tensor of x's shape and dtype.

    Raises:
        ValueError: x is not a float tensor of 2 or 3 dimensions, ``out`` does not match it, or the
            compute dtype is unsupported.
    """
    _check(x, compute_dtype, out)
    result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if x.numel() == 0:
        return result
    space = workspace or Workspace()
    m, n = x.shape[-2:]
    batch = x.unsqueeze(0) if x.ndim == 2 else x
    work = _take_like(space, "x", batch.mT if m > n else batch, _wide(x, compute_dtype))
    orthogonal = orthogonalize_(
        (work.mT if m > n else work).copy_(batch),
        schedule,
        compute_dtype=compute_dtype,
        segments=segments,
        workspace=space,
    )
    result.copy_(orthogonal if x.ndim == 3 else orthogonal[0])
    return result


@torch.no_grad()
def orthogonalize_(
    x: Tensor,
    schedule: Schedule,
    *,
    compute_dtype: torch.dtype,
    scale: float = 1.0,
    segments: Segments | None = None,
    workspace: Workspace,
) -> Tensor:
    """Computes ``newton_schulz`` times a scale, overwriting the batch.

    Args:
        x: (B, m, n), any floating dtype; no copy is made if it is as wide as the normalization and
            laid out by ``small_side_first``, or contiguous on CPU. Its content is undefined
            afterwards.
        schedule: As for ``newton_schulz``.
        compute_dtype: As for ``newton_schulz``.
        scale: Factor on the result.
        segments: As for ``newton_schulz``.
        workspace: Temporary memory.

    Returns:
        (B, m, n) in the compute dtype, in the memory of x or of the workspace: valid until the next
        call.
    """
    m, n = x.shape[-2:]
    if segments is None:
        segments = cheapest_segments(m, n, schedule, compute_dtype, x.device)
    oriented = x.mT if m > n else x
    if compute_dtype == x.dtype and _fits(oriented):
        normalized = _normalize_(oriented)
    else:
        normalized = _normalized_copy(oriented, compute_dtype, workspace)
    # With the caller's settings fp32 may silently be TF32: 1e-3 instead of 1e-6.
    with full_precision_matmul() if compute_dtype == torch.float32 else nullcontext():
        orthogonal = _iterate(normalized, segments, scale, workspace)
    return orthogonal.mT if m > n else orthogonal


def newton_schulz_bytes(
    batch: int,
    m: int,
    n: int,
    segments: Segments,
    device: torch.device,
    *,
    held: torch.dtype,
    compute: torch.dtype,
) -> int:
    """Returns the bytes that ``orthogonalize_`` allocates for a batch of m×n matrices.

    Args:
        batch: Number of matrices.
        m: Rows.
        n: Columns.
        segments: The segmented schedule.
        device: Device.
        held: dtype of the batch, whose layout needs no copy.
        compute: Compute dtype.
    """
    small, large = sorted((m, n))
    numel = batch * small * large
    squares = 4 if any(len(segment) > 1 for segment in segments) else 2
    columns = columns_at_once(batch, small, large, compute.itemsize)
    total = compute.itemsize * batch * small * (squares * small + columns)
    total += max(temporary_bytes(small, over, device, compute) for over in (small, large))
    if held != compute:
        wide = torch.promote_types(torch.promote_types(held, torch.float32), compute)
        total += numel * wide.itemsize + (0 if wide == compute else numel * compute.itemsize)
    return total


def columns_at_once(batch: int, m: int, n: int, itemsize: int) -> int:
    """Returns the number of columns of W X computed at a time, for a batch of X (m×n).

    All of them if that takes at most ``_MAX_TEMPORARY_BYTES``; then the product has its own memory.
    """
    most = _MAX_TEMPORARY_BYTES // max(1, batch * m * itemsize)
    if most >= n:
        return n
    # At least an eighth: more parts would only add launches.
    return -(-max(most, n // 8, 1) // _MULTIPLE) * _MULTIPLE


def _wide(x: Tensor, compute_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which x is normalized, before any rounding to a narrower one."""
    return torch.promote_types(torch.promote_types(x.dtype, torch.float32), compute_dtype)


def _fits(x: Tensor) -> bool:
    """Returns True if x (B, m, n), m ≤ n, has a layout that needs no copy."""
    return x.is_contiguous() or (not small_side_first(x.device) and x.mT.is_contiguous())


def _take_like(space: Workspace, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns memory for a tensor of x's shape (B, m, n), m ≤ n, and layout, if supported."""
    if x.is_contiguous() or not _fits(x):
        return space.take(name, tuple(x.shape), dtype=dtype, device=x.device)
    return space.take(name, tuple(x.mT.shape), dtype=dtype, device=x.device).mT


def _normalize_(x: Tensor) -> Tensor:
    """Divides each matrix of x (B, m, n) by its Frobenius norm, in place, and returns x.

    A power of two is divided out first, which is exact, so that squares neither overflow nor
    underflow: in fp32 the square of 1e-25 is zero. There is no epsilon, which would shrink small
    gradients; only an exact zero is replaced.
    """
    largest = largest_magnitude(x)
    # masked_fill instead of where, whose scalar would be copied from the host.
    # A quotient, not a product with 1/largest: the reciprocal of a subnormal is inf.
    x.div_(power_of_two(largest))
    norm = frobenius_norm(x)
    return x.div_(norm.masked_fill(norm == 0, 1.0))


def power_of_two(largest: Tensor) -> Tensor:
    """Returns a power of two in (value, 2 value]; 1 for zero, the value itself for inf and nan."""
    wide = largest.to(torch.promote_types(largest.dtype, torch.float32))
    mantissa, _ = torch.frexp(wide)
    is_number = mantissa.isfinite() & (mantissa != 0)
    return torch.where(is_number, wide / (2.0 * mantissa), wide + (wide == 0))


def _normalized_copy(x: Tensor, compute_dtype: torch.dtype, space: Workspace) -> Tensor:
    """Returns a normalized copy in the compute dtype, in a layout that needs no further copy.

    Computed in x's dtype or float32, whichever is wider, and rounded at the end.
    """
    wide = _take_like(space, "x", x, _wide(x, compute_dtype)).copy_(x)
    normalized = _normalize_(wide)
    if normalized.dtype == compute_dtype:
        return normalized
    return _take_like(space, "narrow", normalized, compute_dtype).copy_(normalized)


def _iterate(x: Tensor, segments: Segments, scale: float, space: Workspace) -> Tensor:
    """Runs the steps on x (B, m, n), m ≤ n; x is one of the two buffers of the iterates.

    A large batch has no second buffer: its columns are updated in parts, in place.
    """
    batch, m, _ = x.shape

    def square(name: str) -> Tensor:
        return space.take(name, (batch, m, m), dtype=x.dtype, device=x.device)

    a, z, spare = square("a"), square("z"), None
    for number, segment in enumerate(segments, start=1):
        factor = scale if number == len(segments) else 1.0
        gram(x, out=a)
        if len(segment) == 1:
            ((alpha, beta, gamma),) = segment
            square_plus(a, alpha=gamma, beta=beta, out=z)
            x, spare = _multiply(x, z, spare, space, beta=factor * alpha, alpha=factor)
        else:
            q = _carried(segment, a, z, square("y"), square("q"))
            x, spare = _multiply(x, q, spare, space, beta=0.0, alpha=factor)
    return x


def _multiply(
    x: Tensor, w: Tensor, spare: Tensor | None, space: Workspace, *, beta: float, alpha: float
) -> tuple[Tensor, Tensor | None]:
    """Returns beta X + alpha W X, and free memory of X's shape; X and W are overwritten."""
    if columns_at_once(*_sizes(x)) < x.shape[-1]:
        multiply_(x, w, space, beta=beta, alpha=alpha)
        return x, None
    out = _take_like(space, "following", x, x.dtype) if spare is None else spare
    return _product(x, w, beta=beta, alpha=alpha, out=out), x


def _sizes(x: Tensor) -> tuple[int, int, int, int]:
    batch, m, n = x.shape
    return batch, m, n, x.element_size()


def multiply_(x: Tensor, w: Tensor, space: Workspace, *, beta: float, alpha: float) -> None:
    """Computes X ← beta X + alpha W X of a batch (B, m, n), in place, by groups of columns.

    Args:
        x: X (B, m, n).
        w: W (B, m, m); overwritten if beta is 0.
        space: Memory for a group of columns.
        beta: Factor of X.
        alpha: Factor of W X.
    """
    columns = columns_at_once(*_sizes(x))
    part = space.take("part", (*x.shape[:-1], columns), dtype=x.dtype, device=x.device)
    if beta == 0.0 and alpha != 1.0:
        w, alpha = w.mul_(alpha), 1.0
    for old in torch.split(x, max(1, columns), dim=-1):
        new = part[..., : old.shape[-1]]
        old.copy_(_product(old, w, beta=beta, alpha=alpha, out=new))


def _product(x: Tensor, w: Tensor, *, beta: float, alpha: float, out: Tensor) -> Tensor:
    if beta != 0.0:
        return torch.baddbmm(x, w, x, beta=beta, alpha=alpha, out=out)
    # Without an added term a copy is saved.
    return torch.bmm(w if alpha == 1.0 else w.mul_(alpha), x, out=out)


def _carried(segment: Schedule, a: Tensor, z: Tensor, y: Tensor, q: Tensor) -> Tensor:
    """Returns Q of a segment from its A, in y, z or q; all arguments are overwritten."""
    for index, (alpha, beta, gamma) in enumerate(segment):
        # W = aI + Z as a matrix: each product without an added term saves a copy.
        square_plus(a, alpha=gamma, beta=beta, out=z)
        z.diagonal(dim1=-2, dim2=-1).add_(alpha)
        if index + 1 < len(segment):
            symmetric_mm(z, a, out=y)
            symmetric_mm(y, z, out=a)
        if index == 0:
            q, z = z, q
        else:
            symmetric_mm(z, q, out=y)
            q, y = y, q
    return q


def _check(x: Tensor, compute_dtype: torch.dtype, out: Tensor | None) -> None:
    """Refuses unsupported arguments of ``newton_schulz``."""
    if x.ndim not in (2, 3) or not x.is_floating_point():
        raise ValueError(
            f"newton_schulz requires a float tensor (m, n) or (B, m, n), not {x.dtype} of shape "
            f"{tuple(x.shape)}."
        )
    if compute_dtype not in _COMPUTE_DTYPES:
        raise ValueError(
            f"newton_schulz computes in {', '.join(map(str, _COMPUTE_DTYPES))}, "
            f"not in {compute_dtype}."
        )
    if out is not None and (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; it must match the input, "
            f"{x.dtype} {tuple(x.shape)} on {x.device}."
        )
