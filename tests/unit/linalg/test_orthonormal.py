"""Orthonormal bases and right factors against SVD and textbook formulas in float64."""

import pytest
import torch

from megatron_muon.linalg import RIGHT_FACTORS, dion_flops, orthonormal_basis, right_factor

FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
EPS = {FP64: 1e-13, FP32: 5e-6}

# B, n, r: r = 1, square, tall, one matrix, a scalar.
SHAPES = [(3, 9, 1), (2, 12, 12), (3, 40, 7), (1, 64, 24), (2, 1, 1)]
DTYPES = pytest.mark.parametrize("dtype", [FP64, FP32], ids=str)
KINDS = pytest.mark.parametrize("kind", RIGHT_FACTORS)
ISOMETRIES = pytest.mark.parametrize("kind", ["qr", "polar"])


def random(shape, *, dtype=FP64, seed=0) -> torch.Tensor:
    return torch.randn(shape, dtype=FP64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def columns(*positions, n=5) -> torch.Tensor:
    """One matrix (1, n, r) of unit vectors: a position per column, None for a column of zeros."""
    matrix = torch.zeros(1, n, len(positions), dtype=FP64)
    for index, position in enumerate(positions):
        if position is not None:
            matrix[0, position, index] = 1.0
    return matrix


# What Householder QR alone gets wrong (columns that come after a dependent one), and what it need
# not see: name, matrix, rank.
DEPENDENT = [
    ("zeros first", columns(None, 0), 1),
    ("zeros between", columns(2, None, 0), 2),
    ("twice the same, then news", columns(0, 0, 1), 2),
    ("all the same", columns(3, 3, 3), 1),
    ("news hidden twice", columns(None, 0, None, 0, 1), 2),
    ("sums", torch.cat([random((1, 8, 2)), random((1, 8, 2)).sum(-1, keepdim=True)], dim=-1), 2),
    ("rank 3 of 6", random((1, 20, 3)) @ random((1, 3, 6), seed=1), 3),
    ("rank 1 of 4, square", random((1, 4, 1)) @ random((1, 1, 4), seed=1), 1),
]
RANKS = pytest.mark.parametrize(
    ("matrix", "rank"), [row[1:] for row in DEPENDENT], ids=[row[0] for row in DEPENDENT]
)


def conditioned(n, r, condition, *, dtype) -> torch.Tensor:
    """A matrix (1, n, r) with singular values from 1 down to 1/condition."""
    left, right = torch.linalg.qr(random((n, r)))[0], torch.linalg.qr(random((r, r), seed=1))[0]
    exponents = -torch.linspace(0, 1, r, dtype=FP64)
    return ((left * condition**exponents) @ right).unsqueeze(0).to(dtype)


def projector(x) -> torch.Tensor:
    """The exact projector on the range, from an SVD in float64."""
    u, sigma, _ = torch.linalg.svd(x.double(), full_matrices=False)
    u = u * (sigma > 1e-9 * sigma[..., :1]).unsqueeze(-2)
    return u @ u.mT


def spectral(x) -> float:
    return float(torch.linalg.matrix_norm(x.double(), ord=2).max())


def identity_error(x) -> float:
    """Return the deviation of columns from orthonormal; zero columns are allowed."""
    gram = x.double().mT @ x.double()
    wanted = torch.diag_embed((x != 0).any(dim=-2).double())
    return float((gram - wanted).abs().max())


def close(result, expected, bound) -> bool:
    return bool(((result.double() - expected.double()).abs() < bound).all())


# --- orthonormal_basis ---------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_basis_is_orthonormal_and_spans_the_columns(shape, dtype):
    p = random(shape, dtype=dtype)
    basis = orthonormal_basis(p)
    assert (basis.shape, basis.dtype) == (p.shape, dtype)
    assert identity_error(basis) < EPS[dtype]
    assert close(basis @ basis.mT, projector(p), 20 * EPS[dtype])


@DTYPES
def test_basis_takes_the_columns_in_order_and_keeps_their_direction(dtype):
    # The update with right factor qr or colnorm depends on the order: it is not any basis.
    p = random((2, 30, 6), dtype=dtype)
    inner = orthonormal_basis(p).mT @ p
    assert (inner.diagonal(dim1=-2, dim2=-1) > 0).all()
    assert inner.tril(-1).abs().max() < 20 * EPS[dtype]


@RANKS
@DTYPES
def test_dependent_columns_become_zeros_and_the_others_span_the_range(matrix, rank, dtype):
    basis = orthonormal_basis(matrix.to(dtype))
    assert (basis != 0).any(dim=-2).sum() == rank
    assert identity_error(basis) < EPS[dtype]
    assert close(basis @ basis.mT, projector(matrix), 20 * EPS[dtype])


@DTYPES
def test_zeros_have_no_basis(dtype):
    assert torch.equal(orthonormal_basis(torch.zeros(2, 6, 3, dtype=dtype)), torch.zeros(2, 6, 3))


@DTYPES
@pytest.mark.parametrize("factor", [2.0**-100, 2.0**100])
def test_a_power_of_two_changes_no_bit_of_the_basis(factor, dtype):
    p = random((2, 16, 5), dtype=dtype)
    assert torch.equal(orthonormal_basis(p * factor), orthonormal_basis(p))


@pytest.mark.parametrize(
    ("dtype", "factor"), [(FP32, 1e-30), (FP32, 1e30), (FP64, 1e-200), (FP64, 1e200)], ids=str
)
def test_the_size_of_the_matrix_does_not_matter_to_the_basis(dtype, factor):
    p = random((2, 16, 5), dtype=dtype)
    assert close(orthonormal_basis(p * factor), orthonormal_basis(p), 20 * EPS[dtype])


@DTYPES
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6, 1e8])
def test_ill_conditioned_columns_give_an_orthonormal_basis(condition, dtype):
    p = conditioned(256, 32, condition, dtype=dtype)
    basis = orthonormal_basis(p)
    assert identity_error(basis) < EPS[dtype]
    # All of P but rounding is in the span, whatever was dropped.
    remainder = p.double() - basis.double() @ (basis.double().mT @ p.double())
    assert remainder.norm() < 100 * torch.finfo(dtype).eps * p.double().norm()
    kept = int((basis != 0).any(dim=-2).sum())
    assert kept == 32 or (dtype == FP32 and condition > 1e4 and kept >= 20)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_entry_is_not_hidden_by_the_basis_and_stays_in_its_matrix(bad):
    p = random((3, 10, 4), dtype=FP32)
    expected = orthonormal_basis(p)
    p[1, 2, 3] = bad
    basis = orthonormal_basis(p)
    assert basis[1].isnan().all()
    assert close(basis[[0, 2]], expected[[0, 2]], 1e-6)


