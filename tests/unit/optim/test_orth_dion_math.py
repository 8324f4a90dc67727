"""Orth-Dion's formulas: against the float64 reference, and against numbers measured beforehand.

"Expected" numbers come from experiments with other code; the set-up of each stands in its test.
"""

import dataclasses
import math

import pytest
import torch

from megatron_muon.linalg import RIGHT_FACTORS, orthonormal_basis, right_factor
from megatron_muon.optim.dion_math import (
    OrthDionRule,
    decay_captured,
    descend,
    dion_update,
    is_transposed,
    oriented,
    project,
    pull_back,
    seeded_right_factor,
)
from tests.reference.muon import gate_up_parts, qkv_parts
from tests.reference.orth_dion import (
    ReferenceOrthDion,
    orth_dion_step,
    plain_dion_step,
    raw_sign_step,
)

FP64, FP32 = torch.float64, torch.float32
MU = 0.95
KINDS = pytest.mark.parametrize("kind", RIGHT_FACTORS)
ISOMETRIES = pytest.mark.parametrize("kind", ["qr", "polar"])


def generator(seed=0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(shape, *, dtype=FP64, seed=0) -> torch.Tensor:
    return torch.randn(shape, dtype=FP64, generator=generator(seed)).to(dtype)


def rotation(m, n, *, seed) -> torch.Tensor:
    return torch.linalg.qr(random((m, n), seed=seed))[0]


def decaying(m, n, power, *, seed=0) -> torch.Tensor:
    """A matrix (m, n) with m ≥ n and singular values i^-power."""
    sigma = torch.arange(1, n + 1, dtype=FP64) ** -power
    return (rotation(m, n, seed=seed) * sigma) @ rotation(n, n, seed=seed + 1).T


def polar(x) -> torch.Tensor:
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    return u @ vt


def spectral(x) -> float:
    return float(torch.linalg.matrix_norm(x.double(), ord=2).max())


def rule(**changes) -> OrthDionRule:
    return OrthDionRule(**({"rank_fraction": 0.25, "scale_mode": "unit_rms_norm"} | changes))


def step(m, grad, v, kind, *, momentum=MU) -> tuple[torch.Tensor, ...]:
    """One step of batches: new M, U, V of the update, kept V."""
    b = m + grad
    factors = dion_update(b, v, kind)
    return decay_captured(b, factors.u, factors.w, momentum), factors.u, factors.v, factors.kept


# --- expected values -----------------------------------------------------------------------------


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
    v = random((1, 48, 48), seed=1)
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


# --- the reference -------------------------------------------------------------------------------


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


class Whole:
    """The package's formulas on parameters by name, called like the reference."""

    def __init__(self, rule, parts, *, lr, weight_decay, dtype):
        self.rule, self.parts, self.dtype = rule, parts, dtype
        self.lr, self.weight_decay = lr, weight_decay
        self.m, self.v = {}, {}

    def start(self, label, m, n) -> torch.Tensor:
        return seeded_right_factor(label, min(m, n), self.rule.rank(m, n), dtype=self.dtype)

    def step(self, params, grads):
        for name, x in params.items():
            labels = {name: torch.arange(len(x))}
            if name in self.parts:
                labels = {f"{name}[{i}]": rows for i, rows in enumerate(self.parts[name])}
            for label, rows in labels.items():
                x[rows] = self.matrix(label, x[rows], grads[name][rows])

    def matrix(self, label, x, grad) -> torch.Tensor:
        m, n = x.shape
        x, grad = oriented(x, m, n).unsqueeze(0), oriented(grad, m, n).unsqueeze(0)
        v = self.v.get(label, self.start(label, m, n).unsqueeze(0))
        before = self.m.get(label, torch.zeros_like(x))
        self.m[label], u, used, self.v[label] = step(
            before, grad, v, self.rule.right_factor, momentum=self.rule.momentum
        )
        scale = self.rule.scale(m, n)
        x = descend(x, u, used, lr=self.lr, weight_decay=self.weight_decay, scale=scale)
        return oriented(x[0], m, n)


WEIGHTS = {"tall": (40, 16), "wide": (16, 40), "square": (24, 24), "qkv": (48, 32), "gate": (40, 24)}
PARTS = {"qkv": qkv_parts(query_groups=2, heads=4, head_dim=6), "gate": gate_up_parts(20)}


@KINDS
@pytest.mark.parametrize(
    ("dtype", "bound"), [(FP64, 1e-10), (FP32, 1e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scale_mode": "spectral", "rank_compensation": True, "extra_scale_factor": 0.2},
        {"rank_fraction": 1.0, "momentum": 0.8, "scale_mode": "shape_scaling"},
        {"rank_fraction": 0.01, "scale_mode": "match_rms_adamw"},
        {"rank_multiple_of": 8, "momentum": 0.0},
    ],
    ids=["defaults", "scales", "full rank", "rank 1", "multiples"],
)
def test_trajectories_equal_the_reference(kind, dtype, bound, changes):
    chosen = rule(right_factor=kind, **changes)
    params = {name: random(shape, dtype=dtype) for name, shape in WEIGHTS.items()}
    wanted = {name: weight.double() for name, weight in params.items()}
    old = {name: weight.clone() for name, weight in wanted.items()}
    ours = Whole(chosen, PARTS, lr=0.1, weight_decay=0.05, dtype=dtype)
    shapes = {name: shape for name, shape in WEIGHTS.items() if name not in PARTS}
    for name, parts in PARTS.items():
        shapes |= {f"{name}[{i}]": (len(p), WEIGHTS[name][1]) for i, p in enumerate(parts)}
    reference = ReferenceOrthDion(
        lr=0.1,
        momentum=chosen.momentum,
        weight_decay=0.05,
        scale_mode=chosen.scale_mode,
        extra_scale_factor=chosen.extra_scale_factor,
        right_factor=kind,
        start=lambda label: ours.start(label, *shapes[label]),
        rank_compensation=chosen.rank_compensation,
    )
    for index in range(5):
        grads = {name: random(shape, dtype=dtype, seed=10 + index) for name, shape in WEIGHTS.items()}
        ours.step(params, grads)
        reference.step(wanted, grads, PARTS)
    for name, weight in params.items():
        assert weight.dtype == dtype
        moved = (wanted[name] - old[name]).norm()
        assert (weight.double() - wanted[name]).norm() < bound * moved, name


# --- pieces --------------------------------------------------------------------------------------


@KINDS
def test_shards_make_up_the_whole_step(kind):
    # Rows and columns cut unevenly, as tensor parallelism and flat ranges do.
    b, v, x = random((2, 20, 12)), random((2, 12, 5), seed=1), random((2, 20, 12), seed=2)
    u, used, kept, w = dion_update(b, v, kind)
    m = decay_captured(b, u, w, MU)
    stepped = descend(x, u, used, lr=0.1, weight_decay=0.2, scale=3.0)
    rows, columns = [slice(0, 7), slice(7, 20)], [slice(0, 2), slice(2, 12)]
    p = torch.cat([sum(project(b[:, i, j], v[:, j]) for j in columns) for i in rows], dim=1)
    basis = orthonormal_basis(p)
    sharded_w = torch.cat(
        [sum(pull_back(b[:, i, j], basis[:, i]) for i in rows) for j in columns], dim=1
    )
    factor = right_factor(sharded_w, v, kind)
    assert (factor.kept - kept).abs().max() < 1e-12
    for i in rows:
        for j in columns:
            ours = decay_captured(b[:, i, j], basis[:, i], sharded_w[:, j], MU)
            assert (ours - m[:, i, j]).abs().max() < 1e-12
            # A holder that was sent V and the core instead of W.
            rebuilt = factor.update[:, j] @ factor.core
            assert (rebuilt - w[:, j]).abs().max() < 1e-12
            moved = descend(
                x[:, i, j], basis[:, i], factor.update[:, j], lr=0.1, weight_decay=0.2, scale=3.0
            )
            assert (moved - stepped[:, i, j]).abs().max() < 1e-12


def test_the_captured_part_decays_and_the_residual_is_kept():
    b = random((1, 20, 12))
    u, _, _, w = dion_update(b, random((1, 12, 5), seed=1), "qr")
    m = decay_captured(b, u, w, 0.9)
    assert (u.mT @ m - 0.9 * (u.mT @ b)).abs().max() < 1e-13
    residual = torch.eye(20, dtype=FP64) - u @ u.mT
    assert (residual @ m - residual @ b).abs().max() < 1e-13


def test_weight_decay_is_not_scaled():
    x, nothing = random((1, 6, 4)), torch.zeros(1, 6, 2, dtype=FP64)
    result = descend(x, nothing, nothing[:, :4], lr=0.1, weight_decay=0.5, scale=100.0)
    assert (result - 0.95 * x).abs().max() < 1e-15


def test_bf16_matrices_are_multiplied_in_fp32_and_keep_their_dtype():
    b, x = random((1, 20, 12), dtype=torch.bfloat16), random((1, 20, 12), dtype=torch.bfloat16)
    u, v, _, w = dion_update(b, random((1, 12, 5), dtype=torch.bfloat16, seed=1), "qr")
    assert {u.dtype, v.dtype, w.dtype} == {FP32}
    assert decay_captured(b, u, w, MU).dtype == torch.bfloat16
    assert descend(x, u, v, lr=0.1, weight_decay=0.0, scale=1.0).dtype == torch.bfloat16


# --- degenerate input ----------------------------------------------------------------------------


@KINDS
def test_a_zero_gradient_at_the_start_changes_nothing(kind):
    zeros, v = torch.zeros(1, 20, 12), random((1, 12, 5), dtype=FP32)
    m, u, used, kept = step(zeros, zeros, v, kind)
    assert not m.any()
    assert not (u @ used.mT).any()
    assert torch.equal(kept, v)


@KINDS
def test_a_late_first_gradient_acts_as_if_it_were_the_first(kind):
    zeros, grad, v = torch.zeros(1, 20, 12), random((1, 20, 12), dtype=FP32), random((1, 12, 5))
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


# --- rule, orientation, start --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "multiple", "shape", "rank"),
    [
        (0.25, 1, (4096, 1024), 256),
        (0.25, 1, (1024, 4096), 256),
        (0.25, 1, (10, 30), 3),
        (0.1, 1, (30, 30), 3),
        (0.25, 64, (768, 3072), 192),
        (0.25, 128, (768, 3072), 256),
        (0.01, 1, (20, 20), 1),
        (1e-12, 1, (20, 20), 1),
        (0.5, 64, (48, 200), 48),
        (1.0, 7, (20, 30), 20),
        (1.0, 1, (1, 9), 1),
    ],
)
def test_rank_is_a_fraction_of_the_smaller_side_rounded_up(fraction, multiple, shape, rank):
    assert rule(rank_fraction=fraction, rank_multiple_of=multiple).rank(*shape) == rank


def test_scale_sees_the_sides_as_they_are_and_compensates_the_rank_on_demand():
    assert rule().scale(16, 64) == 0.5
    assert rule().scale(64, 16) == 2.0
    assert rule(extra_scale_factor=0.2).scale(64, 16) == pytest.approx(0.4)
    compensated = rule(rank_compensation=True).scale(64, 16)
    assert compensated == pytest.approx(2.0 * math.sqrt(16 / 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank_fraction": 0.0}, "rank_fraction is 0"),
        ({"rank_fraction": 1.5}, "rank_fraction is 1.5"),
        ({"rank_fraction": math.nan}, "rank_fraction is nan"),
        ({"rank_multiple_of": 0}, "rank_multiple_of is 0"),
        ({"momentum": 1.0}, "momentum is 1"),
        ({"momentum": -0.1}, "momentum is -0.1"),
        ({"right_factor": "cholesky"}, "supported are qr, polar, colnorm"),
        ({"scale_mode": "none"}, "--muon-scale-mode none is unknown"),
    ],
)
def test_a_rule_out_of_range_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        rule(**changes)


def test_the_rule_is_frozen_and_defaults_to_the_paper():
    chosen = rule()
    assert (chosen.momentum, chosen.right_factor, chosen.state_dtype) == (0.95, "qr", FP32)
    assert not chosen.rank_compensation
    with pytest.raises(dataclasses.FrozenInstanceError):
        chosen.momentum = 0.9


def test_only_wide_matrices_are_transposed_and_a_shard_goes_by_the_whole():
    assert [is_transposed(*shape) for shape in [(8, 4), (4, 4), (4, 8)]] == [False, False, True]
    shard = random((2, 3))
    assert oriented(shard, 16, 3) is shard
    assert torch.equal(oriented(shard, 2, 64), shard.T)
    assert torch.equal(oriented(oriented(shard, 2, 64), 2, 64), shard)


def test_the_start_of_v_depends_on_the_name_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = seeded_right_factor("layers.0.mlp.linear_fc1.weight", 64, 16)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = seeded_right_factor("layers.0.mlp.linear_fc1.weight", 64, 16)
    other = seeded_right_factor("layers.1.mlp.linear_fc1.weight", 64, 16)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    double = seeded_right_factor("layers.0.mlp.linear_fc1.weight", 64, 16, dtype=FP64)
    assert torch.equal(double.float(), first)
    assert (first.shape, first.dtype, first.device.type) == ((64, 16), FP32, "cpu")
    assert abs(float(double.mean())) < 0.1
    assert abs(float(double.std()) - 1) < 0.1


def test_the_start_of_v_is_frozen():
    # A change would change every run that is started anew.
    found = seeded_right_factor("weight", 3, 2, dtype=FP64).flatten().tolist()
    assert found == pytest.approx([0.0] * 6, abs=1e-9)
