"""Orthonormal factors of tall matrices: what low-rank orthogonalized updates are made of.

Shape letters: B matrices, n×r (or m×r) each, r ≤ n. ``orthonormal_basis`` is the paper's "orth" of
the left side, ``right_factor`` turns W = BᵀU into V in one of three ways:

========  ========================  ============================  ================================
kind      V                         singular values of V          source
========  ========================  ============================  ================================
qr        Q of W = QR, R_ii > 0     1                             Orth-Dion, arXiv:2605.16341
polar     W (WᵀW)^(-1/2)            1; U Vᵀ is the polar factor   Q of QR times the polar factor
                                    of U Wᵀ                       of the r×r matrix R
colnorm   columns of W, length 1    up to √r, the more the        Dion, arXiv:2504.05295
                                    columns of W lean together
========  ========================  ============================  ================================

**Signs.** Householder QR leaves the signs of R's diagonal to chance. As V, its Q has
⟨U Wᵀ, U Vᵀ⟩ = Σ R_ii ≈ 0: a step in no direction, although every singular value is 1. Hence the
positive diagonal.

**Rank.** A direction in which the matrix has nothing must not enter an update with weight 1.
Directions below ``RANK_TOLERANCE`` eps of the longest column (polar: of the largest singular value)
are rounding of the products before and are dropped. Call these functions on whole matrices only: a
shard may have a lower rank than its matrix.

Every matrix is divided by its largest entry first, and is treated as if it were alone. Results are
in float32, or float64 for float64 input; products are true fp32 whatever torch's TF32 settings are.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from megatron_muon.linalg.norms import largest_magnitude
from megatron_muon.linalg.precision import full_precision_matmul

RIGHT_FACTORS: Final = ("qr", "polar", "colnorm")

# In units of eps. Directions without content are below 1 in Bᵀ U (measured in fp32 up to 8192×512).
# In B V a few can be far above: U then has columns too many, which V drops.
RANK_TOLERANCE: Final = 64.0


class RightFactor(NamedTuple):
    """What becomes of W (B, n, r); all float32, or float64 for float64 input."""

    update: Tensor
    """V (B, n, r) of the update U Vᵀ; nothing in dropped directions."""

    kept: Tensor
    """V (B, n, r) for the next step: ``update`` with the dropped directions filled up."""

    core: Tensor
    """(B, r, r) with W = ``update`` @ ``core``, but for what was dropped."""


@torch.no_grad()
def orthonormal_basis(p: Tensor) -> Tensor:
    """Returns an orthonormal basis of the columns of each matrix.

    Column i is column i of P less its projection on the columns before, with length 1: Gram-Schmidt
    by Householder reflections, with signs such that it does not turn away from P's. A column that
    depends on those before becomes zeros, so that U Uᵀ projects on the range of P; zeros give
    zeros. Condition numbers of 1e8 are no problem: what is above the tolerance is orthonormal to
    rounding (5e-6 in float32).

    Reads one flag back to the host. Where dependent columns come before independent ones (rare: not
    for P = B V with a V in general position) the matrix takes r small sequential steps more.

    Args:
        p: (B, m, r) with r ≤ m, any floating dtype and strides. Not modified.

    Returns:
        U (B, m, r), float32 or float64. A matrix with an inf or nan gives nan throughout.

    Raises:
        ValueError: Not a batch of float matrices with r ≤ m.
    """
    _check("orthonormal_basis", p)
    x, largest = _scaled(p)
    with full_precision_matmul():
        basis, _ = _gram_schmidt(x)
    return basis.masked_fill_(~largest.isfinite(), torch.nan)


@torch.no_grad()
def right_factor(w: Tensor, previous: Tensor, kind: str) -> RightFactor:
    """Returns V of the update, V to start the next step from, and what W is in terms of V.

    What is dropped: for ``qr`` and ``colnorm`` columns, which become zeros; for ``polar`` singular
    directions, so that V is a partial isometry (columns of zeros in W stay zeros to rounding). With
    ``qr`` and ``polar`` the singular values of ``update`` are 0 or 1, whatever W is.

    ``kept`` needs full rank: a direction lost once would be lost for ever. The part of the previous
    V's span that is orthogonal to the new V has room for all that was dropped; an orthonormal basis
    of it takes the dropped places. With ``qr`` and ``polar`` the whole of ``kept`` is orthonormal.
    A matrix of zeros keeps the previous V as it is.

    Reads one or two flags back to the host (``polar``: and what torch.linalg.svd reads).

    Args:
        w: W (B, n, r) with r ≤ n, any floating dtype and strides. Not modified.
        previous: V (B, n, r) that this step started from, of full rank. Not modified.
        kind: One of ``RIGHT_FACTORS``.

    Returns:
        ``update``, ``kept`` and ``core``. Where W has an inf or nan, ``update`` and ``core`` are
        nan throughout and ``kept`` is the previous V.

    Raises:
        ValueError: Unknown kind, shapes that differ, or not a batch of float matrices with r ≤ n.
    """
    _check("right_factor", w)
    if kind not in RIGHT_FACTORS:
        raise ValueError(
            f"Right factor {kind} is unknown; supported are {', '.join(RIGHT_FACTORS)}."
        )
    if previous.shape != w.shape:
        raise ValueError(
            f"The previous V is {tuple(previous.shape)} and W is {tuple(w.shape)}; they must agree."
        )
    x, largest = _scaled(w)
    old = previous.to(x.dtype)
    untouched = (largest == 0) | ~largest.isfinite()
    with full_precision_matmul():
        if kind == "polar":
            update, core, dropped, places = _polar(x)
        else:
            update, core = _gram_schmidt(x) if kind == "qr" else _column_lengths(x)
            dropped, places = (update == 0).all(dim=-2), None
        kept = update.clone()
        chosen = (dropped.any(dim=-1) & ~untouched.flatten()).nonzero().flatten()
        if len(chosen):
            span = update[chosen]
            if kind == "colnorm":
                span, _ = _gram_schmidt(span)
            filling = _filling(span, old[chosen], dropped[chosen])
            kept[chosen] += filling if places is None else filling @ places[chosen]
    kept = torch.where(untouched, old, kept)
    core.mul_(largest)
    broken = ~largest.isfinite()
    return RightFactor(
        update.masked_fill_(broken, torch.nan), kept, core.masked_fill_(broken, torch.nan)
    )


def dion_flops(m: int, n: int, r: int) -> int:
    """Returns the floating-point operations of one Orth-Dion step on one m×n matrix.

    Four products of 2mnr (B V, Bᵀ U, U Wᵀ, U Vᵀ), and two Householder QRs, of m×r and of n×r, each
    with its Q written out: 4mr² − 4r³/3 and 4nr² − 4r³/3. Terms of r² are left out, as is the SVD
    of the r×r factor that ``polar`` adds.
    """
    return 8 * m * n * r + 4 * (m + n) * r**2 - 8 * r**3 // 3


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each matrix over its largest entry, and that entry (B, 1, 1); zeros where it is not finite.

    QR and SVD refuse nan, for the whole batch; and squares of 1e-30 vanish in fp32.
    """
    wide: Tensor = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = largest_magnitude(wide)
    # A quotient, not a product with 1/largest: the reciprocal of a subnormal is inf.
    scaled = wide / largest.masked_fill(largest == 0, 1.0)
    return scaled.masked_fill_(~largest.isfinite(), 0.0), largest


