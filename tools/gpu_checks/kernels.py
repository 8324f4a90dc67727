"""Checks of one device without Megatron: rates, factors, kernels and codes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from megatron_muon.benchmark import median_ms
from megatron_muon.linalg import (
    Workspace,
    cheapest_segments,
    coefficient_schedule,
    newton_schulz_flops,
    orthogonalize_,
)
from megatron_muon.linalg.kernels import symmetric_kernel
from megatron_muon.linalg.orthonormal import orthonormal_basis
from tests.te import extension
from tests.te.weights import RECIPES, quantizer, tensors_of
from tools.gpu_checks.outcome import Figures, NotPossible, require

STEPS, ROUNDS = 5, 5
SIDES = {"cuda": (1024, 4096), "cpu": (64, 128)}
ERROR = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-4}
"""What the iteration itself may be off by (docs/newton-schulz-errors.md)."""


def _random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator).to(device, dtype)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def newton_schulz_rates(device: torch.device) -> Figures:
    """Newton-Schulz of one matrix against the rate of a product, per element type."""
    found: Figures = {}
    schedule = coefficient_schedule("quintic", STEPS)
    for dtype, bound in ERROR.items():
        for side in SIDES[device.type]:
            shape = (side, 2 * side)
            x = _random(1, *shape, device=device)
            segments = cheapest_segments(*shape, schedule, dtype, device)
            space = Workspace()

            def update(x: torch.Tensor = x, dtype: Any = dtype, space: Any = space) -> torch.Tensor:
                return orthogonalize_(
                    x.to(dtype), schedule, compute_dtype=dtype, scale=1.0, workspace=space
                )

            exact = _iterated(x[0].double(), schedule)
            error = _relative(update()[0], exact)
            require(error < bound, f"{dtype} {shape}: off by {error:.2e}, at most {bound:g}")
            a = _random(side, side, device=device, dtype=dtype)
            product = 2 * side**3 / median_ms(lambda a=a: a @ a, device, ROUNDS)
            work = newton_schulz_flops(*shape, segments, device) / median_ms(update, device, ROUNDS)
            name = f"{str(dtype).removeprefix('torch.')} {side}x{2 * side}"
            found[name] = f"{work / 1e9:.3g} TFLOP/s, {work / product:.0%} of a product's rate"
    return found


def _iterated(x: torch.Tensor, schedule: Any) -> torch.Tensor:
    x = x / x.norm()
    for a, b, c in schedule:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def right_factors(device: torch.device) -> Figures:
    """Orth-Dion's orthonormal basis against Householder QR: time, and how orthonormal it is."""
    found: Figures = {}
    for side in SIDES[device.type]:
        p = _random(1, 2 * side, side // 4, device=device)
        basis = orthonormal_basis(p.clone())
        gram = basis.double().mT @ basis.double()
        off = float((gram - torch.eye(side // 4, device=device)).abs().max())
        require(off < 1e-5, f"{2 * side}x{side // 4}: columns are orthonormal to {off:.1e} only")
        ours = median_ms(lambda p=p: orthonormal_basis(p.clone()), device, ROUNDS)
        qr = median_ms(lambda p=p: torch.linalg.qr(p), device, ROUNDS)
        found[f"{2 * side}x{side // 4}"] = f"{ours:.2f} ms, QR {qr:.2f} ms, off by {off:.0e}"
    return found


def symmetric_products(device: torch.device) -> Figures:
    """Emerging-Optimizers' kernel for X Xᵀ against plain products."""
    kernel = symmetric_kernel(device, torch.bfloat16)
    if kernel is None:
        raise NotPossible("no kernel: it needs capability 9.0 and emerging-optimizers >= 0.3")
    found: Figures = {}
    for side in (4096, 8192):
        x = _random(side, side, device=device, dtype=torch.bfloat16)
        out, exact = torch.empty_like(x), (x.double() @ x.double().mT)
        kernel(x, None, alpha=1.0, beta=0.0, out=out)
        error = _relative(out, exact)
        require(error < 1e-2, f"{side}: off by {error:.2e}")
        run = partial(kernel, x, None, alpha=1.0, beta=0.0, out=out)
        ours = median_ms(run, device, ROUNDS)
        plain = median_ms(lambda x=x: x @ x.mT, device, ROUNDS)
        found[f"{side}x{side}"] = f"{plain / ours:.2f} x as fast as a product"
    return found


def expected_codes(recipe: str, values: torch.Tensor, like: Any) -> dict[str, torch.Tensor]:
    """What ``tests/te`` makes of a matrix, in tensors of the forms of a quantized one."""
    shapes = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors_of(like).items()}
    out = SimpleNamespace(**shapes, _transpose_invalid=False)

    def columnwise() -> None:
        out._columnwise_data = out._rowwise_data.t().contiguous()
        rows, columns = out._columnwise_scale_inv.shape
        out._columnwise_scale_inv = out._rowwise_scale_inv.t()[:rows, :columns].contiguous()

    out._create_columnwise = columnwise
    extension._QUANTIZE[type(like._quantizer).__name__](
        values.detach().float().cpu(), like._quantizer, out
    )
    return {name: getattr(out, name) for name in shapes if name != "_transpose"}


def shim_codes(device: torch.device) -> Figures:
    """Codes and scales of the CPU stand-in of the tests, against this device's kernels."""
    from tools.gpu_check import FIRST

    found: Figures = {}
    for recipe in RECIPES:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST[recipe]:
            found[recipe] = "not possible here"
            continue
        values = _random(256, 384, device=device, dtype=torch.bfloat16)
        values = values * torch.logspace(-3, 2, 384, device=device, dtype=torch.bfloat16)
        weight = quantizer(recipe, device)(values)
        expected = expected_codes(recipe, values, weight)
        held = tensors_of(weight)
        for name, want in expected.items():
            wrong = int((held[name].cpu() != want).sum())
            require(wrong == 0, f"{recipe}: {wrong} of {want.numel()} of {name}")
        found[recipe] = f"{sum(t.numel() for t in expected.values())} codes and scales equal"
    return found


def empty_group_of_adam(device: torch.device) -> Figures:
    """Transformer Engine's Adam on a rank without scalar parameters (TE#3318, TE#3212)."""
    if device.type != "cuda":
        raise NotPossible("Transformer Engine's Adam needs a GPU")
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam
    except ImportError as error:
        raise NotPossible(f"Transformer Engine: {error}") from error
    weight = torch.nn.Parameter(_random(64, device=device))
    optimizer = FusedAdam([{"params": [weight]}, {"params": []}], lr=0.1)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    torch.cuda.synchronize()
    require(bool(weight.isfinite().all()), "weights are not finite")
    return {"steps": 2}
