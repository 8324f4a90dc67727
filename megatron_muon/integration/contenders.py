"""Optimizers that the benchmark compares, on a small Llama-shaped model of real megatron-core."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from megatron_muon.config import MatrixConfig
from megatron_muon.integration.builder import get_matrix_optimizer
from megatron_muon.integration.distributed_optimizer import MatrixDistributedOptimizer

LR, WEIGHT_DECAY, MOMENTUM, STEPS, SCALE_MODE = 1e-2, 0.1, 0.9, 5, "spectral"


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


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One optimizer.

    Attributes:
        key: Name in the JSON file.
        label: Name in the table.
        build: Gives (wrapped model, optimizer) of a model.
        is_muon: Whether its matrices are updated by Muon's rule.
    """

    key: str
    label: str
    build: Callable[[Any], tuple[Any, Any]]
    is_muon: bool = False


def make_groups(tp: int, seed: int = 1234) -> None:
    """Megatron's process groups: TP, and data parallel with what remains."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def build_model(size: ModelSize, device: torch.device) -> Any:
    """This rank's part of the model: Megatron's local layers, fp32, always the same weights."""
    torch.manual_seed(1)
    config = TransformerConfig(
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
        use_cpu_initialization=device.type == "cpu",
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=size.vocab,
        max_sequence_length=size.sequence,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return model.to(device)


def loss_and_gradients(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Forward, backward and reduction of gradients of one micro-batch (b, s + 1)."""
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    mask = torch.ones(inputs.shape[1], inputs.shape[1], device=inputs.device).tril()[None, None]
    model.zero_grad_buffer()
    loss: torch.Tensor = model(inputs, positions, mask < 0.5, labels=labels).mean()
    torch.autograd.backward(loss)
    model.finish_grad_sync()
    return loss.detach()


def whole_rows(parameter: torch.Tensor) -> tuple[torch.distributed.ProcessGroup, int]:
    """Group and dimension along which a parameter is cut."""
    return parallel_state.get_tensor_model_parallel_group(), int(parameter.partition_dim)  # type: ignore[attr-defined]


def contenders() -> list[Contender]:
    """AdamW, ours, and megatron-core's own muon in its three modes."""
    ours = [
        Contender(key="dmuon", label="dmuon", build=_build_dmuon, is_muon=True),
        Contender(
            key="dmuon_fused",
            label="dmuon, gate+up one matrix",
            build=partial(_build_dmuon, split_gate_up=False),
            is_muon=True,
        ),
        *(
            Contender(
                key=f"orth_dion_{name}",
                label=f"orth_dion, r = {shown}",
                build=partial(_build_orth_dion, fraction=fraction),
            )
            for name, shown, fraction in (("4", "1/4", 0.25), ("8", "1/8", 0.125))
        ),
    ]
    theirs = [
        Contender(
            key=f"muon_{mode}",
            label=f"megatron-core muon, {mode}",
            build=partial(_build_upstream, tp_mode=mode),
            is_muon=True,
        )
        for mode in ("blockwise", "duplicated", "distributed")
    ]
    return [Contender(key="adamw", label="AdamW", build=_build_adamw), *ours, *theirs]


def matrix_updates(optimizer: Any) -> list[Any]:
    """The ``MatrixUpdate`` of every domain of an optimizer; none for others."""
    return [
        child.exchange
        for child in optimizer.chained_optimizers
        if isinstance(child, MatrixDistributedOptimizer) and child.exchange is not None
    ]


def state_bytes(optimizer: Any) -> int:
    """Bytes of this rank's optimizer state: moments, momenta, factors; masters are not counted.

    In fp32 the master weights are the parameters themselves.
    """
    found: int = sum(
        value.nbytes
        for child in optimizer.chained_optimizers
        for state in getattr(child, "optimizer", child).state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    )
    updates = matrix_updates(optimizer)
    factors: int = sum(f.nbytes for u in updates for f in u.right_factors.values())
    return found + factors


def _config(**changes: Any) -> OptimizerConfig:
    fields = {
        "optimizer": "adam",
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "clip_grad": 1.0,
        "params_dtype": torch.float32,
        "use_distributed_optimizer": True,
    }
    return OptimizerConfig(**(fields | changes))


def _wrapped(model: Any) -> Any:
    return DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        model,
    )


def _build_adamw(model: Any) -> tuple[Any, Any]:
    wrapped = _wrapped(model)
    return wrapped, get_megatron_optimizer(_config(), [wrapped])


def _build_dmuon(model: Any, *, split_gate_up: bool = True) -> tuple[Any, Any]:
    return _build_ours(
        model,
        MatrixConfig(
            momentum=MOMENTUM,
            num_ns_steps=STEPS,
            scale_mode=SCALE_MODE,
            split_gate_up=split_gate_up,
            compute_dtype="fp32",
        ),
    )


def _build_orth_dion(model: Any, *, fraction: float) -> tuple[Any, Any]:
    return _build_ours(model, MatrixConfig(optimizer="orth_dion", rank_fraction=fraction))


def _build_ours(model: Any, settings: MatrixConfig) -> tuple[Any, Any]:
    wrapped = _wrapped(model)
    # The start-up table is for users.
    with contextlib.redirect_stdout(io.StringIO()):
        return wrapped, get_matrix_optimizer(_config(), [wrapped], matrix_config=settings)


def _build_upstream(model: Any, *, tp_mode: str) -> tuple[Any, Any]:
    """As ``--optimizer muon --use-distributed-optimizer`` does: layer-wise over data parallel."""
    from megatron.training.training import wrap_model_chunks_with_ddp

    chunks = wrap_model_chunks_with_ddp(
        [model],
        model.config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        use_layer_wise_distributed_optimizer=True,
    )
    config = _config(
        optimizer="muon",
        use_distributed_optimizer=False,
        use_layer_wise_distributed_optimizer=True,
        # Without it the layer-wise optimizer lacks its wrapper and cannot be built. The
        # parameters are fp32 all the same, and the wrapper leaves such parameters as they are.
        bf16=True,
        muon_tp_mode=tp_mode,
        muon_momentum=MOMENTUM,
        muon_num_ns_steps=STEPS,
        muon_scale_mode=SCALE_MODE,
        # "medium", the default, would round the iterates to bf16.
        muon_fp32_matmul_prec="highest",
    )
    return chunks[0], get_megatron_optimizer(config, chunks)
