"""Orthonormal factors of tall matrices, for low-rank orthogonalized updates.

Shape letters: B matrices, n×r (or m×r) each, r ≤ n. ``orthonormal_basis`` is the paper's "orth" of
the left side, ``right_factor`` computes V from W = BᵀU in one of three ways:

========  ========================  ============================  ================================
kind      V                         singular values of V          source
========  ========================  ============================  ================================
qr        Q of W = QR, R_ii > 0     1                             Orth-Dion, arXiv:2605.16341
polar     W (WᵀW)^(-1/2)            1; U Vᵀ is the polar factor   Q of QR times the polar factor
                                    of U Wᵀ                       of the r×r matrix R
colnorm   columns of W, length 1    up to √r, larger for          Dion, arXiv:2504.05295
                                    correlated columns of W
========  ========================  ============================  ================================

**Signs.** Householder QR leaves the signs of R's diagonal arbitrary. As V, its Q has
⟨U Wᵀ, U Vᵀ⟩ = Σ R_ii ≈ 0: not a descent direction, although every singular value is 1. Hence the
positive diagonal.

**Rank.** A null direction of the matrix must not enter an update with weight 1. Directions below
``RANK_TOLERANCE`` eps of the longest column (polar: of the largest singular value) are rounding
errors of the previous products and are dropped. Call these functions on whole matrices only: a
shard may have a lower rank than its matrix.

Every matrix is divided by its largest entry first, and is independent of the others. Results are in
float32, or float64 for float64 input; products are true fp32 regardless of torch's TF32 settings.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from megatron_muon.linalg.norms import largest_magnitude
from megatron_muon.linalg.precision import full_precision_matmul

RIGHT_FACTORS: Final = ("qr", "polar", "colnorm")

# In units of eps. Null directions are below 1 in Bᵀ U (measured in fp32 up to 8192×512). In B V a
# few can be far above: U then has too many columns, which V drops.
RANK_TOLERANCE: Final = 64.0


class RightFactor(NamedTuple):
    """The factors of W (B, n, r); all float32, or float64 for float64 input."""

    update: Tensor
    """V (B, n, r) of the update U Vᵀ; zero in dropped directions."""

    kept: Tensor
    """V (B, n, r) for the next step: ``update`` with the dropped directions replaced."""

    core: Tensor
    """(B, r, r) with W = ``update`` @ ``core``, except for dropped directions."""


class Basis:
    """An orthonormal basis of the columns of each matrix of a batch, in two parts.

    Column i is column i of P minus its projection on the previous columns, with length 1:
    Gram-Schmidt by Householder reflections, with signs such that it does not point away from P's. A
    column that depends on the previous ones becomes zero, so that U Uᵀ projects on the range of P.
    Condition numbers of 1e8 are handled: directions above the tolerance are orthonormal up to
    rounding (5e-6 in float32).

    If dependent columns precede independent ones (rare: not for P = B V with a generic V) a matrix
    takes r further small sequential steps. The flag for that is on the device; the flags of many
    batches can be read by the host together.

    Attributes:
        unsettled: Flags (B,) of the matrices that need these steps.

    Args:
        p: (B, m, r) with r ≤ m, any floating dtype and strides.
        overwrite: True to use p as memory.

    Raises:
        ValueError: Not a batch of float matrices with r ≤ m.
    """

    @torch.no_grad()
    def __init__(self, p: Tensor, *, overwrite: bool = False) -> None:
        _check("orthonormal_basis", p)
        x, _, self._is_broken = _scaled(p, overwrite=overwrite)
        del p
        with full_precision_matmul():
            self._found = _GramSchmidt(x)
        self.unsettled = self._found.is_hiding

    @torch.no_grad()
    def settled(self, is_unsettled: bool) -> Tensor:
        """Returns U (B, m, r), float32 or float64; nan throughout for an inf or nan in P.

        Args:
            is_unsettled: True if any flag is set, here or in other batches. Otherwise a flagged
                matrix lacks a part of the range of P.
        """
        with full_precision_matmul():
            basis, _ = self._found.settled(is_unsettled)
        return basis.masked_fill_(self._is_broken, torch.nan)


def orthonormal_basis(p: Tensor) -> Tensor:
    """Returns ``Basis`` of one batch (B, m, r), which is not modified; one host read."""
    basis = Basis(p)
    return basis.settled(bool(basis.unsettled.any()))


class Refresh:
    """V of the update, V of the next step, and the coefficients of W in terms of V, in two parts.

    ``qr`` and ``colnorm`` drop columns, which become zero; ``polar`` drops singular directions, so
    that V is a partial isometry (zero columns of W stay zero up to rounding). With ``qr`` and
    ``polar`` the singular values of ``update`` are 0 or 1 for any W.

    ``kept`` must have full rank: a lost direction would never return. The part of the previous V's
    span orthogonal to the new V has sufficient dimension; its orthonormal basis replaces dropped
    directions. With ``qr`` and ``polar`` all of ``kept`` is orthonormal. A matrix of zeros keeps
    the previous V unchanged. If W has an inf or nan, ``update`` and ``core`` are nan throughout and
    ``kept`` is the previous V.

    Attributes:
        unsettled: Flags (B,) of the matrices with dropped directions.

    Args:
        w: W (B, n, r) with r ≤ n, any floating dtype and strides.
        previous: The full-rank V (B, n, r) at the start of this step. Not modified.
        kind: One of ``RIGHT_FACTORS``; ``polar`` waits for torch.linalg.svd.
        overwrite: True to use w as memory.

    Raises:
        ValueError: Unknown kind, shapes that differ, or not a batch of float matrices with r ≤ n.
    """

    @torch.no_grad()
    def __init__(self, w: Tensor, previous: Tensor, kind: str, *, overwrite: bool = False) -> None:
        _check("right_factor", w)
        if kind not in RIGHT_FACTORS:
            raise ValueError(
                f"Right factor {kind} is unknown; supported are {', '.join(RIGHT_FACTORS)}."
            )
        if previous.shape != w.shape:
            raise ValueError(
                f"The previous V is {tuple(previous.shape)} and W is {tuple(w.shape)}; they must "
                "agree."
            )
        x, self._largest, self._is_broken = _scaled(w, overwrite=overwrite)
        del w
        self._kind = kind
        self._previous = previous
        self._untouched = (self._largest == 0) | self._is_broken
        self._x = x
        with full_precision_matmul():
            if kind == "polar":
                self._update, self._core, self._dropped, self._places = _polar(x)
                self.unsettled = self._is_dropped(self._dropped)
            elif kind == "colnorm":
                self._update, self._core = _column_lengths(x)
                self.unsettled = self._is_dropped((self._update == 0).all(dim=-2))
            else:
                self._found = _GramSchmidt(x)
                self.unsettled = self._found.is_hiding | self._is_dropped(self._found.dropped)
        del self._x

    def _is_dropped(self, dropped: Tensor) -> Tensor:
        """Returns flags (B,) of matrices whose dropped directions are to be replaced."""
        return dropped.any(dim=-1) & ~self._untouched.flatten()

    @torch.no_grad()
    def settled(self, is_unsettled: bool, *, skipped: Tensor | None = None) -> RightFactor:
        """Returns the three factors.

        Args:
            is_unsettled: True if any flag is set, here or in other batches.
            skipped: Flags (B,) of matrices to skip: a zero update, and the previous V.
        """
        with full_precision_matmul():
            if self._kind == "qr":
                update, core = self._found.settled(is_unsettled)
                del self._found
            else:
                update, core = self._update, self._core
                del self._update, self._core
            old = self._previous.to(update.dtype)
            kept = self._filled_up(update, old) if is_unsettled else update
        untouched = self._untouched
        if skipped is not None:
            untouched = untouched | skipped.view(-1, 1, 1)
        kept = torch.where(untouched, old, kept)
        core.mul_(self._largest)
        for found in (update, core):
            found.masked_fill_(self._is_broken, torch.nan)
            if skipped is not None:
                found.masked_fill_(skipped.view(-1, 1, 1), 0.0)
        return RightFactor(update, kept, core)

    def _filled_up(self, update: Tensor, old: Tensor) -> Tensor:
        is_polar = self._kind == "polar"
        dropped = self._dropped if is_polar else (update == 0).all(dim=-2)
        kept = update.clone()
        chosen = self._is_dropped(dropped).nonzero().flatten()
        if len(chosen):
            span = update[chosen]
            if self._kind == "colnorm":
                span, _ = _GramSchmidt(span).settled(True)
            filling = _filling(span, old[chosen], dropped[chosen])
            kept[chosen] += filling @ self._places[chosen] if is_polar else filling
        return kept


def right_factor(w: Tensor, previous: Tensor, kind: str) -> RightFactor:
    """Returns ``Refresh`` of one batch (B, n, r), which is not modified; one host read."""
    refresh = Refresh(w, previous, kind)
    return refresh.settled(bool(refresh.unsettled.any()))


def dion_flops(m: int, n: int, r: int) -> int:
    """Returns the floating-point operations of one Orth-Dion step on one m×n matrix.

    Four products of 2mnr (B V, Bᵀ U, U Wᵀ, U Vᵀ), and two Householder QRs, of m×r and of n×r, each
    with explicit Q: 4mr² − 4r³/3 and 4nr² − 4r³/3. Terms of r² are neglected, as is the SVD of the
    r×r factor in ``polar``.
    """
    return 8 * m * n * r + 4 * (m + n) * r**2 - 8 * r**3 // 3


def _scaled(x: Tensor, *, overwrite: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns matrices over their largest entries, those entries (B, 1, 1), and nonfinite flags.

    A nonfinite matrix is replaced by zeros: QR and SVD refuse nan, for the whole batch. Squares of
    1e-30 would underflow in fp32.
    """
    wide: Tensor = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = largest_magnitude(wide)
    # A quotient, not a product with 1/largest: the reciprocal of a subnormal is inf.
    divisor = largest.masked_fill(largest == 0, 1.0)
    scaled = wide.div_(divisor) if overwrite or wide is not x else wide / divisor
    is_broken = ~largest.isfinite()
    return scaled.masked_fill_(is_broken, 0.0), largest, is_broken


