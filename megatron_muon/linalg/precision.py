"""Selects the dtype of matrix products and messages, and enforces true fp32 products."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

COMPUTE_POLICIES: Final = ("auto", "fp64", "fp32", "fp16", "bf16")

EXCHANGE_POLICIES: Final = ("auto", "fp32", "bf16")

STATE_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes of state between steps."""

_EXPLICIT: Final = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

# First NVIDIA generation with bf16 tensor cores (Ampere).
_FIRST_BF16_CAPABILITY: Final = (8, 0)


def resolve_compute_dtype(policy: str, device: torch.device) -> torch.dtype:
    """Returns the dtype in which the Newton-Schulz products run.

    ``auto`` is bf16 on CUDA devices of capability 8.0 and later, and fp32 everywhere else,
    including CPUs with bf16 units: runs on CPU are for tests, demos and planning, and their results
    must not depend on the model of the processor. Type ``bf16`` to select it.

    Args:
        policy: One of ``COMPUTE_POLICIES``.
        device: Device of the matrices.

    Returns:
        float64, float32, float16 or bfloat16.

    Raises:
        ValueError: Unknown policy.
    """
    if policy == "auto":
        fast_bf16 = (
            device.type == "cuda"
            and torch.cuda.get_device_capability(device) >= _FIRST_BF16_CAPABILITY
        )
        return torch.bfloat16 if fast_bf16 else torch.float32
    if policy not in _EXPLICIT:
        raise ValueError(
            f"--dmuon-compute-dtype {policy} is unknown; supported are "
            f"{', '.join(COMPUTE_POLICIES)}. Type for example --dmuon-compute-dtype auto."
        )
    return _EXPLICIT[policy]


def resolve_exchange_dtype(policy: str, compute_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which matrices and their updates are communicated.

    ``auto`` is bf16 for 16-bit products, whose rounding errors exceed those of the messages, and
    fp32 otherwise. Never fp16: gradients may underflow.

    Args:
        policy: One of ``EXCHANGE_POLICIES``.
        compute_dtype: Dtype of the Newton-Schulz products, or of those that computed the gradients.

    Raises:
        ValueError: Unknown policy.
    """
    if policy not in EXCHANGE_POLICIES:
        raise ValueError(
            f"The exchange dtype {policy} is unknown; supported are {', '.join(EXCHANGE_POLICIES)}."
        )
    if policy == "auto":
        return torch.bfloat16 if compute_dtype.itemsize == 2 else torch.float32
    return _EXPLICIT[policy]


@contextmanager
def full_precision_matmul() -> Iterator[None]:
    """Runs fp32 matrix products in fp32: no TF32 on CUDA, no bf16 or TF32 inside oneDNN on CPU.

    torch's settings are those of the whole process; they are restored at the end, also after an
    exception.
    """
    backends = _backends_with_own_setting()
    if backends:
        before = [backend.fp32_precision for backend in backends]
        try:
            for backend in backends:
                backend.fp32_precision = "ieee"
            yield
        finally:
            for backend, value in zip(backends, before, strict=True):
                backend.fp32_precision = value
        return
    before_all = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before_all)


def _backends_with_own_setting() -> list[Any]:
    """Returns the matmul settings of cuBLAS and oneDNN; empty before torch 2.9."""
    found = [
        getattr(backend, "matmul", None) for backend in (torch.backends.cuda, torch.backends.mkldnn)
    ]
    return [matmul for matmul in found if hasattr(matmul, "fp32_precision")]
