"""Attention replacing Transformer Engine's where Megatron has no local one.

Megatron's ``DotProductAttention`` asserts CP1 and takes no head sizes of multi-latent attention.
Written from the formula: causal softmax attention of any head sizes; keys and values of a context
parallel group are gathered, and each rank attends with its own queries.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def zigzag(length: int, cp: int, cp_rank: int) -> Tensor:
    """Global positions of one rank: chunks r and 2·cp − 1 − r of 2·cp, as Megatron cuts."""
    chunks = torch.arange(length).chunk(2 * cp)
    return torch.cat([chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]])


class _GatherSequence(torch.autograd.Function):
    """Gather a sequence in global order; backward adds the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        whole = torch.empty(part.shape[0] * group.size(), *part.shape[1:])
        for rank, found in enumerate(parts):
            whole[zigzag(len(whole), group.size(), rank)] = found
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[zigzag(len(total), ctx.group.size(), ctx.group.rank())], None


class PlainAttention(torch.nn.Module):
    """Core attention with Megatron's interface; unneeded arguments are ignored."""

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend causally.

        Args:
            query: (local sequence, batch, heads, size).
            key: (local sequence, batch, groups, size).
            value: (local sequence, batch, groups, value size).

        Returns:
            (local sequence, batch, heads · value size).
        """
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        length = query.shape[0] * group.size()
        positions = torch.arange(length)
        if group.size() > 1:
            key, value = _GatherSequence.apply(key, group), _GatherSequence.apply(value, group)
            positions = zigzag(length, group.size(), group.rank())
        repeats = query.shape[2] // key.shape[2]
        key, value = key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
        scale = self.softmax_scale or query.shape[3] ** -0.5
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * scale
        future = torch.arange(length)[None, :] > positions[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        mixed = torch.einsum("bhqk,kbhd->qbhd", weights, value)
        return mixed.reshape(*mixed.shape[:2], -1)


def use_plain_attention(spec: Any) -> None:
    """Put it into every layer of a block spec, in place."""
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = PlainAttention
