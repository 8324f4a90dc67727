"""Orth-Dion with prescribed gradients through plan, exchange and rule, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_muon.matrices import logical_matrices
from megatron_muon.optim.dion_rule import seeded_right_factor
from tests.distributed.prescribed import (
    Whole,
    assemble,
    gradient,
    initial,
    model,
    parts,
    sharded_parameters,
)
from tests.distributed.prescribed_dion import (
    DionSetting,
    rule_of,
    run_dion_rank,
)
from tests.reference.orth_dion import ReferenceOrthDion

Ranks = Callable[..., list[Any]]

LAYOUTS = [(tp, dp) for tp in (1, 2, 4) for dp in (1, 2, 3)]


def reference(
    setting: DionSetting, entries: list[Whole], gradient_of: Any = gradient
) -> tuple[dict[str, torch.Tensor], ReferenceOrthDion]:
    """Final whole weights of one float64 process."""
    rule = rule_of(setting)
    whole = sharded_parameters(entries, tp=1, dp=1, bucket=1)
    names = {
        f"{p.name}[{i}]": matrix
        for p in whole
        for i, matrix in enumerate(logical_matrices(p, split=setting.split))
    }

    def start(label: str) -> torch.Tensor:
        matrix = names[label]
        rank = rule.rank(*matrix.shape)
        return seeded_right_factor(
            matrix.name, min(matrix.shape), rank, dtype=setting.dtype
        ).double()

    expected = ReferenceOrthDion(
        lr=setting.lr,
        momentum=rule.momentum,
        weight_decay=setting.weight_decay,
        scale_mode=setting.scale_mode,
        extra_scale_factor=0.5,
        right_factor=setting.right_factor,
        start=start,
        rank_compensation=setting.rank_compensation,
    )
    weights = {e.name: initial(e, torch.float64) for e in entries}
    rows = {e.name: parts(e, setting.split) for e in entries}
    for step in range(setting.steps):
        expected.step(weights, {e.name: gradient_of(e, step, torch.float64) for e in entries}, rows)
    return weights, expected


def errors(
    ranks: Ranks, setting: DionSetting, entries: list[Whole], gradient_of: Any = gradient
) -> float:
    """Largest relative error of any final weight, every copy counted."""
    results = ranks(setting.tp * setting.dp, run_dion_rank, setting, entries, gradient_of)
    expected, _ = reference(setting, entries, gradient_of)
    wholes = assemble(results, setting, entries, "masters")
    assert wholes.keys() == expected.keys()
    worst = 0.0
    for name, copies in wholes.items():
        for copy in copies:
            off = float((copy.double() - expected[name]).norm() / expected[name].norm())
            assert off == off
            worst = max(worst, off)
    return worst


@pytest.mark.parametrize("kind", ["qr", "polar", "colnorm"])
@pytest.mark.parametrize("scheme", ["factors", "matrix"])
@pytest.mark.parametrize(("tp", "dp"), LAYOUTS)
def test_equals_one_process(ranks: Ranks, tp: int, dp: int, scheme: Any, kind: str) -> None:
    setting = DionSetting(tp=tp, dp=dp, dtype=torch.float64, scheme=scheme, right_factor=kind)
    assert errors(ranks, setting, model()) < 1e-10