class _GramSchmidt:
    """Q (B, n, r) and R (B, r, r), R_ii ≥ 0; dropped columns of Q and rows of R are zero.

    Attributes:
        dropped: Columns (B, r) that depend on previous ones, as far as detected immediately.
        is_hiding: Matrices (B,) in which dependence must be detected column by column.
    """

    def __init__(self, x: Tensor) -> None:
        self._q, self._r = torch.linalg.qr(x)
        r = self._r
        self._diagonal = r.diagonal(dim1=-2, dim2=-1)
        self._floor = _floor(torch.linalg.vector_norm(r, dim=-2))
        self.dropped = self._diagonal.abs() <= self._floor
        # For a dependent column Householder QR picks an arbitrary direction, which absorbs content
        # of later columns. There is none if the rows from the first such column on are negligible.
        after_first = self.dropped.cumsum(dim=-1) > 0
        left = torch.linalg.vector_norm(r * after_first.unsqueeze(-1), dim=-2)
        self.is_hiding = (left > self._floor).any(dim=-1)

    def settled(self, is_hiding: bool) -> tuple[Tensor, Tensor]:
        """Returns Q and R, computed in place; call it once."""
        q, r, dropped = self._q, self._r, self.dropped
        # Factors of Q's columns and R's rows, applied once and in place: Q is large.
        weights = torch.ones_like(self._diagonal).masked_fill_(self._diagonal < 0, -1.0)
        chosen = self.is_hiding.nonzero().flatten() if is_hiding else ()
        if len(chosen):
            turn = _gram_schmidt_by_column(r[chosen], self._floor[chosen])
            q[chosen], r[chosen] = q[chosen] @ turn, turn.mT @ r[chosen]
            weights[chosen] = 1.0
            dropped[chosen] = (turn == 0).all(dim=-2)
        weights.masked_fill_(dropped, 0.0)
        return q.mul_(weights.unsqueeze(-2)), r.mul_(weights.unsqueeze(-1))


