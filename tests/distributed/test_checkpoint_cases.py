"""Checkpoints with different layers, vocabulary padding, or bf16; and broken code.

What a load gives is compared bit by bit with the whole tensors of the saved run, and every check
is shown to see what it is for: the code is broken on purpose, and the check must go red.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon import install
from megatron_muon.config import MatrixConfig
from megatron_muon.matrices import Rule
from tests.distributed.checkpointing import (
    Whole,
    assert_holds,
    content,
    load,
    poison,
    save,
    whole_state,
)
from tests.distributed.test_any_layout import (
    DMUON,
    ORTH_DION,
    all_pairs,
    one_step,
    run_at,
)
from tests.distributed.training import Run, build, scheduler
from tests.ranks import RankFailed
from tests.tiny_models import Layout

Ranks = Callable[..., list[Any]]

ONE_LAYER = "decoder.layers.1.mlp.linear_fc1.weight"
TO_ADAM = MatrixConfig(min_dim=1, rules=(Rule(pattern=ONE_LAYER, optimizer="adam"),))


def _save(rank: int, run: Run, folder: Path, kind: str, to_adam: str) -> Whole:
    chunks, optimizer, schedule = build(run)
    for step in range(2):
        one_step(chunks, optimizer, schedule, step, run)
    save(chunks, optimizer, schedule, folder, kind)
    return whole_state(chunks, optimizer, to_adam)


def saved(
    ranks: Ranks, run: Run, folder: Path, kind: str = "fully_reshardable", to_adam: str = ""
) -> Whole:
    """Run two steps and save; return whole tensors of its content."""
    states = ranks(run.world_size, _save, run, folder, kind, to_adam)
    return {key: tensor for state in states for key, tensor in state.items()}


def _holds(
    rank: int,
    run: Run,
    folder: Path,
    whole: Whole,
    break_code: Callable[[], None],
    *,
    kind: str = "fully_reshardable",
    to_adam: str = "",
    lose_weights: bool = False,
) -> None:
    """Load, compare, and run one step from the loaded state."""
    chunks, optimizer, _ = build(run)
    schedule = scheduler(optimizer, run)
    poison(chunks, optimizer)
    break_code()
    load(chunks, optimizer, schedule, folder, kind, lose_weights=lose_weights)
    assert_holds(chunks, optimizer, whole, to_adam)
    one_step(chunks, optimizer, schedule, 2, run)


def nothing() -> None:
    """Break nothing."""


# ---- what differs between the layers and the runs ---------------------------------------------


@pytest.mark.parametrize(
    "kind", ["dp_reshardable", pytest.param("fully_reshardable", marks=pytest.mark.slow)]
)
def test_a_rule_on_one_layer_is_saved_and_loaded(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Layer 1 has Adam's two states, and the others of the same stacked key have a momentum."""
    run = run_at(Layout(tp=2, dp=2), config=TO_ADAM)
    whole = saved(ranks, run, tmp_path / "a", kind, ONE_LAYER)
    assert ("exp_avg", ONE_LAYER) in whole
    assert ("momentum_buffer", ONE_LAYER.replace("1", "0", 1)) in whole
    for layout in (Layout(pp=2), Layout(dp=3)):
        elsewhere = run_at(layout, config=TO_ADAM)
        check = functools.partial(_holds, kind=kind, to_adam=ONE_LAYER)
        ranks(elsewhere.world_size, check, elsewhere, tmp_path / "a", whole, nothing)


@pytest.mark.parametrize(("before", "after"), [(TO_ADAM, DMUON), (DMUON, TO_ADAM)])
def test_a_rule_added_or_removed_on_one_layer_is_reported(
    ranks: Ranks, tmp_path: Path, before: MatrixConfig, after: MatrixConfig
) -> None:
    to_adam = ONE_LAYER if before is TO_ADAM else ""
    whole = saved(ranks, run_at(Layout(), config=before), tmp_path / "a", to_adam=to_adam)
    with pytest.raises(RankFailed) as failed:
        ranks(2, _holds, run_at(Layout(pp=2), config=after), tmp_path / "a", whole, install)
    assert len(failed.value.reports) == 2
    for report in failed.value.reports.values():
        assert "CheckpointMismatchError" in report
        assert "--matrix-rule names single layers in one of the two runs only" in report


