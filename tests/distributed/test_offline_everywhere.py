"""Conversions of every kind of model and optimizer, and their cost; the slow tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_muon.offline.reading import Checkpoint
from tests.distributed.offline import (
    ADAM,
    MOE,
    MTP,
    MUON,
    OF,
    RANK,
    STEPS,
    TARGET,
    Saves,
    convert,
    different,
    pretrain_on_counting,
    train,
)
from tests.distributed.pretraining import of_step
from tests.distributed.test_pretrain import DMUON, ORTH_DION

Ranks = Callable[..., list[Any]]
Flags = tuple[str, ...]

pytestmark = pytest.mark.slow

MODELS: dict[str, Flags] = {"dense": (), "experts": MOE, "mtp": MTP}
SOURCES: dict[str, Flags] = {"adam": ADAM, "dmuon": DMUON, "orth_dion": ORTH_DION, "muon": MUON}


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(ranks, tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize(
    ("model", "source", "targets"),
    [
        ("dense", "adam", ("dmuon", "orth_dion")),
        ("dense", "dmuon", ("adam", "orth_dion")),
        ("dense", "orth_dion", ("adam", "dmuon")),
        ("dense", "muon", ("adam", "dmuon", "orth_dion")),
        ("experts", "adam", ("dmuon",)),
        ("experts", "muon", ("orth_dion",)),
        ("mtp", "adam", ("orth_dion",)),
    ],
)
def test_every_conversion_continues_at_two_other_layouts(
    ranks: Ranks, saved: Saves, tmp_path: Path, model: str, source: str, targets: Flags
) -> None:
    """It is loaded bit for bit at both, and both continue with the same losses."""
    here = saved(*SOURCES[source], *MODELS[model])
    half = ("--bf16",) if source == "muon" else ()
    layouts: dict[str, dict[str, Any]] = {"tp": {"tp": 2}, "pp": {"pp": 2}}
    if model == "experts":
        layouts["tp"] = {}  # TP with experts asks for sequence lengths that these runs do not have
    for target in targets:
        flags = (*TARGET[target], *MODELS[model], *half)
        there = convert(here, tmp_path / target, target, *OF.get(target, ()))
        assert different(here, there, "fp32_param of ") == []
        losses = []
        for name, sizes in layouts.items():
            loaded = tmp_path / f"{target}-{name}"
            train(ranks, tmp_path / target, loaded, flags, **sizes, steps=STEPS)
            assert different(there, loaded, "") == []
            on = tmp_path / f"{target}-{name}-on"
            results = train(ranks, loaded, on, flags, **sizes, steps=STEPS + 2)
            losses.append([of_step(results, step, 2) for step in range(2)])
            assert len(different(on, there, "fp32_param of ")) > 8
        assert losses[0] == pytest.approx(losses[1], rel=1e-2 if half else 1e-4)


@pytest.mark.parametrize("target", ["dmuon", "orth_dion"])
def test_experts_continue_at_two_ranks_of_experts(
    ranks: Ranks, saved: Saves, tmp_path: Path, target: str
) -> None:
    convert(saved(*ADAM, *MOE), tmp_path / "c", target, *OF.get(target, ()))
    results = []
    for size in ("1", "2"):
        results.append(tmp_path / size)
        flags = (*TARGET[target], *MOE, "--expert-model-parallel-size", size)
        train(ranks, tmp_path / "c", results[-1], flags)
    assert different(*results, "fp32_param of ", 1e-4) == []


@pytest.mark.parametrize("model", ["experts", "mtp"])
def test_names_of_right_factors(saved: Saves, tmp_path: Path, model: str) -> None:
    there = convert(saved(*DMUON, *MODELS[model]), tmp_path / "c", "orth_dion", *RANK)
    real = Checkpoint(saved(*ORTH_DION, *MODELS[model]))
    assert {k: i.shape for k, i in there.tensors.items()} == {
        k: i.shape for k, i in real.tensors.items()
    }


def test_a_warm_start_is_no_worse_than_a_cold_one(ranks: Ranks, tmp_path: Path) -> None:
    """dmuon, converted to orth_dion, against orth_dion from the same weights without state.

    On a model this small the sums of two starts are 1 % apart at most, either way at one of them.
    """
    more, rate = 8, ("--lr", "3e-3")
    losses: dict[str, list[float]] = {"warm": [], "cold": []}
    for steps in (16, 24):
        start, warm = tmp_path / f"{steps}", tmp_path / f"{steps}-warm"
        train(ranks, start, start, (*DMUON, *rate), steps=steps, run=pretrain_on_counting)
        convert(start, warm, "orth_dion", *RANK)
        for name, folder, flags in (("warm", warm, ()), ("cold", start, ("--no-load-optim",))):
            results = train(
                ranks,
                folder,
                tmp_path / f"{steps}-{name}-on",
                (*ORTH_DION, *rate, *flags),
                steps=steps + more,
                run=pretrain_on_counting,
            )
            losses[name] += [of_step(results, step, more) for step in range(more)]
        assert losses["warm"][-more] == pytest.approx(losses["cold"][-more], rel=1e-5)
        assert losses["warm"][-1] < losses["warm"][-more]
    assert sum(losses["warm"]) <= 1.005 * sum(losses["cold"])


@pytest.fixture(scope="module")
def measuring() -> ModuleType:
    """tools/measure_conversion.py."""
    path = Path(__file__).parents[2] / "tools" / "measure_conversion.py"
    spec = importlib.util.spec_from_file_location("measure_conversion", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["measure_conversion"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("to", ["dmuon", "orth_dion"])
def test_memory_does_not_grow_with_the_checkpoint(
    measuring: ModuleType, tmp_path: Path, to: str
) -> None:
    """Beyond the start of Python and torch: a few chunks, for any checkpoint."""
    measuring.make_checkpoint(tmp_path / "source", 0.3, hidden=512, ffn=1408)
    infos = Checkpoint(tmp_path / "source").tensors.values()
    total, largest = sum(i.nbytes for i in infos), max(i.nbytes for i in infos)
    command = ["convert", str(tmp_path / "source"), str(tmp_path / "c"), "--to", to]
    found = measuring.measure([*command, "--workers", "1"])
    assert found.grown < 2 * largest + 50e6 < 0.9 * total
    assert found.peak < 1e9 + largest
