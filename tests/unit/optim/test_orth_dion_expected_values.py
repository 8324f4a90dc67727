"""Orth-Dion's formulas against numbers measured beforehand, with other code.

The set-up of each number stands in its test. Raw-sign QR, the well-known mistake, is the negative
control of those that are to tell it from the method.
"""

import math

import pytest
import torch

from tests.reference.orth_dion import orth_dion_step, plain_dion_step, raw_sign_step
from tests.unit.optim.whole_matrices import (
    FP32,
    FP64,
    ISOMETRIES,
    KINDS,
    MU,
    decay_captured,
    decaying,
    dion_update,
    generator,
    polar,
    random,
    rotation,
    spectral,
    step,
)


@pytest.mark.parametrize("shape", [(40, 24, 6), (24, 24, 24), (30, 12, 1)], ids=str)
@ISOMETRIES
def test_algebra_of_the_factors(kind, shape):
    m, n, r = shape
    b = random((3, m, n))
    u, v, kept, w = dion_update(b, random((3, n, r), seed=1), kind)
    identity = torch.eye(r, dtype=FP64)
    assert (u.mT @ u - identity).abs().max() < 1e-13
    assert (v.mT @ v - identity).abs().max() < 1e-13
    assert torch.equal(kept, v)
    assert (w - b.mT @ u).abs().max() < 1e-13 * n
    update = u @ v.mT
    sigma = torch.linalg.svdvals(update)
    assert (sigma[:, :r] - 1).abs().max() < 1e-12
    assert (torch.linalg.matrix_norm(update) - math.sqrt(r)).abs().max() < 1e-12
    # The dual of the Ky Fan r-norm.
    dual = torch.maximum(sigma[:, 0], sigma.sum(dim=-1) / r)
    assert (dual - 1).abs().max() < 1e-12
    # Every column of V looks along its column of W, and the step descends: ⟨B, D⟩ = Σ R_ii > 0.
    diagonal = (v.mT @ w).diagonal(dim1=-2, dim2=-1)
    along = (b * update).sum(dim=(-2, -1))
    assert (along - diagonal.sum(dim=-1)).abs().max() < 1e-11
    assert (diagonal > 0).all() if kind == "qr" else (along > 0).all()


# Steps on one fixed B (512×384, σ_i = i^-0.7, r = 96), V from the step before: ⟨B, U Vᵀ⟩ over the
# sum of the first r singular values, and ‖V‖₂, after 1, 2, 5 and 20 steps.
ALIGNMENT = {
    "qr": [0.75, 0.95, 0.994, 0.9997],
    "polar": [0.89, 0.98, 0.997, 0.9998],
    "colnorm": [1.15, 1.01, 1.00, 1.00],
}
WIDTH = {"qr": [1, 1, 1, 1], "polar": [1, 1, 1, 1], "colnorm": [3.1, 1.6, 1.2, 1.06]}


@KINDS
def test_alignment_with_a_fixed_matrix_grows_as_expected(kind):
    b = decaying(512, 384, 0.7).unsqueeze(0)
    best = (torch.arange(1, 97, dtype=FP64) ** -0.7).sum()
    v = random((1, 384, 96), seed=5)
    alignment, width = {}, {}
    for count in range(1, 21):
        u, v, _, _ = dion_update(b, v, kind)
        alignment[count] = float((b * (u @ v.mT)).sum() / best)
        width[count] = spectral(v)
    found = [alignment[count] for count in (1, 2, 5, 20)]
    assert found == pytest.approx(ALIGNMENT[kind], abs=0.03)
    # Near 1 three hundredths are too coarse.
    assert 1 - found[-1] == pytest.approx(1 - ALIGNMENT[kind][-1], abs=3e-4)
    found = [width[count] for count in (1, 2, 5, 20)]
    assert found == pytest.approx(WIDTH[kind], rel=0.08 if kind == "colnorm" else 1e-12)


