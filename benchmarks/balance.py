"""Models the load balance of owners for the matrices of known models; nothing is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.markdown import table
from megatron_muon.linalg import (
    cheapest_segments,
    coefficient_schedule,
    newton_schulz_flops,
    panel_flops,
    panel_requests,
)
from megatron_muon.placement import (
    FLOPS_PER_BYTE,
    FLOPS_PER_NETWORK_BYTE,
    Splitting,
    even_cuts,
)
from megatron_muon.placement.part_costs import Candidate, part_cost, team_of
from megatron_muon.placement.splitting import choose_ranks

CUDA = torch.device("cuda")
TP = 8
RANKS_PER_NODE = 8
MAX_RANKS = 16


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The matrices of one model, dense part and experts.

    Attributes:
        name: Name of the model.
        layers: Transformer layers.
        pp: Number of pipeline stages.
        dense: (count per layer, m, n) of dense weights.
        experts: (count per layer, m, n) of experts' weights, on all expert-parallel ranks.
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
        whole: max/mean modelled time with one owner per matrix.
        reached: max/mean modelled time.
        bound: Lower bound for any placement (``placement.bounds``) over the mean.
        shared: Number of split matrices.
        faster: Modelled speed-up of the busiest rank over one owner per matrix.
    """

    name: str
    owners: int
    matrices: int
    whole: float
    reached: float
    bound: float
    shared: int
    faster: float


def balance_table(data_parallel: tuple[int, ...] = (8, 16, 32, 64, 128)) -> list[BalanceRow]:
    """Return rows for all models at TP8 and all data-parallel sizes, bf16, five quintic steps."""
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


def modelled_splitting(max_ranks: int = MAX_RANKS) -> Splitting:
    """Return how matrices are split, in bf16 on a GPU, for five quintic steps."""
    schedule = coefficient_schedule("quintic", 5)

    def flops(m: int, n: int, ranks: int, number: int) -> int:
        short, long = sorted((m, n))
        start, end = even_cuts(short, ranks)[number]
        first, last = even_cuts(long, ranks)[number]
        segments = cheapest_segments(m, n, schedule, torch.bfloat16, CUDA)
        return panel_flops(short, last - first, end - start, segments, CUDA)

    return Splitting(
        most_ranks=max_ranks,
        flops=flops,
        requests=lambda m, n, team: panel_requests(
            cheapest_segments(m, n, schedule, torch.bfloat16, CUDA), team
        ),
        itemsize=2,
        scalar_itemsize=4,
        flops_per_byte=FLOPS_PER_BYTE["cuda"],
        flops_per_network_byte=FLOPS_PER_NETWORK_BYTE["cuda"],
    )


def _candidates(layers: int, weights: tuple[tuple[int, int, int], ...]) -> list[Candidate]:
    schedule = coefficient_schedule("quintic", 5)
    found = []
    for layer in range(layers):
        for kind, (count, m, n) in enumerate(weights):
            segments = cheapest_segments(m, n, schedule, torch.bfloat16, CUDA)
            flops = newton_schulz_flops(m, n, segments, CUDA)
            found += [
                Candidate(
                    name=f"{layer:03}.{kind:02}.{index:03}",
                    shape=(m, n),
                    flops=flops,
                    cost=flops,
                    held={},
                )
                for index in range(count)
            ]
    return found


def _row(
    name: str, layers: int, weights: tuple[tuple[int, int, int], ...], owners: int
) -> BalanceRow:
    candidates = _candidates(layers, weights)
    without, _, _ = _loads(candidates, owners, None)
    loads, possible, shared = _loads(candidates, owners, modelled_splitting())
    mean = sum(loads) / owners
    return BalanceRow(
        name=name,
        owners=owners,
        matrices=len(candidates),
        whole=max(without) / (sum(without) / owners),
        reached=max(loads) / mean,
        bound=max(mean, possible) / mean,
        shared=shared,
        faster=max(without) / max(loads),
    )


def _loads(
    candidates: list[Candidate], owners: int, splitting: Splitting | None
) -> tuple[list[int], int, int]:
    """Return the loads of all ranks, the lower bound, and the number of split matrices."""
    per_node = min(owners, RANKS_PER_NODE)
    chosen = choose_ranks(
        candidates,
        ranks=owners,
        ranks_per_node=per_node,
        splitting=splitting,
    )
    loads = [0] * owners
    for candidate, ranks in zip(candidates, chosen.ranks, strict=True):
        for number, rank in enumerate(ranks):
            loads[rank] += (
                candidate.cost
                if splitting is None
                else part_cost(
                    candidate, splitting, team_of(candidate.shape, len(ranks), per_node), number
                )
            )
    return loads, chosen.possible, sum(len(ranks) > 1 for ranks in chosen.ranks)


def balance_lines(rows: Sequence[BalanceRow]) -> list[str]:
    """Return a table of modelled balance, its lower bound, and that of one owner per matrix."""
    return table(
        [
            "model at TP8",
            "owners",
            "matrices",
            "split",
            "max/mean, one owner each",
            "max/mean, achieved",
            "lower bound",
            "speed-up of busiest rank",
        ],
        [
            [
                r.name,
                str(r.owners),
                str(r.matrices),
                str(r.shared),
                f"{r.whole:.3f}",
                f"{r.reached:.3f}",
                f"{r.bound:.3f}",
                f"{r.faster:.2f}",
            ]
            for r in rows
        ],
    )