@pytest.mark.parametrize(("then", "now"), [(72, 76), (76, 72)])
def test_another_padding_of_the_vocabulary(
    ranks: Ranks, tmp_path: Path, then: int, now: int
) -> None:
    """Megatron pads it to a multiple of the tensor-parallel size, and reads new rows as zeros."""
    saving = run_at(Layout(dp=2), config=DMUON, options=(("vocab", then),))
    whole = saved(ranks, saving, tmp_path / "a")
    padded = {key: t for key, t in whole.items() if len(t) == then}
    assert {state for state, _ in padded} == {"fp32_param", "exp_avg", "exp_avg_sq"}
    for key, tensor in padded.items():
        whole[key] = torch.zeros(now, *tensor.shape[1:])
        whole[key][:then] = tensor[:now]
    loading = run_at(Layout(tp=4), config=DMUON, options=(("vocab", now),))
    ranks(4, _holds, loading, tmp_path / "a", whole, nothing)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(DMUON, id="dmuon"),
        pytest.param(ORTH_DION, id="orth_dion", marks=pytest.mark.slow),
    ],
)
def test_bf16_weights_are_their_masters_on_every_replica(
    ranks: Ranks, tmp_path: Path, config: MatrixConfig
) -> None:
    """For any content of the model part of the checkpoint."""
    run = run_at(Layout(tp=2, dp=2), config=config, dtype=torch.bfloat16)
    whole = saved(ranks, run, tmp_path / "a")
    for layout in (Layout(tp=2, dp=2), Layout(dp=3)):
        elsewhere = run_at(layout, config=config, dtype=torch.bfloat16)
        check = functools.partial(_holds, lose_weights=True)
        ranks(elsewhere.world_size, check, elsewhere, tmp_path / "a", whole, nothing)


