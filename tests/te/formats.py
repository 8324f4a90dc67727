"""FP8 codes and scales as Transformer Engine's kernels make them, in torch."""

from __future__ import annotations

import enum

import torch


class DType(enum.IntEnum):
    """``transformer_engine_torch.DType``."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


CODES = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
FLOATS = {
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}
MX_BLOCK = 32
LARGEST = {dtype: torch.finfo(codes).max for dtype, codes in CODES.items()}


def codes(values: torch.Tensor, dtype: int) -> torch.Tensor:
    """Bytes of scaled values, rounded to nearest and saturated."""
    kind = DType(int(dtype))
    bound = LARGEST[kind]
    return values.clamp(-bound, bound).to(CODES[kind]).view(torch.uint8)


def scales(
    amax: torch.Tensor, largest: float, *, powers_of_two: bool, least: float
) -> torch.Tensor:
    """The factor that brings ``amax`` to the largest code (``compute_scale_from_amax``)."""
    amax = amax.float().clamp(min=least)
    found = largest / amax
    found = torch.where((amax == 0) | ~amax.isfinite(), torch.ones_like(found), found)
    found = found.clamp(max=torch.finfo(torch.float32).max)
    return _power_of_two(found) if powers_of_two else found


def _power_of_two(positive: torch.Tensor) -> torch.Tensor:
    """Rounded down: the sign and exponent bits."""
    bits = positive.view(torch.int32)
    return (bits & -0x800000).view(torch.float32)


def exponents(amax: torch.Tensor) -> torch.Tensor:
    """E8M0 scale of MXFP8: the exponent of amax / 448, rounded up (``float_to_e8m0``)."""
    ratio = (amax.float() * (1.0 / LARGEST[DType.kFloat8E4M3])).contiguous()
    bits = ratio.view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    is_small = (exponent == 0) & (mantissa <= 0x400000)
    up = (mantissa > 0) & (exponent != 0xFE) & ~is_small
    return torch.where(ratio == 0, 0, exponent + up.int()).to(torch.uint8)


def factors(exponent: torch.Tensor) -> torch.Tensor:
    """What values are multiplied by under an E8M0 scale."""
    return torch.exp2(127.0 - exponent.float())
