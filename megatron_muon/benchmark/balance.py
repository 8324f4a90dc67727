"""How evenly the matrices of known models fall on their owners; modelled, nothing is run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_muon.linalg import cheapest_segments, coefficient_schedule, newton_schulz_flops
from megatron_muon.placement.balance import assign_owners

CUDA = torch.device("cuda")
TP = 8


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The matrices of one model, dense part and experts.

    Attributes:
        name: Name of the model.
        layers: Transformer layers.
        pp: Pipeline stages that they are cut into.
        dense: (count per layer, m, n) of dense weights.
        experts: (count per layer, m, n) of experts' weights, on all expert-parallel ranks together.
        ep: Expert-parallel size, with expert-TP 1.
    """

    name: str
    layers: int
    pp: int
    dense: tuple[tuple[int, int, int], ...]
    experts: tuple[tuple[int, int, int], ...] = ()
    ep: int = 1


def _llama(name: str, layers: int, pp: int, h: int, kv: int, ffn: int, q: int = 0) -> Shapes:
    q = q or h
    return Shapes(
        name=name,
        layers=layers,
        pp=pp,
        dense=((1, q, h), (2, kv, h), (1, h, q), (2, ffn, h), (1, h, ffn)),
    )


MODELS = (
    _llama("Llama-3 8B", 32, 1, 4096, 1024, 14336),
    _llama("Llama-3 70B", 80, 4, 8192, 1024, 28672),
    _llama("Llama-3 405B", 126, 16, 16384, 1024, 53248),
    _llama("Qwen3-32B", 64, 2, 5120, 1024, 25600, q=8192),
    Shapes(
        name="Qwen3-235B-A22B",
        layers=94,
        pp=8,
        dense=((1, 8192, 4096), (2, 512, 4096), (1, 4096, 8192)),
        experts=((256, 1536, 4096), (128, 4096, 1536)),
        ep=8,
    ),
    Shapes(
        name="DeepSeek-V3",
        layers=61,
        pp=16,
        dense=(
            (1, 1536, 7168),
            (1, 16384, 1536),
            (1, 8192, 1536),
            (1, 512, 7168),
            (1, 64, 7168),
            (2, 16384, 512),
            (1, 7168, 16384),
            (2, 2048, 7168),
            (1, 7168, 2048),
        ),
        experts=((512, 2048, 7168), (256, 7168, 2048)),
        ep=32,
    ),
)


@dataclass(frozen=True, kw_only=True)
class BalanceRow:
    """One model at one data-parallel size.

    Attributes:
        name: Model and part.
        owners: Ranks of the exchange group.
        matrices: Matrices of the stage.
        reached: max/mean modelled time.
        bound: The best possible with whole matrices, max(mean, largest)/mean.
    """

    name: str
    owners: int
    matrices: int
    reached: float
    bound: float


def balance_table(data_parallel: tuple[int, ...] = (8, 32, 128)) -> list[BalanceRow]:
    """Every model at TP8 and every data-parallel size, bf16, five quintic steps."""
    rows = []
    for model in MODELS:
        per_stage = -(-model.layers // model.pp)
        for dp in data_parallel:
            rows.append(_row(f"{model.name}, dense", per_stage, model.dense, TP * dp))
            if model.experts:
                held = tuple((count // model.ep, m, n) for count, m, n in model.experts)
                owners = max(1, TP * dp // model.ep)
                rows.append(_row(f"{model.name}, experts", per_stage, held, owners))
    return rows


def _row(
    name: str, layers: int, weights: tuple[tuple[int, int, int], ...], owners: int
) -> BalanceRow:
    schedule = coefficient_schedule("quintic", 5)
    costs, names = [], []
    for layer in range(layers):
        for kind, (count, m, n) in enumerate(weights):
            segments = cheapest_segments(m, n, schedule, torch.bfloat16, CUDA)
            cost = newton_schulz_flops(m, n, segments, CUDA)
            for index in range(count):
                names.append(f"{layer:03}.{kind:02}.{index:03}")
                costs.append(cost)
    chosen = assign_owners(names=names, costs=costs, held=[{}] * len(costs), ranks=owners)
    loads = [0] * owners
    for cost, owner in zip(costs, chosen, strict=True):
        loads[owner] += cost
    mean = sum(costs) / owners
    return BalanceRow(
        name=name,
        owners=owners,
        matrices=len(costs),
        reached=max(loads) / mean,
        bound=max(mean, max(costs)) / mean,
    )