def test_raw_signs_have_no_alignment_with_a_fixed_matrix():
    # Negative control: every singular value of the update is 1, and it points nowhere.
    b = decaying(512, 384, 0.7)
    best = (torch.arange(1, 97, dtype=FP64) ** -0.7).sum()
    _, u, v = raw_sign_step(torch.zeros_like(b), b, random((384, 96), seed=5), momentum=MU)
    assert (torch.linalg.svdvals(u @ v.T)[:96] - 1).abs().max() < 1e-12
    assert abs(float((b * (u @ v.T)).sum() / best)) < 0.35
    assert ((v.T @ (b.T @ u)).diagonal() < 0).sum() > 20


# Warm-started steps with noise (768×768, μ = 0.95): mean ‖V‖₂ by rank.
NOISE_WIDTH = {96: 1.11, 192: 1.14, 384: 1.18}


def width_under_noise(kind, r, steps) -> list[float]:
    """‖V‖₂ of each step in fp32, for gradients with σ_i = i^-0.7 and noise of the same norm."""
    signal = decaying(768, 768, 0.7, seed=3).float()
    v, m = random((1, 768, r), dtype=FP32, seed=1), torch.zeros(1, 768, 768)
    noise = generator(2)
    found = []
    for _ in range(steps):
        grad = signal + signal.norm() / 768 * torch.randn(768, 768, generator=noise)
        m, _, used, v = step(m, grad, v, kind)
        found.append(spectral(used))
    return found


@pytest.fixture(scope="module")
def dion_widths() -> dict[int, float]:
    # Without the first steps, in which V has yet to find its way (3 to 4 in the first).
    found = {r: width_under_noise("colnorm", r, 24)[8:] for r in NOISE_WIDTH}
    return {r: sum(widths) / len(widths) for r, widths in found.items()}


def test_dions_v_grows_under_noise_with_the_rank(dion_widths):
    assert dion_widths == pytest.approx(NOISE_WIDTH, abs=0.06)
    assert dion_widths[96] < dion_widths[192] < dion_widths[384]


@ISOMETRIES
def test_orth_dions_v_stays_at_one_under_noise(kind):
    assert width_under_noise(kind, 96, 8) == pytest.approx([1.0] * 8, abs=1e-5)


# 200 steps on ½⟨E, H₁ E H₂⟩, E = X − X* 64×48, both H of condition 1e2, learning rate falling
# linearly to 0, s = 1: final over initial loss with the best of five learning rates, by rank.
LOSS = {
    "colnorm": {4: 5.3e-2, 12: 5.6e-3, 24: 3.8e-4, 48: 2.9e-5},
    "qr": {4: 5.6e-2, 12: 6.0e-3, 24: 6.0e-4, 48: 7.1e-5},
    "polar": {4: 5.6e-2, 12: 6.0e-3, 24: 5.9e-4, 48: 5.2e-5},
}
MUON_LOSS = 5.1e-5


