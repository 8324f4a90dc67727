"""Measurements of ``make benchmark``, on a model of one small layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

SIZE = {
    "layers": 1,
    "hidden": 64,
    "ffn": 96,
    "heads": 4,
    "query_groups": 2,
    "vocab": 64,
    "sequence": 16,
}


Found = list[tuple[dict[str, torch.Tensor], dict[str, Any]]]


def gradients_and_results(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from benchmarks import steps
    from benchmarks.contenders import contenders
    from benchmarks.models import ModelSize

    size = ModelSize(**SIZE)
    results, owners = steps.measure_optimizer_steps(rank, "cpu", 2, size, 1)
    assert all(owners.milliseconds)
    assert len(owners.milliseconds) == len(owners.costs) == 4
    model, _ = contenders()[0].build(size, torch.device("cpu"))
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
    return steps.gradients_of(model, tokens), results


@pytest.fixture(scope="module")
def found(ranks: Callable[..., Found]) -> Found:
    """At TP2·DP2, of every rank."""
    return ranks(4, gradients_and_results, init_process_group=False)


def test_data_parallel_ranks_have_the_same_gradients(found: Found) -> None:
    for one, other in ((0, 2), (1, 3)):
        mine, others = found[one][0], found[other][0]
        assert all(torch.equal(mine[name], others[name]) for name in mine)
        assert all(gradient.any() for gradient in mine.values())


def test_first_updates_are_those_of_the_whole_gradient_where_the_rule_is_exact(
    found: Found,
) -> None:
    errors = {key: result.update_error for key, result in found[0][1].items()}
    exact = ("dmuon", "dmuon_fused", "muon_duplicated", "muon_distributed")
    assert all(errors.pop(key) < 1e-5 for key in exact)
    assert errors.pop("muon_blockwise") > 0.1
    assert errors == {"adamw": None, "orth_dion_4": None, "orth_dion_8": None}


def test_bytes_are_those_of_the_parameters_gathered_and_the_matrices_exchanged(
    found: Found,
) -> None:
    gradients, results = found[0]
    gathered = sum(gradient.nbytes for gradient in gradients.values()) / 2
    assert results["adamw"].sent_mb * 1e6 == pytest.approx(gathered, rel=0.02)
    assert results["adamw"].exchange_mb == 0 < results["dmuon"].exchange_mb
    assert results["adamw"].sent_mb < results["orth_dion_8"].sent_mb < results["dmuon"].sent_mb