def test_matrices_of_all_sorts_in_one_batch_do_not_see_each_other():
    full = random((1, 5, 3))
    batch = torch.cat([full, columns(None, 0, 1), columns(0, 0, 1), full * 1e-30, 0 * full])
    single = torch.cat([orthonormal_basis(one.unsqueeze(0)) for one in batch])
    assert close(orthonormal_basis(batch), single, 1e-13)


def test_fp32_stays_fp32_under_reduced_precision_settings():
    w, previous = random((2, 64, 64), dtype=FP32), random((2, 64, 64), dtype=FP32, seed=1)
    w[1, :, 5:] = 0.0
    expected = [orthonormal_basis(w), *right_factor(w, previous, "polar")]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        results = [orthonormal_basis(w), *right_factor(w, previous, "polar")]
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


# --- right_factor --------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_qr_is_orthonormal_with_a_positive_diagonal(shape, dtype):
    w, previous = random(shape, dtype=dtype), random(shape, dtype=dtype, seed=1)
    v, kept, core = right_factor(w, previous, "qr")
    assert identity_error(v) < EPS[dtype]
    assert ((v.mT @ w).diagonal(dim1=-2, dim2=-1) > 0).all()
    assert torch.equal(core, core.triu())
    assert torch.equal(kept, v)


