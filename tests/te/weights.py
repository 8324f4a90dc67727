"""A model whose linear weights are quantized tensors of Transformer Engine, as by its layers."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch

from tests.te.formats import LARGEST, DType

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
HISTORY = 4
"""Rows of the amax history of delayed scaling."""


def quantizer(recipe: str, device: torch.device | str = "cpu") -> Any:
    """A new quantizer of a weight.

    Args:
        recipe: Megatron's name of the recipe.
        device: Where the weight is.
    """
    from transformer_engine.pytorch.constants import DType as TeDType
    from transformer_engine.pytorch.tensor import (
        Float8BlockQuantizer,
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
        MXFP8Quantizer,
    )

    e4m3 = TeDType.kFloat8E4M3
    if recipe == "delayed":
        history = torch.zeros(HISTORY, 1, device=device)
        scale = torch.ones(1, device=device)
        made = Float8Quantizer(scale=scale, amax=history[0], fp8_dtype=e4m3)
        made.history = history
        return made
    if recipe == "tensorwise":
        return Float8CurrentScalingQuantizer(e4m3, device=torch.device(device))
    if recipe == "blockwise":
        return Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True, block_scaling_dim=2)
    return MXFP8Quantizer(e4m3)


def quantize_weights(model: Any, recipe: str, keep_bf16: tuple[str, ...] = ()) -> list[str]:
    """Quantize the weights of all parallel linear layers of the decoder, in place.

    Args:
        model: The bare model, in its final dtype and on its device.
        recipe: Megatron's name of the recipe.
        keep_bf16: Beginnings of names of modules that keep theirs.

    Returns:
        Names of the parameters that are quantized now.
    """
    found = []
    for name, module in model.named_modules():
        is_linear = type(module).__name__ in ("ColumnParallelLinear", "RowParallelLinear")
        if not is_linear or ".layers." not in name or name.startswith(keep_bf16):
            continue
        quantize_layer(module, recipe)
        found.append(f"{name}.weight")
    return found


def quantize_layer(layer: Any, recipe: str) -> None:
    """Quantize the weight of a linear layer in place.

    Args:
        layer: The layer.
        recipe: Megatron's name of the recipe.
    """
    weight, quantize = layer.weight, quantizer(recipe)
    with torch.no_grad():
        quantized = torch.nn.Parameter(quantize(weight.detach()), requires_grad=True)
    for attribute, value in weight.__dict__.items():
        setattr(quantized, attribute, value)
    # Not the copy that it has made: amax and scale are those that the layer updates.
    quantized._quantizer = quantize
    _keep_first_value(quantized, weight.detach().cpu())
    layer.weight = quantized


def _keep_first_value(parameter: Any, value: torch.Tensor) -> None:
    """As ``_attach_high_precision_init_val`` of Transformer Engine's ``module/base.py``."""

    def get(self: Any) -> torch.Tensor | None:
        return getattr(self, "_high_precision_init_val", None)

    def clear(self: Any) -> None:
        if hasattr(self, "_high_precision_init_val"):
            del self._high_precision_init_val

    parameter._high_precision_init_val = value
    parameter.get_high_precision_init_val = types.MethodType(get, parameter)
    parameter.clear_high_precision_init_val = types.MethodType(clear, parameter)


def quantized(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, parameter) of every quantized weight."""
    for name, parameter in model.named_parameters():
        if hasattr(type(parameter), "_INNER_TENSORS"):
            yield name, parameter


def tensors_of(weight: Any) -> dict[str, torch.Tensor]:
    """Codes, scales and transposed copies of a quantized weight; views, without padding."""
    names = [name for name, _ in type(weight)._INNER_TENSORS]
    found = {name: getattr(weight, name, None) for name in names}
    held = {name: tensor for name, tensor in found.items() if tensor is not None}
    if type(weight).__name__ == "Float8BlockwiseQTensor":
        rows, columns = (-(-side // weight._quantizer.block_len) for side in weight.shape)
        held["_rowwise_scale_inv"] = held["_rowwise_scale_inv"][:rows, :columns]
        held["_columnwise_scale_inv"] = held["_columnwise_scale_inv"][:columns, :rows]
    return held


def delayed_scales(model: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Scale and amax history of every weight, which real layers store beside it (extra state)."""
    return {
        name: (weight._quantizer.scale, weight._quantizer.history)
        for name, weight in quantized(model)
        if hasattr(weight._quantizer, "history")
    }


def update_delayed_scales(model: Any) -> None:
    """What Transformer Engine does at the end of a forward (``fused_amax_and_scale_update``)."""
    for _, weight in quantized(model):
        update_delayed_scale(weight._quantizer)


def update_delayed_scale(quantizer: Any) -> None:
    """The same for one quantizer; nothing where its recipe has no history."""
    history = getattr(quantizer, "history", None)
    if history is None:
        return
    amax = history.amax(0)
    scale = LARGEST[DType.kFloat8E4M3] / amax
    usable = (amax > 0) & amax.isfinite()
    quantizer.scale.copy_(torch.where(usable, scale, quantizer.scale))
    history.copy_(history.roll(-1, 0))
    history[0].zero_()
