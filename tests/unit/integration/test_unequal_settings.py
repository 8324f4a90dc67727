"""Settings are compared by digest; what differs is still named."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier, get_ident
from typing import Any

import pytest

from megatron_muon.config import MatrixConfig

pytestmark = pytest.mark.usefixtures("megatron")

PATIENCE_S = 30


def _of_megatron(lr: float) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(lr=lr)


class _Ranks:
    """As many threads as ranks, and what they have exchanged."""

    def __init__(self, size: int) -> None:
        self.exchanged: list[list[Any]] = []
        self._here: dict[int, Any] = {}
        self._barrier = Barrier(size)
        self._size = size

    def gather(self, value: tuple[int, Any]) -> list[Any]:
        rank, mine = value
        self._here[rank] = mine
        if self._barrier.wait(PATIENCE_S) == 0:
            self.exchanged.append([self._here[number] for number in range(self._size)])
        self._barrier.wait(PATIENCE_S)
        return self.exchanged[-1]


def _compared(
    monkeypatch: pytest.MonkeyPatch, *settings: tuple[MatrixConfig, Any]
) -> tuple[list[list[str]], list[list[Any]]]:
    """What every rank is told, and what all sent."""
    from megatron_muon.integration import builder

    ranks = _Ranks(len(settings))
    of_thread: dict[int, int] = {}

    def gather(value: Any) -> list[Any]:
        return ranks.gather((of_thread[get_ident()], value))

    def body(rank: int) -> list[str]:
        of_thread[get_ident()] = rank
        return builder._unequal_settings(*settings[rank])

    monkeypatch.setattr(builder, "gather_objects", gather)
    with ThreadPoolExecutor(len(settings)) as pool:
        told = list(pool.map(body, range(len(settings))))
    return told, ranks.exchanged


def test_equal_settings_send_a_digest_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """18 MiB arrived on each of 16,384 ranks where every one sent all of its settings."""
    told, exchanged = _compared(
        monkeypatch, *((MatrixConfig(), _of_megatron(0.1)) for _ in range(3))
    )
    assert told == [[], [], []]
    (digests,) = exchanged
    assert all(len(pickle.dumps(digest)) < 64 for digest in digests)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_difference_is_named_on_every_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    settings = [(MatrixConfig(), _of_megatron(0.1)) for _ in range(3)]
    settings[rank] = (replace(MatrixConfig(), momentum=0.8), _of_megatron(0.2))
    told, exchanged = _compared(monkeypatch, *settings)
    assert len(exchanged) == 2
    assert told[0] == told[1] == told[2]
    named = {word for line in told[0] for word in line.replace("=", " ").split()}
    assert {"MatrixConfig.momentum", "OptimizerConfig.lr"} <= named
    assert len(told[0]) == (2 if rank else 4)
