"""The compared optimizers: AdamW, ours, and megatron-core's own muon in its three modes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.training.training import wrap_model_chunks_with_ddp

from benchmarks.models import ModelSize, build_model, make_optimizer, optimizer_config, wrap
from megatron_muon import MatrixConfig

LR, WEIGHT_DECAY, MOMENTUM, STEPS, SCALE_MODE = 1e-2, 0.1, 0.9, 5, "spectral"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One optimizer; AdamW if neither ``matrix`` nor ``upstream_mode`` is set.

    Attributes:
        key: Name in the JSON file.
        label: Name in the table.
        matrix: Settings of ours.
        upstream_mode: ``muon_tp_mode`` of megatron-core's muon.
    """

    key: str
    label: str
    matrix: MatrixConfig | None = None
    upstream_mode: str | None = None

    @property
    def is_muon(self) -> bool:
        """True if matrices are updated by Muon's rule."""
        return bool(self.upstream_mode or (self.matrix and self.matrix.optimizer == "dmuon"))

    def build(self, size: ModelSize, device: torch.device) -> tuple[Any, Any]:
        """Build the optimizer and the wrapped model, always with the same weights."""
        torch.manual_seed(1)
        model = build_model(size, use_cpu_initialization=True).to(device)
        if self.upstream_mode:
            return _build_upstream(model, self.upstream_mode)
        wrapped = wrap(model)
        return wrapped, make_optimizer(wrapped, self.matrix, lr=LR, weight_decay=WEIGHT_DECAY)


def contenders() -> list[Contender]:
    """Return all optimizers, AdamW first."""
    dmuon = MatrixConfig(
        momentum=MOMENTUM, num_ns_steps=STEPS, scale_mode=SCALE_MODE, compute_dtype="fp32"
    )
    fused = replace(dmuon, split_gate_up=False)
    return [
        Contender(key="adamw", label="AdamW"),
        Contender(key="dmuon", label="dmuon", matrix=dmuon),
        Contender(key="dmuon_fused", label="dmuon, gate+up one matrix", matrix=fused),
        *(
            Contender(
                key=f"orth_dion_{part}",
                label=f"orth_dion, r = 1/{part}",
                matrix=MatrixConfig(optimizer="orth_dion", rank_fraction=1 / part),
            )
            for part in (4, 8)
        ),
        *(
            Contender(key=f"muon_{mode}", label=f"megatron-core muon, {mode}", upstream_mode=mode)
            for mode in ("blockwise", "duplicated", "distributed")
        ),
    ]


def _build_upstream(model: Any, tp_mode: str) -> tuple[Any, Any]:
    """Build as ``--optimizer muon --use-distributed-optimizer``: layer-wise over data parallel."""
    chunks = wrap_model_chunks_with_ddp(
        [model],
        model.config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        use_layer_wise_distributed_optimizer=True,
    )
    config = optimizer_config(
        optimizer="muon",
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        use_distributed_optimizer=False,
        use_layer_wise_distributed_optimizer=True,
        # Without it the layer-wise optimizer lacks its wrapper and cannot be built. The
        # parameters are fp32 all the same, and the wrapper does not change them.
        bf16=True,
        muon_tp_mode=tp_mode,
        muon_momentum=MOMENTUM,
        muon_num_ns_steps=STEPS,
        muon_scale_mode=SCALE_MODE,
        # "medium", the default, would round the iterates to bf16.
        muon_fp32_matmul_prec="highest",
    )
    return chunks[0], get_megatron_optimizer(config, chunks)
