"""Megatron's schedule flags determine all rates at a load, for matrices as for Adam."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.config import MatrixConfig
from megatron_muon.matrices import Rule
from tests import tiny_gpt
from tests.distributed import pretraining
from tests.distributed.checkpointing import load, save, state_bytes
from tests.distributed.pretraining import pretrain_with_our_hooks
from tests.distributed.test_pretrain import DMUON
from tests.ranks import RankFailed, layout

Ranks = Callable[..., list[Any]]

OVERRIDE = {"use_checkpoint_opt_param_scheduler": False, "override_opt_param_scheduler": True}
TAKE_SAVED = {"use_checkpoint_opt_param_scheduler": True}
NEITHER = {"use_checkpoint_opt_param_scheduler": False}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of a run; its weight decay grows, its learning rate falls."""

    lr: float = 4e-3
    decay: float = 0.01
    decoupled_lr: float | None = None
    matrices: MatrixConfig = field(default_factory=MatrixConfig)


FIRST = Rates()
OTHER = Rates(lr=1e-3, decay=0.05)
APART = Rates(matrices=MatrixConfig(lr=8e-3, min_lr=8e-4, weight_decay=0.3))


def _start(rates: Rates, flags: dict[str, bool]) -> tuple[list[Any], Any, Any]:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    import megatron_muon

    chunks = [tiny_gpt.wrap_ddp(tiny_gpt.build_gpt())]
    config = OptimizerConfig(
        optimizer="adam",
        lr=rates.lr,
        min_lr=rates.lr / 10,
        decoupled_lr=rates.decoupled_lr,
        weight_decay=rates.decay,
        use_distributed_optimizer=True,
    )
    optimizer = megatron_muon.get_matrix_optimizer(config, chunks, matrix_config=rates.matrices)
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=rates.lr,
        min_lr=rates.lr / 10,
        lr_warmup_steps=2,
        lr_decay_steps=20,
        lr_decay_style="cosine",
        start_wd=rates.decay,
        end_wd=2 * rates.decay,
        wd_incr_steps=20,
        wd_incr_style="linear",
        **flags,
    )
    return chunks, optimizer, schedule


def _groups(optimizer: Any) -> set[tuple[Any, ...]]:
    return {
        (g.get("optimizer"), g["wd_mult"], g["lr"], g["weight_decay"])
        for g in optimizer.param_groups
    }


def _steps(chunks: list[Any], optimizer: Any, schedule: Any, first: int) -> None:
    for step in range(first, first + 3):
        tiny_gpt.train_step(chunks, optimizer, step, global_batch=8)
        schedule.step(1)


def _run(
    rank: int, rates: Rates, flags: dict[str, bool], folder: Path, save_first: Rates | None
) -> Any:
    """Groups after a load (or at a save of three steps), and the state three steps later."""
    layout(tp=2)
    chunks, optimizer, schedule = _start(save_first or rates, flags)
    if save_first is not None:
        _steps(chunks, optimizer, schedule, 0)
        save(chunks, optimizer, schedule, folder)
    else:
        load(chunks, optimizer, schedule, folder)
    groups = _groups(optimizer)
    _steps(chunks, optimizer, schedule, 3)
    return groups, sorted(state_bytes(optimizer).values())


def _at_step(rank: int, rates: Rates) -> set[tuple[Any, ...]]:
    """Groups of a run that has made three steps without any load."""
    layout(tp=2)
    _, optimizer, schedule = _start(rates, OVERRIDE)
    schedule.step(3)
    return _groups(optimizer)


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        (FIRST, OTHER),
        (FIRST, APART),
        (APART, OTHER),
        (APART, Rates(lr=1e-3, matrices=MatrixConfig(lr=1e-1))),
        (Rates(decoupled_lr=1e-3), Rates(decoupled_lr=5e-3, lr=1e-3)),
        (Rates(decoupled_lr=1e-3), FIRST),
        (Rates(matrices=MatrixConfig(rules=(Rule(pattern="*fc1*", lr_mult=0.5),))),) * 2,
    ],
    ids=[
        *("other rates", "rates of matrices given", "rates of matrices saved", "both"),
        *("decoupled rate", "decoupled rate saved", "rule"),
    ],
)
def test_rates_of_the_checkpoint(ranks: Ranks, tmp_path: Path, saved: Rates, other: Rates) -> None:
    """Learning rate and weight decay of every group; the run continues as if uninterrupted."""
    expected = ranks(2, _run, saved, TAKE_SAVED, tmp_path, saved)
    found = ranks(2, _run, other, TAKE_SAVED, tmp_path, None)
    assert len(expected[0][0]) > 2
    assert found == expected


@pytest.mark.parametrize("other", [OTHER, APART])
def test_rates_of_this_run(ranks: Ranks, tmp_path: Path, other: Rates) -> None:
    ranks(2, _run, FIRST, OVERRIDE, tmp_path, FIRST)
    found = [groups for groups, _ in ranks(2, _run, other, OVERRIDE, tmp_path, None)]
    assert found == ranks(2, _at_step, other)


@pytest.mark.parametrize("saved", [FIRST, APART], ids=["shared rates", "rates of matrices"])
def test_without_a_flag_equal_rates_continue(ranks: Ranks, tmp_path: Path, saved: Rates) -> None:
    expected = ranks(2, _run, saved, NEITHER, tmp_path, saved)
    assert ranks(2, _run, saved, NEITHER, tmp_path, None) == expected


