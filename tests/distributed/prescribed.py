"""Prescribed whole matrices, sharded to any layout: the rule alone, without a model.

The cutting here is written from Megatron's storage conventions and shares nothing with
``megatron_muon.matrices``: row cut, column cut, ``[gate_r; up_r]``, flat bucket shards.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_muon.exchange import Exchange, check_agreement
from megatron_muon.linalg import coefficient_schedule
from megatron_muon.matrices import (
    WHOLE,
    Packing,
    RowPacking,
    RowPart,
    ShardedParameter,
    SplitMode,
    data_parallel_ranges,
    logical_matrices,
)
from megatron_muon.optim import MatrixRange, MuonRule
from megatron_muon.placement import ExchangeGroup, Plan, make_plan
from tests.distributed.late_delivery import LateDelivery
from tests.reference.muon import qkv_parts

GROUPS, HEADS, HEAD_DIM = 4, 8, 4


@dataclass(frozen=True, kw_only=True)
class Whole:
    """One whole parameter; ``shape`` is that of one matrix of a stack."""

    name: str
    shape: tuple[int, int]
    tp_dim: int | None
    packing: Packing = WHOLE
    stack: tuple[int, ...] | None = None

    @property
    def stacked(self) -> int:
        return 1 if self.stack is None else len(self.stack)

    @property
    def view(self) -> tuple[int, int]:
        """Rows of all matrices of the stack, columns."""
        return self.stacked * self.shape[0], self.shape[1]

    @property
    def blocks(self) -> list[int]:
        """Rows that TP cuts on their own."""
        if self.packing.rows is RowPacking.BLOCKS:
            return [part.rows for part in self.packing.parts]
        return [self.shape[0]]


def units(*parts: RowPart, **rows: int) -> Packing:
    """Query groups of these parts."""
    further = (RowPart(name=name, rows=count) for name, count in rows.items())
    return Packing(rows=RowPacking.UNITS, parts=(*parts, *further))


def blocks(**rows: int) -> Packing:
    """Parts that TP cuts on their own."""
    parts = tuple(RowPart(name=name, rows=count) for name, count in rows.items())
    return Packing(rows=RowPacking.BLOCKS, parts=parts)


def gate_up(ffn: int) -> Packing:
    """A gated MLP."""
    return blocks(gate=ffn, up=ffn)


def model(layers: int = 2) -> list[Whole]:
    """Row and column cuts, fused QKV with grouped queries, gated MLP, a replicated weight."""
    qkv_rows = (HEADS + 2 * GROUPS) * HEAD_DIM
    heads = HEADS // GROUPS
    found = []
    for layer in range(layers):
        at = f"layers.{layer}"
        found += [
            Whole(
                name=f"{at}.linear_qkv.weight",
                shape=(qkv_rows, 24),
                tp_dim=0,
                packing=units(
                    RowPart(name="q", rows=heads * HEAD_DIM, heads=heads),
                    RowPart(name="k", rows=HEAD_DIM),
                    RowPart(name="v", rows=HEAD_DIM),
                ),
            ),
            Whole(name=f"{at}.linear_proj.weight", shape=(24, HEADS * HEAD_DIM), tp_dim=1),
            Whole(name=f"{at}.linear_fc1.weight", shape=(80, 24), tp_dim=0, packing=gate_up(40)),
            Whole(name=f"{at}.linear_fc2.weight", shape=(24, 40), tp_dim=1),
            Whole(name=f"{at}.linear_down.weight", shape=(7, 24), tp_dim=None),
            Whole(
                name=f"{at}.in_proj.weight",
                shape=(56, 10),
                tp_dim=0,
                packing=blocks(z=16, x=16, B=8, C=8, dt=8),
            ),
            Whole(
                name=f"{at}.experts.linear_fc1.weight",
                shape=(32, 9),
                tp_dim=0,
                packing=gate_up(16),
                stack=(4, 5, 6),
            ),
            Whole(
                name=f"{at}.experts.linear_fc2.weight",
                shape=(9, 16),
                tp_dim=1,
                stack=(4, 5, 6),
            ),
        ]
    return found


def parts(entry: Whole, split: SplitMode) -> list[torch.Tensor]:
    """Row indices of each logical matrix, for the reference."""
    rows = torch.arange(entry.view[0])
    if split == "none":
        return list(rows.chunk(entry.stacked))
    if entry.packing.rows is RowPacking.UNITS:
        kinds = qkv_parts(GROUPS, HEADS, HEAD_DIM)
        if split == "parts":
            return kinds
        heads = [head for kind in kinds for head in kind.split(HEAD_DIM)]
        return sorted(heads, key=lambda rows: int(rows[0]))
    return [rows for matrix in rows.chunk(entry.stacked) for rows in matrix.split(entry.blocks)]


def shard(entry: Whole, whole: torch.Tensor, tp: int, tp_rank: int) -> torch.Tensor:
    """Return one TP rank's shard of a whole parameter, flat."""
    if entry.tp_dim is None or tp == 1:
        return whole.clone().reshape(-1)
    stacked = whole.view(entry.stacked, *entry.shape)
    if entry.tp_dim == 1:
        return stacked.chunk(tp, dim=2)[tp_rank].clone().reshape(-1)
    cut = [block.chunk(tp, dim=1)[tp_rank] for block in stacked.split(entry.blocks, dim=1)]
    return torch.cat(cut, dim=1).reshape(-1)


