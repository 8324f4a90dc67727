"""Computes the load of megatron-core's own ``--optimizer muon`` on the busiest rank.

Its layer-wise optimizer assigns whole TP shards of parameters to data-parallel ranks, by elements,
and pads every bucket to the largest. Each of its TP modes then orthogonalizes the shards in turn,
gate and up as one matrix; ``distributed`` treats the side that TP cuts as the long one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

MODES = ("blockwise", "duplicated", "distributed")


def upstream_load(built: Any, plan: Any, domain: Any, mode: str) -> dict[str, int]:
    """Return FLOPs, elements, bytes over TP and matrices of the busiest rank, and the padding."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    names = built.optimizer.chained_optimizers[0].setup.names
    parameters = {p.name: p for p in plan.parameters}
    parts: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for matrix in plan.matrices:
        parts[matrix.parameter].append(matrix.shape)
    dp, steps = plan.group.dp, built.args.muon_num_ns_steps
    totals = {key: [0] * dp for key in ("flops", "elements", "tp_bytes", "matrices")}
    padding = 0
    for chunk in built.model_chunks:
        for buffer in domain.buffers(chunk):
            ours = [t for t in reversed(list(buffer.param_index_map)) if names[t] in parameters]
            layout = LayerWiseDistributedOptimizer._compute_per_buffer_param_layout(
                ours, chunk.bucket_size, dp, chunk.ddp_config
            )
            padding += sum(stop - start for start, stop in layout.bucket_indices)
            for tensor, (start, _, bucket) in layout.param_index_map.items():
                first, last = layout.bucket_indices[bucket]
                rank, name = (start - first) * dp // (last - first), names[tensor]
                is_split = "linear_qkv" in name and built.args.muon_split_qkv
                one = parameters[name]
                count = len(one.stack or (0,))
                shapes = parts[name] if is_split else [one.global_shape] * count
                totals["elements"][rank] += tensor.numel()
                totals["matrices"][rank] += len(shapes)
                padding -= tensor.numel()
                for shape in shapes:
                    flops, sent = _work(shape, one.tp_dim, plan.group.tp, mode, steps)
                    totals["flops"][rank] += flops
                    totals["tp_bytes"][rank] += sent
    return {key: max(values) for key, values in totals.items()} | {"padding_elements": padding}


def _work(
    shape: tuple[int, int], tp_dim: int | None, tp: int, mode: str, steps: int
) -> tuple[int, int]:
    """Return (FLOPs, bytes sent to TP neighbours) of one matrix on one rank."""
    local = [side // tp if axis == tp_dim else side for axis, side in enumerate(shape)]
    short, long = sorted(shape)
    sent = 0
    if tp_dim is not None and tp > 1:
        if mode == "blockwise":
            short, long = sorted(local)
        elif mode == "duplicated":
            # Every rank gathers the shards in fp32.
            sent = (tp - 1) * local[0] * local[1] * 4
        else:
            short, long = local[1 - tp_dim], local[tp_dim]
            # The Gram matrix in bf16, all-reduced in every step.
            sent = steps * 2 * (tp - 1) * short * short * 2 // tp
    return steps * (4 * short * short * long + 2 * short**3), sent