def _refused(ranks: Ranks, rates: Rates, flags: dict[str, bool], folder: Path) -> str:
    with pytest.raises(RankFailed) as failed:
        ranks(2, _run, rates, flags, folder, None)
    reports = failed.value.reports.values()
    assert len(reports) == 2
    assert all("CheckpointMismatchError: megatron_muon: " in report for report in reports)
    return next(iter(reports)).partition("CheckpointMismatchError: ")[2]


@pytest.mark.parametrize(
    ("other", "sentences"),
    [
        (OTHER, ["max_lr is 0.001 here and 0.004 in the checkpoint", "start_wd is 0.05 here"]),
        (
            Rates(matrices=MatrixConfig(lr=1e-2)),
            ["a group of dmuon with max_lr 0.01, min_lr 0.0004 here, and in the checkpoint max_lr"],
        ),
        (Rates(matrices=MatrixConfig(weight_decay=0.3)), ["start_wd 0.3, end_wd 0.3 here"]),
        (
            Rates(matrices=MatrixConfig(rules=(Rule(pattern="*fc1*", lr_mult=0.5),))),
            ["a group of dmuon with max_lr 0.002, min_lr 0.0002 here"],
        ),
        (
            Rates(matrices=MatrixConfig(rules=(Rule(pattern="*fc1*", wd_mult=0.5),))),
            ["a group of dmuon, weight decay x 0.5 with max_lr", "no such group"],
        ),
        (
            Rates(decoupled_lr=1e-3),
            ["a group of adam with max_lr 0.001, min_lr 0.0004 here, and in the checkpoint max_lr"],
        ),
    ],
    ids=["rates", "matrix lr", "matrix decay", "rule lr", "rule decay", "decoupled lr"],
)
def test_without_a_flag_other_rates_are_refused(
    ranks: Ranks, tmp_path: Path, other: Rates, sentences: list[str]
) -> None:
    ranks(2, _run, FIRST, NEITHER, tmp_path, FIRST)
    text = _refused(ranks, other, NEITHER, tmp_path)
    for sentence in (
        "type --override-opt_param-scheduler to go on with this run's",
        "--use-checkpoint-opt_param-scheduler with the checkpoint's",
        *sentences,
    ):
        assert sentence in text


HALF = MatrixConfig(rules=(Rule(pattern="*fc1*", lr_mult=0.5),))
DECAY = MatrixConfig(rules=(Rule(pattern="*fc1*", wd_mult=0.5),))


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        (FIRST, Rates(matrices=DECAY)),
        (Rates(matrices=DECAY), FIRST),
        (Rates(matrices=HALF), FIRST),
        (Rates(matrices=HALF), Rates(lr=2e-3)),
        (Rates(matrices=HALF), Rates(lr=1e-3, matrices=HALF)),
    ],
    ids=[
        *("a group more", "a group less", "two groups", "the other one's rate", "two and two"),
    ],
)
def test_rates_of_the_checkpoint_are_never_guessed(
    ranks: Ranks, tmp_path: Path, saved: Rates, other: Rates
) -> None:
    ranks(2, _run, saved, TAKE_SAVED, tmp_path, saved)
    text = _refused(ranks, other, TAKE_SAVED, tmp_path)
    assert "--use-checkpoint-opt_param-scheduler does not say which rates to take" in text
    assert "or type --override-opt_param-scheduler" in text


def _rates_of_pretrain(rank: int, *args: Any) -> set[tuple[float, float]]:
    _, optimizer = pretrain_with_our_hooks(rank, *args)
    return {
        (g["lr"], g["weight_decay"] / g["wd_mult"]) for g in optimizer.param_groups if g["wd_mult"]
    }


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--use-checkpoint-opt_param-scheduler", (4e-3, 0.01)),
        ("--use-checkpoint-opt-param-scheduler", (4e-3, 0.01)),
        ("--override-opt_param-scheduler", (1e-3, 0.05)),
    ],
)
def test_pretrain(ranks: Ranks, tmp_path: Path, flag: str, expected: tuple[float, float]) -> None:
    """The input of the report: the learning rate was this run's, the decay the checkpoint's."""

    def run(save: str, iterations: int, *words: str) -> Any:
        arguments = (tmp_path / "first", tmp_path / save, 1, 1, iterations, (*DMUON, *words))
        return ranks(1, _rates_of_pretrain, *arguments, init_process_group=False)

    run("first", 1, "--lr", "4e-3", "--weight-decay", "0.01")
    found = run("second", 2, flag, "--lr", "1e-3", "--weight-decay", "0.05")
    assert found == [{expected}]


EXPERTS = (
    *("--num-experts", "2", "--moe-ffn-hidden-size", "48"),
    *("--moe-router-load-balancing-type", "none"),
)


def test_a_converted_checkpoint_has_the_groups_of_the_run_that_loads_it(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam's, of a model with experts, whose linear weights are matrices here, without a flag."""
    from megatron_muon.offline.command import main

    def without_a_flag(*arguments: Any) -> list[str]:
        return [word for word in original(*arguments) if "param-scheduler" not in word]

    original = pretraining.flags
    monkeypatch.setattr(pretraining, "flags", without_a_flag)
    adam, converted = tmp_path / "adam", tmp_path / "converted"
    flags = ("--optimizer", "adam", "--dist-ckpt-optim-fully-reshardable", *EXPERTS)
    ranks(1, _rates_of_pretrain, adam, adam, 1, 1, 2, flags, init_process_group=False)
    assert main(["convert", str(adam), str(converted), "--to", "dmuon"]) == 0
    arguments = (converted, tmp_path / "next", 1, 1, 2, (*DMUON, *EXPERTS))
    found = ranks(1, _rates_of_pretrain, *arguments, init_process_group=False)
    assert found == [{(1e-2, 0.01)}]
