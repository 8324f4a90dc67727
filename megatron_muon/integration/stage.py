"""Plan and rule of this pipeline stage, from the wrapped model, before any optimizer exists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_muon.config import MatrixConfig
from megatron_muon.integration.model_parameters import ModelParameter
from megatron_muon.linalg import (
    coefficient_schedule,
    newton_schulz_flops,
    resolve_compute_dtype,
)
from megatron_muon.matrices import (
    LogicalMatrix,
    ShardedParameter,
    data_parallel_ranges,
    logical_matrices,
)
from megatron_muon.optim import MuonRule
from megatron_muon.placement import ExchangeGroup, Plan, make_plan

EXCHANGE_DTYPE = torch.float32
"""Masters and momenta are fp32, and so is what travels."""


def make_rule(settings: MatrixConfig, device: torch.device) -> MuonRule:
    """The update rule that the settings describe.

    Raises:
        ValueError: The coefficient set, its number of steps or the compute dtype does not exist.
    """
    compute_dtype = resolve_compute_dtype(settings.compute_dtype, device)
    return MuonRule(
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        schedule=coefficient_schedule(
            settings.coefficient_type,
            settings.num_ns_steps,
            settings.coefficients,
            compute_dtype=compute_dtype,
        ),
        scale_mode=settings.scale_mode,
        extra_scale_factor=settings.extra_scale_factor,
        compute_dtype=compute_dtype,
    )


def plan_stage(
    settings: MatrixConfig,
    rule: MuonRule,
    matrices: Sequence[tuple[ModelParameter, bool]],
    model_chunks: Sequence[Any],
    *,
    tp: int,
) -> Plan:
    """The plan of this stage's dense matrices.

    The ranges of all DP ranks follow from the layout of the DDP buffers, which is the same on all
    of them; nothing is communicated.

    Args:
        settings: The user's settings.
        rule: The update rule; its number of steps gives the cost of a matrix.
        matrices: Parameters of the matrix optimizer, each with its split decided.
        model_chunks: Chunks wrapped in ``DistributedDataParallel``.
        tp: Tensor-parallel size.

    Raises:
        ValueError: A parameter cannot be cut or split as asked, or the buffer is too small.
    """
    layout = _buffer_layout(model_chunks)
    sizes = {dp for *_, dp in layout.values()}
    assert len(sizes) <= 1, f"dense buffers are sharded over groups of different sizes: {sizes}"
    dp = sizes.pop() if sizes else 1
    parameters: list[ShardedParameter] = []
    logical: list[LogicalMatrix] = []
    for entry, split in matrices:
        parameter = _sharded_parameter(entry, layout[entry.tensor], tp=tp)
        parameters.append(parameter)
        logical.extend(logical_matrices(parameter, split=split))
    return make_plan(
        group=ExchangeGroup(tp=tp, dp=dp),
        parameters=parameters,
        matrices=logical,
        cost=lambda m, n: newton_schulz_flops(m, n, len(rule.schedule)),
        itemsize=EXCHANGE_DTYPE.itemsize,
        buffer_bytes=int(settings.exchange_buffer_mb * 2**20),
    )


BufferPlace = tuple[int, int, int, int, int]
"""(start, stop, bucket start, bucket numel, data-parallel size) in a gradient buffer."""


def _buffer_layout(model_chunks: Sequence[Any]) -> dict[torch.nn.Parameter, BufferPlace]:
    return {
        parameter: (
            start,
            stop,
            buffer.buckets[bucket].offset,
            buffer.buckets[bucket].grad_data.numel(),
            buffer.data_parallel_group.size(),
        )
        for chunk in model_chunks
        for buffer in chunk.buffers
        for parameter, (start, stop, bucket) in buffer.param_index_map.items()
    }


def _sharded_parameter(entry: ModelParameter, place: BufferPlace, *, tp: int) -> ShardedParameter:
    rows, cols = entry.tensor.shape
    if entry.tp_dim == 0:
        rows *= tp
    elif entry.tp_dim == 1:
        cols *= tp
    start, stop, bucket_start, bucket_numel, dp = place
    return ShardedParameter(
        name=entry.name,
        global_shape=(rows, cols),
        tp_dim=entry.tp_dim,
        tp=tp,
        ranges=data_parallel_ranges(
            start=start,
            stop=stop,
            bucket_start=bucket_start,
            bucket_numel=bucket_numel,
            dp=dp,
        ),
        packing=entry.packing,
        part_rows=entry.part_rows,
    )