def _gram_schmidt(x: Tensor) -> tuple[Tensor, Tensor]:
    """Q (B, n, r) and R (B, r, r), R_ii ≥ 0; Q's columns and R's rows are zeros where dropped."""
    q, r = torch.linalg.qr(x)
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    # Factors of Q's columns and R's rows, applied once and in place: Q is large.
    weights = torch.ones_like(diagonal).masked_fill_(diagonal < 0, -1.0)
    floor = _floor(torch.linalg.vector_norm(r, dim=-2))
    dropped = diagonal.abs() <= floor
    # For a dependent column Householder QR makes up a direction, in which it hides what later
    # columns have there. Nothing is hidden if nothing is left below the rows before the first one.
    after_first = dropped.cumsum(dim=-1) > 0
    hidden = torch.linalg.vector_norm(r * after_first.unsqueeze(-1), dim=-2) > floor
    chosen = hidden.any(dim=-1).nonzero().flatten()
    if len(chosen):
        turn = _gram_schmidt_by_column(r[chosen], floor[chosen])
        q[chosen], r[chosen] = q[chosen] @ turn, turn.mT @ r[chosen]
        weights[chosen] = 1.0
        dropped[chosen] = (turn == 0).all(dim=-2)
    weights.masked_fill_(dropped, 0.0)
    return q.mul_(weights.unsqueeze(-2)), r.mul_(weights.unsqueeze(-1))


