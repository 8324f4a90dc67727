"""What Megatron does that fake tensors or a world of one rank cannot follow."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from typing import Any

import torch

from megatron_muon.cpu.megatron_patches import mark_norms_under_sequence_parallel
from megatron_muon.dry_run.fake_cuda import convert


def install() -> None:
    """Replace a few functions of Megatron; none of them decides a shape, a dtype or a layout."""
    import megatron.core.datasets.utils as dataset_utils
    import megatron.training.initialize as initialize
    import megatron.training.training as training
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    mark_norms_under_sequence_parallel()
    training.set_jit_fusion_options = lambda *_, **__: None
    # Rank 0 would compile an extension that reads datasets.
    dataset_utils.compile_helpers = lambda: None
    initialize._set_random_seed = lambda *_, **__: None
    CudaRNGStatesTracker.fork = lambda self, name=None: nullcontext()
    _convert_outside_of_modules()
    attention = DotProductAttention.__init__

    @functools.wraps(attention)
    def of_any_width(
        self: Any,
        config: Any,
        *args: Any,
        k_channels: Any = None,
        v_channels: Any = None,
        **kwargs: Any,
    ) -> None:
        """Megatron's local attention has no parameters, one width and no context parallelism."""
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        attention(self, alone, *args, **kwargs)

    DotProductAttention.__init__ = of_any_width


def _convert_outside_of_modules() -> None:
    from megatron.core.transformer.module import Float16Module

    original = Float16Module.__init__

    @functools.wraps(original)
    def converted(self: Any, config: Any, module: torch.nn.Module) -> None:
        convert(module, torch.float16 if config.fp16 else torch.bfloat16)
        module.bfloat16 = module.half = lambda: module  # type: ignore[method-assign]
        original(self, config, module)

    Float16Module.__init__ = converted
