"""Replaces ``torch.cuda`` as far as Megatron's constructors and fake tensors require."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import fake_tensor

DEVICES_PER_NODE = 8


class _Stream:
    """A stream or event without effect."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *_, **__: self

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        return None


def install(name: str = "fake H100", capability: tuple[int, int] = (9, 0)) -> None:
    """Replace the calls into CUDA; the capability determines kernels and dtypes."""
    fake_tensor.init_gpu_context = lambda device: None  # type: ignore[assignment]
    # torch.tensor(…, device="cuda") would query the driver.
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment]
    torch._C._ensureCUDADeviceGuardSet()
    properties = types.SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        total_memory=80 << 30,
        multi_processor_count=132,
        warp_size=32,
        gcnArchName="",
    )
    stream = _Stream()
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: DEVICES_PER_NODE,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: name,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream: stream,
        "Stream": _Stream,
        "Event": _Stream,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda function, **_: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_, **__: None,
    }
    replaced["default_generators"] = (torch.Generator(),) * DEVICES_PER_NODE
    for attribute, value in replaced.items():
        setattr(torch.cuda, attribute, value)
    torch.nn.Module.cuda = lambda self, *_, **__: convert(self)  # type: ignore[assignment,method-assign]


def convert(module: torch.nn.Module, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Move a module in place to ``cuda`` and, for floating point, to a dtype, by new parameters.

    Torch itself swaps the parameters' data, which fake tensors do not have.
    """
    for part in module.modules():
        for values in (part._parameters, part._buffers):
            for name, old in values.items():
                if old is None:
                    continue
                wanted = dtype if dtype is not None and old.is_floating_point() else old.dtype
                if (wanted, "cuda") == (old.dtype, old.device.type):
                    continue
                new: Any = torch.empty_like(old, dtype=wanted, device="cuda")
                if isinstance(old, torch.nn.Parameter):
                    new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
                # Megatron's attributes, but not the fake tensor's own.
                for attribute in vars(old).keys() - vars(new).keys():
                    setattr(new, attribute, getattr(old, attribute))
                if isinstance(old, fake_tensor.FakeTensor):
                    # That of an FP8 weight says so.
                    new.__class__ = type(old)
                values[name] = new
    return module
