"""Optional CUDA kernels for symmetric products, used only after a check against torch.

The supported one is Emerging-Optimizers' Triton ``tsyrk_ex`` (bf16, devices of capability 9.0 and
later, ``pip install 'emerging-optimizers>=0.3'``). It computes the tiles on and below the diagonal
and writes each twice, which halves the work of X Xᵀ and of A².
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

SyrkFunction = Callable[..., Tensor]
"""``f(a, c, alpha=…, beta=…)`` returns alpha A Aᵀ + beta C of one matrix."""

# FLOPs of a product below which launching a kernel per matrix, and the copy of its result, are
# assumed to cost more than they save: 50 µs at 400 TFLOP/s (modelled, not measured).
_SMALLEST_PRODUCT: Final = 20e9

# The rounding error of a bf16 result is 2⁻⁹ of each element; a wrong tile is off by its magnitude.
_CHECK_TOLERANCE: Final = 1e-2

# First generation with the tensor descriptors that the kernel uses.
_FIRST_CAPABILITY: Final = (9, 0)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SymmetricKernel:
    """A kernel that passed its check.

    Attributes:
        name: Name in reports.
        function: The kernel.
    """

    name: str
    function: SyrkFunction

    def supports(self, x: Tensor) -> bool:
        """Return True for matrices x (B, m, n) of suitable size, layout and alignment."""
        return self.supports_shape(*x.shape[-2:]) and x.is_contiguous()

    def supports_shape(self, m: int, n: int) -> bool:
        """Return True for (m, n) matrices of suitable size and alignment."""
        return 2 * m * m * n >= _SMALLEST_PRODUCT and m % 8 == n % 8 == 0

    def __call__(
        self, a: Tensor, c: Tensor | None, *, alpha: float, beta: float, out: Tensor
    ) -> None:
        """``out`` (m, m) = alpha A Aᵀ + beta C."""
        out.copy_(self.function(a, c, alpha=alpha, beta=beta))


@lru_cache(maxsize=16)
def symmetric_kernel(device: torch.device, dtype: torch.dtype) -> SymmetricKernel | None:
    """Return the kernel for a device and dtype, checked at its first use, or None."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    if torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return None
    try:
        from emerging_optimizers.triton_kernels import tsyrk_ex
    except (ImportError, AttributeError):
        return None
    return checked(SymmetricKernel(name="emerging-optimizers tsyrk_ex", function=tsyrk_ex), device)


def warm_up(shapes: Iterable[tuple[int, int]], device: torch.device, dtype: torch.dtype) -> None:
    """Run the kernel's autotuning for (m, n) matrices while no other rank waits."""
    kernel = symmetric_kernel(device, dtype)
    if kernel is None:
        return
    for m, n in sorted({(min(shape), max(shape)) for shape in shapes}):
        x = torch.zeros(1, m, n, device=device, dtype=dtype)
        a, result = (torch.zeros(1, m, m, device=device, dtype=dtype) for _ in range(2))
        if kernel.supports(x):
            kernel(x[0], None, alpha=1.0, beta=0.0, out=a[0])
        if kernel.supports(a):
            kernel(a[0], a[0], alpha=1.0, beta=1.0, out=result[0])


def checked(kernel: SymmetricKernel, device: torch.device) -> SymmetricKernel | None:
    """Return the kernel if it agrees with torch's products on ``device``, else None and warn.

    Called once per device and process, before the first step, so that host reads are harmless.
    """
    generator = torch.Generator().manual_seed(0)
    for m, n in ((512, 640), (640, 512), (768, 768)):
        drawn = torch.randn(m, n, generator=generator) / n**0.5
        x = drawn.to(device=device, dtype=torch.bfloat16)
        c = (x.float() @ x.float().T).to(torch.bfloat16)
        expected = 0.5 * (x.float() @ x.float().T) - 2.0 * c.float()
        out = torch.empty_like(c)
        try:
            kernel(x, c, alpha=0.5, beta=-2.0, out=out)
        except Exception as error:
            _log.warning("%s fails here (%s); plain products are used.", kernel.name, error)
            return None
        off = float((out.float() - expected).norm() / expected.norm())
        if not off < _CHECK_TOLERANCE:
            _log.warning(
                "%s is off by %.1e at %dx%d here; plain products are used.", kernel.name, off, m, n
            )
            return None
    return kernel
