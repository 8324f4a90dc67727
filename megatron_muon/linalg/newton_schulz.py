"""Orthogonalization of a batch of matrices by the quintic Newton-Schulz iteration.

Shape letters: B matrices, each m×n before and after; inside, the smaller side comes first.

With X₀ = x/‖x‖_F, m ≤ n, each step (a, b, c) of a schedule is, with A = X Xᵀ and Z = bA + cA²::

    X ← (aI + Z) X

so that x = U diag(σ) Vᵀ becomes U diag(p(σ/‖x‖_F)) Vᵀ, p the composition of the polynomials
aσ + bσ³ + cσ⁵. A *segment* of L steps computes A once from X, carries it on as a polynomial of
itself, and touches X again at its end only (the Gram form)::

    Q = aI + Z,   then   A ← (aI + Z) A (aI + Z),  Q ← (aI + Z) Q   for each further step;   X ← Q X

Segments of one step are the standard form. All products but Q X have symmetric results
(``linalg.products``).

Sources: Keller Jordan, "Muon" (2024); Gram Newton-Schulz with restarts: Dao-AILab,
gram-newton-schulz (2026). The rule for restarts here is our own.
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
    bytes_beside,
    gram,
    small_side_first,
    square_plus,
    symmetric_mm,
)
from megatron_muon.linalg.segments import Segments, cheapest_segments
from megatron_muon.linalg.workspace import Workspace

_COMPUTE_DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_MOST_BYTES_BESIDE: Final = 1 << 25
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
    """Moves all singular values of each matrix towards 1, keeping the singular vectors.

    Every matrix of a batch is treated as if it were alone. A matrix of zeros gives zeros; a matrix
    with an inf or nan gives nan throughout, and touches no other matrix. Nothing is read back to
    the host.

    Relative error (Frobenius) against the polynomial p on the singular values, for any matrix: at
    most 8 u S, with u the unit roundoff (6e-8 in float32) and S the largest slope of p on [0, 1],
    listed in ``linalg.coefficients``. The worst are matrices of rank one: where x has nothing,
    rounding is enlarged as a small singular value is. In 16 bits 8 u S is above 1 for most sets:
    directions weaker than u come out as noise of full strength. Normal random matrices with sides
    of 32 and more are much nearer: 1e-12 in float64, 1e-4 in float32; errors of all sets, forms and
    dtypes are listed in docs/newton-schulz-errors.md.

    Args:
        x: (B, m, n) or (m, n), any floating dtype, any strides. Not modified.
        schedule: Triples (a, b, c), see ``coefficient_schedule``.
        compute_dtype: float64, float32, float16 or bfloat16: dtype of the iterates and of the
            products. float32 is true fp32 whatever torch's TF32 settings are. The normalization is
            done in x's dtype, at least in float32, before any rounding to a narrower dtype.
        out: Where to put the result: x's shape, dtype and device; may be x itself.
        segments: The schedule as it is to be computed; None for what ``cheapest_segments`` says.
        workspace: Memory to work in; with the same one again nothing is allocated.

    Returns:
        ``out``, or a new contiguous tensor of x's shape and dtype.

    Raises:
        ValueError: x is not a float tensor of 2 or 3 dimensions, ``out`` does not match it, or the
            compute dtype is another one.
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
    """``newton_schulz`` times a scale, for a batch whose memory may be used up.

    Args:
        x: (B, m, n), any floating dtype; best as wide as the normalization and laid out as
            ``small_side_first`` says, or on CPU contiguous: then no copy is made. Its content is
            undefined afterwards.
        schedule: As for ``newton_schulz``.
        compute_dtype: As for ``newton_schulz``.
        scale: Factor on the result.
        segments: As for ``newton_schulz``.
        workspace: Memory to work in.

    Returns:
        (B, m, n) in the compute dtype, in the memory of x or of the workspace: it holds until the
        next call.
    """
    m, n = x.shape[-2:]
    if segments is None:
        segments = cheapest_segments(m, n, schedule, compute_dtype, x.device)
    oriented = x.mT if m > n else x
    if compute_dtype == x.dtype and _fits(oriented):
        normalized = _normalize_(oriented)
    else:
        normalized = _normalized_copy(oriented, compute_dtype, workspace)
    # Under the caller's settings fp32 may silently mean TF32: 1e-3 instead of 1e-6.
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
        segments: The schedule as it is computed.
        device: Where.
        held: dtype of the batch, which lies as it is computed on.
        compute: Compute dtype.
    """
    small, large = sorted((m, n))
    numel = batch * small * large
    squares = 4 if any(len(segment) > 1 for segment in segments) else 2
    columns = columns_at_once(batch, small, large, compute.itemsize)
    total = compute.itemsize * batch * small * (squares * small + columns)
    total += max(bytes_beside(small, over, device, compute) for over in (small, large))
    if held != compute:
        wide = torch.promote_types(torch.promote_types(held, torch.float32), compute)
        total += numel * wide.itemsize + (0 if wide == compute else numel * compute.itemsize)
    return total


def columns_at_once(batch: int, m: int, n: int, itemsize: int) -> int:
    """Returns the columns of a batch of X (m×n) that W X is computed of at once.

    All of them where that takes no more than ``_MOST_BYTES_BESIDE``; then the product has memory of
    its own.
    """
    most = _MOST_BYTES_BESIDE // max(1, batch * m * itemsize)
    if most >= n:
        return n
    # Of a very large batch an eighth: more parts would only be more launches.
    return -(-max(most, n // 8, 1) // _MULTIPLE) * _MULTIPLE


def _wide(x: Tensor, compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which x is normalized, before any rounding to a narrower one."""
    return torch.promote_types(torch.promote_types(x.dtype, torch.float32), compute_dtype)


