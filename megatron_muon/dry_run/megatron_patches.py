"""Replaces parts of Megatron that fake tensors or a single existing rank do not support."""

from __future__ import annotations

import copy
import dataclasses
import functools
from contextlib import nullcontext
from typing import Any

import torch

from megatron_muon.cpu.megatron_patches import mark_norms_under_sequence_parallel
from megatron_muon.dry_run.fake_cuda import convert


def install() -> None:
    """Replace a few functions of Megatron; none affects a shape, a dtype or a layout."""
    import megatron.core.datasets.utils as dataset_utils
    import megatron.training.initialize as initialize
    import megatron.training.training as training
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    mark_norms_under_sequence_parallel()
    training.set_jit_fusion_options = lambda *_, **__: None
    # Rank 0 would compile the extension of the datasets.
    dataset_utils.compile_helpers = lambda: None
    initialize._set_random_seed = lambda *_, **__: None
    CudaRNGStatesTracker.fork = lambda self, name=None: nullcontext()
    _convert_outside_of_modules()
    _build_hybrid_layers()
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


def _build_hybrid_layers() -> None:
    """Build layers of a hybrid model as ``--transformer-impl local`` builds those of a GPT.

    Megatron has a single specification for them, with Transformer Engine's layers, and requires the
    kernels of Mamba to build its parameters.
    """
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid import hybrid_layer_specs as specs
    from megatron.core.ssm import mamba_mixer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.training.models import hybrid

    local = LocalSpecProvider()

    class NormAndLinear(local.column_parallel_linear()):  # type: ignore[misc]
        """The weights of a norm and of the following linear layer."""

        def __init__(self, input_size: int, *args: Any, **kwargs: Any) -> None:
            super().__init__(input_size, *args, **kwargs)
            norm = WrappedTorchNorm(self.config, input_size)
            for name, parameter in norm.named_parameters():
                self.register_parameter(f"layer_norm_{name}", parameter)

    class GatedNorm(torch.nn.Module):
        """The weight of Mamba's norm."""

        def __init__(self, size: int, *, device: Any, dtype: torch.dtype, **_: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(size, device=device, dtype=dtype))

    replaced = (
        (specs.TELayerNormColumnParallelLinear, NormAndLinear),
        (specs.TEColumnParallelLinear, local.column_parallel_linear()),
        (specs.TERowParallelLinear, local.row_parallel_linear()),
        (specs.TEDotProductAttention, local.core_attention()),
        (specs.TENorm, WrappedTorchNorm),
        (specs.moe, get_moe_module_spec(use_te=False, num_experts=8)),
    )

    def localized(spec: Any) -> Any:
        for old, new in replaced:
            if spec is old:
                return new
        if isinstance(spec, functools.partial):
            return functools.partial(
                spec.func, **{k: localized(v) for k, v in spec.keywords.items()}
            )
        if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
            values = {f.name: localized(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
            return type(spec)(**values)
        return spec

    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.ExtendedRMSNorm = GatedNorm
    hybrid_block.TENorm = WrappedTorchNorm
    # ``--spec`` names the second.
    hybrid.default_hybrid_stack_spec = specs.hybrid_stack_spec = localized(specs.hybrid_stack_spec)
