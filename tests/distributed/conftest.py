"""Runs that several test files export and import."""

from __future__ import annotations

import pytest

from tests.distributed.interchange import (
    MORE,
    Ranks,
    Runs,
    Saved,
    trained,
)
from tests.distributed.test_pretrain import DMUON, ORTH_DION


@pytest.fixture(scope="session")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """(a run, one like it of another seed) of a model and an optimizer."""
    made: dict[tuple[str, str], tuple[Saved, Saved]] = {}

    def run(model: str, optimizer: str) -> tuple[Saved, Saved]:
        if (model, optimizer) not in made:
            flags = (*(DMUON if optimizer == "dmuon" else ORTH_DION), *MORE[model])
            both = []
            for seed in ("1", "2"):
                folder = tmp_path_factory.mktemp("saved")
                more = (*flags, "--seed", seed)
                tp, pp = (1, 1) if model == "experts" else (2, 1)
                results = ranks(
                    2, trained, folder, folder, tp, pp, 2, more, init_process_group=False
                )
                weights = {n: t for _, held in results for n, t in held.items()}
                both.append(Saved(folder=folder, weights=weights, flags=flags))
            made[model, optimizer] = (both[0], both[1])
        return made[model, optimizer]

    return run
