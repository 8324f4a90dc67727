"""Random pipeline stages, and what each rank of them stores, element by element.

Every element of every whole parameter has a number of its own. ``stored`` cuts them by Megatron's
conventions (``tests.distributed.prescribed``), so that a plan can be checked by looking where the
numbers go.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_muon.matrices import (
    LogicalMatrix,
    RowPacking,
    ShardedParameter,
    SplitMode,
    logical_matrices,
)
from megatron_muon.placement import ExchangeGroup, Method, Plan, Run, make_plan
from megatron_muon.placement.memory import (
    LanePhases,
    Phase,
    PhasesFunction,
    WaveUse,
    step_peaks,
    wave_uses,
)
from megatron_muon.placement.schedule import LaneOrder, step_schedule
from megatron_muon.placement.schemes import SOURCE, UPDATE
from megatron_muon.placement.waves import cut_by_owner
from tests.distributed.prescribed import Whole, gate_up, shard, sharded_parameters, units

UNBOUNDED = 1 << 50


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The parameters of one pipeline stage at one layout."""

    entries: tuple[Whole, ...]
    group: ExchangeGroup
    parameters: tuple[ShardedParameter, ...]
    split: SplitMode

    @property
    def matrices(self) -> tuple[LogicalMatrix, ...]:
        """All logical matrices."""
        return tuple(m for p in self.parameters for m in logical_matrices(p, split=self.split))

    def plan(self, *, buffer_bytes: int = UNBOUNDED, itemsize: int = 4) -> Plan:
        """The plan, with mn·min(m, n) as cost."""
        return make_plan(
            group=self.group,
            parameters=self.parameters,
            matrices=self.matrices,
            method=whole_method(itemsize),
            buffer_bytes=buffer_bytes,
        )


def whole_method(itemsize: int = 4, **changes: Any) -> Method:
    """Whole matrices with owners, as dmuon's."""
    values = {"cost": cost, "flops": changes.get("cost", cost)} | changes
    kinds = ("source", "update", "scalars", "squares")
    return Method(
        itemsizes=dict.fromkeys(kinds, itemsize),
        phases=lambda use: phases(use, itemsize),
        **values,
    )


def phases(use: WaveUse, itemsize: int) -> list[Phase]:
    """Memory of a wave that needs none to compute.

    Messages are released when they have been waited for, matrices when the update is packed.
    """
    arriving = use.sent[SOURCE] + use.received[SOURCE]
    returning = use.sent[UPDATE] + use.received[UPDATE]
    computed = itemsize * sum(scheme.region(number).numel for scheme, number in use.computed)
    there = use.received[SOURCE] + computed
    work = Phase(peak=max(there, computed + use.sent[UPDATE], returning), held=returning)
    requests = [Phase(peak=there, held=there)] * (use.messages - 2)
    return [
        Phase(peak=arriving, held=arriving),
        *requests,
        work,
        Phase(peak=use.received[UPDATE], held=0),
    ]


def runs_of(plan: Plan, index: int, *, copies: bool) -> list[tuple[int, Run]]:
    """(rank, run) of everything that holds a matrix: its sources, or also further copies."""
    shares = plan.schemes[index].shares
    return [(s.rank, run) for s in shares if copies or s.is_source for run in s.runs]


def with_waves(plan: Plan, cap: int) -> Plan:
    """The plan with waves of at most so many elements per owner."""
    numels = [m.numel for m in plan.matrices]
    waves = cut_by_owner(owners=plan.owners, numels=numels, cap=cap)
    lane = replace(plan.main, waves=waves)
    uses = [
        wave_uses([plan.schemes[i] for i in wave], plan.itemsizes, alone=plan.group.size == 1)
        for wave in waves
    ]
    found = LanePhases(uses, phases_of(plan))
    turns = step_schedule(
        LaneOrder(found.messages, lane.slots, lane.alone), LaneOrder((), 1, alone=True)
    )
    peaks = step_peaks(turns, (found,), ranks=plan.group.size)
    return replace(plan, main=lane, peak_bytes=tuple(peaks))


