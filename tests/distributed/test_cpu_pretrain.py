"""``megatron.training.pretrain`` on CPU: trains, saves, and resumes in another layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pretraining import of_step, pretrain

RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def uninterrupted(ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    return ranks(2, pretrain, folder, folder, 1, 1, 4, init_process_group=False)


@pytest.fixture(scope="module")
def stopped_at_two(ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    ranks(2, pretrain, folder, folder, 1, 1, 2, init_process_group=False)
    return folder


@pytest.mark.parametrize(
    ("world_size", "tp", "pp"), [(2, 1, 1), (2, 2, 1), (4, 2, 2)], ids=["dp2", "tp2", "tp2-pp2"]
)
def test_pretrain_resumes_where_it_stopped(
    ranks: RunRanks,
    uninterrupted: list[list[float]],
    stopped_at_two: Path,
    tmp_path: Path,
    world_size: int,
    tp: int,
    pp: int,
) -> None:
    resumed = ranks(
        world_size, pretrain, stopped_at_two, tmp_path, tp, pp, 4, init_process_group=False
    )
    for step in (2, 3):
        expected = of_step(uninterrupted, step, 4)
        assert of_step(resumed, step - 2, 2) == pytest.approx(expected, abs=1e-5)
    assert of_step(uninterrupted, 3, 4) != pytest.approx(of_step(uninterrupted, 0, 4), abs=1e-2)
