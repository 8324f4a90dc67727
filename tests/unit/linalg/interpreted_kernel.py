"""Runs emerging-optimizers' symmetric kernel on the CPU, in Triton's interpreter; prints errors.

A process of its own: the interpreter is chosen while triton is imported.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import absl.testing  # noqa: F401 - where it is imported the kernel keeps one configuration
import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from emerging_optimizers.triton_kernels import tsyrk_ex

from megatron_muon.linalg.kernels import SymmetricKernel, checked


def widened(handle: interpreter.TensorHandle) -> np.ndarray:
    """Numpy has no bf16: the interpreter would multiply the bits as integers."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def create_dot(self, a, b, d, *_):
    product = np.matmul(widened(a), widened(b)).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def errors(m: int, n: int, *, alpha: float, beta: float) -> dict[str, float]:
    """Of alpha X Xᵀ + beta C, relative, and how far it is from symmetric."""
    generator = torch.Generator().manual_seed(m + n)
    x = (torch.randn(m, n, generator=generator) / n**0.5).bfloat16()
    c = (x.double() @ x.double().mT).bfloat16() if beta else None
    expected = alpha * (x.double() @ x.double().mT)
    if c is not None:
        expected += beta * c.double()
    found = torch.empty(m, m, dtype=torch.bfloat16)
    kernel(x, c, alpha=alpha, beta=beta, out=found)
    return {
        "relative": float((found.double() - expected).norm() / expected.norm()),
        "asymmetric": float((found - found.mT).abs().max()),
    }


if __name__ == "__main__":
    interpreter.InterpreterBuilder.create_dot = create_dot
    kernel = SymmetricKernel(name="tsyrk_ex", function=tsyrk_ex)
    shapes = [(64, 128), (128, 64), (200, 264)]
    print(
        json.dumps(
            {
                "passes our check": checked(kernel, torch.device("cpu")) is not None,
                "errors": [
                    errors(m, n, alpha=alpha, beta=beta)
                    for m, n in shapes
                    for alpha, beta in ((1.0, 0.0), (0.5, -2.0))
                ],
            }
        )
    )
