"""The CPU kernels of ``tests/te`` make the codes and scales of torchao, and of the formula."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.te import loading, weights

Ranks = Callable[..., list[Any]]
DTYPES = (torch.bfloat16, torch.float32)


def _values(dtype: torch.dtype, rows: int = 256, columns: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 3, columns)
    values[:32, :32] = 0.0
    return values.to(dtype)


def _by_torchao(rank: int, version: str) -> None:
    loading.use(version)
    sys.path.insert(0, str(loading.folder("torchao")))
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    for dtype in DTYPES:
        values = _values(dtype)
        found = weights.tensors_of(weights.quantizer("mxfp8")(values))
        for side, which in (("rowwise", values), ("columnwise", values.t().contiguous())):
            scale, codes = to_mx(which, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
            codes, scale = codes.view(torch.uint8).view(which.shape), scale.view(torch.uint8)
            scale = scale.view(which.shape[0], -1)
            if side == "columnwise":
                codes, scale = codes.t(), scale.t()
            assert torch.equal(codes, found[f"_{side}_data"]), (dtype, side)
            kept = found[f"_{side}_scale_inv"][: scale.shape[0], : scale.shape[1]]
            assert torch.equal(scale, kept), (dtype, side)
    values = _values(torch.float32)
    theirs = hp_tensor_to_float8_dynamic(values, torch.float8_e4m3fn, LinearMMConfig())
    found = weights.tensors_of(weights.quantizer("tensorwise")(values))
    assert torch.equal(theirs._data.view(torch.uint8), found["_data"])
    torch.testing.assert_close(1.0 / theirs._scale, found["_scale_inv"].view(()), rtol=1e-7, atol=0)


@pytest.mark.parametrize("version", loading.VERSIONS)
def test_codes_are_torchaos(te_ranks: Ranks, version: str) -> None:
    te_ranks(1, _by_torchao, version, init_process_group=False)


def _nearest(values: torch.Tensor) -> torch.Tensor:
    """The nearest of all finite e4m3 values, by a table; of two equally near the even code."""
    codes = torch.arange(127, dtype=torch.uint8)
    table = codes.view(torch.float8_e4m3fn).double()
    distance = (values.abs().double().reshape(-1, 1) - table).abs()
    least = distance.amin(1, keepdim=True)
    odd = (codes % 2 == 1).double()
    return table[(distance - least + odd * (distance == least) * 1e-300).argmin(1)]


def _by_formula(rank: int) -> None:
    loading.use(loading.VERSIONS[-1])
    values = _values(torch.bfloat16)
    weight = weights.quantizer("blockwise")(values)
    found = weights.tensors_of(weight)
    for i in range(2):
        for j in range(2):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            amax = float(values[block].abs().max())
            scale = 2.0 ** math.floor(math.log2(448.0 / amax))
            assert float(found["_rowwise_scale_inv"][i, j]) == 1.0 / scale
            got = found["_rowwise_data"][block].contiguous().view(torch.float8_e4m3fn).double()
            exact = values[block].double() * scale
            assert torch.equal(got.abs().reshape(-1), _nearest(exact)), (i, j)
            assert torch.equal(found["_columnwise_data"].t()[block], found["_rowwise_data"][block])


def test_blocks_have_the_codes_of_the_formula(te_ranks: Ranks) -> None:
    te_ranks(1, _by_formula, init_process_group=False)
