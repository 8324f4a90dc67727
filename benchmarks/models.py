"""A small Llama-shaped GPT of real megatron-core, wrapped and trained as in Megatron."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from megatron_muon import MatrixConfig, get_matrix_optimizer


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a GPT with grouped queries and gated MLP."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    query_groups: int
    vocab: int
    sequence: int


def build_model(size: ModelSize, **config: Any) -> Any:
    """Build this rank's part of the model in fp32, on the CPU, from Megatron's local layers.

    Args:
        size: Its sizes.
        **config: More fields of ``TransformerConfig``.
    """
    return GPTModel(
        config=TransformerConfig(
            num_layers=size.layers,
            hidden_size=size.hidden,
            ffn_hidden_size=size.ffn,
            num_attention_heads=size.heads,
            num_query_groups=size.query_groups,
            normalization="RMSNorm",
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            **config,
        ),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=size.vocab,
        max_sequence_length=size.sequence,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a batch of tokens (b, s + 1)."""
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    loss: torch.Tensor = model(inputs, positions, None, labels=labels).mean()
    return loss


def backward(model: Any, *batches: torch.Tensor) -> torch.Tensor:
    """Accumulate unreduced gradients of all micro-batches; return the loss of the last one."""
    model.zero_grad_buffer()
    with model.no_sync():
        for tokens in batches[:-1]:
            torch.autograd.backward(loss_of(model, tokens))
    loss = loss_of(model, batches[-1])
    torch.autograd.backward(loss)
    return loss.detach()


def wrap(model: Any) -> Any:
    """Wrap the model in Megatron's DDP, for the distributed optimizer."""
    return DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        model,
    )


def optimizer_config(**fields: Any) -> OptimizerConfig:
    """Return settings of Adam in fp32 with the distributed optimizer, updated by ``fields``."""
    defaults = {
        "optimizer": "adam",
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "params_dtype": torch.float32,
        "use_distributed_optimizer": True,
    }
    return OptimizerConfig(**(defaults | fields))


def make_optimizer(model: Any, matrix: MatrixConfig | None, **fields: Any) -> Any:
    """Build AdamW or, with ``matrix``, a matrix optimizer for a wrapped model."""
    if matrix is None:
        return get_megatron_optimizer(optimizer_config(**fields), [model])
    # The start-up table is for users.
    with contextlib.redirect_stdout(io.StringIO()):
        return get_matrix_optimizer(optimizer_config(**fields), [model], matrix_config=matrix)