def raw_signs(b, v) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both factors by QR as torch gives it, and W."""
    u = torch.linalg.qr(b @ v)[0]
    w = b.mT @ u
    return u, torch.linalg.qr(w)[0], w


def best_loss(kind, r) -> float:
    """Final over initial loss; the learning rates are one batch."""
    rates = torch.tensor([0.01, 0.05, 0.2, 0.5, 1.0], dtype=FP64).reshape(5, 1, 1)
    hessians = []
    for size, seed in ((64, 1), (48, 2)):
        axes = rotation(size, size, seed=seed)
        hessians.append((axes * torch.logspace(0, -2, size, dtype=FP64)) @ axes.T)
    rows, columns = hessians
    x = random((64, 48), seed=3).expand(5, -1, -1)
    m, v = torch.zeros_like(x), random((48, r), seed=4).expand(5, -1, -1)
    losses = [(x * (rows @ x @ columns)).sum(dim=(-2, -1))]
    for index in range(200):
        b = m + rows @ x @ columns
        if kind == "muon":
            m, update = MU * b, polar(b)
        else:
            u, v, w = raw_signs(b, v) if kind == "raw" else _factors(b, v, kind)
            m, update = decay_captured(b, u, w, MU), u @ v.mT
        x = x - (1 - index / 200) * rates * update
    losses.append((x * (rows @ x @ columns)).sum(dim=(-2, -1)))
    return float((losses[1] / losses[0]).min())


def _factors(b, v, kind) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    u, v, kept, w = dion_update(b, v, kind)
    assert torch.equal(kept, v)
    return u, v, w


@pytest.mark.parametrize("r", [4, 12, 24, 48])
@KINDS
def test_loss_of_a_quadratic_falls_as_expected(kind, r):
    assert best_loss(kind, r) == pytest.approx(LOSS[kind][r], rel=0.25)


def test_loss_of_muon_is_the_one_that_full_rank_is_compared_with():
    assert best_loss("muon", 48) == pytest.approx(MUON_LOSS, rel=0.25)


@pytest.mark.parametrize("r", [4, 48])
def test_with_raw_signs_the_loss_hardly_falls(r):
    # Negative control: the expected values above tell the mistake from the method.
    assert best_loss("raw", r) > 0.8


# Relative distance to the polar factor after one step at full rank.
FULL_RANK_DISTANCE = {"qr": 0.38, "colnorm": 0.55}


@pytest.mark.parametrize("kind", ["qr", "colnorm"])
def test_at_full_rank_qr_and_colnorm_approach_the_polar_factor_slowly(kind):
    b = decaying(64, 48, 0.7)
    exact = polar(b)
    v = random((1, 48, 48), seed=7)
    distances = []
    for _ in range(100):
        u, v, _, _ = dion_update(b.unsqueeze(0), v, kind)
        distances.append(float((u @ v.mT - exact).norm() / exact.norm()))
    assert distances[0] == pytest.approx(FULL_RANK_DISTANCE[kind], abs=0.15)
    assert distances[-1] < 0.02


@pytest.mark.parametrize("shape", [(40, 24), (24, 24), (7, 1)], ids=str)
def test_at_full_rank_polar_is_the_exact_polar_factor_in_one_step(shape):
    b = random((2, *shape))
    u, v, _, _ = dion_update(b, random((2, shape[1], shape[1]), seed=1), "polar")
    assert (u @ v.mT - polar(b)).abs().max() < 1e-10


def test_v_in_bf16_is_a_thousandth_from_orthonormal():
    v = rotation(768, 96, seed=1)
    rounded = v.bfloat16().double()
    assert 3e-4 < spectral(rounded.T @ rounded - torch.eye(96, dtype=FP64)) < 3e-3


@KINDS
def test_all_kinds_track_like_plain_dion(kind):
    m, n, r = 48, 32, 8
    ours, theirs = torch.zeros(1, m, n, dtype=FP64), torch.zeros(m, n, dtype=FP64)
    v = random((1, n, r), seed=1)
    their_v = v[0]
    grads = generator(2)
    signal = decaying(m, n, 0.7)
    for _ in range(60):
        grad = signal + 0.1 * torch.randn(m, n, dtype=FP64, generator=grads)
        ours, u, used, v = step(ours, grad.unsqueeze(0), v, kind)
        theirs, their_u, their_v = plain_dion_step(theirs, grad, their_v, momentum=MU)
        assert (ours[0] - theirs).norm() < 1e-10 * theirs.norm()
        assert (u[0] @ u[0].T - their_u @ their_u.T).abs().max() < 1e-10
        difference = (used[0] @ u[0].T - their_v @ their_u.T).norm()
        assert difference < 1e-6 if kind == "colnorm" else difference > 1e-3


@KINDS
def test_one_step_equals_the_reference(kind):
    momenta, grads, v = random((3, 20, 12)), random((3, 20, 12), seed=1), random((3, 12, 5), seed=2)
    m, u, used, kept = step(momenta, grads, v, kind)
    for index in range(3):
        expected = orth_dion_step(momenta[index], grads[index], v[index], momentum=MU, kind=kind)
        for got, wanted in zip((m, u, used), expected, strict=True):
            assert (got[index] - wanted).abs().max() < 1e-10
    assert torch.equal(kept, used)
