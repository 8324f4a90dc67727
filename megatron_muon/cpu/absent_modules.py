"""Hides or provides modules for which Megatron probes."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from megatron_muon.cpu.optimizers import FusedAdam, FusedSGD

_HIDDEN = ("transformer_engine", "apex", "amp_C")

# Megatron's modules that are always imported and import triton without a guard.
_NEED_TRITON = ("megatron.core.transformer.moe.ops.paged_stash",)


def _offer_optimizers_as_apex() -> None:
    """Make ``from apex.optimizers import FusedAdam`` work while ``import apex`` still fails.

    The import of a submodule looks up the full name first and needs no parent if it exists; all of
    Megatron's other probes (``apex``, ``apex.normalization``, …) fail.
    """
    offered: Any = types.ModuleType("apex.optimizers")
    offered.FusedAdam = FusedAdam
    offered.FusedSGD = FusedSGD
    sys.modules["apex.optimizers"] = offered


def _hide(name: str) -> None:
    """Make ``import name`` raise ModuleNotFoundError, installed or not."""
    if sys.modules.get(name) is None:
        sys.modules[name] = None  # type: ignore[assignment]
    else:
        raise RuntimeError(
            f"megatron_muon.cpu.enable() was called after {name} had been imported; "
            f"a CPU run must not use it."
        )


class _Kernels(types.ModuleType):
    """A module from which any name can be imported, and none can be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def kernel(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"{self.__name__}.{name} requires triton, which is not installed.")

        return kernel


def _stub_triton_kernels() -> None:
    if importlib.util.find_spec("triton") is None:
        for name in _NEED_TRITON:
            sys.modules[name] = _Kernels(name)


def _skip_compilation(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(model: Any = None, **_: Any) -> Any:
        return (lambda function: function) if model is None else model

    return compile


def install() -> None:
    """Fill ``sys.modules`` and replace ``torch.compile``."""
    for name in _HIDDEN:
        _hide(name)
    _offer_optimizers_as_apex()
    _stub_triton_kernels()
    torch.compile = _skip_compilation(torch.compile)
