"""Weight decay and sums over lists of tensors, against each tensor by itself."""

from __future__ import annotations

import pytest
import torch

from megatron_muon.optim import rule
from megatron_muon.optim.rule import MatrixRange

RATES = ((4e-3, 0.5), (1e-2, 0.1), (3e-2, 0.3))


def _ranges(dtype: torch.dtype) -> list[MatrixRange]:
    generator = torch.Generator().manual_seed(3)
    ranges = []
    for lr, decay in RATES:
        master = torch.randn(257, generator=generator).to(dtype)
        ranges.append(
            MatrixRange(
                master=master,
                grad=torch.zeros_like(master),
                momentum=torch.zeros_like(master),
                lr=lr,
                weight_decay=decay,
            )
        )
    return ranges


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_decay_by_the_exact_factor_of_their_range(dtype: torch.dtype) -> None:
    ranges = _ranges(dtype)
    expected = [(r.master.double() * (1 - r.lr * r.weight_decay)).to(dtype) for r in ranges]
    rule.decay_weights(ranges)
    for found, r in zip(ranges, expected, strict=True):
        # An ulp: the product is made in float32 or in the dtype. A factor in bf16 is off by many.
        bound = torch.finfo(dtype).eps * r.double().abs()
        assert ((found.master.double() - r.double()).abs() <= bound).all()
        if dtype.itemsize == 2:
            assert (found.master == r).float().mean() > 0.99
