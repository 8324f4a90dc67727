"""What every test shares.

Importing Megatron takes seconds, so it is left to the tests that ask for it, by the fixtures below;
a test module must not import ``megatron`` at its top, for the CPU stand-ins have to come first.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

# Before torch is imported: its thread pools would neither survive a fork nor help on tiny tensors.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import pytest


@pytest.fixture(scope="session")
def megatron() -> Any:
    """The package ``megatron``, imported once per session, on its CPU stand-ins."""
    import torch

    from megatron_muon import cpu

    cpu.enable()
    torch.set_num_threads(1)
    # Numpy and torch import these on first use; here that is paid for once, not by every rank.
    for name in ("numpy.random", "torch._dynamo"):
        importlib.import_module(name)
    import megatron.training.training

    return megatron


@pytest.fixture(scope="session")
def ranks(megatron: Any) -> Callable[..., list[Any]]:
    """``tests.ranks.run_ranks``, with everything imported that its forks shall share."""
    from tests.ranks import run_ranks

    return run_ranks


@pytest.fixture(scope="session")
def layouts_tested(pytestconfig: pytest.Config) -> Iterator[Callable[[Any, Any], None]]:
    """Takes (case, errors found); at the end of the session all are in ``build/layouts.json``."""
    import dataclasses
    import json

    found: dict[str, Any] = {}

    def tell(case: Any, errors: Any) -> None:
        found[case.name] = dataclasses.asdict(errors)

    yield tell
    path = pytestconfig.rootpath / "build" / "layouts.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


@pytest.fixture(scope="session")
def te_ranks(ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """``ranks`` whose forks need not import Transformer Engine (``tests.te.loading.use``) again."""
    from tests.te.loading import VERSIONS, import_te

    for version in VERSIONS:
        import_te(version)
    return ranks
