"""A checkpoint like that of a small run of Megatron, created without Megatron, for tests."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_muon.offline.outputs import OutChunk, Output, OutTensor
from megatron_muon.offline.safe_pickle import dump_torch
from megatron_muon.offline.writing import write_checkpoint, write_tracker

LAYERS, HIDDEN, FFN, HEADS, GROUPS, VOCAB = 2, 64, 96, 4, 2, 128
STEP = 5

SHAPES: Mapping[str, tuple[int, ...]] = {
    "embedding.word_embeddings.weight": (VOCAB, HIDDEN),
    "decoder.layers.self_attention.linear_qkv.weight": (LAYERS, 2 * HIDDEN, HIDDEN),
    "decoder.layers.self_attention.linear_proj.weight": (LAYERS, HIDDEN, HIDDEN),
    "decoder.layers.mlp.linear_fc1.weight": (LAYERS, 2 * FFN, HIDDEN),
    "decoder.layers.mlp.linear_fc2.weight": (LAYERS, HIDDEN, FFN),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "output_layer.weight": (VOCAB, HIDDEN),
}
"""Of a Llama-like model by key; SwiGLU, grouped queries."""

ARGS: Mapping[str, Any] = {
    "num_attention_heads": HEADS,
    "group_query_attention": True,
    "num_query_groups": GROUPS,
    "kv_channels": HIDDEN // HEADS,
    "swiglu": True,
    "muon_momentum": 0.9,
}
ADAM = ("param", "exp_avg", "exp_avg_sq")
"""States of ``fully_reshardable`` Adam."""

ADAM_GROUP: Mapping[str, Any] = {
    "lr": 1e-3,
    "max_lr": 1e-3,
    "wd_mult": 1.0,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "step": STEP,
    "is_expert_parallel": False,
}


@dataclass(frozen=True)
class Noise:
    """Return standard normal elements, positive for squares."""

    key: str

    def tensor(self, source: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(self.key.encode()))
        values = torch.randn(shape, generator=generator)
        return (values.square() if ".exp_avg_sq." in self.key else values).to(dtype)


def save_run(
    root: Path,
    *,
    states: Sequence[str] | Mapping[str, Sequence[str]] = ADAM,
    weights: Mapping[str, tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    groups: Sequence[Mapping[str, Any]] = (ADAM_GROUP,),
    args: Mapping[str, Any] | None = ARGS,
    optimizer: Any = None,
    more: Mapping[str, tuple[int, ...]] | None = None,
) -> Path:
    """Write one.

    Args:
        root: Folder that the run saves into.
        states: Names of the states of every parameter, or of each by its key.
        weights: Shapes of the model part.
        dtype: Element type of the weights; states are fp32.
        groups: Parameter groups.
        args: Saved arguments, None for a checkpoint without.
        optimizer: The optimizer's entry of the common state; default: one that holds ``groups``.
        more: Further tensors by key, fp32.
    """
    of = states if isinstance(states, Mapping) else dict.fromkeys(weights, states)
    shapes = {
        f"optimizer.state.{s}.{key}": weights[key] for key, names in of.items() for s in names
    }
    tensors = [_tensor(key, shape, dtype) for key, shape in weights.items()]
    tensors += [
        _tensor(key, shape, torch.float32) for key, shape in (shapes | dict(more or {})).items()
    ]
    common: dict[str, Any] = {
        "iteration": STEP,
        "optimizer": optimizer or {"optimizer": {"param_groups": [dict(g) for g in groups]}},
        "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
    }
    if args is not None:
        common["args"] = argparse.Namespace(**args)
    output = Output(
        tensors=tuple(tensors),
        blobs={"rng_state/shard_0_1": dump_torch([1])},
        common=common,
        common_in_file=False,
        backend={"sharded_backend": "torch_dist", "sharded_backend_version": 1},
    )
    write_checkpoint(root / f"iter_{STEP:07d}", output)
    write_tracker(root, STEP)
    return root


def _tensor(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> OutTensor:
    chunk = OutChunk(offset=(0,) * len(shape), shape=shape, value=Noise(key))
    return OutTensor(key=key, shape=shape, dtype=dtype, chunks=(chunk,), rule="noise")
