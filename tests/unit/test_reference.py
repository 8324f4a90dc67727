"""The one-process reference against SVD, emerging-optimizers, torch's AdamW and steps by hand."""

import math

import pytest
import torch

from tests.reference.muon import (
    POLAR_EXPRESS,
    QUINTIC,
    ReferenceAdamW,
    ReferenceMuon,
    clip,
    gate_up_parts,
    global_norm,
    orthogonalize,
    qkv_parts,
    scale_of,
)

CONVERGENT = (*POLAR_EXPRESS, *[POLAR_EXPRESS[-1]] * 6)
SHAPES = [(1, 9), (9, 1), (12, 12), (10, 24), (24, 10)]


def random(shape, seed=0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def polar(x: torch.Tensor) -> torch.Tensor:
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    return u @ vt


def muon(**changes) -> ReferenceMuon:
    arguments = {
        "lr": 0.1,
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 0.0,
        "scale_mode": "spectral",
        "extra_scale_factor": 1.0,
        "coefficients": CONVERGENT,
    }
    return ReferenceMuon(**(arguments | changes))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e30])
def test_convergent_coefficients_give_the_polar_factor(shape, factor):
    x = random(shape)
    assert torch.allclose(orthogonalize(x * factor, CONVERGENT), polar(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("coefficients", [QUINTIC, POLAR_EXPRESS], ids=["quintic", "polar"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_follow_the_polynomial(shape, coefficients):
    x = random(shape)
    u, sigma, vt = torch.linalg.svd(x, full_matrices=False)
    sigma = sigma / sigma.norm()
    for a, b, c in coefficients:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    expected = u @ sigma.diag() @ vt
    assert torch.allclose(orthogonalize(x, coefficients), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("coefficients", "name"), [(QUINTIC, "quintic"), (POLAR_EXPRESS, "polar_express")]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_of_emerging_optimizers(shape, coefficients, name):
    upstream = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    x = random(shape)
    theirs = upstream.newton_schulz(x.float(), len(coefficients), coefficient_type=name).double()
    assert torch.allclose(orthogonalize(x, coefficients), theirs, rtol=0, atol=2e-5)


def test_zero_gives_zero():
    zero = torch.zeros(3, 5, dtype=torch.float64)
    assert torch.equal(orthogonalize(zero, QUINTIC), zero)


@pytest.mark.parametrize(
    ("mode", "wide", "tall"),
    [
        ("spectral", 4.0, 4.0),
        ("unit_rms_norm", 0.5, 2.0),
        ("shape_scaling", 1.0, 2.0),
        ("match_rms_adamw", 0.8, 0.8),
    ],
)
def test_scales_at_4x16_and_16x4(mode, wide, tall):
    assert (scale_of(mode, 4, 16), scale_of(mode, 16, 4)) == pytest.approx((wide, tall))


@pytest.mark.parametrize("nesterov", [False, True])
def test_two_steps_worked_out_by_hand(nesterov):
    old, first, second = random((4, 6), 1), random((4, 6), 2), random((4, 6), 3)
    params = {"w": old.clone()}
    optimizer = muon(nesterov=nesterov, weight_decay=0.01, extra_scale_factor=0.5)
    optimizer.step(params, {"w": first}, {})
    # M₁ = 0.1 G₁; Nesterov: 0.1 G₁ + 0.9 M₁: both are multiples of G₁.
    scale = 0.1 * 0.5 * math.sqrt(6)
    expected = (1 - 0.1 * 0.01) * old - scale * polar(first)
    assert torch.allclose(params["w"], expected, rtol=0, atol=1e-12)
    update = optimizer.step(params, {"w": second}, {}, lr=0.2, weight_decay=0.5)
    # M₂ = 0.09 G₁ + 0.1 G₂; Nesterov: 0.1 G₂ + 0.9 M₂ = 0.081 G₁ + 0.19 G₂.
    direction = 0.081 * first + 0.19 * second if nesterov else 0.09 * first + 0.1 * second
    new = (1 - 0.2 * 0.5) * expected - 2 * scale * polar(direction)
    assert torch.allclose(params["w"], new, rtol=0, atol=1e-12)
    assert torch.allclose(update["w"], new - expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
def test_five_steps_of_emerging_optimizers_muon(mode, nesterov):
    upstream = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers.muon")
    weight = torch.nn.Parameter(random((12, 20)).float())
    params = {"w": weight.detach().double()}
    ours = muon(lr=0.01, nesterov=nesterov, weight_decay=0.1, scale_mode=mode, coefficients=QUINTIC)
    theirs = upstream.Muon(
        [weight],
        lr=0.01,
        momentum=0.9,
        weight_decay=0.1,
        nesterov=nesterov,
        scale_mode=mode,
        fp32_matmul_prec="highest",
    )
    for seed in range(5):
        grad = random((12, 20), seed + 10)
        weight.grad = grad.float()
        theirs.step()
        ours.step(params, {"w": grad}, {})
    assert torch.allclose(weight.detach().double(), params["w"], rtol=0, atol=1e-5)


def test_parts_are_orthogonalized_apart_with_the_scale_of_their_own_shape():
    grad = random((8, 4))
    parts = [torch.tensor([0, 3, 5, 6, 7, 1]), torch.tensor([2, 4])]
    # One part's gradient much larger must not shrink the other's update.
    grad[parts[0]] *= 1e6
    params = {"w": torch.zeros(8, 4, dtype=torch.float64)}
    update = muon().step(params, {"w": grad}, {"w": parts})["w"]
    for rows, scale in zip(parts, (math.sqrt(6), 2.0), strict=True):
        expected = -0.1 * scale * polar(grad[rows])
        assert torch.allclose(update[rows], expected, rtol=0, atol=1e-12)


def test_qkv_rows_follow_the_packing_by_group():
    # 2 groups of 2 heads of dimension 3: q q k v, q q k v.
    queries, keys, values = qkv_parts(query_groups=2, heads=4, head_dim=3)
    assert queries.tolist() == [*range(6), *range(12, 18)]
    assert keys.tolist() == [6, 7, 8, 18, 19, 20]
    assert values.tolist() == [9, 10, 11, 21, 22, 23]


def test_gate_comes_before_up():
    gate, up = gate_up_parts(3)
    assert (gate.tolist(), up.tolist()) == ([0, 1, 2], [3, 4, 5])


def test_adamw_is_that_of_torch():
    shapes = {"bias": (5,), "embedding": (6, 3)}
    weights = {name: torch.nn.Parameter(random(shape)) for name, shape in shapes.items()}
    params = {name: weight.detach().clone() for name, weight in weights.items()}
    decays = {"bias": 0.0, "embedding": 0.1}
    theirs = torch.optim.AdamW(
        [{"params": [weights[name]], "weight_decay": decays[name]} for name in shapes],
        lr=0.01,
        betas=(0.8, 0.95),
        eps=1e-6,
    )
    ours = ReferenceAdamW(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for seed in range(6):
        grads = {name: random(shape, seed + 20) for name, shape in shapes.items()}
        before = {name: weight.clone() for name, weight in params.items()}
        for name, weight in weights.items():
            weight.grad = grads[name].clone()
        theirs.step()
        updates = ours.step(params, grads, weight_decay={"bias": 0.0})
        for name, weight in weights.items():
            assert torch.allclose(params[name], weight.detach(), rtol=0, atol=1e-14)
            assert torch.equal(updates[name], params[name] - before[name])


def test_adamw_takes_rate_and_decay_of_one_step():
    params = {"w": torch.tensor([2.0], dtype=torch.float64)}
    optimizer = ReferenceAdamW(lr=0.01, betas=(0.9, 0.99), eps=0.0, weight_decay=0.1)
    optimizer.step(params, {"w": torch.tensor([3.0])}, lr=0.5, weight_decay=0.2)
    # The first step of Adam is the sign of the gradient: 2 (1 − 0.5 · 0.2) − 0.5.
    assert params["w"].item() == pytest.approx(1.3, rel=1e-12)


def test_the_norm_is_over_all_gradients():
    assert global_norm([torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])]) == pytest.approx(5.0)


def test_clipping_scales_by_megatrons_factor_when_it_binds():
    grads = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    clipped, norm = clip(grads, 2.0)
    assert norm == pytest.approx(5.0)
    assert clipped["a"].item() == pytest.approx(3.0 * 2.0 / (5.0 + 1e-6), rel=1e-15)
    assert clipped["b"].item() == pytest.approx(4.0 * 2.0 / (5.0 + 1e-6), rel=1e-15)
    assert grads["a"].item() == 3.0


def test_clipping_leaves_a_small_norm_alone():
    clipped, _ = clip({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, 5.1)
    assert (clipped["a"].item(), clipped["b"].item()) == (3.0, 4.0)