def _gram_schmidt_by_column(x: Tensor, floor: Tensor) -> Tensor:
    """Gram-Schmidt on x (B, r, r) that skips columns with no more than ``floor`` (B, 1) of news."""
    basis = torch.zeros_like(x)
    for index in range(x.shape[-1]):
        column = x[..., index : index + 1]
        # Once is not enough where the column is nearly dependent.
        for _ in range(2):
            column = column - basis @ (basis.mT @ column)
        length = torch.linalg.vector_norm(column, dim=-2, keepdim=True)
        skipped = length <= floor.unsqueeze(-1)
        basis[..., index : index + 1] = (column / length).masked_fill_(skipped, 0.0)
    return basis


def _polar(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Partial isometry and symmetric factor of x (B, n, r), and its null directions.

    Returns:
        The isometry (B, n, r), the factor (B, r, r); which singular directions were dropped (B, r),
        and all right singular directions as rows (B, r, r).
    """
    q, r = torch.linalg.qr(x)
    left, sigma, right = torch.linalg.svd(r)
    dropped = sigma <= _floor(sigma)
    isometry = (q @ left.masked_fill(dropped.unsqueeze(-2), 0.0)) @ right
    symmetric = right.mT @ (sigma.masked_fill(dropped, 0.0).unsqueeze(-1) * right)
    return isometry, symmetric, dropped, right


def _column_lengths(x: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of x (B, n, r) over their length, and the lengths as a diagonal matrix (B, r, r)."""
    lengths: Tensor = torch.linalg.vector_norm(x, dim=-2)
    dropped = lengths <= _floor(lengths)
    unit = x / lengths.masked_fill(dropped, 1.0).unsqueeze(-2)
    return (
        unit.masked_fill_(dropped.unsqueeze(-2), 0.0),
        torch.diag_embed(lengths.masked_fill(dropped, 0.0)),
    )


def _filling(span: Tensor, previous: Tensor, dropped: Tensor) -> Tensor:
    """Orthonormal columns for the places in ``dropped`` (B, r), zeros in the other places.

    Of span(previous), r-dimensional, at least as many dimensions are orthogonal to K (B, n, r), a
    partial isometry, as K's rank is below r. They are the left singular vectors of
    (I − K Kᵀ) previous with singular value 1, the largest it has.
    """
    start, _ = torch.linalg.qr(previous)
    q, r = torch.linalg.qr(start - span @ (span.mT @ start))
    left, _, _ = torch.linalg.svd(r)
    fresh = q @ left
    order = (dropped.cumsum(dim=-1) - 1).clamp_(min=0)
    filling = fresh.gather(-1, order.unsqueeze(-2).expand_as(fresh))
    result: Tensor = filling.masked_fill_(~dropped.unsqueeze(-2), 0.0)
    return result


def _floor(sizes: Tensor) -> Tensor:
    """The size (B, 1) up to which a direction is rounding, of the largest of ``sizes`` (B, r)."""
    return sizes.amax(dim=-1, keepdim=True) * (RANK_TOLERANCE * torch.finfo(sizes.dtype).eps)


def _check(what: str, x: Tensor) -> None:
    """Refuses what is not a batch of tall float matrices."""
    if x.ndim != 3 or not x.is_floating_point() or not 1 <= x.shape[-1] <= x.shape[-2]:
        raise ValueError(
            f"{what} takes a float tensor (B, n, r) with 1 ≤ r ≤ n, not {x.dtype} of shape "
            f"{tuple(x.shape)}."
        )
