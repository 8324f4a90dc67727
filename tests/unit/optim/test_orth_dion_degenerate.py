"""Orth-Dion's factors of matrices that are zero, rank-deficient, tiny, huge or not finite."""

import pytest
import torch

from tests.reference.orth_dion import orth_dion_step
from tests.unit.optim.whole_matrices import (
    FP32,
    FP64,
    ISOMETRIES,
    KINDS,
    MU,
    decaying,
    dion_update,
    random,
    rotation,
    spectral,
    step,
)


@KINDS
def test_a_zero_gradient_at_the_start_changes_nothing(kind):
    zeros, v = torch.zeros(1, 20, 12), random((1, 12, 5), dtype=FP32)
    m, u, used, kept = step(zeros, zeros, v, kind)
    assert not m.any()
    assert not (u @ used.mT).any()
    assert torch.equal(kept, v)


@KINDS
def test_a_late_first_gradient_acts_as_if_it_were_the_first(kind):
    zeros, grad = torch.zeros(1, 20, 12), random((1, 20, 12), dtype=FP32)
    v = random((1, 12, 5), dtype=FP32)
    late = v
    for _ in range(3):
        _, _, _, late = step(zeros, zeros, late, kind)
    for ours, wanted in zip(step(zeros, grad, late, kind), step(zeros, grad, v, kind), strict=True):
        assert torch.equal(ours, wanted)


@ISOMETRIES
@pytest.mark.parametrize("rank", [1, 3, 11])
@pytest.mark.parametrize("dtype", [FP64, FP32], ids=str)
def test_below_full_rank_noise_gets_no_weight(kind, rank, dtype):
    # 40 steps with a gradient whose row and column space change on the way.
    v, m = random((1, 24, 12), dtype=dtype), torch.zeros(1, 30, 24, dtype=dtype)
    signal = None
    for index in range(40):
        if index % 10 == 0:
            left, right = random((1, 30, rank), seed=index), random((1, rank, 24), seed=index + 1)
            signal = (left @ right).to(dtype)
        m, u, used, v = step(m, signal, v, kind)
        assert spectral(u @ used.mT) <= 1 + 1e-4
        assert spectral(v.mT @ v - torch.eye(12, dtype=dtype)) < 1e-5
        if index < 10:
            sigma = torch.linalg.svdvals((u @ used.mT).double())
            assert (sigma[0, :rank] > 1 - 1e-4).all()
            assert (sigma[0, rank:] < 1e-4).all()
    # V has full rank again as soon as the gradient has.
    m, u, used, v = step(m, random((1, 30, 24), dtype=dtype, seed=99), v, kind)
    assert (torch.linalg.svdvals(u @ used.mT)[0, :12] - 1).abs().max() < 1e-4


def test_directions_of_rounding_alone_do_not_enter_the_update_even_where_u_has_them():
    """In B V rounding can look like content; in Bᵀ U it is below one eps (``RANK_TOLERANCE``)."""
    extra = 0
    for seed in range(40):
        b = random((1, 96, 20), dtype=FP32, seed=seed) @ random((1, 20, 64), dtype=FP32, seed=100)
        u, used, _, _ = dion_update(b, random((1, 64, 32), dtype=FP32, seed=seed), "qr")
        extra += int((u != 0).any(dim=-2).sum()) - 20
        assert (used != 0).any(dim=-2).sum() == 20
        diagonal = torch.linalg.qr(b.mT @ u).R.diagonal(dim1=-2, dim2=-1).abs()
        assert diagonal[..., 20:].max() < 10 * torch.finfo(FP32).eps * diagonal.max()
    assert extra > 0


