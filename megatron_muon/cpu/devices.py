"""Creates tensors on the CPU that Megatron requests on a CUDA device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

_FACTORIES = (
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")

# Results of ``Tensor.type()`` that Megatron compares; other dtypes keep their own name.
_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float64: "torch.cuda.DoubleTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.uint8: "torch.cuda.ByteTensor",
    torch.int32: "torch.cuda.IntTensor",
    torch.int64: "torch.cuda.LongTensor",
    torch.bool: "torch.cuda.BoolTensor",
}

_CPU = torch.device("cpu")


def _names_cuda(device: Any) -> bool:
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, torch.device) and device.type == "cuda"


def _on_cpu(device: Any) -> Any:
    return _CPU if _names_cuda(device) else device


def _redirect_keywords(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return make


def _redirect_to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _redirect_type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return _TYPE_NAMES.get(self.dtype) or original(self)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original(self, dtype, *args, **kwargs)

    return type_name


def _redirect_load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(f, _on_cpu(map_location), *args, **kwargs)

    return load


def _cuda(self: torch.Tensor, device: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    return self


def _pin_memory(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return self


def _record_stream(self: torch.Tensor, stream: Any) -> None:
    return None


def install() -> None:
    """Redirect the factories of ``torch`` and the methods of ``torch.Tensor``."""
    # ``with torch.device(...)`` looks up factories by identity in a table built on first use: build
    # it now with the originals, which the replacements call.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _redirect_keywords(getattr(torch, name)))
    for name in _METHODS:
        setattr(torch.Tensor, name, _redirect_keywords(getattr(torch.Tensor, name)))
    methods: dict[str, Callable[..., Any]] = {
        "to": _redirect_to(torch.Tensor.to),
        "type": _redirect_type(torch.Tensor.type),
        "cuda": _cuda,
        "pin_memory": _pin_memory,
        "record_stream": _record_stream,
    }
    for name, replacement in methods.items():
        setattr(torch.Tensor, name, replacement)
    torch.load = _redirect_load(torch.load)
