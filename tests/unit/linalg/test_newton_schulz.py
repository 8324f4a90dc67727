"""Newton-Schulz against the exact result: the scalar polynomial on the singular values in float64.

The expected values come from an SVD, not from another run of the iteration.
"""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_muon.linalg import (
    COEFFICIENT_SETS,
    Workspace,
    carried_segments,
    coefficient_schedule,
    newton_schulz,
    orthogonalize_,
)

FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16

SETS = [(name, len(row.steps)) for name, row in COEFFICIENT_SETS.items() if row.steps]
SETS += [("simple", 5), ("quintic", 10), ("polar_express", 5), ("cans", 7)]
BF16_SETS = [(name, steps) for name, steps in SETS if COEFFICIENT_SETS[name].stable_in_16_bits]

# Both orientations, square, vectors, a scalar, batches.
SHAPES = [(1, 1), (1, 64), (64, 1), (48, 48), (24, 96), (96, 24), (3, 32, 40), (2, 40, 8)]
SHAPES += [(4, 1, 7), (1, 5, 5)]

QUINTIC = coefficient_schedule("quintic", 5)


class Operations(TorchDispatchMode):
    """Records the name of every dispatched operation, and the shape of its result."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        self.sizes.append(tuple(getattr(result, "shape", ())))
        return result


def random(shape, *, dtype=FP64, seed=0) -> torch.Tensor:
    return torch.randn(shape, dtype=FP64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x, schedule) -> torch.Tensor:
    """U diag(p(σ/‖x‖)) Vᵀ of each matrix, in float64."""
    u, sigma, vt = torch.linalg.svd(x.double(), full_matrices=False)
    sigma = sigma / sigma.norm(dim=-1, keepdim=True)
    for a, b, c in schedule:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return u @ torch.diag_embed(sigma) @ vt


def error(result, expected) -> float:
    """Relative Frobenius error of the worst matrix."""
    expected = expected.double()
    difference = (result.double() - expected).norm(dim=(-2, -1))
    return float((difference / expected.norm(dim=(-2, -1))).max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "steps"), SETS)
def test_fp64_is_the_polynomial_of_the_singular_values(name, steps, shape):
    x, schedule = random(shape), coefficient_schedule(name, steps)
    # cans amplifies rounding 3e4 times where a singular value is all of the norm.
    bound = 1e-9 if name == "cans" else 1e-12
    assert error(newton_schulz(x, schedule, compute_dtype=FP64), exact(x, schedule)) < bound


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "steps"), SETS)
def test_fp32_is_the_polynomial_of_the_singular_values(name, steps, shape):
    x, schedule = random(shape, dtype=FP32), coefficient_schedule(name, steps)
    rank_one = min(shape[-2:]) == 1
    bound = 3e-5 if not rank_one else 1e-2 if name == "cans" else 1e-4
    assert error(newton_schulz(x, schedule, compute_dtype=FP32), exact(x, schedule)) < bound


@pytest.mark.parametrize("shape", [(1, 64), (48, 48), (24, 96), (96, 24), (3, 32, 40)], ids=str)
@pytest.mark.parametrize(("name", "steps"), BF16_SETS)
def test_bf16_is_the_polynomial_of_the_singular_values(name, steps, shape):
    x, schedule = random(shape, dtype=FP32), coefficient_schedule(name, steps)
    result = newton_schulz(x, schedule, compute_dtype=BF16)
    assert error(result, exact(x, schedule)) < 0.08


@pytest.mark.parametrize(("name", "steps"), BF16_SETS)
def test_bf16_does_not_diverge_in_sets_that_are_called_stable(name, steps):
    # 8 bits lift singular values above what a triple was fitted to; most sets bring them back.
    schedule = coefficient_schedule(name, steps)
    for m, n in [(1, 1000), (40, 40), (48, 48), (64, 128)]:
        x = random((20, m, n), dtype=FP32, seed=m)
        result = newton_schulz(x, schedule, compute_dtype=BF16)
        assert torch.linalg.matrix_norm(result, ord=2).max() < 1.35


@pytest.mark.parametrize("compute_dtype", [BF16, torch.float16], ids=str)
def test_cans_diverges_in_16_bits_as_documented(compute_dtype):
    x = random((20, 48, 1), dtype=FP32, seed=48) @ random((20, 1, 48), dtype=FP32, seed=49)
    result = newton_schulz(x, coefficient_schedule("cans", 7), compute_dtype=compute_dtype)
    assert not result.abs().max() < 1e3


def test_the_polar_factor_is_reached_by_a_convergent_set():
    x = random((40, 24))
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    result = newton_schulz(x, coefficient_schedule("polar_express", 14), compute_dtype=FP64)
    assert error(result, u @ vt) < 1e-12


@pytest.mark.parametrize("dtype", [FP64, FP32], ids=str)
@pytest.mark.parametrize("factor", [1e-30, 1e-20, 1e-12, 1e-6, 1e6, 1e12, 1e20, 1e30])
def test_the_size_of_the_gradient_does_not_matter(factor, dtype):
    x = random((2, 16, 24), dtype=FP32).to(dtype)
    plain = newton_schulz(x, QUINTIC, compute_dtype=dtype)
    scaled = newton_schulz(x * factor, QUINTIC, compute_dtype=dtype)
    assert error(scaled, plain) < (1e-12 if dtype == FP64 else 1e-5)


@pytest.mark.parametrize("compute_dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("factor", [2.0**-120, 2.0**100])
def test_a_power_of_two_changes_no_bit(factor, compute_dtype):
    x = random((16, 24), dtype=FP32).abs() + 0.1
    plain = newton_schulz(x, QUINTIC, compute_dtype=compute_dtype)
    assert torch.equal(newton_schulz(x * factor, QUINTIC, compute_dtype=compute_dtype), plain)


@pytest.mark.parametrize(
    ("dtype", "tiny"), [(FP64, 5e-324), (FP32, 1.4e-45), (BF16, 9.2e-41), (torch.float16, 6e-8)]
)
def test_a_matrix_of_smallest_subnormals_is_orthogonalized(dtype, tiny):
    pattern = torch.tensor([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0]], dtype=FP64)
    x = (pattern * tiny).to(dtype)
    assert x.count_nonzero() == 4
    # In fp32 the reciprocal of such an entry is inf.
    result = newton_schulz(x, QUINTIC, compute_dtype=FP64 if dtype == FP64 else FP32)
    assert error(result, exact(pattern, QUINTIC)) < (5e-3 if dtype == BF16 else 1e-3)


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16, torch.float16], ids=str)
def test_the_largest_finite_entries_do_not_overflow(dtype):
    pattern = torch.tensor([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0]], dtype=FP64)
    x = pattern.to(dtype) * torch.finfo(dtype).max
    assert x.isfinite().all()
    result = newton_schulz(x, QUINTIC, compute_dtype=FP64)
    assert error(result, exact(pattern, QUINTIC)) < 5e-3


@pytest.mark.parametrize("compute_dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 4, 4), (1, 1)], ids=str)
def test_zero_gives_zero(shape, compute_dtype):
    result = newton_schulz(torch.zeros(shape), QUINTIC, compute_dtype=compute_dtype)
    assert torch.equal(result, torch.zeros(shape))


def test_matrices_of_one_batch_do_not_see_each_other():
    sizes = torch.tensor([1e-30, 0.0, 1.0, 1e30]).reshape(4, 1, 1)
    x = random((4, 12, 20), dtype=FP32) * sizes
    result = newton_schulz(x, QUINTIC, compute_dtype=FP32)
    assert torch.equal(result[1], torch.zeros(12, 20))
    for index in (0, 2, 3):
        assert error(result[index], exact(x[index], QUINTIC)) < 1e-5


@pytest.mark.parametrize("compute_dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(5, 24, 40), (5, 40, 24), (5, 1, 16)], ids=str)
def test_a_batch_equals_its_matrices_one_by_one(shape, compute_dtype):
    x = random(shape, dtype=FP32)
    batched = newton_schulz(x, QUINTIC, compute_dtype=compute_dtype)
    single = torch.stack([newton_schulz(one, QUINTIC, compute_dtype=compute_dtype) for one in x])
    assert error(batched, single) < {FP64: 1e-7, FP32: 1e-5, BF16: 2e-2}[compute_dtype]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("compute_dtype", [FP64, FP32, BF16], ids=str)
def test_a_non_finite_entry_is_not_hidden_and_stays_in_its_matrix(bad, compute_dtype):
    x = random((3, 6, 9), dtype=FP32)
    x[1, 2, 3] = bad
    result = newton_schulz(x, QUINTIC, compute_dtype=compute_dtype)
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


@pytest.mark.parametrize("compute_dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (2, 8, 8)], ids=str)
def test_the_input_keeps_every_bit(shape, dtype, compute_dtype):
    x = random(shape, dtype=dtype)
    before, version = x.clone(), x._version
    newton_schulz(x, QUINTIC, compute_dtype=compute_dtype)
    assert torch.equal(x, before)
    assert x._version == version


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (2, 12, 8)], ids=str)
def test_the_result_has_shape_and_dtype_of_the_input_and_is_contiguous(shape, dtype):
    x = random(shape, dtype=dtype)
    result = newton_schulz(x, QUINTIC, compute_dtype=FP32)
    assert (result.shape, result.dtype) == (x.shape, x.dtype)
    assert result.is_contiguous()
    assert error(result, exact(x, QUINTIC)) < {FP64: 1e-5, FP32: 1e-5}.get(dtype, 4e-3)


def test_strided_input_is_read_right():
    x = random((2, 20, 30))[:, ::2, 1::3]
    result = newton_schulz(x, QUINTIC, compute_dtype=FP64)
    assert result.is_contiguous()
    assert error(result, exact(x, QUINTIC)) < 1e-12


def test_transposed_input_gives_a_contiguous_result():
    x = random((2, 20, 30)).mT
    result = newton_schulz(x, QUINTIC, compute_dtype=FP64)
    assert result.is_contiguous()
    assert error(result, exact(x, QUINTIC)) < 1e-12


@pytest.mark.parametrize("shape", [(2, 40, 24), (2, 24, 40), (3, 260, 300), (1, 300, 260)], ids=str)
@pytest.mark.parametrize("small_first", [False, True])
@pytest.mark.parametrize("in_small_first", [False, True])
def test_a_batch_is_computed_where_it_lies(shape, small_first, in_small_first, monkeypatch):
    """Contiguous or transposed; tall ones are copied if the smaller side must come first."""
    there = "megatron_muon.linalg.newton_schulz"
    monkeypatch.setattr(sys.modules[there], "small_side_first", lambda device: small_first)
    tall = shape[1] > shape[2]
    turned = tall and in_small_first
    source, space = random(shape), Workspace()
    x = source.mT.contiguous().mT if turned else source.clone()
    result = orthogonalize_(x, QUINTIC, compute_dtype=FP64, workspace=space)
    assert error(result, exact(source, QUINTIC)) < 1e-12
    copied = "x" in {name for name, _, _ in space._buffers}
    assert copied == (tall and small_first and not in_small_first)


def test_bf16_input_is_normalized_in_fp32():
    x = random((64, 96), dtype=BF16)
    from_fp32 = newton_schulz(x.float(), QUINTIC, compute_dtype=BF16)
    assert torch.equal(newton_schulz(x, QUINTIC, compute_dtype=BF16), from_fp32.to(BF16))


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (3, 9, 4)], ids=str)
def test_the_gram_matrix_is_that_of_the_smaller_side(shape):
    with Operations() as ran:
        newton_schulz(random(shape), QUINTIC, compute_dtype=FP64)
    grams = [size for name, size in zip(ran.names, ran.sizes, strict=True) if ".bmm" in name]
    assert {size[-2:] for size in grams if size[-1] == size[-2]} == {(4, 4)}
    assert sum(size[-1] == size[-2] for size in grams) >= len(carried_segments(QUINTIC))


@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (2, 12, 8)], ids=str)
def test_out_receives_the_result(shape):
    x = random(shape)
    expected = newton_schulz(x, QUINTIC, compute_dtype=FP64)
    out = torch.full(shape, torch.nan, dtype=FP64)
    assert newton_schulz(x, QUINTIC, compute_dtype=FP64, out=out) is out
    assert torch.equal(out, expected)
    newton_schulz(x, QUINTIC, compute_dtype=FP64, out=x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("shape", [(0, 3, 4), (0, 4)], ids=str)
def test_nothing_in_nothing_out(shape):
    assert newton_schulz(torch.empty(shape), QUINTIC, compute_dtype=FP32).shape == shape


@pytest.mark.parametrize("compute_dtype", [FP64, FP32, BF16], ids=str)
def test_nothing_is_read_back_to_the_host(compute_dtype):
    x = random((2, 8, 4), dtype=FP32)
    with Operations() as ran:
        newton_schulz(x, QUINTIC, compute_dtype=compute_dtype)
    assert "aten.baddbmm.out" in ran.names
    host_reads = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item")
    assert not [name for name in ran.names if name.split(".")[1] in host_reads]


def test_fp32_stays_fp32_under_reduced_precision_settings():
    x = random((64, 64), dtype=FP32)
    expected = newton_schulz(x, QUINTIC, compute_dtype=FP32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(newton_schulz(x, QUINTIC, compute_dtype=FP32), expected)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("name", "steps"), SETS)
def test_values_of_emerging_optimizers_in_fp32(name, steps):
    upstream = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    schedule = coefficient_schedule(name, steps)
    for shape in [(32, 48), (48, 32), (3, 16, 20)]:
        x = random(shape, dtype=FP32)
        theirs = upstream.newton_schulz(x, steps, coefficient_type=name)
        assert error(newton_schulz(x, schedule, compute_dtype=FP32), theirs) < 3e-5


@pytest.mark.parametrize(
    "x", [torch.ones(4), torch.ones(1, 2, 3, 4), torch.ones(2, 2, dtype=torch.int64)]
)
def test_only_batches_of_float_matrices_are_accepted(x):
    with pytest.raises(ValueError, match="newton_schulz requires a float tensor"):
        newton_schulz(x, QUINTIC, compute_dtype=FP32)


def test_other_compute_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"not in torch\.int8"):
        newton_schulz(torch.ones(2, 2), QUINTIC, compute_dtype=torch.int8)


@pytest.mark.parametrize("out", [torch.ones(3, 2), torch.ones(2, 3, dtype=FP64)])
def test_an_out_that_does_not_match_is_refused(out):
    with pytest.raises(ValueError, match="it must match the input"):
        newton_schulz(torch.ones(2, 3), QUINTIC, compute_dtype=FP32, out=out)
