"""Recommendations of a dry run, from minimal reports of stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_muon.config import MatrixConfig
from megatron_muon.dry_run.prediction import recommendations

SETTINGS = MatrixConfig()
PREDICTION = {"ours_ms": {"products": 3.0, "exchange": 2.0, "launches": 1.0}}


def _group(**changes: Any) -> dict[str, Any]:
    """One matrix of 80 TFLOP among 64 ranks, whose mean is 5."""
    return {
        "domain": "dense",
        "matrices": 4,
        "tp": 8,
        "dp": 8,
        "largest_matrix_flops": 80 * 10**12,
        "flops_mean": 5e12,
        "sent_bytes": 1,
        "dmuon_sent_bytes": 1,
    } | changes


def _advice(split_ranks: int | None, **changes: Any) -> list[str]:
    settings = replace(SETTINGS, split_ranks=split_ranks)
    return recommendations([{"groups": [_group(**changes)]}], settings, PREDICTION)


NOTHING = ["nothing to change: no setting is predicted to be faster by 10 %"]


@pytest.mark.parametrize("bound", [1, 4, 14])
def test_a_bound_that_prevents_splitting_is_reported(bound: int) -> None:
    (advice,) = _advice(bound)
    assert advice == (
        "--dmuon-split-ranks auto: one dense matrix is 80 TFLOP and the mean of its 64 ranks 5; "
        f"--dmuon-split-ranks {bound} prevents more ranks from sharing it"
    )


@pytest.mark.parametrize("bound", [None, 15, 16, 32])
def test_no_advice_if_auto_cannot_split_more(bound: int | None) -> None:
    assert _advice(bound) == NOTHING


def test_no_advice_for_matrices_below_the_mean_load_or_the_limit() -> None:
    assert _advice(1, flops_mean=75e12) == NOTHING
    assert _advice(1, largest_matrix_flops=10**11, flops_mean=1e9) == NOTHING
    assert _advice(1, tp=1, dp=1) == NOTHING
