"""Runs whose checkpoints are exported and imported, and the tool on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_muon.offline.command import main
from tests.distributed.pretraining import pretrain_with_our_hooks
from tests.tiny_gpt import gather_full

Ranks = Callable[..., list[Any]]
Tensors = dict[str, torch.Tensor]

EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "40"),
    *("--moe-router-load-balancing-type", "none", "--moe-token-dispatcher-type", "alltoall"),
    *("--expert-model-parallel-size", "2"),
)
# The vocabulary of 62 is padded to 64.
PADDED = ("--vocab-size", "62", "--make-vocab-size-divisible-by", "32")
MORE = {"dense": PADDED, "experts": EXPERTS, "no padding": ()}
HEADS, GROUPS, HIDDEN, FFN = 4, 2, 32, 48
HEAD_DIM = HIDDEN // HEADS


def trained(rank: int, *args: Any) -> tuple[list[float], Tensors]:
    """Losses, and the whole weights of this rank's part of the model at the end."""
    losses, optimizer = pretrain_with_our_hooks(rank, *args)
    found: Tensors = {}
    for chunk in optimizer.model_chunks:
        found |= gather_full(chunk)
    return losses, found


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A run of two iterations: where it is, and its weights by Megatron's names."""

    folder: Path
    weights: Tensors
    flags: tuple[str, ...]


Runs = Callable[[str, str], tuple[Saved, Saved]]


def rows_of(saved: Saved) -> tuple[str, ...]:
    """Return flags that omit the padding of the vocabulary."""
    return ("--vocab-size", "62") if "32" in saved.flags else ()


def like(saved: Saved) -> tuple[object, ...]:
    """Return flags that give an import the form of a checkpoint."""
    return ("--like", saved.folder, *rows_of(saved))


def tool(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def exported(saved: Saved, path: Path, *flags: str) -> dict[str, Any]:
    assert tool("export", saved.folder, path, *rows_of(saved), *flags) == 0
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def unpadded(weights: Mapping[str, torch.Tensor]) -> Tensors:
    rows = 62
    return {
        name: tensor[:rows] if "word_embeddings" in name or "output_layer" in name else tensor
        for name, tensor in weights.items()
    }


def as_stored(weights: Mapping[str, torch.Tensor]) -> Tensors:
    """Names as in Megatron's checkpoints: norms belong to the linear layers after them."""
    fused = {
        ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
        ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
    }
    found = {}
    for name, tensor in weights.items():
        for plain, stored in fused.items():
            name = name.replace(plain, stored)
        found[name] = tensor
    return found


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