@ISOMETRIES
def test_without_momentum_a_gradient_in_new_directions_is_found(kind):
    # After the first step V's leading columns lie where the second gradient has nothing.
    first, second = torch.zeros(1, 8, 6, dtype=FP64), torch.zeros(1, 8, 6, dtype=FP64)
    first[0, 0, 0], first[0, 1, 1] = 1.0, 2.0
    second[0, 2, 2], second[0, 3, 3] = 3.0, 4.0
    zeros = torch.zeros_like(first)
    _, _, _, v = step(zeros, first, random((1, 6, 4)), kind, momentum=0.0)
    _, u, used, kept = step(zeros, second, v, kind, momentum=0.0)
    assert (u @ u.mT - torch.diag(torch.tensor([0.0, 0, 1, 1, 0, 0, 0, 0]))).abs().max() < 1e-12
    assert (torch.linalg.svdvals(u @ used.mT)[0, :3] - torch.tensor([1, 1, 0])).abs().max() < 1e-12
    assert (kept.mT @ kept - torch.eye(4)).abs().max() < 1e-12


@KINDS
def test_one_entry_gives_one_entry(kind):
    b = torch.zeros(1, 10, 6)
    b[0, 7, 2] = -3e-5
    u, v, kept, _ = dion_update(b, random((1, 6, 4), dtype=FP32), kind)
    expected = torch.zeros(10, 6)
    expected[7, 2] = -1.0
    assert (u[0] @ v[0].T - expected).abs().max() < 1e-6
    assert torch.linalg.matrix_rank(kept[0]) == 4


@KINDS
@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_the_size_of_the_gradient_does_not_matter(kind, factor):
    grad, v, zeros = random((1, 20, 12), dtype=FP32), random((1, 12, 5), dtype=FP32), 0.0
    m, u, used, _ = step(zeros, grad, v, kind)
    scaled_m, scaled_u, scaled_used, _ = step(zeros, grad * factor, v, kind)
    assert (scaled_u @ scaled_used.mT - u @ used.mT).abs().max() < 1e-5
    assert (scaled_m / factor - m).abs().max() < 1e-5


@KINDS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_gradient_stays_in_its_matrix_and_out_of_v(kind, bad):
    b, v = random((3, 20, 12), dtype=FP32), random((3, 12, 5), dtype=FP32, seed=1)
    expected = dion_update(b, v, kind)
    b[1, 3, 4] = bad
    result = dion_update(b, v, kind)
    assert result.u[1].isnan().all()
    assert result.v[1].isnan().all()
    assert torch.equal(result.kept[1], v[1])
    for got, wanted in zip(result, expected, strict=True):
        assert (got[[0, 2]] - wanted[[0, 2]]).abs().max() < 1e-5


@ISOMETRIES
@pytest.mark.parametrize("r", [1, 8, 48])
def test_condition_1e8_in_fp32_keeps_singular_values_at_one_or_none(kind, r):
    sigma = torch.logspace(0, -8, 48, dtype=FP64)
    b = ((rotation(64, 48, seed=1) * sigma) @ rotation(48, 48, seed=2).T).float().unsqueeze(0)
    v = random((1, 48, r), dtype=FP32)
    for _ in range(5):
        u, used, v, _ = dion_update(b, v, kind)
        found = torch.linalg.svdvals((u @ used.mT).double())
        assert found.max() <= 1 + 1e-4
        assert ((found - found.round()).abs() < 1e-4).all()
        assert spectral(v.mT @ v - torch.eye(r)) < 1e-5
    # What fp32 can tell from rounding takes part: here 24 directions above 1e-4.
    assert found.round().sum() >= min(r, 24)


@KINDS
def test_a_gradient_that_vanishes_and_comes_back_is_followed(kind):
    m, n, r = 24, 16, 6
    start, signal = random((n, r), seed=1), decaying(m, n, 0.5)
    ours, v = torch.zeros(1, m, n, dtype=FP64), start.unsqueeze(0)
    reference, their_v = torch.zeros(m, n, dtype=FP64), start
    for index in range(30):
        grad = signal * (0.0 if 10 <= index < 20 else 1.0)
        ours, u, used, v = step(ours, grad.unsqueeze(0), v, kind)
        reference, their_u, their_v = orth_dion_step(
            reference, grad, their_v, momentum=MU, kind=kind
        )
        assert (ours[0] - reference).norm() < 1e-10 * reference.norm()
        assert (u[0] @ used[0].T - their_u @ their_v.T).abs().max() < 1e-9
