"""Megatron's local linear layers, made to keep their weights in FP8 as Transformer Engine's do.

Megatron's own builders, and so ``pretrain``, make quantized weights with it, by their flags: where
``fp8_model_init`` is entered, with the first value kept, through ``.cuda()`` and ``Float16Module``,
with the scales of delayed scaling in the layer's extra state.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch

from tests.te import loading
from tests.te.weights import quantize_layer, update_delayed_scales

_EMPTY = torch.empty(0, dtype=torch.uint8)


def install(version: str = loading.VERSIONS[-1]) -> None:
    """Change Megatron's layers in this process, for good.

    Args:
        version: One of ``loading.VERSIONS``.
    """
    loading.use(version)
    import megatron.core.fp8_utils as fp8_utils
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    recipes: list[str] = []
    layers: list[Any] = []

    @contextmanager
    def quantizing(recipe: str) -> Iterator[None]:
        recipes.append(recipe)
        yield
        recipes.pop()

    @contextmanager
    def computing() -> Iterator[None]:
        """As ``fp8_autocast``: its end updates the scales of delayed scaling.

        Of all ranks of a stage at once, so that a checkpoint needs those of one of them.
        """
        yield
        if torch.is_grad_enabled() and layers:
            latest = torch.cat([layer.quantizer.history[0] for layer in layers])
            group = parallel_state.get_amax_reduction_group(with_context_parallel=True)
            torch.distributed.all_reduce(latest, torch.distributed.ReduceOp.MAX, group=group)
            for layer, amax in zip(layers, latest.split(1), strict=True):
                layer.quantizer.history[0].copy_(amax)
                update_delayed_scales(layer)

    def context(config: Any, layer_no: int = -1, is_init: bool = False) -> Any:
        if not config.fp8 or fp8_utils.is_first_last_bf16_layer(config, layer_no):
            return nullcontext()
        if is_init:
            return quantizing(str(config.fp8_recipe)) if config.fp8_param else nullcontext()
        return computing() if config.fp8_recipe == "delayed" else nullcontext()

    theirs = fp8_utils.get_fp8_context
    for module in list(sys.modules.values()):
        if getattr(module, "get_fp8_context", None) is theirs:
            module.get_fp8_context = context  # type: ignore[attr-defined]
    for kind in (ColumnParallelLinear, RowParallelLinear):
        _keep_weights_in_fp8(kind, recipes, layers)
    store = dist_checkpointing.save

    def save(stored: Any, *args: Any, **kwargs: Any) -> Any:
        """The writer does it with tensors on a GPU."""
        force_all_tensors_to_non_fp8(stored)
        return store(stored, *args, **kwargs)

    dist_checkpointing.save = save


def _keep_weights_in_fp8(kind: Any, recipes: list[str], layers: list[Any]) -> None:
    init, move = kind.__init__, kind._apply

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if recipes and self.weight is not None:
            quantize_layer(self, recipes[-1])
            self.quantizer = self.weight._quantizer
            layers.append(self)

    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``_apply`` of their layers, which puts back what torch swaps away."""
        old, held = self.weight, dict(vars(self.weight)) if hasattr(self, "quantizer") else {}
        found = move(self, *args, **kwargs)
        for name, value in held.items():
            if name not in vars(self.weight):
                is_bound = isinstance(value, MethodType) and value.__self__ is old
                value = MethodType(value.__func__, self.weight) if is_bound else value
                setattr(self.weight, name, value)
        if held:
            self.weight._quantizer = self.quantizer
        return found

    def get_extra_state(self: Any) -> torch.Tensor | None:
        quantizer = getattr(self, "quantizer", None)
        if quantizer is None:
            return None
        if not hasattr(quantizer, "history"):
            return _EMPTY
        state = pickle.dumps((quantizer.scale.tolist(), quantizer.history.tolist()))
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def set_extra_state(self: Any, state: torch.Tensor | None) -> None:
        has_scale = hasattr(getattr(self, "quantizer", None), "history")
        if state is None or state.numel() == 0 or not has_scale:
            return
        scale, history = pickle.loads(state.numpy().tobytes())
        self.quantizer.scale.copy_(torch.tensor(scale))
        self.quantizer.history.copy_(torch.tensor(history))

    kind.__init__, kind._apply = made, moved
    kind.get_extra_state, kind.set_extra_state = get_extra_state, set_extra_state