@pytest.mark.parametrize(
    ("then", "now"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_weights_of_another_dtype(
    ranks: Ranks, tmp_path: Path, then: torch.dtype, now: torch.dtype
) -> None:
    """Masters keep every bit, although fp32 masters are views of rounded weights."""
    whole = saved(ranks, run_at(Layout(tp=2), config=DMUON, dtype=then), tmp_path / "a")
    loading = run_at(Layout(dp=3), config=DMUON, dtype=now)
    ranks(3, _holds, loading, tmp_path / "a", whole, nothing)


@pytest.mark.slow
@pytest.mark.parametrize(("then", "now"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_right_factors_of_another_dtype(ranks: Ranks, tmp_path: Path, then: str, now: str) -> None:
    saving = run_at(Layout(tp=2), config=replace(ORTH_DION, state_dtype=then))
    whole = saved(ranks, saving, tmp_path / "a")
    kept = {"fp32": torch.float32, "bf16": torch.bfloat16}[now]
    whole = {k: t.to(kept) if k[0] == "right_factor" else t for k, t in whole.items()}
    loading = run_at(Layout(dp=3), config=replace(ORTH_DION, state_dtype=now))
    ranks(3, _holds, loading, tmp_path / "a", whole, nothing)


ONE_EXPERT = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight"


@pytest.mark.slow
def test_a_rule_on_one_expert(ranks: Ranks, tmp_path: Path) -> None:
    config = MatrixConfig(min_dim=1, rules=(Rule(pattern=ONE_EXPERT, optimizer="adam"),))
    saving = run_at(Layout(dp=2, ep=2), config=config, model="moe")
    whole = saved(ranks, saving, tmp_path / "a", to_adam=ONE_EXPERT)
    assert ("exp_avg", ONE_EXPERT) in whole
    for layout in (Layout(), Layout(dp=4, ep=4), Layout(tp=2, dp=2, ep=2, etp=1), Layout(pp=2)):
        loading = run_at(layout, config=config, model="moe")
        check = functools.partial(_holds, to_adam=ONE_EXPERT)
        ranks(loading.world_size, check, loading, tmp_path / "a", whole, nothing)


@pytest.mark.parametrize("layers", [2, 6])
def test_another_number_of_layers_is_reported(ranks: Ranks, tmp_path: Path, layers: int) -> None:
    four = run_at(Layout(tp=2), config=DMUON, options=(("layers", 4),))
    whole = saved(ranks, four, tmp_path / "a")
    other = run_at(Layout(pp=2), config=DMUON, options=(("layers", layers),))
    with pytest.raises(RankFailed) as failed:
        ranks(2, _holds, other, tmp_path / "a", whole, install)
    assert len(failed.value.reports) == 2
    assert all("it is another model" in report for report in failed.value.reports.values())


def _save_at_once(rank: int, run: Run, folder: Path) -> Whole:
    chunks, optimizer, schedule = build(run)
    save(chunks, optimizer, schedule, folder)
    return whole_state(chunks, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("config", [DMUON, ORTH_DION], ids=["dmuon", "orth_dion"])
def test_a_save_before_the_first_step(ranks: Ranks, tmp_path: Path, config: MatrixConfig) -> None:
    states = ranks(4, _save_at_once, run_at(Layout(tp=2, dp=2), config=config), tmp_path / "a")
    whole = {key: tensor for state in states for key, tensor in state.items()}
    for layout in (Layout(pp=2), Layout(dp=3)):
        loading = run_at(layout, config=config)
        ranks(loading.world_size, _holds, loading, tmp_path / "a", whole, nothing)


@pytest.mark.slow
def test_dp_reshardable_continues_at_every_layout_too(ranks: Ranks, tmp_path: Path) -> None:
    layouts = (Layout(tp=2, dp=2), Layout(pp=2, vpp=2), Layout(dp=3))
    all_pairs(ranks, tmp_path, layouts, kind="dp_reshardable", config=ORTH_DION)


# ---- what a save costs ------------------------------------------------------------------------


def _copied(rank: int, run: Run) -> list[str]:
    """Keys of optimizer state that a save does not take from the state itself."""
    chunks, optimizer, schedule = build(run)
    one_step(chunks, optimizer, schedule, 0, run)
    kinds = {"is_loading": False, "kind": "fully_reshardable"}
    stored = content(chunks, optimizer, schedule, **kinds)["optimizer"]  # type: ignore[arg-type]
    held = {
        value.untyped_storage().data_ptr()
        for child in optimizer.chained_optimizers
        for main, states in child.optimizer.state.items()
        for value in (main.data, *states.values())
        if isinstance(value, torch.Tensor)
    }
    for child in optimizer.chained_optimizers:
        if child.exchange is not None:
            factors = child.exchange.owned_state.values()
            held |= {factor.untyped_storage().data_ptr() for factor in factors}
    tensors = list(_sharded_tensors(stored["param_state"]))
    assert tensors
    return [t.key for t in tensors if t.data.untyped_storage().data_ptr() not in held]


def _sharded_tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _sharded_tensors(inner)
    else:
        yield value


def test_a_save_copies_no_state(ranks: Ranks) -> None:
    run = run_at(Layout(tp=2, dp=2), config=ORTH_DION, model="moe")
    assert ranks(4, _copied, run) == [[], [], [], []]


# ---- broken on purpose ------------------------------------------------------------------------


def swap_gate_and_up() -> None:
    from megatron_muon.integration import chained_optimizer

    right = chained_optimizer.stored_parts

    def wrong(state: Any) -> Any:
        found = dict(right(state))
        for parameter, parts in found.items():
            if len(parts) == 2:
                gate, up = parts
                found[parameter] = (
                    replace(gate, tensor=up.tensor),
                    replace(up, tensor=gate.tensor),
                )
        return found

    chained_optimizer.stored_parts = wrong


def take_another_ranks_ranges() -> None:
    """The rank with the first part of a parameter reads as many elements from the end."""
    from megatron_muon.integration import distributed_optimizer

    right = distributed_optimizer.sharded_range

    def wrong(state: str, values: Any, start: int, parts: Any, **named: Any) -> Any:
        last = parts[-1]
        total = last.start + int(torch.Size(last.tensor.local_shape).numel())
        return right(state, values, total - start - values.numel(), parts, **named)

    distributed_optimizer.sharded_range = wrong


def exchange_the_owners_of_factors() -> None:
    """Every V is sent to the owner of the next matrix of the same shape."""
    from megatron_muon.integration import distributed_optimizer

    right = distributed_optimizer.sharded_right_factors

    def wrong(factors: Any, **named: Any) -> Any:
        found = right(factors, **named)
        by_shape: dict[Any, list[str]] = {}
        for name, factor in factors.items():
            by_shape.setdefault(factor.shape, []).append(name)
        after = {
            name: names[(number + 1) % len(names)]
            for names in by_shape.values()
            for number, name in enumerate(names)
        }
        for name, tensor in found.items():
            tensor.key = tensor.key.replace(name, after[name])
        return found

    distributed_optimizer.sharded_right_factors = wrong


def forget_the_gather() -> None:
    from megatron.core.distributed import DistributedDataParallel

    DistributedDataParallel.start_param_sync = lambda *_, **__: None


def forget_the_masters() -> None:
    from megatron_muon.integration.distributed_optimizer import MatrixDistributedOptimizer

    MatrixDistributedOptimizer._copy_main_params_to_model_params = lambda _: None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("break_code", "seen"),
    [
        (nothing, ""),
        (swap_gate_and_up, "linear_fc1.weight"),
        (take_another_ranks_ranges, " of "),
        (exchange_the_owners_of_factors, "V of "),
        (forget_the_gather, "weight of "),
        (forget_the_masters, "weight of "),
    ],
    ids=lambda value: value.__name__ if isinstance(value, types.FunctionType) else "",
)
def test_broken_code_is_seen(
    ranks: Ranks, tmp_path: Path, break_code: Callable[[], None], seen: str
) -> None:
    run = run_at(Layout(tp=2, dp=2), config=ORTH_DION, dtype=torch.bfloat16)
    whole = saved(ranks, run, tmp_path / "a")
    check = functools.partial(_holds, lose_weights=True)
    if break_code is nothing:
        ranks(4, check, run, tmp_path / "a", whole, break_code)
        return
    with pytest.raises(RankFailed) as failed:
        ranks(4, check, run, tmp_path / "a", whole, break_code)
    reports = failed.value.reports.values()
    assert any("AssertionError: " in report and seen in report for report in reports)
