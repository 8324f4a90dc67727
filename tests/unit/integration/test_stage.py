"""What the update rule of a stage is made of besides the user's settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_muon.config import MatrixConfig

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("policy", "device", "trains_in_bf16", "dtype"),
    [
        ("auto", "cuda", True, BF16),
        ("auto", "cuda", False, FP32),
        ("auto", "cpu", True, FP32),
        ("fp32", "cuda", True, FP32),
        ("bf16", "cpu", False, BF16),
    ],
)
def test_orth_dion_communicates_in_bf16_where_gradients_come_from_it(
    megatron: Any,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    device: str,
    trains_in_bf16: bool,
    dtype: torch.dtype,
) -> None:
    from megatron_muon.integration.stage import make_rule

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    settings = MatrixConfig(optimizer="orth_dion", exchange_dtype=policy)
    rule, _ = make_rule(settings, torch.device(device), trains_in_bf16=trains_in_bf16)
    assert set(rule.dtypes.values()) == {dtype}
    assert f"exchanged in {str(dtype).removeprefix('torch.')}" in rule.description
