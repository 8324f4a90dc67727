"""Fixtures of all tests.

Importing Megatron takes seconds, so it is left to the tests that ask for it, by the fixtures below;
a test module must not import ``megatron`` at its top, for the CPU stand-ins have to come first.
"""

from __future__ import annotations

import importlib
import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

# Before torch is imported: its thread pools would neither survive a fork nor help on tiny tensors.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import pytest

SAMPLE = 6
"""Of the slow cases of a distributed test, one in so many runs without ``--all-cases``."""


IMPORTED_LATE = (
    "numpy.random",
    "torch._dynamo",
    "torch.utils.serialization.config",
    "multiprocessing.managers",
    "multiprocessing.pool",
    "multiprocessing.shared_memory",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "megatron.core.models.mimo.optimizer",
    "megatron_muon.integration.builder",
    "megatron_muon.integration.checkpoint_hook",
    "megatron_muon.integration.hooks",
)
"""Modules that training imports when it needs them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases", action="store_true", help="run every slow case, not a fixed sample of them"
    )
    parser.addoption(
        "--one-case", action="store_true", help="run one quick case of each distributed test"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases by a fixed sample of each test; a test named by its id always runs."""
    if "megatron.core" in sys.modules:
        raise pytest.UsageError(
            "a test module imports megatron at its top: use the fixture megatron"
        )
    if config.getoption("all_cases") or any("::" in argument for argument in config.args):
        return
    quick, slow = defaultdict(list), defaultdict(list)
    for item in items:
        if "distributed" in item.path.parts:
            cases = slow if item.get_closest_marker("slow") else quick
            cases[item.nodeid.split("[")[0]].append(item)
    left_out = set()
    for name, cases in slow.items():
        # Of a few slow cases beside quick ones this may be none.
        count = SAMPLE if name in quick else min(SAMPLE, len(cases))
        chosen = [] if config.getoption("one_case") else cases[_hash(name) % count :: SAMPLE]
        left_out |= set(cases) - set(chosen)
    if config.getoption("one_case"):
        for name, cases in quick.items():
            left_out |= set(cases) - {cases[_hash(name) % len(cases)]}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _hash(name: str) -> int:
    """By a test's name: tests over the same layouts run different ones."""
    return zlib.crc32(name.encode())


@pytest.fixture(scope="session")
def megatron() -> Any:
    """The package ``megatron``, imported once per session, on its CPU stand-ins."""
    import torch

    from megatron_muon import cpu

    cpu.enable()
    torch.set_num_threads(1)
    import megatron.training.training

    # What is imported on first use; here that is paid for once, not by every rank.
    for name in IMPORTED_LATE:
        importlib.import_module(name)

    return megatron


@pytest.fixture(scope="session")
def ranks(megatron: Any) -> Callable[..., list[Any]]:
    """``tests.ranks.run_ranks``, after importing everything for its forks."""
    from tests.ranks import run_ranks

    return run_ranks


@pytest.fixture(scope="session")
def layouts_tested(pytestconfig: pytest.Config) -> Iterator[Callable[[Any, Any], None]]:
    """Collects (case, errors); the session writes them to ``build/layouts.json`` at its end."""
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
