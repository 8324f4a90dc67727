"""All forms of the iteration have the same result, and the cheapest is selected."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_muon.linalg import (
    Workspace,
    carried_segments,
    cheapest_segments,
    coefficient_schedule,
    newton_schulz,
    newton_schulz_flops,
    orthogonalize_,
    standard_segments,
)
from tests.unit.linalg.test_coefficients import largest_slope
from tests.unit.linalg.test_newton_schulz import BF16_SETS, SETS, error, exact, random
from tests.unit.optim.whole_matrices import rotation

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
QUINTIC = coefficient_schedule("quintic", 5)


def cut(schedule, lengths):
    steps = iter(schedule)
    return tuple(tuple(itertools.islice(steps, length)) for length in lengths)


def spectrum(m, n, power, *, dtype=FP32) -> torch.Tensor:
    """A batch of 2 with singular values i^-power; of rank one for an infinite power."""
    sigma = torch.arange(1, m + 1, dtype=FP64) ** -power
    return torch.stack([with_sigma(sigma, n, seed=seed) for seed in (0, 1)]).to(dtype)


def with_sigma(sigma, n, *, seed) -> torch.Tensor:
    m = len(sigma)
    return (rotation(m, m, seed=seed) * sigma) @ rotation(n, m, seed=seed + 9).T


@pytest.mark.parametrize("lengths", [(1, 1, 1, 1, 1), (2, 3), (3, 2), (1, 4), (2, 1, 2), (5,)])
@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (24, 96), (96, 24), (2, 40, 56)], ids=str)
def test_every_segmentation_is_the_polynomial_of_the_singular_values(shape, lengths):
    x = random(shape)
    result = newton_schulz(x, QUINTIC, compute_dtype=FP64, segments=cut(QUINTIC, lengths))
    assert error(result, exact(x, QUINTIC)) < 1e-11


@pytest.mark.parametrize("shape", [(300, 300), (2, 257, 400), (520, 260)], ids=str)
@pytest.mark.parametrize("form", [standard_segments, carried_segments])
def test_block_rows_make_up_the_products(shape, form):
    x = random(shape)
    result = newton_schulz(x, QUINTIC, compute_dtype=FP64, segments=form(QUINTIC))
    assert error(result, exact(x, QUINTIC)) < 1e-12


@pytest.mark.parametrize(("name", "steps"), SETS)
@pytest.mark.parametrize(("dtype", "largest"), [(FP64, 300), (FP32, 300), (FP16, 100)], ids=str)
def test_carried_segments_hold_the_schedule_and_bound_the_growth_of_rounding(
    name, steps, dtype, largest
):
    schedule = coefficient_schedule(name, steps)
    segments = carried_segments(schedule, dtype)
    assert tuple(step for segment in segments for step in segment) == schedule
    for segment in segments:
        growth = 1.0
        for a, _, _ in segment[:-1]:
            growth *= a**2
        assert growth <= largest


SHAPES = [(1, 64), (2, 2), (5, 5), (8, 40), (48, 48), (64, 160)]
POWERS = [0.0, 0.5, 1.0, 1.5, 3.0, 12.0, float("inf")]


@pytest.mark.parametrize("form", [standard_segments, carried_segments])
@pytest.mark.parametrize(("name", "steps"), SETS)
def test_the_error_is_bounded_by_the_slope_for_every_spectrum(name, steps, form):
    """The bound of ``newton_schulz``, for matrices of any rank; random ones are more accurate."""
    schedule = coefficient_schedule(name, steps)
    bound, segments = 8 * 2.0**-24 * largest_slope(schedule), form(schedule)
    for m, n in SHAPES:
        both = random((20 if m < 24 else 4, m, n), dtype=FP32)
        found = newton_schulz(both, schedule, compute_dtype=FP32, segments=segments)
        assert error(found, exact(both, schedule)) < (bound if m < 32 else min(bound, 1e-4))
        for power in POWERS:
            x = spectrum(m, n, power)
            found = newton_schulz(x, schedule, compute_dtype=FP32, segments=segments)
            assert error(found, exact(x, schedule)) < bound, (m, n, power)


def test_a_whole_schedule_in_one_segment_breaks_that_bound():
    schedule, x = coefficient_schedule("polar_express", 8), spectrum(64, 160, 12.0)
    found = newton_schulz(x, schedule, compute_dtype=FP32, segments=(schedule,))
    assert not error(found, exact(x, schedule)) < 8 * 2.0**-24 * largest_slope(schedule)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.5], ids="power {}".format)
@pytest.mark.parametrize(("name", "steps"), SETS)
def test_carried_on_in_fp32_is_as_near_as_the_standard_form(name, steps, power):
    schedule = coefficient_schedule(name, steps)
    x = spectrum(64, 160, power)
    expected = exact(x, schedule)
    off = [
        error(newton_schulz(x, schedule, compute_dtype=FP32, segments=form(schedule)), expected)
        for form in (standard_segments, carried_segments)
    ]
    assert off[1] < 3 * off[0] + 1e-6


def test_a_whole_schedule_in_one_segment_is_not():
    # Negative control: what the bound on the growth is there for.
    schedule = coefficient_schedule("polar_express", 8)
    x = spectrum(64, 160, 1.5)
    expected = exact(x, schedule)
    off = [
        error(newton_schulz(x, schedule, compute_dtype=FP32, segments=form), expected)
        for form in (carried_segments(schedule), (schedule,))
    ]
    assert not off[1] < 10 * off[0]


@pytest.mark.parametrize(("name", "steps"), SETS)
def test_fp16_carried_on_is_nearer_than_bf16(name, steps):
    schedule = coefficient_schedule(name, steps)
    x = spectrum(64, 160, 0.5)
    expected = exact(x, schedule)
    half = newton_schulz(x, schedule, compute_dtype=FP16, segments=carried_segments(schedule, FP16))
    brain = newton_schulz(x, schedule, compute_dtype=BF16)
    assert error(half, expected) < error(brain, expected)


@pytest.mark.parametrize(("name", "steps"), BF16_SETS)
def test_fp16_carried_on_lifts_no_singular_value_beyond_the_set(name, steps):
    """With segments as long as those of fp32 the quintic set lifts some to 3.6, twice to inf."""
    schedule = coefficient_schedule(name, steps)
    segments = carried_segments(schedule, FP16)
    for m, n in [(5, 5), (16, 40)]:
        sigma = torch.full((m,), 0.03, dtype=FP64)
        sigma[0] = 1.0
        x = torch.stack([with_sigma(sigma, n, seed=seed) for seed in range(8)]).float()
        found = newton_schulz(x, schedule, compute_dtype=FP16, segments=segments)
        assert torch.linalg.matrix_norm(found, ord=2).max() < 1.25


def test_bf16_carried_on_diverges():
    """The reason why ``cheapest_segments`` does not select it."""
    schedule, x = coefficient_schedule("deepseekv4", 10), spectrum(96, 256, 1.5)
    carried = carried_segments(schedule)
    found = newton_schulz(x, schedule, compute_dtype=BF16, segments=carried)
    assert not found.abs().max() < 1e3


@pytest.mark.parametrize("compute_dtype", [FP64, FP32], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 5, 5), (3, 8, 40), (2, 300, 300), (2, 256, 700), (1, 130, 40)], ids=str
)
@pytest.mark.parametrize("form", [standard_segments, carried_segments])
def test_operations_are_counted_as_they_are_done(shape, form, compute_dtype):
    batch, m, n = shape
    segments = form(QUINTIC)
    with FlopCounterMode(display=False) as counter:
        newton_schulz(
            random(shape, dtype=compute_dtype),
            QUINTIC,
            compute_dtype=compute_dtype,
            segments=segments,
        )
    assert counter.get_total_flops() == batch * newton_schulz_flops(m, n, segments)
    assert newton_schulz_flops(n, m, segments) == newton_schulz_flops(m, n, segments)


def test_costs_of_design_are_met():
    m, n, k, s = 64, 640, 5, 2
    assert newton_schulz_flops(m, n, standard_segments(QUINTIC), CUDA) == k * (
        4 * m * m * n + 2 * m**3
    )
    carried = newton_schulz_flops(m, n, carried_segments(QUINTIC), CUDA)
    assert len(carried_segments(QUINTIC)) == s
    assert carried == 4 * s * m * m * n + 2 * (4 * k - 3 * s) * m**3


@pytest.mark.parametrize(
    ("shape", "dtype", "carried"),
    [
        ((512, 512), FP32, False),
        ((512, 2048), FP32, True),
        ((2048, 512), FP32, True),
        ((128, 512), FP16, True),
        ((512, 2048), BF16, False),
    ],
)
def test_the_form_is_chosen_by_count_and_dtype(shape, dtype, carried):
    segments = cheapest_segments(*shape, QUINTIC, dtype, CPU)
    assert segments == (carried_segments(QUINTIC, dtype) if carried else standard_segments(QUINTIC))


@pytest.mark.parametrize(
    ("dtype", "compute_dtype", "most"),
    [(FP32, FP32, 16), (BF16, BF16, 16), (BF16, FP16, 16), (FP32, BF16, 16), (FP32, FP64, 40)],
    ids=str,
)
def test_the_memory_of_an_iteration_is_bounded_by_its_matrices(dtype, compute_dtype, most):
    """What ``optim.muon.MOST_ELEMENTS`` relies on."""
    for shape in [(2, 40, 40), (2, 40, 55), (2, 60, 40), (2, 40, 200)]:
        space = Workspace()
        x = random(shape, dtype=dtype)
        orthogonalize_(x, QUINTIC, compute_dtype=compute_dtype, workspace=space)
        assert space.nbytes <= most * x.numel()


@pytest.mark.parametrize("compute_dtype", [FP32, BF16], ids=str)
def test_a_workspace_is_allocated_once(compute_dtype):
    space = Workspace()
    shapes = [(3, 40, 24), (2, 24, 64), (1, 8, 8), (3, 40, 24)]
    fresh = [
        newton_schulz(random(s, dtype=FP32), QUINTIC, compute_dtype=compute_dtype) for s in shapes
    ]
    for _ in range(2):
        held = space.nbytes
        for shape, expected in zip(shapes, fresh, strict=True):
            x = random(shape, dtype=FP32)
            result = newton_schulz(x, QUINTIC, compute_dtype=compute_dtype, out=x, workspace=space)
            assert torch.equal(result, expected)
    assert space.nbytes == held
    space.clear()
    assert space.nbytes == 0
    # Two iterates (and x before rounding), four of m x m, of the largest that was asked for.
    largest = 2 * 24 * 64
    assert held <= 4 * largest * (2 if compute_dtype == FP32 else 3) + 4 * 4 * 3 * 24 * 24
