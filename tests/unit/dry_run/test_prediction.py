"""What a dry run recommends, from reports of stages as short as they can be."""

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
def test_a_bound_that_keeps_owners_from_sharing_a_matrix_is_to_be_lifted(bound: int) -> None:
    (advice,) = _advice(bound)
    assert advice == (
        "--dmuon-split-ranks auto: one dense matrix is 80 TFLOP and the mean of its 64 ranks 5; "
        f"--dmuon-split-ranks {bound} prevents more ranks from sharing it"
    )


@pytest.mark.parametrize("bound", [None, 15, 16, 32])
def test_nothing_is_said_where_auto_splits_already_or_may_not_split_more(bound: int | None) -> None:
    assert _advice(bound) == NOTHING


def test_nothing_is_said_of_a_matrix_that_is_no_larger_than_a_ranks_mean_or_too_small() -> None:
    assert _advice(1, flops_mean=75e12) == NOTHING
    assert _advice(1, largest_matrix_flops=10**11, flops_mean=1e9) == NOTHING
    assert _advice(1, tp=1, dp=1) == NOTHING