def _gram_schmidt_by_column(x: Tensor, floor: Tensor) -> Tensor:
    """Gram-Schmidt on x (B, r, r) that skips columns with a residual up to ``floor`` (B, 1)."""
    basis = torch.zeros_like(x)
    for index in range(x.shape[-1]):
        column = x[..., index : index + 1]
        # Once does not suffice for a nearly dependent column.
        for _ in range(2):
            column = column - basis @ (basis.mT @ column)
        length = torch.linalg.vector_norm(column, dim=-2, keepdim=True)
        skipped = length <= floor.unsqueeze(-1)
        basis[..., index : index + 1] = (column / length).masked_fill_(skipped, 0.0)
    return basis


def _polar(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the partial isometry and symmetric factor of x (B, n, r), and its null directions.

    Returns:
        The isometry (B, n, r), the factor (B, r, r), flags of dropped singular directions (B, r),
        and all right singular directions as rows (B, r, r).
    """
    q, r = torch.linalg.qr(x)
    left, sigma, right = torch.linalg.svd(r)
    dropped = sigma <= _floor(sigma)
    isometry = (q @ left.masked_fill(dropped.unsqueeze(-2), 0.0)) @ right
    symmetric = right.mT @ (sigma.masked_fill(dropped, 0.0).unsqueeze(-1) * right)
    return isometry, symmetric, dropped, right


def _column_lengths(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns unit columns of x (B, n, r), and their lengths as a diagonal matrix (B, r, r)."""
    lengths: Tensor = torch.linalg.vector_norm(x, dim=-2)
    dropped = lengths <= _floor(lengths)
    unit = x / lengths.masked_fill(dropped, 1.0).unsqueeze(-2)
    return (
        unit.masked_fill_(dropped.unsqueeze(-2), 0.0),
        torch.diag_embed(lengths.masked_fill(dropped, 0.0)),
    )


def _filling(span: Tensor, previous: Tensor, dropped: Tensor) -> Tensor:
    """Returns orthonormal columns for the positions in ``dropped`` (B, r), zero elsewhere.

    The part of the r-dimensional span(previous) orthogonal to the partial isometry K (B, n, r) has
    at least dimension r − rank(K). It is spanned by the left singular vectors of
    (I − K Kᵀ) previous with singular value 1, its largest.
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
    """Returns the size (B, 1) up to which a direction is a rounding error, from sizes (B, r)."""
    return sizes.amax(dim=-1, keepdim=True) * (RANK_TOLERANCE * torch.finfo(sizes.dtype).eps)


def _check(what: str, x: Tensor) -> None:
    """Refuses anything but a batch of tall float matrices."""
    if x.ndim != 3 or not x.is_floating_point() or not 1 <= x.shape[-1] <= x.shape[-2]:
        raise ValueError(
            f"{what} requires a float tensor (B, n, r) with 1 ≤ r ≤ n, not {x.dtype} of shape "
            f"{tuple(x.shape)}."
        )
