"""Orthogonalization of a batch of matrices by the quintic Newton-Schulz iteration.

Shape letters: B matrices, each m×n before and after; inside, the smaller side comes first.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from megatron_muon.linalg.coefficients import Schedule
from megatron_muon.linalg.precision import full_precision_matmul

_COMPUTE_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@torch.no_grad()
def newton_schulz(
    x: Tensor, schedule: Schedule, *, compute_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Moves all singular values of each matrix towards 1, keeping the singular vectors.

    With X₀ = x/‖x‖_F, oriented so that m ≤ n, each step (a, b, c) of the schedule does::

        A = X Xᵀ
        X ← aX + (bA + cA²) X

    so that x = U diag(σ) Vᵀ becomes U diag(p(σ/‖x‖_F)) Vᵀ, p the composition of the polynomials
    aσ + bσ³ + cσ⁵. Every matrix of a batch is treated as if it were alone. A matrix of zeros gives
    zeros; a matrix with an inf or nan gives nan throughout, and touches no other matrix. Nothing
    is read back to the host.

    Relative error (Frobenius) against that formula, measured on normal random matrices of 1×64 to
    384×384: 1e-13 in float64, 3e-5 in float32, 7e-2 in bfloat16. The CANS set is ill-conditioned
    for matrices of rank one (1e-10 in float64, 5e-3 in float32) and diverges in bfloat16.

    Args:
        x: (B, m, n) or (m, n), any floating dtype, any strides. Not modified.
        schedule: Triples (a, b, c), see ``coefficient_schedule``.
        compute_dtype: float64, float32 or bfloat16: dtype of the iterates and of the products.
            float32 is true fp32 whatever torch's TF32 settings are. The normalization is done in
            x's dtype, at least in float32, before any rounding to a narrower compute dtype.
        out: Where to put the result: x's shape, dtype and device; may be x itself.

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
    tall = x.shape[-2] > x.shape[-1]
    batch = x.unsqueeze(0) if x.ndim == 2 else x
    normalized = _normalize(batch.mT if tall else batch, compute_dtype)
    # Under the caller's settings fp32 may silently mean TF32: 1e-3 instead of 1e-6.
    with full_precision_matmul() if compute_dtype == torch.float32 else nullcontext():
        orthogonal = _iterate(normalized, schedule)
    result.copy_((orthogonal.mT if tall else orthogonal).view_as(x))
    return result


def newton_schulz_flops(m: int, n: int, steps: int) -> int:
    """Returns the floating-point operations of ``steps`` iterations on one m×n matrix.

    With m ≤ n after orientation: two products of 2m²n and one of 2m³ per step.
    """
    small, large = sorted((m, n))
    return steps * (4 * small**2 * large + 2 * small**3)


def _normalize(x: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """Returns each matrix of x (B, m, n) over its Frobenius norm, contiguous.

    The largest entry is divided out first, so that squares neither overflow nor vanish: in fp32 the
    square of 1e-25 is zero. There is no epsilon, because it would shrink small gradients; only an
    exact zero is replaced.
    """
    wide = torch.promote_types(torch.promote_types(x.dtype, torch.float32), compute_dtype)
    scaled: Tensor = x.to(wide)
    largest: Tensor = torch.linalg.vector_norm(scaled, ord=torch.inf, dim=(-2, -1), keepdim=True)
    # masked_fill and not where: a scalar of where would be copied from the host.
    # A quotient, not a product with 1/largest: the reciprocal of a subnormal is inf.
    scaled = scaled / largest.masked_fill(largest == 0, 1.0)
    norm: Tensor = torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True)
    scaled.div_(norm.masked_fill(norm == 0, 1.0))
    return scaled.to(compute_dtype).contiguous()


def _iterate(x: Tensor, schedule: Schedule) -> Tensor:
    """Runs the steps on x (B, m, n), m ≤ n; x serves as one of the two buffers of the iterates."""
    gram = x.new_empty(x.shape[0], x.shape[1], x.shape[1])
    polynomial = torch.empty_like(gram)
    following = torch.empty_like(x)
    for a, b, c in schedule:
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x, polynomial, x, beta=a, out=following)
        x, following = following, x
    return x


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
