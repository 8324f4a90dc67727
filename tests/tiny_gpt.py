"""A small GPT whose training can be compared between parallel layouts.

All layouts start from the same whole matrices and see the same global batches, so losses, gradients
and updated parameters must agree.  Megatron is imported inside the functions: the CPU stand-ins
come first, and tests that need no model stay fast.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist

Batch = dict[str, torch.Tensor]


def build_gpt(
    *,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    query_groups: int = 2,
    ffn: int = 48,
    vocab: int = 64,
    seq: int = 16,
    params_dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
    seed: int = 0,
    swiglu: bool = True,
    tied: bool = False,
    vp_stage: int | None = None,
    **config: Any,
) -> Any:
    """Build this rank's part of a GPT with Megatron's local layers.

    The parallel sizes are those of ``tests.ranks.layout``.

    Args:
        layers: number of transformer layers in all.
        hidden: hidden size.
        heads: attention heads.
        query_groups: groups of grouped-query attention.
        ffn: feed-forward size, of each of gate and up.
        vocab: vocabulary size, a multiple of the tensor-parallel size.
        seq: sequence length.
        params_dtype: dtype of the model parameters.
        sequence_parallel: whether norms and dropout run on a part of the sequence each.
        seed: of the initial weights.
        swiglu: gated feed-forward, else GELU.
        tied: whether embedding and output layer share their weight.
        vp_stage: virtual pipeline stage, with interleaved schedules.
        **config: more fields of ``TransformerConfig``.

    Returns:
        A ``GPTModel``.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    fields: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": query_groups,
        "ffn_hidden_size": ffn,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": swiglu,
        "activation_func": torch.nn.functional.silu if swiglu else torch.nn.functional.gelu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": params_dtype,
        "pipeline_dtype": params_dtype,
        "bf16": params_dtype == torch.bfloat16,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": (
            parallel_state.get_virtual_pipeline_model_parallel_world_size()
        ),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "sequence_parallel": sequence_parallel,
        "gradient_accumulation_fusion": False,
    }
    transformer = TransformerConfig(**(fields | config))
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            transformer, use_transformer_engine=False, vp_stage=vp_stage
        ),
        vocab_size=vocab,
        max_sequence_length=seq,
        pre_process=parallel_state.is_pipeline_first_stage(vp_stage=vp_stage, ignore_virtual=False),
        post_process=parallel_state.is_pipeline_last_stage(vp_stage=vp_stage, ignore_virtual=False),
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(_cut(model, name, param, _initial(model, name, param, seed)))
    return model


def wrap_ddp(
    model: Any,
    *,
    overlap_grad_reduce: bool = False,
    overlap_param_gather: bool = False,
    bucket_size: int | None = 5_000,
    use_distributed_optimizer: bool = True,
    grad_reduce_in_fp32: bool = True,
    disable_bucketing: bool = False,
    **ddp_config: Any,
) -> Any:
    """Wrap a model as Megatron's training code does.

    Args:
        model: what ``build_gpt`` returned.
        overlap_grad_reduce: reduce buckets during backward; only then are there several buckets.
        overlap_param_gather: gather buckets during the next forward.
        bucket_size: elements per bucket, roughly.
        use_distributed_optimizer: reduce-scatter instead of all-reduce.
        grad_reduce_in_fp32: dtype of the gradient buffers.
        disable_bucketing: one bucket, as for virtual stages after the first.
        **ddp_config: more fields of ``DistributedDataParallelConfig``.

    Returns:
        A ``DistributedDataParallel``.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    if model.config.bf16:
        model = Float16Module(model.config, model)
    return DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather,
            bucket_size=bucket_size,
            use_distributed_optimizer=use_distributed_optimizer,
            grad_reduce_in_fp32=grad_reduce_in_fp32,
            **ddp_config,
        ),
        module=model,
        disable_bucketing=disable_bucketing,
    )


def adam(model: Any, **options: Any) -> Any:
    """Megatron's Adam for a wrapped model.

    Args:
        model: what ``wrap_ddp`` returned, or a list of chunks.
        **options: fields of ``OptimizerConfig``.

    Returns:
        A ``MegatronOptimizer``.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    chunks = _chunks(model)
    fields: dict[str, Any] = {
        "optimizer": "adam",
        "lr": 1e-2,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "bf16": chunks[0].config.bf16,
        "params_dtype": chunks[0].config.params_dtype,
        "use_distributed_optimizer": chunks[0].ddp_config.use_distributed_optimizer,
        "overlap_param_gather": chunks[0].ddp_config.overlap_param_gather,
    }
    return get_megatron_optimizer(OptimizerConfig(**(fields | options)), chunks)


