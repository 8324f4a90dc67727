"""Norms of batches of matrices with any strides."""

import math

import pytest
import torch

from megatron_muon.linalg.norms import frobenius_norm, largest_magnitude

SHAPES = pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (2, 7, 1), (2, 1, 9)], ids=str)
TURNED = pytest.mark.parametrize("turned", [False, True])


def random(shape, *, turned, dtype=torch.float32) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x.mT.contiguous().mT if turned else x


@SHAPES
@TURNED
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_largest_magnitude(shape, turned, dtype):
    x = random(shape, turned=turned, dtype=dtype)
    expected = x.abs().flatten(1).max(dim=1).values.view(-1, 1, 1)
    assert torch.equal(largest_magnitude(x), expected)
    assert torch.equal(largest_magnitude(-x), expected)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_affect_only_their_matrix(odd):
    x = random((3, 4, 5), turned=False)
    clean = largest_magnitude(x)
    x[1, 2, 3] = odd
    found = largest_magnitude(x)
    assert not found[1].isfinite()
    assert found[1].isnan() == math.isnan(odd)
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


@SHAPES
@TURNED
def test_frobenius_norm(shape, turned):
    x = random(shape, turned=turned, dtype=torch.float64)
    expected = x.square().sum(dim=(-2, -1), keepdim=True).sqrt()
    assert torch.allclose(frobenius_norm(x), expected, rtol=1e-14, atol=0.0)


@TURNED
def test_a_million_squares_keep_their_digits_in_fp32(turned):
    x = random((1, 1024, 1024), turned=turned)
    exact = x.double().norm()
    off = abs(float(frobenius_norm(x)) / float(exact) - 1.0)
    assert off < 3e-7
    in_one_sum = abs(float(torch.linalg.vector_norm(x)) / float(exact) - 1.0)
    assert in_one_sum > 10 * off, "then one sum would do"
