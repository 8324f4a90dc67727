"""Compares time and error of the orthogonalization with other libraries, in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_muon.benchmark import median_ms
from megatron_muon.linalg import (
    COEFFICIENT_SETS,
    Segments,
    Workspace,
    carried_segments,
    cheapest_segments,
    coefficient_schedule,
    full_precision_matmul,
    newton_schulz,
    newton_schulz_flops,
    orthogonalize_,
    standard_segments,
)

BATCHES = ((8, 512, 2048), (8, 512, 512), (16, 128, 512), (2, 1024, 1024))
STEPS = 5


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One implementation on one batch.

    Attributes:
        name: The implementation.
        batch: (B, m, n).
        milliseconds: Median.
        gflop: Counted; None for other libraries.
        gemm_share: Rate relative to a large product; None for other libraries.
        error: Relative distance from the polynomial on the singular values, in float64.
    """

    name: str
    batch: tuple[int, int, int]
    milliseconds: float
    gflop: float | None
    gemm_share: float | None
    error: float


def polynomial_of(matrix: torch.Tensor, coefficients: str, steps: int) -> torch.Tensor:
    """Return U p(σ / ‖·‖) Vᵀ of a matrix or batch, in float64."""
    factors: tuple[torch.Tensor, ...] = torch.linalg.svd(matrix.double(), full_matrices=False)
    u, sigma, vt = factors
    sigma = sigma / sigma.norm(dim=-1, keepdim=True)
    for a, b, c in coefficient_schedule(coefficients, steps):
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    result: torch.Tensor = (u * sigma.unsqueeze(-2)) @ vt
    return result


def gemm_rate(device: torch.device, rounds: int) -> float:
    """Return the GFLOP/s of a 2048 x 2048 product in fp32."""
    a = torch.randn(2048, 2048, device=device)
    out = torch.empty_like(a)
    with full_precision_matmul():
        return 2 * 2.048**3 / (median_ms(lambda: torch.mm(a, a, out=out), device, rounds) / 1e3)


def kernel_table(device: torch.device, rounds: int) -> list[KernelRow]:
    """Measure all implementations in fp32; torch's own Muon computes in bf16."""
    schedule = coefficient_schedule("quintic", STEPS)
    rows = []
    for shape in BATCHES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
        exact = polynomial_of(x, "quintic", STEPS)
        rate = gemm_rate(device, rounds)
        standard = standard_segments(schedule)
        cheapest = cheapest_segments(shape[1], shape[2], schedule, torch.float32, device)
        for name, segments in (("ours", cheapest), ("ours, standard form", standard)):
            rows.append(_ours(name, x, segments, exact, rate, rounds))
        rows += _others(x, exact, rounds)
    return rows


def _ours(
    name: str, x: torch.Tensor, segments: Segments, exact: torch.Tensor, rate: float, rounds: int
) -> KernelRow:
    batch, m, n = x.shape
    schedule = coefficient_schedule("quintic", STEPS)
    space, work = Workspace(), torch.empty_like(x)

    def run() -> torch.Tensor:
        return orthogonalize_(
            work.copy_(x),
            schedule,
            compute_dtype=torch.float32,
            segments=segments,
            workspace=space,
        )

    milliseconds = median_ms(run, x.device, rounds)
    gflop = batch * newton_schulz_flops(m, n, segments, x.device) / 1e9
    return KernelRow(
        name=name,
        batch=(batch, m, n),
        milliseconds=milliseconds,
        gflop=gflop,
        gemm_share=gflop / (milliseconds / 1e3) / rate,
        error=_error(run(), exact),
    )


def _others(x: torch.Tensor, exact: torch.Tensor, rounds: int) -> list[KernelRow]:
    """Return Emerging-Optimizers, by batch, and torch.optim.Muon, by matrix."""
    found: list[tuple[str, Callable[[], torch.Tensor], torch.Tensor]] = []
    try:
        from emerging_optimizers.orthogonalized_optimizers import muon_utils

        def theirs() -> torch.Tensor:
            with full_precision_matmul():
                result: torch.Tensor = muon_utils.newton_schulz(
                    x, STEPS, coefficient_type="quintic"
                )
            return result

        found.append(("emerging-optimizers", theirs, exact))
    except ImportError:
        pass
    muon: Any = getattr(torch.optim, "_muon", None)
    if muon is not None:
        # It uses Jordan's coefficients, the same triple in all steps.
        jordan = (3.4445, -4.7750, 2.0315)

        def torchs() -> torch.Tensor:
            return torch.stack(
                [muon._zeropower_via_newtonschulz(one, jordan, STEPS, 1e-7) for one in x]
            )

        found.append(("torch.optim.Muon (bf16)", torchs, polynomial_of(x, "simple", STEPS)))
    return [
        KernelRow(
            name=name,
            batch=(x.shape[0], x.shape[1], x.shape[2]),
            milliseconds=median_ms(run, x.device, rounds),
            gflop=None,
            gemm_share=None,
            error=_error(run(), expected),
        )
        for name, run, expected in found
    ]


def _error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


@dataclass(frozen=True, kw_only=True)
class ErrorRow:
    """Errors of one coefficient set in one form and dtype.

    Attributes:
        coefficients: Name and steps.
        form: Form and dtype.
        polynomial: Relative distance from the polynomial on the singular values, by spectrum.
        polar: Relative distance from the exact polar factor, by spectrum.
    """

    coefficients: str
    form: str
    polynomial: tuple[float, ...]
    polar: tuple[float, ...]


SPECTRA = ("normal", "i^-1/2", "i^-3/2")


def error_table() -> list[ErrorRow]:
    """Measure all coefficient sets in all forms, on 192 x 512 matrices of three spectra."""
    matrices = [_with_spectrum(kind) for kind in SPECTRA]
    rows = []
    for name, found in COEFFICIENT_SETS.items():
        if not found.steps:
            continue
        steps = 4 if name == "aol" else len(found.steps) if len(found.steps) > 1 else STEPS
        schedule = coefficient_schedule(name, steps)
        standard, half = standard_segments(schedule), torch.float16
        for form, dtype, segments in (
            ("fp32, standard", torch.float32, standard),
            ("fp32, Gram", torch.float32, carried_segments(schedule)),
            ("fp16, Gram", half, carried_segments(schedule, half)),
            ("bf16, standard", torch.bfloat16, standard),
        ):
            if dtype.itemsize == 2 and not found.stable_in_16_bits:
                continue
            pairs = [
                (newton_schulz(x, schedule, compute_dtype=dtype, segments=segments), x)
                for x in matrices
            ]
            rows.append(
                ErrorRow(
                    coefficients=f"{name}, {steps} steps",
                    form=form,
                    polynomial=tuple(_error(r, polynomial_of(x, name, steps)) for r, x in pairs),
                    polar=tuple(_error(r, _polar(x)) for r, x in pairs),
                )
            )
    return rows


def _with_spectrum(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 192, 512, dtype=torch.float64, generator=generator)
    if kind != "normal":
        u, sigma, vt = torch.linalg.svd(x, full_matrices=False)
        power = {"i^-1/2": -0.5, "i^-3/2": -1.5}[kind]
        decaying = torch.arange(1, sigma.shape[-1] + 1, dtype=torch.float64) ** power
        x = (u * decaying) @ vt
    return x.float()


def _polar(x: torch.Tensor) -> torch.Tensor:
    factors: tuple[torch.Tensor, ...] = torch.linalg.svd(x.double(), full_matrices=False)
    return factors[0] @ factors[2]