def test_raw_signs_would_fail_that():
    # Negative control: what torch gives is no right factor, although its singular values are 1.
    w = random((1, 64, 24))
    raw = torch.linalg.qr(w)[0]
    diagonal = (raw.mT @ w).diagonal(dim1=-2, dim2=-1)
    assert 6 <= (diagonal < 0).sum() <= 24
    assert abs(spectral(raw) - 1) < 1e-13


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_polar_is_the_polar_factor(shape, dtype):
    w, previous = random(shape, dtype=dtype), random(shape, dtype=dtype, seed=1)
    v, kept, core = right_factor(w, previous, "polar")
    u, sigma, vt = torch.linalg.svd(w.double(), full_matrices=False)
    condition = float((sigma[:, 0] / sigma[:, -1]).max())
    assert close(v, u @ vt, condition * EPS[dtype])
    assert close(core, core.mT, 20 * EPS[dtype])
    assert torch.equal(kept, v)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_colnorm_scales_columns_to_length_one(shape, dtype):
    w, previous = random(shape, dtype=dtype), random(shape, dtype=dtype, seed=1)
    v, kept, _ = right_factor(w, previous, "colnorm")
    assert close(v, w / w.norm(dim=-2, keepdim=True), EPS[dtype])
    assert torch.equal(kept, v)


@KINDS
@DTYPES
@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e30])
def test_core_leads_back_to_w(kind, dtype, factor):
    w = torch.cat([random((2, 20, 6)), random((1, 20, 3)) @ random((1, 3, 6), seed=1)]) * factor
    w[1, :, 2] = 0.0
    v, _, core = right_factor(w.to(dtype), random(w.shape, seed=2), kind)
    assert close(v @ core, w, 50 * EPS[dtype] * factor)


@KINDS
def test_zeros_give_no_update_and_keep_the_previous_v_bit_for_bit(kind):
    previous = random((2, 8, 3), dtype=FP32)
    w = torch.stack([torch.zeros(8, 3), random((8, 3), dtype=FP32, seed=1)])
    v, kept, core = right_factor(w, previous, kind)
    assert not v[0].any()
    assert not core[0].any()
    assert torch.equal(kept[0], previous[0])
    assert torch.equal(kept[1], v[1])


@ISOMETRIES
@DTYPES
@RANKS
def test_dropped_directions_are_not_in_the_update_but_v_keeps_full_rank(kind, dtype, matrix, rank):
    previous = random(matrix.shape, dtype=dtype, seed=7)
    v, kept, _ = right_factor(matrix.to(dtype), previous, kind)
    sigma = torch.linalg.svdvals(v.double())
    assert sigma[0, rank - 1] > 1 - EPS[dtype]
    assert sigma[0, 0] < 1 + EPS[dtype]
    assert (sigma[0, rank:] < EPS[dtype]).all()
    assert close(v @ v.mT, projector(matrix), 20 * EPS[dtype])
    if kind == "qr":
        assert (v != 0).any(dim=-2).sum() == rank
    # Nothing that V is made of gets lost, and nothing of it turns: kept is v and more.
    assert identity_error(kept) < EPS[dtype]
    assert close(v @ (v.mT @ kept), v, 20 * EPS[dtype])


@ISOMETRIES
def test_dropped_places_are_filled_from_the_span_of_the_previous_v(kind):
    previous = torch.linalg.qr(random((1, 20, 6)))[0]
    w = previous @ random((1, 6, 2), seed=1) @ random((1, 2, 6), seed=2)
    _, kept, _ = right_factor(w, previous, kind)
    assert close(kept @ kept.mT, previous @ previous.mT, 1e-12)


@ISOMETRIES
@DTYPES
def test_dropped_places_are_filled_where_the_previous_column_has_been_taken(kind, dtype):
    # The new first column is the previous second one: that cannot stay where it was.
    previous = columns(0, 1, 2).to(dtype)
    _, kept, _ = right_factor(columns(1, None, None).to(dtype), previous, kind)
    assert identity_error(kept) < EPS[dtype]
    assert close(kept @ kept.mT, previous @ previous.mT, EPS[dtype])


def test_colnorm_drops_columns_of_zeros_and_fills_them():
    w, previous = random((1, 12, 4)), random((1, 12, 4), seed=1)
    w[..., 1:3] = 0.0
    v, kept, _ = right_factor(w, previous, "colnorm")
    assert not v[..., 1:3].any()
    assert torch.equal(kept[..., [0, 3]], v[..., [0, 3]])
    fresh = kept[..., 1:3]
    assert identity_error(fresh) < 1e-13
    assert close(fresh.mT @ v, torch.zeros(2, 4), 1e-13)


