"""A stand-in for Transformer Engine's ``TELinear`` with ``parallel_mode="duplicated"``.

Multi-latent attention holds its down-projections on every TP rank so. Megatron's local spec cuts
them instead, and then loses part of the gradient of the rotary key: ``_qkv_down_projection``
gathers it over TP, which in backward takes the own part only, while every TP rank's heads use it.
"""

from __future__ import annotations

from typing import Any

import torch


class DuplicatedLinear(torch.nn.Module):
    """y = x Wᵀ with the whole W on every TP rank, and Megatron's marks on it."""

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, parallel_mode: str, **_: Any
    ) -> None:
        super().__init__()
        assert parallel_mode == "duplicated"
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype)
        )
        marks = {
            "allreduce": True,
            # Its gradient is summed over TP, each rank having seen its part of the sequence.
            "sequence_parallel": config.sequence_parallel,
            "tensor_model_parallel": False,
            "partition_dim": 0,
            "partition_stride": 1,
        }
        for name, value in marks.items():
            setattr(self.weight, name, value)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return output and bias like Megatron's linear layers."""
        return torch.nn.functional.linear(tokens, self.weight), None


def duplicate_down_projections(spec: Any) -> None:
    """Let every MLA layer of a block spec hold its down-projections whole, in place."""
    from megatron.core.transformer import multi_latent_attention

    multi_latent_attention.TELinear = DuplicatedLinear
    for layer in spec.layer_specs:
        submodules = layer.submodules.self_attention.submodules
        submodules.linear_q_down_proj = DuplicatedLinear
        submodules.linear_kv_down_proj = DuplicatedLinear
