"""Orth-Dion on prescribed whole matrices, sharded to any layout: the rule alone, no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_muon.exchange import Exchange, check_agreement
from megatron_muon.matrices import logical_matrices
from megatron_muon.optim import MatrixRange, OrthDionRule
from megatron_muon.placement import ExchangeGroup, Plan, make_plan
from megatron_muon.placement.schemes import FactorChoice
from tests.distributed.late_delivery import LateDelivery
from tests.distributed.prescribed import (
    Setting,
    Whole,
    gradient,
    initial,
    rates,
    shard,
    sharded_parameters,
)


@dataclass(frozen=True, kw_only=True)
class DionSetting(Setting):
    """One layout and one Orth-Dion rule."""

    steps: int = 12
    scale_mode: str = "shape_scaling"
    rank_fraction: float = 0.25
    rank_multiple_of: int = 1
    right_factor: str = "qr"
    scheme: FactorChoice = "auto"
    lr: float = 0.02
    momentum: float = 0.95
    rank_compensation: bool = False
    exchange_dtype: torch.dtype | None = None


def rule_of(setting: DionSetting) -> OrthDionRule:
    """The rule of a setting."""
    return OrthDionRule(
        rank_fraction=setting.rank_fraction,
        rank_multiple_of=setting.rank_multiple_of,
        momentum=setting.momentum,
        right_factor=setting.right_factor,
        scale_mode=setting.scale_mode,
        extra_scale_factor=0.5,
        rank_compensation=setting.rank_compensation,
        state_dtype=setting.dtype,
        exchange_dtype=setting.exchange_dtype or setting.dtype,
    )


def factor_plan_of(setting: DionSetting, entries: list[Whole]) -> Plan:
    """The plan of a setting."""
    rule = rule_of(setting)
    parameters = sharded_parameters(entries, tp=setting.tp, dp=setting.dp, bucket=setting.bucket)
    return make_plan(
        group=ExchangeGroup(tp=setting.tp, dp=setting.dp),
        parameters=parameters,
        matrices=[m for p in parameters for m in logical_matrices(p, split=setting.split)],
        method=rule.method(setting.scheme),
        buffer_bytes=int(setting.buffer_mb * 2**20),
    )


def run_dion_rank(
    rank: int,
    setting: DionSetting,
    entries: list[Whole],
    gradient_of: Any = gradient,
) -> dict[str, Any]:
    """Train on one rank; returns its final ranges, its factors and the counters of every step."""
    import torch.distributed as dist

    plan, rule = factor_plan_of(setting, entries), rule_of(setting)
    by_name = {entry.name: entry for entry in entries}
    tp_rank, dp_rank = rank % setting.tp, rank // setting.tp
    device = torch.device("cpu")
    check_agreement(digest=plan.digest, expected_rank=rank, group=dist.group.WORLD, device=device)
    exchange = Exchange(
        plan,
        rank=rank,
        transport=LateDelivery(dist.group.WORLD),
        dtypes=rule.dtypes,
        device=device,
    )

    def mine(name: str, whole: torch.Tensor, owned: tuple[int, int]) -> torch.Tensor:
        return shard(by_name[name], whole, setting.tp, tp_rank)[owned[0] : owned[1]].clone()

    state: dict[str, MatrixRange] = {}
    for parameter in plan.parameters:
        owned = parameter.ranges[dp_rank]
        if owned[1] > owned[0]:
            master = mine(parameter.name, initial(by_name[parameter.name], setting.dtype), owned)
            lr, weight_decay = rates(setting, parameter.name)
            state[parameter.name] = MatrixRange(
                master=master,
                momentum=torch.zeros_like(master),
                grad=torch.empty_like(master),
                lr=lr,
                weight_decay=weight_decay,
            )
    factors = rule.first_state(plan, rank, device)
    counters = []
    for step in range(setting.steps):
        for parameter in plan.parameters:
            if parameter.name in state:
                whole = gradient_of(by_name[parameter.name], step, setting.dtype)
                state[parameter.name].grad = mine(parameter.name, whole, parameter.ranges[dp_rank])
        rule.step([state.get(p.name) for p in plan.parameters], exchange, factors)
        counters.append(exchange.counters)
    return {
        "masters": {name: r.master for name, r in state.items()},
        "momenta": {name: r.momentum for name, r in state.items()},
        "factors": factors,
        "counters": counters,
    }
