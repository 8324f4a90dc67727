"""A resumed run equals an uninterrupted one bit for bit, at the same layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.config import MatrixConfig
from megatron_muon.matrices import Rule
from tests.distributed.checkpointing import train_between
from tests.distributed.training import Run, build

Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("tp", "dp", "pp", "half"),
    [
        (2, 2, 1, 3),
        *(
            pytest.param(*sizes, 10, marks=pytest.mark.slow)
            for sizes in ((2, 2, 1), (1, 4, 1), (2, 1, 2))
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_resumed_run_is_bit_equal(
    ranks: Ranks, tmp_path: Path, tp: int, dp: int, pp: int, half: int, dtype: torch.dtype
) -> None:
    """Uninterrupted, or in two halves with a torch_dist checkpoint and a new process."""
    run = Run(tp=tp, dp=dp, pp=pp, dtype=dtype, overlap=pp == 1)
    world = run.world_size
    straight = ranks(world, train_between, run, 0, 2 * half, None, None)
    ranks(world, train_between, run, 0, half, None, tmp_path)
    resumed = ranks(world, train_between, run, half, 2 * half, tmp_path, None)
    for rank, (expected, found) in enumerate(zip(straight, resumed, strict=True)):
        assert expected["losses"][half:] == found["losses"]
        assert expected["weights"] == found["weights"], rank
        assert expected["state"] == found["state"], rank
        assert expected["groups"] == found["groups"], rank


def test_resume_with_other_rates_and_rules(ranks: Ranks, tmp_path: Path) -> None:
    """Megatron fails with a bare ``KeyError`` on any change of a learning rate (M#2625)."""
    ranks(2, train_between, Run(tp=2), 0, 3, None, tmp_path)
    changed = MatrixConfig(
        lr=5e-3, weight_decay=0.3, rules=(Rule(pattern="*.linear_fc2.weight", lr_mult=0.5),)
    )
    same = ranks(2, train_between, Run(tp=2), 3, 4, tmp_path, None)
    other = ranks(2, train_between, Run(tp=2, config=changed), 3, 4, tmp_path, None)
    # The same weights before the first resumed step, other rates in it.
    assert same[0]["losses"] == other[0]["losses"]
    assert same[0]["weights"] != other[0]["weights"]
    assert {g["step"] for g in other[0]["groups"]} == {4}
    rates = {g["max_lr"] for g in other[0]["groups"] if g.get("optimizer") == "dmuon"}
    assert rates == {5e-3, 2.5e-3}


def test_other_sharding_types_are_refused_by_name(ranks: Ranks) -> None:
    def body(rank: int) -> str:
        (wrapped,), optimizer, _ = build(Run())
        with pytest.raises(ValueError) as refused:
            optimizer.sharded_state_dict(
                wrapped.module.sharded_state_dict(),
                metadata={"distrib_optim_sharding_type": "fully_sharded_model_space"},
            )
        return str(refused.value)

    (message,) = ranks(1, body)
    assert "fully_sharded_model_space" in message and "--ckpt-format torch_dist" in message
