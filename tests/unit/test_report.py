"""The start-up table of small stages, with numbers counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_muon.config import MatrixConfig
from megatron_muon.integration.model_parameters import ModelParameter
from megatron_muon.integration.plan_warnings import family_name
from megatron_muon.integration.report import (
    _gathered,
    adam_traffic_bytes,
    startup_report,
    summarize,
)
from megatron_muon.integration.routes import RoutedParameter
from megatron_muon.matrices import WHOLE, Packing, ParameterFacts, Rule, SplitMode, route
from megatron_muon.optim import MuonRule
from megatron_muon.placement import CostTable, MeasuredCost, Plan, write_cost_table
from tests.distributed.prescribed import Whole, gate_up
from tests.unit.placement.stages import stage_of

SETTINGS = MatrixConfig(exchange_buffer_mb=64.0, min_dim=1, split_min_gflop=0.0)
BUFFER = SimpleNamespace(
    numel=2000,
    grad_dtype=torch.float32,
    param_dtype=torch.bfloat16,
    param_data=torch.empty(0, dtype=torch.bfloat16),
)


def _routed(
    name: str,
    shape: tuple[int, ...],
    *,
    packing: Packing = WHOLE,
    split: SplitMode = "none",
    **facts: bool,
) -> RoutedParameter:
    known = {
        "is_linear_weight": len(shape) == 2,
        "is_embedding_or_output": False,
        "is_router": False,
        "is_tied": False,
        **facts,
    }
    described = ParameterFacts(name=name, shape=shape, **known)
    rule = Rule(pattern=name)
    return RoutedParameter(
        parameter=ModelParameter(
            tensor=torch.nn.Parameter(torch.empty(shape)),
            facts=described,
            tp_dim=None,
            tp=1,
            packing=packing,
            family="",
            is_expert=False,
            stack=None,
        ),
        route=route(described, rule, min_dim=1),
        rule=rule,
        split=split,
    )


def _report(
    entries: Sequence[Whole],
    *,
    tp: int = 2,
    dp: int = 1,
    extra: Sequence[RoutedParameter] = (),
    settings: MatrixConfig = SETTINGS,
    groups: int = 1,
    **rule: Any,
) -> list[str]:
    """Lines for the entries and further parameters; 2 buffers of 2000 elements, fp32 and bf16."""
    plan = _plan(entries, tp=tp, dp=dp)
    values: dict[str, Any] = {
        "momentum": 0.9,
        "nesterov": True,
        "schedule": ((1.0, 2.0, 3.0),) * 5,
        "scale_mode": "spectral",
        "extra_scale_factor": 0.2,
        "compute_dtype": torch.bfloat16,
    }
    routed = [
        _routed(e.name, e.shape, packing=e.packing, split="parts" if e.packing.parts else "none")
        for e in entries
    ]
    summary = summarize(
        settings,
        plan,
        MuonRule(coefficient_type="quintic", **(values | rule)),
        [*routed, *extra],
        domain="dense",
        buffers=[BUFFER, BUFFER],
    )
    return startup_report(settings, [summary] * groups).splitlines()


def _plan(entries: Sequence[Whole], *, tp: int, dp: int) -> Plan:
    return stage_of(entries, tp=tp, dp=dp).plan()


def _cells(lines: Sequence[str], first: str) -> list[list[str]]:
    """Return rows whose first column has this prefix, split at two spaces or more."""
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
OTHERS = [
    _routed("embedding.weight", (100, 8), is_embedding_or_output=True),
    _routed("norm.weight", (8,)),
    _routed("norm.bias", (8,)),
]


def test_every_parameter_is_counted_with_the_reason() -> None:
    lines = _report(ENTRIES, extra=OTHERS)
    assert lines[0] == "megatron_muon dmuon: parameters of the model"
    assert _cells(lines, "dmuon") == [["dmuon", "16", "1,728", "linear weight"]]
    assert _cells(lines, "adam") == [
        ["adam", "1", "800", "embedding or output layer"],
        ["adam", "2", "16", "norm or bias"],
    ]


def test_equal_matrices_of_all_layers_are_one_row() -> None:
    """Shape, count, split, cut, scale (0.2 x sqrt of the longer side), owners."""
    assert _cells(_report(ENTRIES), "layers.") == [
        [
            "layers.*.down.weight",
            "4x8",
            "2",
            "-",
            "copy on every TP rank",
            "0.5657",
            "2 of 2 ranks",
        ],
        ["layers.*.fc2.weight", "8x8", "2", "-", "rows", "0.5657", "2 of 2 ranks"],
        ["layers.*.proj.weight", "16x8", "12", "-", "columns", "0.8", "2 of 2 ranks"],
    ]


def test_exchange_groups_are_summed_and_listed_once() -> None:
    lines = _report(ENTRIES, groups=3)
    assert [row[2] for row in _cells(lines, "layers.")] == ["6", "6", "36"]
    assert {row[-1] for row in _cells(lines, "layers.")} == {"6 of 6 ranks"}
    assert sum("owner load" in line for line in lines) == 1
    assert any(line.endswith("(the same in 3 exchange groups)") for line in lines)


def test_nothing_is_cut_at_tp_1() -> None:
    lines = _report(ENTRIES, tp=1, dp=2)
    assert {row[4] for row in _cells(lines, "layers.")} == {"not cut"}


def test_parts_of_a_packed_parameter_have_rows_of_their_own() -> None:
    entries = [
        Whole(name=f"layers.{i}.fc1.weight", shape=(32, 8), tp_dim=0, packing=gate_up(16))
        for i in range(3)
    ]
    lines = _report(entries)
    assert [row[:5] for row in _cells(lines, "layers.")] == [
        ["layers.*.fc1.weight[gate]", "16x8", "3", "part of gate, up", "rows"],
        ["layers.*.fc1.weight[up]", "16x8", "3", "part of gate, up", "rows"],
    ]


def test_experts_and_heads_of_any_number_are_one_family() -> None:
    assert family_name("layers.3.experts.linear_fc1.weight17") == (
        "layers.*.experts.linear_fc1.weight*"
    )
    assert family_name("a.weight12[gate]") == "a.weight*[gate]"
    assert family_name("a.linear_fc1.weight[12.gate]") == "a.linear_fc1.weight[*.gate]"
    assert family_name("a.linear_qkv.weight[q31]") == "a.linear_qkv.weight[q*]"
    assert family_name("layers.0.experts.local_experts.5.linear_fc1.weight") == (
        "layers.*.experts.local_experts.*.linear_fc1.weight"
    )


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_update_is_described(nesterov: bool) -> None:
    lines = _report(ENTRIES, nesterov=nesterov)
    (line,) = (line for line in lines if line.startswith("update: "))
    assert line == (
        "update: spectral scale x 0.2, 5 Newton-Schulz steps (quintic), computed in bfloat16, "
        "exchanged in float32; momentum 0.9" + (" (Nesterov)" if nesterov else "")
    )


def test_owners_waves_and_bytes_are_those_of_the_plan() -> None:
    entries = [Whole(name=f"layers.{i}.w", shape=(512, 256), tp_dim=0) for i in range(12)]
    loads = _plan(entries, tp=2, dp=3).loads
    lines = _report(entries, dp=3)
    (line,) = (line for line in lines if " owners, " in line)
    assert line.startswith("dense, TP 2 x DP 3: 12 matrices, 6 owners, waves: 1; owner load")
    assert (
        "max/mean 1.000, best possible 1.000 (by operations); busiest owner has 2 matrices" in line
    )
    assert f"{2 * 512 * 256 * 256 / 1e9:.3g} GFLOP a step" in line
    sent = max(load.sent_bytes for load in loads)
    peak = max(load.peak_buffer_bytes for load in loads)
    # The ring over 3 ranks: 2/3 of 4000 elements of 4 + 2 bytes.
    assert line.endswith(
        f"exchange: at most {sent / 2**20:.2f} MiB sent by a rank and step "
        f"({sent / 16_000:.2f} x what AdamW's reduce and gather send); memory of a step at most "
        f"{peak / 2**20:.2f} MiB of --matrix-exchange-buffer-mb 64 (1 wave of whole matrices, 1 at "
        "once; the largest matrix, 512x256, is sent in 0.50 MiB); Megatron gathers weights in 0.01 "
        "MiB bfloat16; momenta take at most 1.00 MiB of a rank (float32)"
    )
    # A third of twelve matrices, of which a TP rank has half.
    assert 12 * 512 * 256 // 2 // 3 * 4 == 2**20
    (line,) = (
        line for line in _report(entries, dp=3, momentum_dtype=torch.bfloat16) if "owners, " in line
    )
    assert line.endswith("momenta take at most 0.50 MiB of a rank (bfloat16)")
    assert not any("warning" in line for line in lines)
    lines = _report(entries, dp=3, settings=replace(SETTINGS, exchange_buffer_mb=0.3000001))
    assert any("of --matrix-exchange-buffer-mb 0.3000001 (" in line for line in lines)


@pytest.mark.parametrize(("dp", "expected"), [(1, 0), (2, 12_000), (3, 16_000), (4, 18_000)])
def test_traffic_of_adam_is_the_rings(dp: int, expected: int) -> None:
    assert adam_traffic_bytes([BUFFER, BUFFER], dp) == expected


def test_without_data_parallel_ranks_nothing_is_compared_with_adam() -> None:
    (line,) = (line for line in _report(ENTRIES) if "exchange: " in line)
    assert "AdamW" not in line


def test_idle_owners_are_warned_of() -> None:
    lines = _report(ENTRIES[:5], dp=4)
    assert (
        "warning: 3 of 8 dense owners have no matrix, there are fewer matrices than ranks" in lines
    )


def test_thin_parts_are_warned_of() -> None:
    settings = MatrixConfig(min_dim=5)
    lines = _report(ENTRIES, settings=settings)
    (line,) = (line for line in lines if line.startswith("warning"))
    assert line.startswith("warning: a side shorter than --matrix-min-dim 5, and ")
    assert line.endswith(" by a rule: layers.*.down.weight (4x8)")


def test_a_matrix_that_dominates_is_warned_of() -> None:
    """Costs 64·8·8 and seven times 8·8·8 on two ranks: 8 of 15 units, 16/15 of the mean."""
    entries = [
        Whole(name="layers.0.large", shape=(64, 8), tp_dim=0),
        *(Whole(name=f"layers.{i}.w", shape=(8, 8), tp_dim=0) for i in range(1, 8)),
    ]
    words = (
        "warning: layers.0.large (64x8) alone takes 1.07 x the mean load of an owner and dominates "
        "the balance"
    )
    for ranks, advice in (
        (1, "; --dmuon-split-ranks auto would split it among owners where that is faster"),
        (None, ""),
    ):
        lines = _report(entries, settings=replace(SETTINGS, split_ranks=ranks))
        assert [line for line in lines if line.startswith("warning")] == [words + advice]
    assert not any("warning" in line for line in _report([*entries, ENTRIES[0]]))


def test_shapes_that_were_not_measured_are_named_with_the_command(tmp_path: Path) -> None:
    """The command also measures the shapes of the table, which it rewrites."""
    path = tmp_path / "costs.json"
    entries = [Whole(name=f"layers.{i}.w", shape=(16, 8), tp_dim=0) for i in range(4)]
    settings = replace(SETTINGS, cost_table=str(path))

    def warnings_with(*shapes: tuple[int, int]) -> list[str]:
        measured = tuple(
            MeasuredCost(short=short, long=long, batch=1, nanoseconds=9) for short, long in shapes
        )
        about = {"device": "one", "dtype": "bfloat16", "steps": 5}
        write_cost_table(CostTable(**about, measured=measured), path)
        return [line for line in _report(entries, settings=settings) if line.startswith("warning")]

    assert warnings_with((8, 16)) == []
    assert warnings_with((4, 4)) == [
        (
            f"warning: --dmuon-cost-table {path} lacks 8x16, taken at the rate of what is nearest "
            "in operations; measure with python -m megatron_muon.benchmark --cost-table "
            f"{path} --cost-shapes 4x4,8x16 --cost-dtype bfloat16 --cost-steps 5"
        )
    ]


def test_a_model_without_matrices_is_reported() -> None:
    lines = _report([], dp=2, extra=OTHERS)
    assert lines[-1] == "no parameter goes to the matrix optimizer: all are trained with Adam"
    assert not any("owners" in line or "update:" in line for line in lines)


@pytest.mark.parametrize(
    ("kept", "travels", "message", "sent"),
    [
        (torch.uint8, torch.uint8, "fp8", 2000 * (4 + 1)),
        (torch.uint8, torch.bfloat16, "bfloat16 for mxfp8", 2000 * (4 + 2)),
        (torch.float16, torch.float16, "float16", 2000 * (4 + 2)),
    ],
)
def test_bytes_of_the_parameter_gather_are_communicated_bytes(
    kept: torch.dtype, travels: torch.dtype, message: str, sent: int
) -> None:
    buffer = SimpleNamespace(
        numel=2000,
        grad_dtype=torch.float32,
        param_dtype=kept,
        param_data=torch.empty(0, dtype=travels),
    )
    assert adam_traffic_bytes([buffer], dp=2) == sent // 2
    assert _gathered([buffer], dp=2).endswith(f"gathers weights in 0.00 MiB {message}")
    assert _gathered([buffer], dp=1) == ""
