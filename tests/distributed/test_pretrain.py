"""Both optimizers through ``megatron.training.pretrain``: hooks, flags, save and resume."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pretraining import of_step, pretrain_with_our_hooks

Ranks = Callable[..., list[Any]]

DMUON = ("--optimizer", "dmuon", "--muon-scale-mode", "match_rms_adamw")
ORTH_DION = (
    *("--optimizer", "orth_dion", "--orth-dion-rank-fraction", "0.5"),
    *("--orth-dion-scale-mode", "match_rms_adamw", "--orth-dion-exchange", "factors"),
)


def pretrain_with_hooks(rank: int, *args: Any) -> tuple[list[float], dict[str, Any]]:
    """Return losses, and the resulting arguments and optimizer of Megatron."""
    losses, optimizer = pretrain_with_our_hooks(rank, *args)
    from megatron.training import get_args

    arguments = get_args()
    return losses, {
        "class": type(optimizer).__name__,
        "optimizer": arguments.optimizer,
        "matrix_optimizer": arguments.matrix_optimizer,
        "distributed": arguments.use_distributed_optimizer,
        "steps": sorted({group.get("step", 0) for group in optimizer.param_groups}),
    }


@pytest.mark.parametrize("flags", [DMUON, ORTH_DION], ids=["dmuon", "orth_dion"])
def test_resume_is_bit_equal(ranks: Ranks, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Six iterations at once, or three, a checkpoint, new processes, three more."""
    folders = [tmp_path / name for name in ("straight", "stopped", "resumed")]
    straight, stopped, resumed = folders

    def run(load: Path, save: Path, iterations: int) -> list[Any]:
        return ranks(
            4, pretrain_with_hooks, load, save, 2, 1, iterations, flags, init_process_group=False
        )

    whole = run(straight, straight, 6)
    first = run(stopped, stopped, 3)
    second = run(stopped, resumed, 6)
    for (expected, facts), (before, _), (after, later) in zip(whole, first, second, strict=True):
        assert before + after == expected
        assert facts == {
            "class": "MatrixChainedOptimizer",
            "optimizer": "adam",
            "matrix_optimizer": flags[1],
            "distributed": True,
            "steps": [6],
        }
        assert later["steps"] == [6]
    assert whole[0][0][-1] < whole[0][0][0]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(DMUON, id="dmuon"),
        pytest.param(ORTH_DION, id="orth_dion", marks=pytest.mark.slow),
    ],
)
def test_resume_at_another_layout(ranks: Ranks, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Three iterations at TP2 x DP2, three at PP2 x DP2, against six at TP2 x DP2."""

    def run(load: str, save: str, tp: int, pp: int, iterations: int) -> list[list[float]]:
        arguments = (tmp_path / load, tmp_path / save, tp, pp, iterations, flags)
        results = ranks(4, pretrain_with_hooks, *arguments, init_process_group=False)
        return [losses for losses, _ in results]

    whole = run("straight", "straight", 2, 1, 6)
    run("stopped", "stopped", 2, 1, 3)
    resumed = run("stopped", "resumed", 1, 2, 6)
    expected = [of_step(whole, step, 6) for step in range(3, 6)]
    assert [of_step(resumed, step, 3) for step in range(3)] == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def uninterrupted(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    arguments = (folder, folder, 2, 1, 4, ORTH_DION)
    results = ranks(4, pretrain_with_hooks, *arguments, init_process_group=False)
    return [losses for losses, _ in results]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        ("--no-ckpt-fully-parallel-save", "--ckpt-fully-parallel-load"),
        (
            "--ckpt-assume-constant-structure --save-interval 1",
            "--ckpt-fully-parallel-load --ckpt-fully-parallel-load-exchange-algo gather_rounds",
        ),
        (
            "--ckpt-fully-parallel-save-process-group ep_dp",
            "--ckpt-fully-parallel-load --ckpt-fully-parallel-load-exchange-algo gather_object",
        ),
        ("--async-save --use-persistent-ckpt-worker --async-strategy mcore", "--no-load-rng"),
        ("", "--dist-ckpt-strictness log_all"),
        ("", "--dist-ckpt-strictness log_unexpected"),
        ("", "--use-checkpoint-args"),
        ("--dist-ckpt-workers 2", "--no-ckpt-load-validate-sharding-integrity"),
        ("--non-persistent-save-interval 2 --non-persistent-ckpt-type global", ""),
    ],
)
def test_every_way_of_saving_and_loading_resumes(
    ranks: Ranks,
    tmp_path: Path,
    uninterrupted: list[list[float]],
    saving: str,
    loading: str,
) -> None:
    def run(save: str, iterations: int, flags: str) -> list[list[float]]:
        arguments = (tmp_path / "stopped", tmp_path / save, 2, 1, iterations)
        ours = (*ORTH_DION, *flags.split())
        results = ranks(4, pretrain_with_hooks, *arguments, ours, init_process_group=False)
        return [losses for losses, _ in results]

    first = run("stopped", 2, saving)
    second = run("resumed", 4, loading)
    assert uninterrupted == [a + b for a, b in zip(first, second, strict=True)]


def test_resume_draws_the_same_dropout(ranks: Ranks, tmp_path: Path) -> None:
    """Without tensor parallelism dropout comes from the generator that a data loader seeds from."""
    folders = [tmp_path / name for name in ("straight", "stopped", "resumed")]
    straight, stopped, resumed = folders
    dropout = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")

    def run(load: Path, save: Path, iterations: int) -> list[list[float]]:
        arguments = (load, save, 1, 1, iterations, (*DMUON, *dropout))
        results = ranks(2, pretrain_with_hooks, *arguments, init_process_group=False)
        return [losses for losses, _ in results]

    whole = run(straight, straight, 4)
    first = run(stopped, stopped, 2)
    second = run(stopped, resumed, 4)
    assert whole == [before + after for before, after in zip(first, second, strict=True)]


def test_checkpoint_holds_one_state_per_matrix_and_two_per_scalar(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(2, pretrain_with_hooks, tmp_path, tmp_path, 2, 1, 1, DMUON, init_process_group=False)
    from torch.distributed.checkpoint import FileSystemReader

    (folder,) = [entry for entry in tmp_path.iterdir() if entry.is_dir()]
    keys = set(FileSystemReader(str(folder)).read_metadata().state_dict_metadata)
    states: dict[str, set[str]] = {}
    for key in keys:
        match = re.fullmatch(r"optimizer\.state\.([a-z0-9_]+)\.(.+)", key)
        if match:
            states.setdefault(match[2], set()).add(match[1])
    assert states["decoder.layers.mlp.linear_fc1.weight"] == {"fp32_param", "momentum_buffer"}
    assert states["output_layer.weight"] == {"fp32_param", "exp_avg", "exp_avg_sq"}
    assert sum("momentum_buffer" in found for found in states.values()) == 4
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


def test_adam_is_untouched(ranks: Ranks, tmp_path: Path) -> None:
    flags = ("--optimizer", "adam")
    ((_, facts),) = ranks(
        1, pretrain_with_hooks, tmp_path, tmp_path, 1, 1, 1, flags, init_process_group=False
    )
    assert facts["class"] == "ChainedOptimizer"
    assert facts["matrix_optimizer"] is None
