"""Stands for ``transformer_engine_torch``: the kernels that quantized weights need, on CPU.

Names and arguments are the extension's. What is not here raises when it is called. ``calls`` lists
the kernels in order, for transcripts.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.te import formats
from tests.te.formats import FLOATS, MX_BLOCK, DType

__all__: list[str] = []

calls: list[str] = []

FP8FwdTensors = enum.IntEnum(
    "FP8FwdTensors",
    [f"GEMM{n}_{kind}" for n in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT")],
    start=0,
)
FP8BwdTensors = enum.IntEnum(
    "FP8BwdTensors", [f"GRAD_{kind}{n}" for n in (1, 2, 3) for kind in ("OUTPUT", "INPUT")], start=0
)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{name} has no stand-in on CPU")

    return missing


def _kernel[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """List the calls of a kernel."""

    @functools.wraps(function)
    def listed(*args: P.args, **kwargs: P.kwargs) -> T:
        quantizer = next((f" {type(a).__name__}" for a in args if _is_quantizer(a)), "")
        calls.append(f"{function.__name__}{quantizer}")
        return function(*args, **kwargs)

    return listed


def _is_quantizer(value: Any) -> bool:
    return type(value).__name__.endswith("Quantizer")


def get_cudnn_version() -> int:
    return 91900


# ---- many small tensors at once -----------------------------------------------------------------


@_kernel
def multi_tensor_scale(
    chunk: int, overflow: torch.Tensor, lists: Sequence[list[torch.Tensor]], scale: float
) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


@_kernel
def multi_tensor_compute_scale_and_scale_inv(
    chunk: int,
    overflow: torch.Tensor,
    lists: Sequence[list[torch.Tensor]],
    largest: float,
    powers_of_two: bool,
    least: float,
) -> None:
    for amax, scale, inverse in zip(*lists, strict=True):
        scale.copy_(formats.scales(amax, largest, powers_of_two=powers_of_two, least=least))
        inverse[tuple(slice(0, size) for size in scale.shape)].copy_(1.0 / scale)


@_kernel
def multi_tensor_compute_scale_inv_e8m0(
    chunk: int, overflow: torch.Tensor, lists: Sequence[list[torch.Tensor]], *args: Any
) -> None:
    for amax, inverse in zip(*lists, strict=True):
        inverse.copy_(formats.exponents(amax))


# ---- flat parts of weights ----------------------------------------------------------------------


@_kernel
def compute_amax(values: torch.Tensor, amax: torch.Tensor) -> None:
    amax.copy_(values.abs().max() if values.numel() else torch.zeros(()))


def _places(count: int, width: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every element of a flat part."""
    index = torch.arange(start, start + count)
    return index // width, index % width


def _take_amax(amax: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: Any) -> None:
    flat = amax.view(-1)
    place = rows * amax.shape[1] + columns
    flat.scatter_reduce_(0, place, values.reshape(-1).abs().to(amax.dtype), "amax")


