"""Symmetric products, and the check of a kernel."""

import itertools
import logging

import pytest
import torch

from megatron_muon.linalg.kernels import SymmetricKernel, checked, symmetric_kernel, warm_up
from megatron_muon.linalg.products import (
    block_rows,
    gram,
    square_plus,
    symmetric_mm,
    symmetric_product_flops,
)

FP64 = torch.float64
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIDES = pytest.mark.parametrize("m", [1, 5, 127, 128, 255, 256, 300, 513])


def random(*shape, seed=0) -> torch.Tensor:
    return torch.randn(shape, dtype=FP64, generator=torch.Generator().manual_seed(seed))


def symmetric(m, *, seed=0) -> torch.Tensor:
    x = random(2, m, m, seed=seed)
    return (x + x.mT) / m


@SIDES
def test_gram_is_the_product_with_the_transpose(m):
    x, out = random(2, m, 40), torch.full((2, m, m), torch.nan, dtype=FP64)
    gram(x, out)
    assert (out - x @ x.mT).abs().max() < 1e-12


@SIDES
def test_square_and_sum(m):
    a, out = symmetric(m), torch.full((2, m, m), torch.nan, dtype=FP64)
    square_plus(a, alpha=0.5, beta=-2.0, out=out)
    assert (out - (0.5 * a @ a - 2.0 * a)).abs().max() < 1e-12


@SIDES
def test_product_of_commuting_matrices(m):
    a = symmetric(m)
    b, out = a @ a, torch.full((2, m, m), torch.nan, dtype=FP64)
    symmetric_mm(a, b, out)
    assert (out - a @ b).abs().max() < 1e-12


def test_block_rows_cover_the_matrix_in_blocks_of_even_size():
    for m in range(1, 1100):
        rows = block_rows(m, CPU)
        assert rows[0][0] == 0
        assert rows[-1][1] == m
        assert all(before[1] == after[0] for before, after in itertools.pairwise(rows))
        sizes = {end - start for start, end in rows}
        assert max(sizes) - min(sizes) <= 1
        assert len(rows) == 1 or min(sizes) >= 128
    assert block_rows(4096, CUDA) == ((0, 4096),)


def test_blocks_save_up_to_half():
    assert symmetric_product_flops(512, 100, CUDA) == 2 * 512 * 512 * 100
    assert symmetric_product_flops(512, 100, CPU) == 0.625 * 2 * 512 * 512 * 100


def right(a, c, *, alpha, beta) -> torch.Tensor:
    return (alpha * (a.float() @ a.float().T) + beta * c.float()).to(a.dtype)


def one_tile_wrong(a, c, *, alpha, beta) -> torch.Tensor:
    result = right(a, c, alpha=alpha, beta=beta)
    result[:64, 128:192] = 0
    return result


def fails(a, c, *, alpha, beta) -> torch.Tensor:
    raise RuntimeError("no kernel image for this device")


def test_a_right_kernel_is_trusted_for_large_aligned_matrices():
    kernel = checked(SymmetricKernel(name="right", function=right), CPU)
    assert kernel is not None
    assert kernel.supports(torch.empty(2, 2048, 4096, device="meta"))
    assert not kernel.supports(torch.empty(2, 2048, 4092, device="meta"))
    assert not kernel.supports(torch.empty(2, 4096, 2048, device="meta").mT)
    # Experts of 768 x 2048: a batch of plain products has fewer launches.
    assert not kernel.supports(torch.empty(128, 768, 2048, device="meta"))


@pytest.mark.parametrize(
    ("function", "message"), [(one_tile_wrong, "off by"), (fails, "fails here")]
)
def test_a_kernel_that_is_wrong_or_fails_is_not(function, message, caplog):
    with caplog.at_level(logging.WARNING):
        assert checked(SymmetricKernel(name="broken", function=function), CPU) is None
    assert f"broken {'is ' if message == 'off by' else ''}{message}" in caplog.text
    assert "plain products are used" in caplog.text


def test_a_kernel_is_warmed_up_for_large_shapes_of_either_orientation(monkeypatch):
    seen = []

    def noted(a, c, *, alpha, beta) -> torch.Tensor:
        seen.append((tuple(a.shape), c is not None))
        return a.new_empty(a.shape[0], a.shape[0])

    kernel = SymmetricKernel(name="noted", function=noted)
    monkeypatch.setattr("megatron_muon.linalg.kernels.symmetric_kernel", lambda *_: kernel)
    warm_up(
        [(64, 64), (4096, 2048), (2048, 4096), (4096, 4096)], torch.device("meta"), torch.bfloat16
    )
    assert seen == [((2048, 4096), False), ((4096, 4096), False), ((4096, 4096), True)]


def test_without_cuda_there_is_no_kernel():
    assert symmetric_kernel(CPU, torch.bfloat16) is None
