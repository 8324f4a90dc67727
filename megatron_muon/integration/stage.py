"""Plans and rule of this pipeline stage, from the wrapped model, before any optimizer exists."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_muon.config import MatrixConfig
from megatron_muon.integration.domains import Domain
from megatron_muon.integration.routes import RoutedParameter
from megatron_muon.linalg import (
    STATE_DTYPES,
    coefficient_schedule,
    resolve_compute_dtype,
    resolve_exchange_dtype,
)
from megatron_muon.matrices import (
    LogicalMatrix,
    ShardedParameter,
    data_parallel_ranges,
    logical_matrices,
)
from megatron_muon.optim import MatrixRule, MuonRule, OrthDionRule
from megatron_muon.placement import (
    MOST_SPLIT_RANKS,
    CostFunction,
    ExchangeGroup,
    Method,
    Plan,
    buffer_bytes_of,
    load_cost_table,
    make_plan,
)

MethodFunction = Callable[[Sequence[LogicalMatrix], int], Method]
"""What planning has to know of an optimizer, from the matrices of a stage and its owners."""

RANKS_OF_A_NODE = 8
"""Among which a matrix is split where it is not known how many ranks a node has."""


def make_rule(
    settings: MatrixConfig, device: torch.device, *, trains_in_bf16: bool
) -> tuple[MatrixRule, MethodFunction]:
    """The update rule that the settings describe, and how it is planned.

    Args:
        settings: The user's settings.
        device: Where matrices are computed; it decides what an operation costs.
        trains_in_bf16: Whether gradients come from products in bf16.

    Raises:
        ValueError: A setting that does not exist or is out of range.
    """
    if settings.optimizer == "orth_dion":
        gradients = resolve_compute_dtype("auto", device) if trains_in_bf16 else torch.float32
        return _orth_dion(settings, resolve_exchange_dtype(settings.exchange_dtype, gradients))
    return _dmuon(settings, device)


def _orth_dion(
    settings: MatrixConfig, exchange_dtype: torch.dtype
) -> tuple[MatrixRule, MethodFunction]:
    rule = OrthDionRule(
        rank_fraction=settings.rank_fraction,
        rank_multiple_of=settings.rank_multiple_of,
        momentum=settings.momentum,
        right_factor=settings.right_factor,
        scale_mode=settings.scale_mode,
        extra_scale_factor=settings.extra_scale_factor,
        rank_compensation=settings.rank_compensation,
        state_dtype=STATE_DTYPES[settings.state_dtype],
        exchange_dtype=exchange_dtype,
    )

    def method(matrices: Sequence[LogicalMatrix], owners: int) -> Method:
        _require_room_for_ranks(settings, matrices)
        return rule.method(settings.exchange)

    return rule, method


def _dmuon(settings: MatrixConfig, device: torch.device) -> tuple[MatrixRule, MethodFunction]:
    compute_dtype = resolve_compute_dtype(settings.compute_dtype, device)
    rule = MuonRule(
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        schedule=coefficient_schedule(
            settings.coefficient_type,
            settings.num_ns_steps,
            settings.coefficients,
            compute_dtype=compute_dtype,
        ),
        coefficient_type=settings.coefficient_type,
        scale_mode=settings.scale_mode,
        extra_scale_factor=settings.extra_scale_factor,
        compute_dtype=compute_dtype,
        momentum_dtype=STATE_DTYPES[settings.momentum_dtype],
        exchange_dtype=resolve_exchange_dtype(settings.exchange_dtype, compute_dtype),
    )

    def method(matrices: Sequence[LogicalMatrix], owners: int) -> Method:
        known = MOST_SPLIT_RANKS if _ranks_of_a_node(settings) else RANKS_OF_A_NODE
        most = settings.split_ranks or known
        return rule.method(
            device,
            cost=_costs(settings, rule, matrices, owners=owners, device=device),
            splitting=rule.splitting(most, device, min_flops=int(settings.split_min_gflop * 1e9)),
        )

    return rule, method


def plan_stage(
    settings: MatrixConfig,
    method: MethodFunction,
    routed: Sequence[RoutedParameter],
    model_chunks: Sequence[Any],
    domain: Domain,
) -> Plan:
    """The plan of this stage's matrices of one domain.

    The ranges of all DP ranks follow from the layout of the DDP buffers, which is the same on all
    of them; nothing is communicated.

    Args:
        settings: The user's settings.
        method: How the update rule is planned.
        routed: Every trainable parameter, with its split decided.
        model_chunks: Chunks wrapped in ``DistributedDataParallel``.
        domain: Dense parameters or experts.

    Raises:
        ValueError: A parameter cannot be cut or split as asked, or the buffer is too small.
    """
    tp, dp = domain.tp_group.size(), domain.dp_group.size()
    layout = _buffer_layout(model_chunks, domain)
    parameters: list[ShardedParameter] = []
    logical: list[LogicalMatrix] = []
    for entry in routed:
        if not entry.is_matrix or not domain.has(entry.parameter):
            continue
        parameter = _sharded_parameter(entry, layout[entry.parameter.tensor], tp=tp, dp=dp)
        parameters.append(parameter)
        logical.extend(logical_matrices(parameter, split=entry.split))
    group, bound = ExchangeGroup(tp=tp, dp=dp), settings.exchange_buffer_mb
    return make_plan(
        group=group,
        parameters=parameters,
        matrices=logical,
        method=method(logical, group.size),
        buffer_bytes=None if bound is None else buffer_bytes_of(bound),
        ranks_per_node=domain.ranks_per_node(_ranks_of_a_node(settings)),
    )


def _ranks_of_a_node(settings: MatrixConfig) -> int | None:
    """Ranks of the world on every node: what the user says, or torchrun, or nothing."""
    if settings.ranks_per_node is not None:
        return settings.ranks_per_node
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdigit() and int(said) else None


def _costs(
    settings: MatrixConfig,
    rule: MuonRule,
    matrices: Sequence[LogicalMatrix],
    *,
    owners: int,
    device: torch.device,
) -> CostFunction | None:
    """Measured time of a matrix in batches as owners will have them; None without measurements.

    Raises:
        ValueError: The table is of another kind of iteration.
    """
    if settings.cost_table is None:
        return None
    table = load_cost_table(settings.cost_table)
    dtype, steps = str(rule.compute_dtype).removeprefix("torch."), len(rule.schedule)
    if (table.dtype, table.steps) != (dtype, steps):
        raise ValueError(
            f"--dmuon-cost-table {settings.cost_table} was measured in {table.dtype} with "
            f"{table.steps} steps, and this run computes in {dtype} with {steps}: write it with "
            f"python -m megatron_muon.benchmark --cost-table {settings.cost_table} "
            f"--cost-dtype {dtype} --cost-steps {steps}"
        )
    shapes = Counter((min(m.shape), max(m.shape)) for m in matrices)

    def flops(m: int, n: int) -> int:
        return rule.flops(m, n, device)

    costs = {
        shape: table.cost(*shape, batch=-(-count // owners), flops=flops)
        for shape, count in shapes.items()
    }
    return lambda m, n: costs[min(m, n), max(m, n)]


def _require_room_for_ranks(settings: MatrixConfig, matrices: Sequence[LogicalMatrix]) -> None:
    narrow = [m for m in matrices if min(m.shape) < settings.rank_multiple_of]
    if narrow:
        m, n = narrow[0].shape
        raise ValueError(
            f"--orth-dion-rank-multiple-of is {settings.rank_multiple_of}, but {narrow[0].name} "
            f"({m}x{n}, the first of {len(narrow)}) has room for rank {min(m, n)} at most: type "
            f"--orth-dion-rank-multiple-of {min(min(m.shape) for m in narrow)} or less, or send "
            f"thin matrices to Adam with --matrix-min-dim {settings.rank_multiple_of}"
        )


BufferPlace = tuple[int, int, int, int]
"""(start, stop, bucket start, bucket numel) in a gradient buffer."""


def _buffer_layout(
    model_chunks: Sequence[Any], domain: Domain
) -> dict[torch.nn.Parameter, BufferPlace]:
    layout: dict[torch.nn.Parameter, BufferPlace] = {}
    for chunk in model_chunks:
        for buffer in domain.buffers(chunk):
            size = buffer.data_parallel_group.size()
            if size != domain.dp_group.size():
                raise ValueError(
                    f"{domain.name} gradient buffers are sharded over {size} ranks, but their "
                    f"data-parallel group has {domain.dp_group.size()}: wrap the model and build "
                    "the optimizer with the same process groups"
                )
            for parameter, (start, stop, number) in buffer.param_index_map.items():
                bucket = buffer.buckets[number]
                layout[parameter] = (start, stop, bucket.offset, bucket.grad_data.numel())
    return layout


def _sharded_parameter(
    entry: RoutedParameter, place: BufferPlace, *, tp: int, dp: int
) -> ShardedParameter:
    parameter = entry.parameter
    rows, cols = parameter.facts.shape
    start, stop, bucket_start, bucket_numel = place
    return ShardedParameter(
        name=parameter.name,
        global_shape=(rows, cols),
        tp_dim=parameter.tp_dim,
        tp=tp,
        ranges=data_parallel_ranges(
            start=start,
            stop=stop,
            bucket_start=bucket_start,
            bucket_numel=bucket_numel,
            dp=dp,
        ),
        packing=parameter.packing,
        stack=parameter.stack,
    )
