"""Replaces queries of the CUDA device and the accelerator by Megatron and torch."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

# As of a Hopper GPU, for which Megatron takes its common branches.
_CAPABILITY = (9, 0)
_DEVICE_NAME = "CPU"


class Device:
    """Replaces the context manager ``torch.cuda.device``."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        return None


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=_DEVICE_NAME,
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=_host_memory(),
        multi_processor_count=os.cpu_count() or 1,
    )


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    return _host_memory(), _host_memory()


def _memory_stats(device: Any = None) -> dict[str, int]:
    return defaultdict(int)


@contextlib.contextmanager
def _nvtx_range(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _answer(name: str, value: Any) -> Callable[..., Any]:
    """Return a distinct function for each name: torch._dynamo asserts that none is shared."""

    def answer(*_: Any, **__: Any) -> Any:
        return value

    answer.__name__ = answer.__qualname__ = name
    return answer


_CUDA_ANSWERS: dict[str, Any] = {
    "is_available": True,
    "is_initialized": True,
    "_is_in_bad_fork": False,
    "is_current_stream_capturing": False,
    "is_bf16_supported": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_name": _DEVICE_NAME,
    "get_device_capability": _CAPABILITY,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "device_memory_used": 0,
    "memory_summary": "",
    # Power, clock and similar values may be logged.
    "utilization": 0,
    "temperature": 0,
    "power_draw": 0,
    "clock_rate": 0,
    # Actions without effect.
    "init": None,
    "_lazy_init": None,
    "set_device": None,
    "synchronize": None,
    "empty_cache": None,
    "ipc_collect": None,
    "reset_peak_memory_stats": None,
    "reset_max_memory_allocated": None,
    "set_per_process_memory_fraction": None,
}
_NVTX_ANSWERS: dict[str, Any] = {"range_push": 0, "range_pop": 0, "mark": None}
# torch falls back to the CPU without an accelerator.
_ACCELERATOR_ANSWERS: dict[str, Any] = {
    "is_available": False,
    "device_count": 0,
    "current_accelerator": None,
    "synchronize": None,
    "empty_cache": None,
}


def install() -> None:
    """Install the answers in ``torch.cuda``, ``torch.cuda.nvtx`` and ``torch.accelerator``."""
    # An existing GPU must not be initialized, as its autograd threads would prevent forking.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Orders kernels on a GPU; Megatron requires it to overlap tensor parallelism.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for owner, answers in (
        (torch.cuda, _CUDA_ANSWERS),
        (torch.cuda.nvtx, _NVTX_ANSWERS),
        (torch.accelerator, _ACCELERATOR_ANSWERS),
    ):
        for name, value in answers.items():
            setattr(owner, name, _answer(name, value))
    for name, replacement in {
        "device": Device,
        "get_device_properties": _device_properties,
        "mem_get_info": _mem_get_info,
        "memory_stats": _memory_stats,
    }.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.nvtx.range = _nvtx_range
