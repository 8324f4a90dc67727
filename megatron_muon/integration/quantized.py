"""Weights that are FP8 tensors of Transformer Engine (``--fp8-param-gather``): which are refused.

Masters and state are those of bf16 weights. Megatron quantizes the masters after each step: every
rank enters one reduction of the maxima with its shards, codes are gathered (of MXFP8: bf16 values,
through the gradient buffer), and every rank makes the transposed copies itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

SUPPORTED_TE = ((2, 19), (2, 21))
"""Transformer Engine from the first version (included) to the second (excluded)."""

QUANTIZED_TYPES = ("Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor")

_REFUSED_TYPES = {
    "NVFP4Tensor": (
        "packed NVFP4 weights are padded by themselves, so that a rank's part of them is not that "
        "of its gradients at every data-parallel size: remove --fp4-param-gather"
    ),
    "GroupedTensor": "remove --moe-single-grouped-weight, or --fp8-param-gather",
    "HybridQuantizedTensor": "choose one recipe for both directions",
}


def is_quantized(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a tensor of Transformer Engine that has codes instead of values."""
    return any(base.__name__ == "QuantizedTensor" for base in type(parameter).__mro__)


def quantized_kind_problem(name: str, parameter: torch.Tensor) -> str | None:
    """The sentence about a quantized parameter of a kind that cannot be trained."""
    kind = type(parameter).__name__
    if kind in QUANTIZED_TYPES and parameter.dtype in (torch.bfloat16, torch.float16):
        return None
    advice = _REFUSED_TYPES.get(kind, "use another --fp8-recipe")
    return f"parameter {name} is a {kind} of {parameter.dtype}, which is not supported: {advice}"


def transformer_engine_problem() -> str | None:
    """The sentence about a Transformer Engine that quantized weights are not tested with."""
    # Late, because flags are checked before a script has imported Megatron's core.
    from megatron.core import utils as megatron_utils

    found = megatron_utils.get_te_version()
    if SUPPORTED_TE[0] <= found.release[:2] < SUPPORTED_TE[1]:
        return None
    # What Megatron says where there is none.
    what = "none is installed" if found.release == (0, 0, 0) else f"{found} is installed"
    return (
        f"quantized weights (--fp8-param-gather) need Transformer Engine 2.19 or 2.20, and {what}: "
        "type pip install --no-build-isolation 'transformer-engine[pytorch]==2.20.2', or remove "
        "the flag"
    )


def quantized_weight_problems(
    config: Any, model_chunks: Sequence[torch.nn.Module], *, tp: int
) -> Iterator[str]:
    """What is wrong with the quantized weights of a model, one sentence per kind.

    Args:
        config: Megatron's ``OptimizerConfig``.
        model_chunks: The wrapped model chunks.
        tp: Tensor-parallel size.
    """
    chunks: list[Any] = [chunk for chunk in model_chunks if hasattr(chunk, "ddp_config")]
    found = [(c, n, p) for c in chunks for n, p in c.named_parameters() if is_quantized(p)]
    if not found:
        return
    if (problem := transformer_engine_problem()) is not None:
        yield problem
    for chunk, name, _ in found:
        if not chunk.ddp_config.fp8_param_gather:
            yield (
                f"parameter {name} is quantized and DistributedDataParallelConfig.fp8_param_gather "
                "is False, so that no step would reach it: set it to True"
            )
            break
    for chunk in chunks:
        reuse = "reuse_grad_buf_for_mxfp8_param_ag"
        for field in (reuse, *(("overlap_param_gather",) if getattr(config, reuse) else ())):
            ours, theirs = getattr(config, field), getattr(chunk.ddp_config, field)
            if bool(ours) != bool(theirs):
                yield (
                    f"OptimizerConfig.{field} is {ours!r} and DistributedDataParallelConfig's is "
                    f"{theirs!r}: give both the same, else MXFP8 weights miss steps"
                )
    for _, name, parameter in found:
        if tp > 1 and parameter.requires_grad and not hasattr(parameter, "tensor_model_parallel"):
            yield (
                f"parameter {name} is quantized and has lost its tensor-parallel attributes (torch "
                "drops them when a module with quantized weights is moved or converted): use "
                "layers of Transformer Engine, which keep them"
            )
            break


def clear_first_values(model_chunks: Sequence[torch.nn.Module]) -> None:
    """Release the values that weights were quantized from; masters have been made of them.

    Megatron does it for those that a rank has a master of.
    """
    for chunk in model_chunks:
        for parameter in chunk.parameters():
            if is_quantized(parameter) and hasattr(parameter, "clear_high_precision_init_val"):
                parameter.clear_high_precision_init_val()
