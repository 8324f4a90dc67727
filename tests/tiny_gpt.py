"""A small GPT for comparing training between parallel layouts.

All layouts start from the same whole matrices and see the same global batches, so losses, gradients
and updated parameters must agree.  Megatron is imported inside the functions: the CPU stand-ins
come first, and tests that need no model stay fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist

from tests.duplicated_linear import duplicate_down_projections
from tests.plain_attention import use_plain_attention, zigzag
from tests.whole_parameters import cut, gather_full, global_name, initial

__all__ = ["gather_full", "global_name"]

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
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = "rope",
    plain_attention: bool = False,
    duplicated_down: bool = False,
    idle_expert: int | None = None,
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
        position_embedding_type: of the model.
        plain_attention: whether core attention is ``tests.plain_attention``, which also runs with
            context parallelism and multi-latent attention.
        duplicated_down: whether multi-latent attention holds its down-projections whole on every
            tensor-parallel rank, as with Transformer Engine.
        idle_expert: an expert that the router never chooses.
        vp_stage: virtual pipeline stage, with interleaved schedules.
        **config: more fields of ``TransformerConfig``.

    Returns:
        A ``GPTModel``.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

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
        "fp16": params_dtype == torch.float16,
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
    if fields["virtual_pipeline_model_parallel_size"]:
        # Else several messages between the same two ranks are in one batch, and mix.
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if config.get("multi_latent_attention"):
        fields |= {"rope_type": "rope", "apply_rope_fusion": False}
        transformer: TransformerConfig = MLATransformerConfig(**(fields | config))
    else:
        transformer = TransformerConfig(**(fields | config))
    spec = get_gpt_decoder_block_spec(transformer, use_transformer_engine=False, vp_stage=vp_stage)
    if plain_attention:
        use_plain_attention(spec)
    if duplicated_down:
        duplicate_down_projections(spec)
    is_last = parallel_state.is_pipeline_last_stage(vp_stage=vp_stage, ignore_virtual=False)
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=spec,
        vocab_size=vocab,
        max_sequence_length=seq,
        pre_process=parallel_state.is_pipeline_first_stage(vp_stage=vp_stage, ignore_virtual=False),
        post_process=is_last,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=position_embedding_type,
        mtp_block_spec=(
            get_gpt_mtp_block_spec(
                transformer, spec, use_transformer_engine=False, vp_stage=vp_stage
            )
            if transformer.mtp_num_layers and is_last
            else None
        ),
        vp_stage=vp_stage,
    )
    if idle_expert is not None:
        _never_choose(model, idle_expert)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(cut(model, name, param, initial(model, name, param, seed)))
    return model


def _never_choose(model: Any, expert: int) -> None:
    """Give one expert the lowest logit in every router of a model."""
    for module in model.modules():
        if type(module).__name__ == "TopKRouter":
            gating = module.gating

            def without(tokens: torch.Tensor, gating: Any = gating) -> torch.Tensor:
                logits = gating(tokens)
                lowest = torch.arange(logits.shape[-1]) == expert
                return logits.masked_fill(lowest, -1e4)

            module.gating = without


def wrap_ddp(
    model: Any,
    *,
    overlap_grad_reduce: bool = False,
    overlap_param_gather: bool = False,
    bucket_size: int | None = 5_000,
    use_distributed_optimizer: bool = True,
    grad_reduce_in_fp32: bool = True,
    disable_bucketing: bool = False,
    prepare: Callable[[Any], object] | None = None,
    **ddp_config: Any,
) -> Any:
    """Wrap a model as in Megatron's training code.

    Args:
        model: what ``build_gpt`` returned.
        overlap_grad_reduce: reduce buckets during backward; only then are there several buckets.
        overlap_param_gather: gather buckets during the next forward.
        bucket_size: elements per bucket, roughly.
        use_distributed_optimizer: reduce-scatter instead of all-reduce.
        grad_reduce_in_fp32: dtype of the gradient buffers.
        disable_bucketing: one bucket, as for virtual stages after the first.
        prepare: called with the model in its final dtype, before its weights go into buffers.
        **ddp_config: more fields of ``DistributedDataParallelConfig``.

    Returns:
        A ``DistributedDataParallel``.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    bare = model
    if model.config.bf16 or model.config.fp16:
        model = Float16Module(model.config, model)
    if prepare is not None:
        prepare(bare)
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
    context = parallel_state.get_context_parallel_group()
    here = torch.arange(seq)
    if context.size() > 1:
        here = zigzag(seq, context.size(), context.rank())
    positions = here.expand(micro_batch, -1)
    return [
        {"tokens": part[:, here], "labels": part[:, here + 1], "position_ids": positions}
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
    _stage_mxfp8_weights(chunks, optimizer)
    tokens = micro_batches[0]["tokens"]
    reported = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=chunks,
        num_microbatches=len(micro_batches),
        seq_length=tokens.shape[1] * parallel_state.get_context_parallel_world_size(),
        micro_batch_size=tokens.shape[0],
    )
    # Only the last stage has losses: every other one adds nothing to the sum.
    total = torch.stack([entry["loss"] for entry in reported]).sum() if reported else None
    loss = torch.zeros(()) if total is None else total / len(micro_batches)
    dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())
    everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(loss, dist.ReduceOp.AVG, group=everyone)
    return float(loss)


def _stage_mxfp8_weights(chunks: list[Any], optimizer: Any) -> None:
    """Prepare as in Megatron's ``train_step``, for an overlapped gather of MXFP8 weights."""
    config = chunks[0].ddp_config
    if not (config.reuse_grad_buf_for_mxfp8_param_ag and config.overlap_param_gather):
        return
    if chunks[0].remove_forward_pre_hook_handles:
        for child in optimizer.chained_optimizers:
            child._copy_main_params_to_param_buffer()


def without_gather(chunks: list[Any]) -> None:
    """Prepare as in Megatron's ``train`` before its first step, with complete weights."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather and chunk.remove_forward_pre_hook_handles:
            chunk.disable_forward_pre_hook(param_sync=False)


def with_gather(chunks: list[Any]) -> None:
    """Continue as in Megatron's ``train`` after its first step."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather and not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()


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


def _chunks(model: Any) -> list[Any]:
    return model if isinstance(model, list) else [model]


def _forward_step(iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    from megatron.core import parallel_state

    part = next(iterator)
    output = model(part["tokens"], part["position_ids"], None, labels=part["labels"])

    def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        # Megatron's schedules multiply by the context-parallel size.
        shared = loss / parallel_state.get_context_parallel_world_size()
        return shared, {"loss": loss.detach().clone()}

    return output, mean_loss
