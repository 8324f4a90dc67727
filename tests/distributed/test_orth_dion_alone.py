"""Orth-Dion with prescribed gradients through plan, exchange and rule, against one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_muon.linalg.orthonormal import RightFactor
from megatron_muon.matrices import logical_matrices
from megatron_muon.optim.dion_rule import seeded_right_factor
from megatron_muon.placement.program import compile_wave
from tests.distributed.prescribed import (
    Whole,
    assemble,
    gradient,
    initial,
    model,
    parts,
    rates,
    sharded_parameters,
)
from tests.distributed.prescribed_dion import (
    DionSetting,
    factor_plan_of,
    rule_of,
    run_dion_rank,
)
from tests.reference.orth_dion import ReferenceOrthDion
from tests.worst import worst_of

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
    lr, decay = ({e.name: rates(setting, e.name)[which] for e in entries} for which in (0, 1))
    for step in range(setting.steps):
        grads = {e.name: gradient_of(e, step, torch.float64) for e in entries}
        expected.step(weights, grads, rows, lr=lr, weight_decay=decay)
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
            worst = worst_of(worst, off)
    return worst


@pytest.mark.parametrize(("steps", "least", "most"), [(1, 1e-3, 8e-3), (8, 2e-3, 2e-2)])
@pytest.mark.parametrize(
    ("tp", "dp", "scheme"), [(2, 2, "factors"), (2, 2, "auto"), (1, 3, "matrix")]
)
def test_messages_of_16_bits_are_near_the_reference_and_the_same_on_all_ranks(
    ranks: Ranks, tp: int, dp: int, scheme: Any, steps: int, least: float, most: float
) -> None:
    """The error relative to the total change; and half of the bytes are sent."""
    wide = DionSetting(tp=tp, dp=dp, dtype=torch.float32, scheme=scheme, steps=steps)
    narrow = replace(wide, exchange_dtype=torch.bfloat16)
    in_32, in_16 = (ranks(tp * dp, run_dion_rank, setting, model()) for setting in (wide, narrow))
    expected, _ = reference(narrow, model())
    worst = 0.0
    for name, copies in assemble(in_16, narrow, model(), "masters").items():
        assert all(torch.equal(copy, copies[0]) for copy in copies), name
        start = next(initial(e, torch.float64) for e in model() if e.name == name)
        off, moved = (copies[0].double() - expected[name]).norm(), (expected[name] - start).norm()
        # One has neither gradient nor weight decay.
        worst = worst_of(worst, off / moved if moved else off)
    assert least < worst < most
    for a, b in zip(in_32, in_16, strict=True):
        assert a["counters"][0].sent_bytes == 2 * b["counters"][0].sent_bytes


QUICK = [(1, 1, "factors"), (2, 2, "factors"), (4, 3, "matrix")]
EVERY = [
    pytest.param(*case, kind, marks=() if case in QUICK and kind == "qr" else pytest.mark.slow)
    for case in ((*layout, scheme) for layout in LAYOUTS for scheme in ("factors", "matrix"))
    for kind in ("qr", "polar", "colnorm")
]


@pytest.mark.parametrize(("tp", "dp", "scheme", "kind"), EVERY)
def test_equals_one_process(ranks: Ranks, tp: int, dp: int, scheme: Any, kind: str) -> None:
    setting = DionSetting(tp=tp, dp=dp, dtype=torch.float64, scheme=scheme, right_factor=kind)
    assert errors(ranks, setting, model()) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qr", "polar", "colnorm"])
@pytest.mark.parametrize(
    "changes",
    [
        {"scale_mode": "spectral", "rank_compensation": True},
        {"rank_fraction": 1.0, "momentum": 0.8, "split": "none"},
        {"rank_fraction": 1e-9, "scale_mode": "match_rms_adamw", "split": "heads"},
        {"rank_multiple_of": 8, "momentum": 0.0, "weight_decay": 0.0},
    ],
    ids=["scales", "full rank", "rank 1", "multiples"],
)
def test_every_setting_equals_one_process(ranks: Ranks, changes: dict[str, Any], kind: str) -> None:
    setting = DionSetting(tp=2, dp=2, dtype=torch.float64, steps=8, right_factor=kind, **changes)
    assert errors(ranks, setting, model()) < 1e-10


class RawSigns:
    """The known mistake, replacing ``linalg.Refresh``."""

    def __init__(self, w: torch.Tensor, previous: torch.Tensor, kind: str, **_: Any) -> None:
        self.v, self.core = torch.linalg.qr(w)
        self.unsettled = torch.zeros(len(w), dtype=torch.bool)

    def settled(self, is_unsettled: bool) -> RightFactor:
        return RightFactor(update=self.v, kept=self.v, core=self.core)


def test_raw_signs_are_distinguished(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_muon.optim.dion_owner.Refresh", RawSigns)
    setting = DionSetting(tp=2, dp=2, dtype=torch.float64, steps=3)
    assert errors(ranks, setting, model()) > 1e-3


@pytest.mark.parametrize("scheme", ["auto", "factors", "matrix"])
@pytest.mark.parametrize(("tp", "dp"), [(2, 2), (1, 3)])
def test_bytes_messages_and_peaks_are_those_of_the_plan(
    ranks: Ranks, tp: int, dp: int, scheme: Any
) -> None:
    mb = 0.015
    setting = DionSetting(tp=tp, dp=dp, dtype=torch.float32, steps=2, scheme=scheme, buffer_mb=mb)
    plan = factor_plan_of(setting, model())
    assert len(plan.main.waves) > 2
    results = ranks(tp * dp, run_dion_rank, setting, model())
    rounds = sum(len(compile_wave(plan, wave, 0).messages) for wave in plan.main.waves)
    for result, load in zip(results, plan.loads, strict=True):
        for counters in result["counters"]:
            assert counters.sent_bytes == load.sent_bytes
            assert counters.received_bytes == load.received_bytes
            assert counters.matrices == load.matrices
            assert counters.messages == rounds
            assert counters.peak_buffer_bytes <= load.peak_buffer_bytes <= mb * 2**20