def unshard(entry: Whole, shards: list[torch.Tensor], tp: int) -> torch.Tensor:
    """Inverse of ``shard``."""
    rows, cols = entry.shape
    if entry.tp_dim is None or tp == 1:
        return shards[0].view(entry.view)
    if entry.tp_dim == 1:
        whole = torch.cat([s.view(entry.stacked, rows, -1) for s in shards], dim=2)
        return whole.reshape(entry.view)
    cut = [
        s.view(entry.stacked, -1, cols).split([block // tp for block in entry.blocks], dim=1)
        for s in shards
    ]
    pieces = [piece for block in zip(*cut, strict=True) for piece in block]
    return torch.cat(pieces, dim=1).reshape(entry.view)


def sharded_parameters(
    entries: list[Whole], *, tp: int, dp: int, bucket: int
) -> list[ShardedParameter]:
    """Arrange TP shards in one flat buffer with buckets, in Megatron's reverse order."""
    result = []
    position = bucket_start = 0
    members: list[tuple[Whole, int, int]] = []

    def close(end: int) -> int:
        stop = bucket_start + -(-(end - bucket_start) // (dp * 8)) * (dp * 8)
        result.extend(
            ShardedParameter(
                name=entry.name,
                global_shape=entry.shape,
                tp_dim=None if tp == 1 else entry.tp_dim,
                tp=tp,
                ranges=data_parallel_ranges(
                    start=low,
                    stop=high,
                    bucket_start=bucket_start,
                    bucket_numel=stop - bucket_start,
                    dp=dp,
                ),
                packing=entry.packing,
                stack=entry.stack,
            )
            for entry, low, high in members
        )
        members.clear()
        return stop

    for entry in reversed(entries):
        position = -(-position // 64) * 64
        rows, cols = entry.view
        numel = rows * cols // (tp if entry.tp_dim is not None else 1)
        members.append((entry, position, position + numel))
        position += numel
        if position - bucket_start >= bucket:
            position = bucket_start = close(position)
    if members:
        close(position)
    return result


def gradient(entry: Whole, step: int, dtype: torch.dtype) -> torch.Tensor:
    """The prescribed whole gradient of a step; the fc2 of layer 1 is exactly zero throughout."""
    generator = torch.Generator().manual_seed(
        1000 * step + sum(ord(letter) for letter in entry.name)
    )
    if entry.name == "layers.1.linear_fc2.weight":
        return torch.zeros(entry.view, dtype=dtype)
    # Drawn in fp32, so that fp32 and fp64 runs and the reference see the same numbers.
    drawn = torch.randn(entry.view, generator=generator)
    return (drawn * 10.0 ** (step % 5 - 2)).to(dtype)


def initial(entry: Whole, dtype: torch.dtype) -> torch.Tensor:
    """The whole initial weight."""
    generator = torch.Generator().manual_seed(sum(ord(letter) for letter in entry.name))
    return torch.randn(entry.view, generator=generator).to(dtype)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One layout and one rule."""

    tp: int
    dp: int
    dtype: torch.dtype
    steps: int = 10
    layers: int = 2
    bucket: int = 1500
    buffer_mb: float = 16.0
    nesterov: bool = False
    scale_mode: str = "spectral"
    split: SplitMode = "parts"
    lr: float = 0.02
    weight_decay: float = 0.1
    most_ranks: int = 1
    compute_dtype: torch.dtype | None = None
    momentum_dtype: torch.dtype | None = None
    ranks_per_node: int | None = None
    spoil_copies: bool = False
    """Gradients of copies of another TP rank's elements are NaN."""


def rates(setting: Setting, name: str) -> tuple[float, float]:
    """(learning rate, weight decay) of a parameter: rules may give each its own."""
    number = sum(ord(letter) for letter in name)
    return setting.lr * (1 + number % 4 / 2), setting.weight_decay * (number % 3)


def plan_of(setting: Setting, entries: list[Whole]) -> Plan:
    """The plan of a setting."""
    parameters = sharded_parameters(entries, tp=setting.tp, dp=setting.dp, bucket=setting.bucket)
    rule, device = rule_of(setting), torch.device("cpu")
    splits = setting.most_ranks > 1
    return make_plan(
        group=ExchangeGroup(tp=setting.tp, dp=setting.dp),
        parameters=parameters,
        matrices=[m for p in parameters for m in logical_matrices(p, split=setting.split)],
        method=rule.method(
            device,
            cost=None if splits else lambda m, n: 5 * min(m, n) * m * n,
            splitting=replace(
                rule.splitting(setting.most_ranks, device, min_flops=0),
                flops_per_byte=0,
                flops_per_network_byte=0,
            )
            if splits
            else None,
        ),
        buffer_bytes=int(setting.buffer_mb * 2**20),
        ranks_per_node=setting.ranks_per_node,
    )


def rule_of(setting: Setting) -> MuonRule:
    """The rule of a setting."""
    return MuonRule(
        momentum=0.9,
        nesterov=setting.nesterov,
        schedule=coefficient_schedule("quintic", 5),
        scale_mode=setting.scale_mode,
        extra_scale_factor=0.5,
        compute_dtype=setting.compute_dtype or setting.dtype,
        exchange_dtype=setting.dtype,
        momentum_dtype=setting.momentum_dtype or setting.dtype,
    )


def run_rank(
    rank: int, setting: Setting, entries: list[Whole], *, count_flops: bool = False
) -> dict[str, Any]:
    """Train on one rank; returns its final ranges, and counters of every step."""
    import torch.distributed as dist

    plan, rule = plan_of(setting, entries), rule_of(setting)
    by_name = {entry.name: entry for entry in entries}
    tp_rank, dp_rank = rank % setting.tp, rank // setting.tp
    check_agreement(
        digest=plan.digest,
        expected_rank=plan.group.rank(tp_rank=tp_rank, dp_rank=dp_rank),
        group=dist.group.WORLD,
        device=torch.device("cpu"),
    )
    exchange = Exchange(
        plan,
        rank=rank,
        transport=LateDelivery(dist.group.WORLD),
        dtypes=rule.dtypes,
        device=torch.device("cpu"),
    )

    def mine(name: str, whole: torch.Tensor, owned: tuple[int, int]) -> torch.Tensor:
        return shard(by_name[name], whole, setting.tp, tp_rank)[owned[0] : owned[1]].clone()

    state: list[MatrixRange | None] = []
    for parameter in plan.parameters:
        owned = parameter.ranges[dp_rank]
        if owned[1] == owned[0]:
            state.append(None)
            continue
        master = mine(parameter.name, initial(by_name[parameter.name], setting.dtype), owned)
        lr, weight_decay = rates(setting, parameter.name)
        state.append(
            MatrixRange(
                master=master,
                momentum=torch.zeros_like(master, dtype=rule.momentum_dtype),
                grad=torch.empty_like(master),
                lr=lr,
                weight_decay=weight_decay,
            )
        )
    counters, flops = [], []
    for step in range(setting.steps):
        for parameter, owned_range in zip(plan.parameters, state, strict=True):
            if owned_range is not None:
                whole = gradient(by_name[parameter.name], step, setting.dtype)
                owned_range.grad = mine(parameter.name, whole, parameter.ranges[dp_rank])
                if setting.spoil_copies and parameter.tp_dim is None and tp_rank > 0:
                    owned_range.grad.fill_(float("nan"))
        counter = FlopCounterMode(display=False)
        with counter if count_flops else nullcontext():
            rule.step(state, exchange, {})
        flops.append(counter.get_total_flops())
        counters.append(exchange.counters)
    return {
        "masters": {
            p.name: r.master for p, r in zip(plan.parameters, state, strict=True) if r is not None
        },
        "momenta": {
            p.name: r.momentum for p, r in zip(plan.parameters, state, strict=True) if r is not None
        },
        "counters": counters,
        "flops": flops,
    }


def assemble(
    results: list[dict[str, Any]], setting: Setting, entries: list[Whole], what: str
) -> dict[str, list[torch.Tensor]]:
    """Whole parameters from all ranks' ranges; a replicated one once per TP rank."""
    plan = plan_of(setting, entries)
    by_name = {entry.name: entry for entry in entries}
    wholes: dict[str, list[torch.Tensor]] = {}
    for parameter in plan.parameters:
        shards = [
            torch.cat(
                [
                    results[dp_rank * setting.tp + tp_rank][what][parameter.name]
                    for dp_rank in range(setting.dp)
                    if parameter.ranges[dp_rank][1] > parameter.ranges[dp_rank][0]
                ]
            )
            for tp_rank in range(setting.tp)
        ]
        entry = by_name[parameter.name]
        if entry.tp_dim is None:
            wholes[entry.name] = [s.view(entry.view) for s in shards]
        else:
            wholes[entry.name] = [unshard(entry, shards, setting.tp)]
    return wholes
