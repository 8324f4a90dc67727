"""The table printed at start, for small stages whose numbers can be counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_muon.config import MatrixConfig
from megatron_muon.integration.model_parameters import ModelParameter
from megatron_muon.integration.report import RoutedParameter, adam_traffic_bytes, startup_report
from megatron_muon.matrices import ParameterFacts, RowPacking, Rule, route
from megatron_muon.optim import MuonRule
from megatron_muon.placement import Plan
from tests.distributed.prescribed import Whole
from tests.unit.placement.stages import stage_of


def _routed(name: str, shape: tuple[int, ...], **facts: bool) -> RoutedParameter:
    known = {
        "is_linear_weight": len(shape) == 2,
        "is_embedding_or_output": False,
        "is_router": False,
        "is_tied": False,
        **facts,
    }
    described = ParameterFacts(name=name, ndim=len(shape), **known)
    rule = Rule(pattern=name)
    return RoutedParameter(
        parameter=ModelParameter(
            tensor=torch.nn.Parameter(torch.empty(shape)),
            facts=described,
            tp_dim=None,
            packing=RowPacking.WHOLE,
            part_rows=(),
            is_expert=False,
        ),
        route=route(described, rule),
        rule=rule,
        split=True,
    )


def _child(plan: Plan | None, *, dp: int = 1, **rule: Any) -> Any:
    """What the report reads of a ``MatrixDistributedOptimizer``: 2000 elements, fp32 and bf16."""
    values: dict[str, Any] = {
        "momentum": 0.9,
        "nesterov": True,
        "schedule": ((1.0, 2.0, 3.0),) * 5,
        "scale_mode": "spectral",
        "extra_scale_factor": 0.2,
        "compute_dtype": torch.bfloat16,
    }
    buffer = SimpleNamespace(numel=2000, grad_dtype=torch.float32, param_dtype=torch.bfloat16)
    return SimpleNamespace(
        plan=plan,
        rule=MuonRule(**(values | rule)),
        data_parallel_group=SimpleNamespace(size=lambda: dp),
        buffers=[buffer, buffer],
    )


def _report(routed: Sequence[RoutedParameter], *children: Any) -> list[str]:
    optimizer = SimpleNamespace(chained_optimizers=list(children))
    return startup_report(MatrixConfig(exchange_buffer_mb=64.0), routed, optimizer).splitlines()


def _cells(lines: Sequence[str], first: str) -> list[list[str]]:
    """Rows of the table whose first column starts so, cut at two spaces or more."""
    return [
        [cell.strip() for cell in line.split("  ") if cell.strip()]
        for line in lines
        if line.strip().startswith(first)
    ]


ENTRIES = [
    *(Whole(name=f"layers.{i}.proj.weight", shape=(16, 8), tp_dim=1) for i in range(12)),
    *(Whole(name=f"layers.{i}.fc2.weight", shape=(8, 8), tp_dim=0) for i in range(2)),
    *(Whole(name=f"layers.{i}.down.weight", shape=(4, 8), tp_dim=None) for i in range(2)),
]
ROUTED = [
    *(_routed(f"layers.{i}.proj.weight", (16, 8)) for i in range(12)),
    _routed("embedding.weight", (100, 8), is_embedding_or_output=True),
    _routed("norm.weight", (8,)),
    _routed("norm.bias", (8,)),
]


def test_every_parameter_is_counted_with_the_reason() -> None:
    lines = _report(ROUTED, _child(None))
    assert lines[0].startswith("megatron_muon dmuon: parameters of this pipeline stage")
    assert _cells(lines, "dmuon") == [["dmuon", "12", "1,536", "linear weight"]]
    assert _cells(lines, "adam") == [
        ["adam", "1", "800", "embedding or output layer"],
        ["adam", "2", "16", "norm or bias"],
    ]


def test_equal_matrices_of_all_layers_are_one_row() -> None:
    lines = _report(ROUTED, _child(stage_of(ENTRIES, tp=2, dp=1).plan()))
    assert _cells(lines, "layers.") == [
        ["layers.*.down.weight", "4x8", "2", "copy on every TP rank"],
        ["layers.*.fc2.weight", "8x8", "2", "rows"],
        ["layers.*.proj.weight", "16x8", "12", "columns"],
    ]


def test_nothing_is_cut_at_tp_1() -> None:
    lines = _report(ROUTED, _child(stage_of(ENTRIES, tp=1, dp=2).plan()))
    assert {row[-1] for row in _cells(lines, "layers.")} == {"not cut"}


def test_parts_of_a_packed_parameter_have_rows_of_their_own() -> None:
    entries = [
        Whole(
            name=f"layers.{i}.fc1.weight",
            shape=(32, 8),
            tp_dim=0,
            packing=RowPacking.GATE_UP,
        )
        for i in range(3)
    ]
    lines = _report(ROUTED, _child(stage_of(entries, tp=2, dp=1).plan()))
    assert _cells(lines, "layers.") == [
        ["layers.*.fc1.weight[gate]", "16x8", "3", "rows"],
        ["layers.*.fc1.weight[up]", "16x8", "3", "rows"],
    ]


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_update_is_described(nesterov: bool) -> None:
    lines = _report(ROUTED, _child(stage_of(ENTRIES, tp=2, dp=1).plan(), nesterov=nesterov))
    (line,) = (line for line in lines if line.startswith("update: "))
    assert line == (
        "update: spectral scale x 0.2, 5 Newton-Schulz steps (quintic), computed in bfloat16, "
        "exchanged in fp32; momentum 0.9" + (" (Nesterov)" if nesterov else "")
    )


def test_owners_waves_and_bytes_are_those_of_the_plan() -> None:
    entries = [Whole(name=f"layers.{i}.w", shape=(512, 256), tp_dim=0) for i in range(12)]
    plan = stage_of(entries, tp=2, dp=3).plan()
    lines = _report(ROUTED, _child(plan, dp=3))
    (owners,) = (line for line in lines if " owners (" in line)
    assert owners.startswith("12 matrices, 6 owners (TP 2 x DP 3), waves: 1; owner load max/mean")
    assert "max/mean 1.000, best possible 1.000; busiest owner has 2 matrices" in owners
    assert owners.endswith(f"{2 * 512 * 256 * 256 / 1e9:.3g} GFLOP a step")
    (exchange,) = (line for line in lines if line.startswith("exchange: "))
    sent = max(load.sent_bytes for load in plan.loads)
    peak = max(load.peak_buffer_bytes for load in plan.loads)
    # The ring over 3 ranks: 2/3 of 4000 elements of 4 + 2 bytes.
    assert exchange == (
        f"exchange: at most {sent / 2**20:.2f} MiB sent by a rank and step "
        f"({sent / 16_000:.2f} x what AdamW's reduce and gather send); buffers at most "
        f"{peak / 2**20:.2f} MiB of --dmuon-exchange-buffer-mb 64"
    )
    assert not any("warning" in line for line in lines)


@pytest.mark.parametrize(("dp", "expected"), [(1, 0), (2, 12_000), (3, 16_000), (4, 18_000)])
def test_traffic_of_adam_is_the_rings(dp: int, expected: int) -> None:
    assert adam_traffic_bytes(_child(None, dp=dp)) == expected


def test_without_data_parallel_ranks_nothing_is_compared_with_adam() -> None:
    lines = _report(ROUTED, _child(stage_of(ENTRIES, tp=2, dp=1).plan()))
    (exchange,) = (line for line in lines if line.startswith("exchange: "))
    assert "AdamW" not in exchange


def test_idle_owners_are_warned_of() -> None:
    lines = _report(ROUTED, _child(stage_of(ENTRIES[:5], tp=2, dp=4).plan(), dp=4))
    assert "warning: 3 of 8 owners have no matrix, there are fewer matrices than ranks" in lines


def test_a_matrix_that_dominates_is_warned_of() -> None:
    """Costs 64·8·8 and seven times 8·8·8 on two ranks: 8 of 15 units, 16/15 of the mean."""
    entries = [
        Whole(name="layers.0.large", shape=(64, 8), tp_dim=0),
        *(Whole(name=f"layers.{i}.w", shape=(8, 8), tp_dim=0) for i in range(1, 8)),
    ]
    lines = _report(ROUTED, _child(stage_of(entries, tp=2, dp=1).plan()))
    assert [line for line in lines if line.startswith("warning")] == [
        (
            "warning: layers.0.large (64x8) alone takes 1.07 x the mean load of an owner and "
            "dominates the balance"
        )
    ]
    lines = _report(ROUTED, _child(stage_of([*entries, ENTRIES[0]], tp=2, dp=1).plan()))
    assert not any("warning" in line for line in lines)


def test_a_stage_without_matrices_says_so() -> None:
    adam = [entry for entry in ROUTED if entry.route.optimizer == "adam"]
    lines = _report(adam, _child(stage_of([], tp=2, dp=2).plan()))
    assert lines[-1] == "no parameter goes to the matrix optimizer: all are trained with Adam"
    assert not any("owners" in line or "update:" in line for line in lines)