@ISOMETRIES
@DTYPES
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6, 1e8])
def test_ill_conditioned_w_gives_singular_values_of_one_or_none(kind, dtype, condition):
    w = conditioned(256, 32, condition, dtype=dtype)
    v, kept, _ = right_factor(w, random(w.shape, dtype=dtype, seed=5), kind)
    sigma = torch.linalg.svdvals(v.double())
    assert ((sigma - sigma.round()).abs() < EPS[dtype]).all()
    assert identity_error(kept) < EPS[dtype]


@KINDS
@pytest.mark.parametrize(
    ("dtype", "factor"), [(FP32, 1e-30), (FP32, 1e30), (FP64, 1e-200), (FP64, 1e200)], ids=str
)
def test_the_size_of_w_does_not_matter(kind, dtype, factor):
    w, previous = random((2, 16, 5), dtype=dtype), random((2, 16, 5), dtype=dtype, seed=1)
    plain, scaled = right_factor(w, previous, kind), right_factor(w * factor, previous, kind)
    assert close(scaled.update, plain.update, 50 * EPS[dtype])


@KINDS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_w_spoils_neither_the_kept_v_nor_other_matrices(kind, bad):
    w, previous = random((4, 10, 4), dtype=FP32), random((4, 10, 4), dtype=FP32, seed=1)
    w[3, :, 1] = 0.0
    expected = right_factor(w, previous, kind)
    w[1, 2, 3] = bad
    result = right_factor(w, previous, kind)
    assert result.update[1].isnan().all()
    assert torch.equal(result.kept[1], previous[1])
    for got, wanted in zip(result, expected, strict=True):
        assert close(got[[0, 2, 3]], wanted[[0, 2, 3]], 1e-4)


# --- both ----------------------------------------------------------------------------------------


@KINDS
def test_the_inputs_keep_every_bit(kind):
    w, previous = random((2, 8, 4), dtype=FP32), random((2, 8, 4), dtype=FP32, seed=1)
    w[1, :, 2] = 0.0
    before = w.clone(), previous.clone()
    orthonormal_basis(w)
    right_factor(w, previous, kind)
    assert torch.equal(w, before[0])
    assert torch.equal(previous, before[1])


@KINDS
def test_strided_and_bf16_input_is_read_right_and_computed_in_fp32(kind):
    w = random((2, 24, 5), dtype=BF16)
    strided = torch.stack([w, w], dim=-1)[..., 0]
    assert not strided.is_contiguous()
    assert torch.equal(orthonormal_basis(strided), orthonormal_basis(w.float()))
    previous = random((2, 24, 5), dtype=BF16, seed=1)
    result, expected = (
        right_factor(strided, previous, kind),
        right_factor(w.float(), previous, kind),
    )
    assert all(torch.equal(*pair) for pair in zip(result, expected, strict=True))
    assert {part.dtype for part in result} == {FP32}


@KINDS
def test_nothing_in_nothing_out(kind):
    nothing = torch.empty(0, 4, 2)
    assert orthonormal_basis(nothing).shape == (0, 4, 2)
    assert [part.shape for part in right_factor(nothing, nothing, kind)] == [
        (0, 4, 2),
        (0, 4, 2),
        (0, 2, 2),
    ]


@pytest.mark.parametrize(
    "x",
    [torch.ones(4, 2), torch.ones(1, 2, 3), torch.ones(1, 4, 0), torch.ones(1, 4, 2).long()],
    ids=["no batch", "wide", "no columns", "integers"],
)
def test_only_batches_of_tall_float_matrices_are_accepted(x):
    with pytest.raises(ValueError, match="orthonormal_basis requires a float tensor"):
        orthonormal_basis(x)
    with pytest.raises(ValueError, match="right_factor requires a float tensor"):
        right_factor(x, x, "qr")


def test_unknown_kinds_and_another_shape_of_the_previous_v_are_refused():
    w = torch.ones(1, 4, 2)
    with pytest.raises(ValueError, match="supported are qr, polar, colnorm"):
        right_factor(w, w, "cholesky")
    with pytest.raises(ValueError, match="they must agree"):
        right_factor(w, torch.ones(1, 4, 3), "qr")


def test_flops_are_four_products_and_two_qr():
    m, n, r = 300, 200, 30
    products = 4 * 2 * m * n * r
    # Householder QR of a×r: 2ar² − 2r³/3 for R, as much again for Q.
    qr = 4 * m * r**2 - 4 * r**3 / 3 + 4 * n * r**2 - 4 * r**3 / 3
    assert dion_flops(m, n, r) == products + qr