def phases_of(plan: Plan) -> PhasesFunction:
    """``phases`` with the element size of a plan."""
    return lambda use: phases(use, plan.itemsizes["source"])


def cost(m: int, n: int) -> int:
    """FLOPs but for a constant."""
    return m * n * min(m, n)


def random_stage(
    seed: int, *, tp: int, dp: int, parameters: int = 7, split: SplitMode = "parts"
) -> Stage:
    """Parameters of every kind and many shapes, in buckets of a few parameters each."""
    rng = random.Random(seed)
    entries = tuple(_random_entry(rng, number) for number in range(parameters))
    return stage_of(entries, tp=tp, dp=dp, bucket=rng.choice([1, 300, 2000, 10**6]), split=split)


def stage_of(
    entries: Sequence[Whole], *, tp: int, dp: int, bucket: int = 1000, split: SplitMode = "parts"
) -> Stage:
    """The given parameters at one layout."""
    return Stage(
        entries=tuple(entries),
        group=ExchangeGroup(tp=tp, dp=dp),
        parameters=tuple(sharded_parameters(list(entries), tp=tp, dp=dp, bucket=bucket)),
        split=split,
    )


def _random_entry(rng: random.Random, number: int) -> Whole:
    cols = 8 * rng.randint(1, 3)
    rows = 8 * rng.randint(1, 4)
    at = f"layers.{number}"
    kind = rng.choice(("rows", "columns", "replicated", "gated", "qkv"))
    if kind == "rows":
        return Whole(name=f"{at}.rows", shape=(rows, rng.choice((cols, 5))), tp_dim=0)
    if kind == "columns":
        return Whole(name=f"{at}.columns", shape=(rng.choice((rows, 7)), cols), tp_dim=1)
    if kind == "replicated":
        return Whole(name=f"{at}.replicated", shape=(rng.randint(1, 9), cols), tp_dim=None)
    if kind == "gated":
        return Whole(name=f"{at}.gated", shape=(2 * rows, cols), tp_dim=0, packing=gate_up(rows))
    heads, head_dim = rng.randint(1, 3), rng.choice((4, 8))
    groups = rng.choice((1, 2, 4)) * 8 // head_dim
    return Whole(
        name=f"{at}.qkv",
        shape=(groups * (heads + 2) * head_dim, cols),
        tp_dim=0,
        packing=units(q=heads * head_dim, k=head_dim, v=head_dim),
    )


def numbered(entries: Sequence[Whole]) -> dict[str, torch.Tensor]:
    """Whole parameters whose elements are 0, 1, 2, … through all of them."""
    wholes, first = {}, 0
    for entry in sorted(entries, key=lambda e: e.name):
        rows, cols = entry.shape
        wholes[entry.name] = torch.arange(first, first + rows * cols).view(rows, cols)
        first += rows * cols
    return wholes


def whole_matrices(stage: Stage, wholes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every logical matrix by name, from whole parameters."""
    found = {}
    for entry in stage.entries:
        whole = wholes[entry.name]
        if stage.split == "parts" and entry.packing.rows is RowPacking.BLOCKS:
            for part, half in zip(("gate", "up"), whole.chunk(2), strict=True):
                found[f"{entry.name}[{part}]"] = half
        elif stage.split == "parts" and entry.packing.rows is RowPacking.UNITS:
            pieces = whole.view(-1, entry.packing.rows_per_unit, entry.shape[1]).split(
                [part.rows for part in entry.packing.parts], dim=1
            )
            for part, piece in zip(entry.packing.parts, pieces, strict=True):
                found[f"{entry.name}[{part.name}]"] = piece.reshape(-1, entry.shape[1])
        else:
            found[entry.name] = whole
    return found


def stored(stage: Stage, wholes: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """This rank's flat range of every parameter, empty where it owns nothing."""
    dp_rank, tp_rank = divmod(rank, stage.group.tp)
    ranges = {p.name: p.ranges[dp_rank] for p in stage.parameters}
    return {
        e.name: shard(e, wholes[e.name], stage.group.tp, tp_rank)[slice(*ranges[e.name])].clone()
        for e in stage.entries
    }