@_kernel
def fp8_block_scaling_compute_partial_amax(
    values: torch.Tensor, amax: torch.Tensor, height: int, width: int, start: int, block: int
) -> None:
    rows, columns = _places(values.numel(), width, start)
    _take_amax(amax, rows // block, columns // block, values)


@_kernel
def fp8_block_scaling_partial_cast(
    values: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    height: int,
    width: int,
    start: int,
    block: int,
    dtype: int,
) -> None:
    rows, columns = _places(values.numel(), width, start)
    scaled = values.reshape(-1).float() * scale[rows // block, columns // block]
    out.copy_(formats.codes(scaled, dtype))


@_kernel
def fp8_transpose(
    codes: torch.Tensor, dtype: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    transposed = codes.reshape(-1, codes.shape[-1]).t().contiguous()
    if out is None:
        return transposed
    return out.copy_(transposed.view(out.shape))


# ---- whole weights ------------------------------------------------------------------------------


@_kernel
def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pinned: bool
) -> Any:
    if type(quantizer).__name__ == "Float8Quantizer":
        return quantizer.create_tensor_from_data(torch.zeros(shape, dtype=torch.uint8), dtype)
    inner = {name: t.zero_() for name, t in quantizer.alloc_tensors(shape, device="cpu").items()}
    metadata = quantizer.create_metadata(shape, dtype=dtype)
    kind = metadata["cls"]
    tensors = {argument: inner.get(name) for name, argument in kind._INNER_TENSORS}
    others = {k: v for k, v in metadata["nontensor_kwargs"].items() if k != "fake_dtype"}
    cpu = torch.device("cpu")
    return kind(shape=torch.Size(shape), dtype=dtype, device=cpu, **tensors, **others)


@_kernel
def quantize(source: torch.Tensor, quantizer: Any, out: Any = None, noop: Any = None) -> Any:
    values = source.detach()
    if out is None:
        out = quantizer.make_empty(tuple(values.shape), dtype=values.dtype, device="cpu")
    _QUANTIZE[type(quantizer).__name__](values.float(), quantizer, out)
    return out


def _by_delayed_scale(values: torch.Tensor, quantizer: Any, out: Any) -> None:
    """By the scale that is there; the maximum is noted for the next one."""
    if quantizer.amax.numel() and values.numel():
        here = values.abs().max().view(quantizer.amax.shape)
        quantizer.amax.copy_(torch.maximum(quantizer.amax, here))
    _fill_per_tensor(values, quantizer, out, quantizer.scale.view(-1)[0])


def _by_current_scale(values: torch.Tensor, quantizer: Any, out: Any) -> None:
    scale = formats.scales(
        values.abs().max(),
        formats.LARGEST[DType(int(quantizer.dtype))],
        powers_of_two=quantizer.force_pow_2_scales,
        least=quantizer.amax_epsilon,
    )
    _fill_per_tensor(values, quantizer, out, scale)


def _fill_per_tensor(values: torch.Tensor, quantizer: Any, out: Any, scale: torch.Tensor) -> None:
    found = formats.codes(values * scale, quantizer.dtype)
    out._data.copy_(found.view(out._data.shape))
    out._scale_inv.fill_(1.0 / scale)
    out._transpose_invalid = True


def _by_blocks(values: torch.Tensor, quantizer: Any, out: Any) -> None:
    height, width = values.reshape(-1, values.shape[-1]).shape
    amax = torch.zeros(out._rowwise_scale_inv.shape)
    place = (height, width, 0, quantizer.block_len)
    fp8_block_scaling_compute_partial_amax.__wrapped__(values, amax, *place)  # type: ignore[attr-defined]
    scale = formats.scales(
        amax,
        formats.LARGEST[DType(int(quantizer.dtype))],
        powers_of_two=quantizer.force_pow_2_scales,
        least=quantizer.amax_epsilon,
    )
    cast: Any = fp8_block_scaling_partial_cast
    cast.__wrapped__(values, out._rowwise_data.view(-1), scale, *place, quantizer.dtype)
    out._rowwise_scale_inv.copy_(1.0 / scale)
    out._create_columnwise()


def _by_mx_blocks(values: torch.Tensor, quantizer: Any, out: Any) -> None:
    matrix = values.reshape(-1, values.shape[-1])
    rows, columns = _places(matrix.numel(), matrix.shape[1], 0)
    sides = (
        (out._rowwise_data, out._rowwise_scale_inv, rows, columns // MX_BLOCK),
        (out._columnwise_data, out._columnwise_scale_inv, rows // MX_BLOCK, columns),
    )
    for data, exponent, row, column in sides:
        if data is None:
            continue
        amax = torch.zeros(exponent.shape)
        _take_amax(amax, row, column, matrix)
        exponent.copy_(formats.exponents(amax))
        scaled = matrix.reshape(-1) * formats.factors(exponent[row, column])
        data.copy_(formats.codes(scaled, quantizer.dtype).view(data.shape))


_QUANTIZE: dict[str, Callable[[torch.Tensor, Any, Any], None]] = {
    "Float8Quantizer": _by_delayed_scale,
    "Float8CurrentScalingQuantizer": _by_current_scale,
    "Float8BlockQuantizer": _by_blocks,
    "MXFP8Quantizer": _by_mx_blocks,
}


@_kernel
def dequantize(tensor: Any, dtype: int) -> torch.Tensor:
    """Of an ``MXFP8Tensor``; the other classes do it in torch on CPU."""
    data = tensor._rowwise_data
    height, width = data.reshape(-1, data.shape[-1]).shape
    exponent = tensor._rowwise_scale_inv[:height, : width // MX_BLOCK]
    values = data.view(torch.float8_e4m3fn).float().view(height, width)
    whole = values / formats.factors(exponent.repeat_interleave(MX_BLOCK, 1))
    return whole.view(data.shape).to(FLOATS[DType(int(dtype))])
