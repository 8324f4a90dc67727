"""The compute dtype by policy and device, and true fp32 products for any setting of torch."""

import pytest
import torch

from megatron_muon.linalg import (
    COMPUTE_POLICIES,
    EXCHANGE_POLICIES,
    full_precision_matmul,
    precision,
    resolve_compute_dtype,
    resolve_exchange_dtype,
)

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 1)


def settings() -> tuple[str, str, str]:
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
    )


@pytest.fixture(params=["highest", "high", "medium"])
def legacy_setting(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ("fp64", torch.float64),
        ("fp32", torch.float32),
        ("fp16", torch.float16),
        ("bf16", torch.bfloat16),
    ],
)
def test_an_explicit_policy_holds_on_every_device(policy, dtype, device):
    assert resolve_compute_dtype(policy, device) == dtype


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        ((7, 5), torch.float32),
        ((8, 0), torch.bfloat16),
        ((9, 0), torch.bfloat16),
        ((10, 0), torch.bfloat16),
    ],
)
def test_auto_on_cuda_goes_by_the_capability_of_that_device(monkeypatch, capability, dtype):
    asked = []

    def get_device_capability(device):
        asked.append(device)
        return capability

    monkeypatch.setattr(torch.cuda, "get_device_capability", get_device_capability)
    assert resolve_compute_dtype("auto", CUDA) == dtype
    assert asked == [CUDA]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_auto_elsewhere_is_fp32(device):
    assert resolve_compute_dtype("auto", torch.device(device)) == torch.float32


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="--dmuon-compute-dtype fp8 is unknown") as error:
        resolve_compute_dtype("fp8", CPU)
    assert all(policy in str(error.value) for policy in COMPUTE_POLICIES)


@pytest.mark.parametrize(
    ("policy", "compute", "dtype"),
    [
        ("auto", torch.bfloat16, torch.bfloat16),
        ("auto", torch.float16, torch.bfloat16),
        ("auto", torch.float32, torch.float32),
        ("auto", torch.float64, torch.float32),
        ("fp32", torch.bfloat16, torch.float32),
        ("bf16", torch.float32, torch.bfloat16),
    ],
)
def test_messages_are_as_narrow_as_the_products(policy, compute, dtype):
    assert resolve_exchange_dtype(policy, compute) == dtype


def test_an_unknown_exchange_dtype_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="exchange dtype fp16 is unknown") as error:
        resolve_exchange_dtype("fp16", torch.float16)
    assert all(policy in str(error.value) for policy in EXCHANGE_POLICIES)


def test_reduced_precision_is_off_inside_and_back_afterwards(legacy_setting):
    before = settings()
    with full_precision_matmul():
        assert settings()[1:] == ("ieee", "ieee")
    assert settings() == before


def test_settings_are_back_after_an_exception(legacy_setting):
    before = settings()
    with pytest.raises(KeyError), full_precision_matmul():
        raise KeyError
    assert settings() == before


def test_products_are_those_of_the_default(legacy_setting):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((2, 256, 256), generator=generator)
    inside_error = default_error = None
    expected = x.double() @ x.double()
    with full_precision_matmul():
        inside_error = (torch.bmm(x, x) - expected).abs().max()
    torch.set_float32_matmul_precision("highest")
    default_error = (torch.bmm(x, x) - expected).abs().max()
    assert inside_error == default_error


def test_torch_with_one_setting_for_all_is_served_too(monkeypatch, legacy_setting):
    monkeypatch.setattr(precision, "_backends_with_own_setting", list)
    with full_precision_matmul():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == legacy_setting
