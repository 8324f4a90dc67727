"""Parameter groups of a checkpoint beside those of the run that loads it."""

from __future__ import annotations

from typing import Any

import pytest

GROUPS = [
    {"optimizer": "dmuon", "max_lr": 0.1, "wd_mult": 1.0, "step": 7},
    {"optimizer": "adam", "max_lr": 0.2, "wd_mult": 0.0, "step": 8},
]


def test_a_group_keeps_the_identity_of_this_run(megatron: Any) -> None:
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    from megatron_muon.integration.distributed_optimizer import _resumed_group

    assert {"max_lr", "wd_mult"} <= set(param_group_identifier_keys)
    current = {"optimizer": "adam", "max_lr": 0.3}
    resumed = _resumed_group(current, GROUPS)
    # The likest, and no part of its identity that this run does not have.
    assert resumed == {"optimizer": "adam", "max_lr": 0.3, "step": 8}
    assert GROUPS[1]["wd_mult"] == 0.0, "the saved group was changed"


@pytest.mark.parametrize(
    ("saved", "words"),
    [("orth_dion", ("orth_dion", "dmuon", "--optimizer")), (None, ("Adam", "dmuon"))],
)
def test_state_of_another_optimizer_is_refused(
    megatron: Any, saved: str | None, words: tuple[str, ...]
) -> None:
    from megatron_muon.integration.distributed_optimizer import (
        MATRIX_GROUP_KEY,
        _require_same_optimizer,
    )

    ours = [{MATRIX_GROUP_KEY: "dmuon"}, {}]
    _require_same_optimizer(ours, {"param_groups": [{MATRIX_GROUP_KEY: "dmuon"}, {}]})
    _require_same_optimizer([{}], {"param_groups": [{}]})
    with pytest.raises(ValueError) as refusal:
        _require_same_optimizer(ours, {"param_groups": [{MATRIX_GROUP_KEY: saved}, {}]})
    for word in words:
        assert word in str(refusal.value)
