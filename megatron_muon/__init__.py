"""Exact distributed matrix optimizers for NVIDIA Megatron, without a fork.

``megatron_muon.install()`` adds ``--optimizer dmuon`` to Megatron's training code;
``megatron_muon.get_matrix_optimizer(...)`` is for custom training loops. Importing this package
requires no GPU, Megatron, Transformer Engine or Apex.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_muon.config import MatrixConfig

if TYPE_CHECKING:
    from megatron_muon.integration.builder import get_matrix_optimizer
    from megatron_muon.integration.hooks import install, uninstall

__version__ = "0.1.0"

__all__ = ["MatrixConfig", "__version__", "get_matrix_optimizer", "install", "uninstall"]


def __getattr__(name: str) -> Any:
    # Megatron is imported on first use, so that this package can be imported without it.
    if name == "get_matrix_optimizer":
        from megatron_muon.integration.builder import get_matrix_optimizer

        return get_matrix_optimizer
    if name in ("install", "uninstall"):
        from megatron_muon.integration import hooks

        return getattr(hooks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