def batch(
    step: int,
    *,
    global_batch: int = 8,
    micro_batch: int = 2,
    seq: int = 16,
    vocab: int = 64,
    seed: int = 0,
) -> list[Batch]:
    """This data-parallel rank's micro-batches of one step, a part of the same global batch.

    Args:
        step: number of the step.
        global_batch: sequences over all ranks and micro-batches.
        micro_batch: sequences per micro-batch.
        seq: sequence length.
        vocab: vocabulary size.
        seed: of the data.

    Returns:
        Micro-batches with ``tokens``, ``labels`` and ``position_ids``.
    """
    from megatron.core import parallel_state

    shards = parallel_state.get_data_parallel_world_size()
    if global_batch % (shards * micro_batch):
        raise ValueError(
            f"{global_batch} sequences do not split into micro-batches of {micro_batch} "
            f"on {shards} data-parallel ranks."
        )
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    text = torch.randint(vocab, (global_batch, seq + 1), generator=generator)
    mine = text.chunk(shards)[parallel_state.get_data_parallel_rank()]
    positions = torch.arange(seq).expand(micro_batch, -1)
    return [
        {"tokens": part[:, :-1], "labels": part[:, 1:], "position_ids": positions}
        for part in mine.split(micro_batch)
    ]


def forward_backward(model: Any, micro_batches: list[Batch], optimizer: Any = None) -> float:
    """Accumulate gradients by Megatron's schedule and finish their reduction.

    Args:
        model: what ``wrap_ddp`` returned, or a list of chunks.
        micro_batches: what ``batch`` returned.
        optimizer: scales the loss, if given.

    Returns:
        The loss, averaged over the global batch; the same on all ranks.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks = _chunks(model)
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = None if optimizer is None else optimizer.scale_loss
    if chunks[0].ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    tokens = micro_batches[0]["tokens"]
    reported = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=chunks,
        num_microbatches=len(micro_batches),
        seq_length=tokens.shape[1],
        micro_batch_size=tokens.shape[0],
    )
    # Only the last stage has losses: every other one adds nothing to the sum.
    total = torch.stack([entry["loss"] for entry in reported]).sum() if reported else None
    loss = torch.zeros(()) if total is None else total / len(micro_batches)
    dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(loss, dist.ReduceOp.AVG, group=parallel_state.get_data_parallel_group())
    return float(loss)


def train_step(model: Any, optimizer: Any, step: int, **batch_options: Any) -> float:
    """One step of training on ``batch(step, **batch_options)``.

    Args:
        model: what ``wrap_ddp`` returned, or a list of chunks.
        optimizer: a Megatron optimizer.
        step: number of the step, which chooses the data.
        **batch_options: options of ``batch``.

    Returns:
        The loss before the update, averaged over the global batch.
    """
    optimizer.zero_grad()
    loss = forward_backward(model, batch(step, **batch_options), optimizer)
    succeeded, _, _ = optimizer.step()
    if not succeeded:
        raise RuntimeError(f"The optimizer skipped step {step}.")
    return loss


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
    bare = _unwrapped(model)
    return {
        global_name(bare, name): _assemble(bare, name, param, local[param])
        for name, param in bare.named_parameters()
    }


def global_name(model: Any, name: str) -> str:
    """The name that a parameter would have in one process.

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


def _chunks(model: Any) -> list[Any]:
    return model if isinstance(model, list) else [model]


def _unwrapped(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


def _forward_step(iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    part = next(iterator)
    output = model(part["tokens"], part["position_ids"], None, labels=part["labels"])

    def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return output, mean_loss


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


def _initial(model: Any, name: str, param: torch.Tensor, seed: int) -> torch.Tensor:
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


def _cut(model: Any, name: str, param: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole parameter, as Megatron cuts it."""
    dim = _cut_dim(param)
    if dim is None:
        return whole
    group = _tensor_group(param)
    stacked = whole.chunk(2) if _is_gated(model, name) else (whole,)
    return torch.cat([block.chunk(group.size(), dim)[group.rank()] for block in stacked])


def _assemble(
    model: Any, name: str, param: torch.nn.Parameter, local: torch.Tensor
) -> torch.Tensor:
    """The whole parameter from the parts of all tensor-parallel ranks: the inverse of ``_cut``."""
    dim = _cut_dim(param)
    if dim is None:
        return local.clone()
    group = _tensor_group(param)
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local.contiguous(), group=group)
    if not _is_gated(model, name):
        return torch.cat(parts, dim)
    gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
    return torch.cat([*gates, *ups])


def _parameters(model: Any) -> dict[torch.nn.Parameter, torch.Tensor]:
    ddp_config = getattr(model, "ddp_config", None)
    if ddp_config is not None and ddp_config.overlap_param_gather:
        # Updated shards travel with the next forward only: have them now.
        model.start_param_sync(force_sync=True)
    return {param: param.detach() for param in _unwrapped(model).parameters()}


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