def _fits(x: Tensor) -> bool:
    """Whether x (B, m, n), m ≤ n, can be computed on where it lies."""
    return x.is_contiguous() or (not small_side_first(x.device) and x.mT.is_contiguous())


def _take_like(space: Workspace, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a tensor of x's shape (B, m, n), m ≤ n, and layout, as far as that fits."""
    if x.is_contiguous() or not _fits(x):
        return space.take(name, tuple(x.shape), dtype=dtype, device=x.device)
    return space.take(name, tuple(x.mT.shape), dtype=dtype, device=x.device).mT


def _normalize_(x: Tensor) -> Tensor:
    """Divides each matrix of x (B, m, n) by its Frobenius norm, in place, and returns x.

    A power of two is divided out first, which rounds nothing, so that squares neither overflow nor
    vanish: in fp32 the square of 1e-25 is zero. There is no epsilon, because it would shrink small
    gradients; only an exact zero is replaced.
    """
    largest = largest_magnitude(x)
    # masked_fill and not where: a scalar of where would be copied from the host.
    # A quotient, not a product with 1/largest: the reciprocal of a subnormal is inf.
    x.div_(power_of_two(largest))
    norm = frobenius_norm(x)
    return x.div_(norm.masked_fill(norm == 0, 1.0))


def power_of_two(largest: Tensor) -> Tensor:
    """A power of two between the value and twice it; 1 for zero, the value itself for inf, nan."""
    wide = largest.to(torch.promote_types(largest.dtype, torch.float32))
    mantissa, _ = torch.frexp(wide)
    is_number = mantissa.isfinite() & (mantissa != 0)
    return torch.where(is_number, wide / (2.0 * mantissa), wide + (wide == 0))


def _normalized_copy(x: Tensor, compute_dtype: torch.dtype, space: Workspace) -> Tensor:
    """``_normalize_`` of a copy in the compute dtype, laid out as it is computed on.

    Done in x's dtype, at least in float32, and rounded to a narrower one at the end.
    """
    wide = _take_like(space, "x", x, _wide(x, compute_dtype)).copy_(x)
    normalized = _normalize_(wide)
    if normalized.dtype == compute_dtype:
        return normalized
    return _take_like(space, "narrow", normalized, compute_dtype).copy_(normalized)


def _iterate(x: Tensor, segments: Segments, scale: float, space: Workspace) -> Tensor:
    """Runs the steps on x (B, m, n), m ≤ n; x serves as one of the two buffers of the iterates.

    A large batch has no second one: its columns are updated part by part, in place.
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
    """Returns beta X + alpha W X, and memory of X's shape that is free; X and W are overwritten."""
    if columns_at_once(*_sizes(x)) < x.shape[-1]:
        multiply_(x, w, space, beta=beta, alpha=alpha)
        return x, None
    out = _take_like(space, "following", x, x.dtype) if spare is None else spare
    return _product(x, w, beta=beta, alpha=alpha, out=out), x


def _sizes(x: Tensor) -> tuple[int, int, int, int]:
    batch, m, n = x.shape
    return batch, m, n, x.element_size()


def multiply_(x: Tensor, w: Tensor, space: Workspace, *, beta: float, alpha: float) -> None:
    """X ← beta X + alpha W X of a batch (B, m, n), in place, some columns at once.

    Args:
        x: X (B, m, n).
        w: W (B, m, m); overwritten if there is no term to add.
        space: Memory for these columns.
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
    # Without a term to add a copy is saved.
    return torch.bmm(w if alpha == 1.0 else w.mul_(alpha), x, out=out)


def _carried(segment: Schedule, a: Tensor, z: Tensor, y: Tensor, q: Tensor) -> Tensor:
    """Q of a segment, from its A; all five are overwritten, and Q lies in y, z or q."""
    for index, (alpha, beta, gamma) in enumerate(segment):
        # W = aI + Z as a matrix: products without a term to add save a copy each.
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
    """Refuses what ``newton_schulz`` cannot do."""
    if x.ndim not in (2, 3) or not x.is_floating_point():
        raise ValueError(
            f"newton_schulz takes a float tensor (m, n) or (B, m, n), not {x.dtype} of shape "
            f"{tuple(x.shape)}."
        )
    if compute_dtype not in _COMPUTE_DTYPES:
        raise ValueError(
            f"newton_schulz computes in {', '.join(map(str, _COMPUTE_DTYPES))}, "
            f"not in {compute_dtype}."
        )
    if out is not None and (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; it must be as the input, "
            f"{x.dtype} {tuple(x.shape)} on {x.device}."
        )
