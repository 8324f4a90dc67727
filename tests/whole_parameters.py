"""Assembles whole parameters and gradients of a model from the ranks' shards, and splits them."""

from __future__ import annotations

import re
import zlib
from typing import Any, Literal

import torch
import torch.distributed as dist


def gather_full(
    model: Any, value: Literal["param", "main_grad"] = "param"
) -> dict[str, torch.Tensor]:
    """Whole parameters or gradients of this pipeline stage, on every rank.

    Rows are in logical order: all rows of gate before all rows of up.  All ranks must call it.

    Args:
        model: what ``build_gpt`` or ``wrap_ddp`` returned; for gradients, the latter, after
            ``forward_backward``.
        value: what to gather.

    Returns:
        Copies by name, with layers and experts numbered over all ranks; of experts, those that this
        rank's expert-parallel part holds.
    """
    local = _reduced_gradients(model) if value == "main_grad" else _parameters(model)
    bare = unwrapped(model)
    named = list(bare.named_parameters())
    parts = _of_all_tensor_ranks({param: local[param] for _, param in named})
    return {global_name(bare, name): _joined(bare, name, p, parts[p]) for name, p in named}


def _of_all_tensor_ranks(
    local: dict[torch.nn.Parameter, torch.Tensor],
) -> dict[torch.nn.Parameter, list[torch.Tensor]]:
    """The part of every tensor-parallel rank (of what is not cut: this rank's), in one message."""
    found = {param: [value] for param, value in local.items() if _cut_dim(param) is None}
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for param in local:
        if param not in found:
            groups.setdefault((_tensor_group(param), local[param].dtype), []).append(param)
    for (group, _), params in groups.items():
        mine = torch.cat([local[param].flatten() for param in params])
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everyone, mine, group=group)
        pieces = [theirs.split([local[p].numel() for p in params]) for theirs in everyone]
        for param, *theirs in zip(params, *pieces, strict=True):
            found[param] = [piece.view(local[param].shape) for piece in theirs]
    return found


def global_name(model: Any, name: str) -> str:
    """Return the name of a parameter in one process.

    Args:
        model: this rank's ``GPTModel``.
        name: name in ``model.named_parameters()``.

    Returns:
        The name, with the layer and the expert numbered over all ranks.
    """
    from megatron.core import parallel_state

    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    if layer:
        number = model.decoder.layers[int(layer[1])].layer_number - 1
        name = f"decoder.layers.{number}.{name[layer.end() :]}"
    expert = re.search(r"\.local_experts\.(\d+)\.", name)
    if expert:
        per_rank = (
            model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        )
        number = int(expert[1]) + per_rank * parallel_state.get_expert_model_parallel_rank()
        name = f"{name[: expert.start()]}.local_experts.{number}.{name[expert.end() :]}"
    if model.share_embeddings_and_output_weights and name == "output_layer.weight":
        # The last stage's copy of the embedding.
        return "embedding.word_embeddings.weight"
    return name


def _tensor_group(param: torch.nn.Parameter) -> Any:
    from megatron.core import parallel_state

    if getattr(param, "allreduce", True):
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def _cut_dim(param: Any) -> int | None:
    sharded = getattr(param, "tensor_model_parallel", False)
    return param.partition_dim if sharded and _tensor_group(param).size() > 1 else None


def _is_gated(model: Any, name: str) -> bool:
    return model.config.gated_linear_unit and ".linear_fc1." in name


def initial(model: Any, name: str, param: torch.Tensor, seed: int) -> torch.Tensor:
    """The whole parameter, drawn from its global name alone."""
    shape = list(param.shape)
    dim = _cut_dim(param)
    if dim is not None:
        shape[dim] *= _tensor_group(param).size()
    key = f"{seed}:{global_name(model, name)}".encode()
    generator = torch.Generator().manual_seed(zlib.crc32(key))
    drawn = torch.randn(shape, generator=generator)
    # Vectors are norms here, whose weights lie around one.
    return drawn * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.1 * drawn


def cut(model: Any, name: str, param: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole parameter, as Megatron cuts it."""
    dim = _cut_dim(param)
    if dim is None:
        return whole
    group = _tensor_group(param)
    stacked = whole.chunk(2) if _is_gated(model, name) else (whole,)
    return torch.cat([block.chunk(group.size(), dim)[group.rank()] for block in stacked])


def assemble(model: Any, name: str, param: torch.nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """The whole parameter from the parts of all tensor-parallel ranks: the inverse of ``cut``."""
    return _joined(model, name, param, _of_all_tensor_ranks({param: local})[param])


def _joined(
    model: Any, name: str, param: torch.nn.Parameter, parts: list[torch.Tensor]
) -> torch.Tensor:
    dim = _cut_dim(param)
    if dim is None:
        return parts[0].clone()
    if not _is_gated(model, name):
        return torch.cat(parts, dim)
    gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
    return torch.cat([*gates, *ups])


def _parameters(model: Any) -> dict[torch.nn.Parameter, torch.Tensor]:
    ddp_config = getattr(model, "ddp_config", None)
    if ddp_config is not None and ddp_config.overlap_param_gather:
        # Updated shards travel with the next forward only: have them now.
        model.start_param_sync(force_sync=True)
    return {param: param.detach() for param in unwrapped(model).parameters()}


def _reduced_gradients(model: Any) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Gradients after the reduction, whole over data parallel.

    After a reduce-scatter only this rank's part of each bucket holds the sum; the rest holds what
    this rank contributed.  The parts of all ranks, in the order of ranks, make up the bucket.
    """
    gradients = {}
    for buffer in (*model.buffers, *model.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            whole = bucket.grad_data
            if model.ddp_config.use_distributed_optimizer:
                shards = [torch.empty_like(s) for s in whole.chunk(group.size())]
                dist.all_gather(shards, whole.chunk(group.size())[group.rank()], group=group)
                whole = torch.cat(shards)
            for param in bucket.params_list:
                start, end = bucket.param_to_index[param]
                gradients[param] = whole[start:end].view(param.shape)
    return gradients


def unwrapped(model: Any) -> Any:
    """The model inside all wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model
