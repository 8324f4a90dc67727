"""Matrices split among several owners, measured costs and nodes, on real megatron-core."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.config import MatrixConfig
from megatron_muon.integration import support
from megatron_muon.linalg import coefficient_schedule
from megatron_muon.placement import (
    FLOPS_PER_BYTE,
    FLOPS_PER_NETWORK_BYTE,
    CostTable,
    MeasuredCost,
    load_cost_table,
    write_cost_table,
)
from tests.distributed.training import RATES, Run, build, errors_against_reference, merged, train
from tests.ranks import RankFailed

Ranks = Callable[..., list[Any]]

SPLIT = MatrixConfig(min_dim=1, split_ranks=4, split_min_gflop=0.0, rules=RATES)
# Few matrices on many ranks: the largest are above the mean load of an owner.
RUN = Run(
    tp=2,
    dp=4,
    steps=4,
    overlap=True,
    sequence_parallel=True,
    config=SPLIT,
    options=(("layers", 1),),
)
RUNS = {
    "dense": RUN,
    "one TP rank": replace(RUN, tp=1, sequence_parallel=False),
    "experts": replace(RUN, model="moe", dp=4, ep=1),
    "two stages": replace(RUN, dp=2, pp=2, options=(("layers", 2),)),
    "two nodes": replace(RUN, config=replace(SPLIT, ranks_per_node=2)),
}


@pytest.fixture(autouse=True)
def messages_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing as small as here would be split."""
    monkeypatch.setitem(FLOPS_PER_BYTE, "cpu", 0)
    monkeypatch.setitem(FLOPS_PER_NETWORK_BYTE, "cpu", 0)


def _split_ranks(rank: int, run: Run) -> list[tuple[int, ...]]:
    _, optimizer, _ = build(run)
    return [
        scheme.ranks
        for child in optimizer.chained_optimizers
        for scheme in child.plan.schemes
        if len(scheme.ranks) > 1
    ]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "dense" else [pytest.mark.slow]) for n in RUNS]
)
def test_every_update_equals_the_reference(ranks: Ranks, name: str) -> None:
    run = RUNS[name]
    split = [found for theirs in ranks(run.world_size, _split_ranks, run) for found in theirs]
    # Of two nodes all ranks, of one node some.
    assert max(map(len, split)) == run.config.split_ranks
    results = ranks(run.world_size, train, run)
    found = errors_against_reference(
        run, merged(results, run), list(coefficient_schedule("quintic", 5))
    )
    assert found.matrix < 1e-5
    assert found.scalar < 2e-4
    for result in results:
        for counters, load in result["counters"]:
            assert counters.sent_bytes == load.sent_bytes
            assert counters.peak_buffer_bytes <= load.peak_buffer_bytes
            # Both lanes are planned at their peaks at once, which a step need not reach.
            assert load.peak_buffer_bytes < 1.5 * counters.peak_buffer_bytes


def test_the_startup_table_lists_split_matrices(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks(RUN.world_size, _split_ranks, RUN)
    message = capfd.readouterr().out
    assert " split among " in message


def test_nothing_is_split_unless_requested(
    ranks: Ranks, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A threshold goes with more ranks only; here it makes a tiny matrix worth the advice.
    monkeypatch.setattr(support, "stray_setting_problems", lambda settings: [])
    run = replace(RUN, config=replace(SPLIT, split_ranks=1))
    assert not any(ranks(run.world_size, _split_ranks, run))
    message = capfd.readouterr().out
    assert "dominates the balance; --dmuon-split-ranks auto would split it" in message


def _owners(rank: int, run: Run, table: Path | None, per_node: int | None) -> Any:
    config = replace(run.config, cost_table=None if table is None else str(table))
    _, optimizer, _ = build(replace(run, config=replace(config, ranks_per_node=per_node)))
    plan = optimizer.chained_optimizers[0].plan
    return plan.costs, plan.flops, plan.ranks_per_node


def _table(path: Path, nanoseconds: int, **changes: Any) -> Path:
    about = {"device": "one", "dtype": "float32", "steps": 5} | changes
    measured = MeasuredCost(short=32, long=32, batch=1, nanoseconds=nanoseconds)
    write_cost_table(CostTable(**about, measured=(measured,)), path)
    return path


def test_owners_are_balanced_by_measured_times(ranks: Ranks, tmp_path: Path) -> None:
    run = replace(RUN, dp=1, config=MatrixConfig(min_dim=1))
    table = _table(tmp_path / "costs.json", 1000)
    (costs, flops, _), _ = ranks(2, _owners, run, table, None)
    measured = load_cost_table(table).measured[0]
    square = flops[costs.index(1000)]
    for cost, operations in zip(costs, flops, strict=True):
        assert cost == measured.nanoseconds * operations // square
    (plain, same, _), _ = ranks(2, _owners, run, None, None)
    assert plain == flops == same


def test_a_table_of_another_iteration_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    run = replace(RUN, dp=1)
    table = _table(tmp_path / "costs.json", 1000, dtype="bfloat16")
    with pytest.raises(RankFailed) as failed:
        ranks(2, _owners, run, table, None)
    assert len(failed.value.reports) == 2
    for report in failed.value.reports.values():
        assert "was measured in bfloat16 with 5 steps, and this run computes in float32" in report
        assert "--cost-dtype float32 --cost-steps 5" in report


def _table_of_this_rank(rank: int, run: Run, folder: Path) -> None:
    os.chdir(folder / str(rank))
    _owners(rank, run, Path("costs.json"), None)


def test_another_table_on_one_rank_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Same path on every rank, other content, as on disks of their own."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        _table(tmp_path / str(rank) / "costs.json", 1000 + rank)
    with pytest.raises(RankFailed) as failed:
        ranks(2, _table_of_this_rank, replace(RUN, dp=1), tmp_path)
    assert len(failed.value.reports) == 2
    for report in failed.value.reports.values():
        assert "made another plan than rank 0" in report
        assert "the content of --dmuon-cost-table differ between ranks" in report


def _nodes(rank: int, message: str, per_node: int | None) -> int:
    os.environ["LOCAL_WORLD_SIZE"] = message
    return int(_owners(rank, RUN, None, per_node)[2])


@pytest.mark.parametrize(
    ("message", "per_node", "expected"),
    [("8", None, 8), ("4", None, 4), ("?", None, 8), ("4", 2, 2), ("8", 3, 3), ("2", 16, 8)],
)
def test_nodes_come_from_the_flag_or_from_torchrun(
    ranks: Ranks, message: str, per_node: int | None, expected: int
) -> None:
    assert set(ranks(8, _nodes, message, per_node)) == {expected}
