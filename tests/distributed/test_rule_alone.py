"""Prescribed gradients through plan, exchange and rule, against one float64 process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_muon.matrices import SplitMode
from tests.distributed.prescribed import (
    Setting,
    Whole,
    assemble,
    gradient,
    initial,
    model,
    parts,
    plan_of,
    rates,
    run_rank,
    units,
)
from tests.reference.muon import QUINTIC, ReferenceMuon
from tests.worst import worst_of

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4), (1, 3), (2, 3)]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

Ranks = Callable[..., list[Any]]


def reference(setting: Setting, entries: list[Whole]) -> dict[str, torch.Tensor]:
    """Final whole weights of one float64 process."""
    weights = {e.name: initial(e, torch.float64) for e in entries}
    rule = ReferenceMuon(
        lr=setting.lr,
        momentum=0.9,
        nesterov=setting.nesterov,
        weight_decay=setting.weight_decay,
        scale_mode=setting.scale_mode,
        extra_scale_factor=0.5,
        coefficients=QUINTIC,
    )
    rows = {e.name: parts(e, setting.split) for e in entries}
    lr, decay = ({e.name: rates(setting, e.name)[which] for e in entries} for which in (0, 1))
    for step in range(setting.steps):
        grads = {e.name: gradient(e, step, torch.float64) for e in entries}
        rule.step(weights, grads, rows, lr=lr, weight_decay=decay)
    return weights


def errors(ranks: Ranks, setting: Setting, entries: list[Whole], **options: Any) -> float:
    """Largest relative error of any final weight, every copy counted."""
    results = ranks(setting.tp * setting.dp, run_rank, setting, entries, **options)
    expected = reference(setting, entries)
    wholes = assemble(results, setting, entries, "masters")
    assert wholes.keys() == expected.keys()
    worst = 0.0
    for name, copies in wholes.items():
        # Where the gradient is zero only weight decay changes anything, and the change is as small
        # as the rounding of fp32 weights: there the weight itself is the measure.
        still = initial(next(e for e in entries if e.name == name), torch.float64)
        is_still = name == "layers.1.linear_fc2.weight"
        measure = expected[name] if is_still else expected[name] - still
        for copy in copies:
            difference = (copy.double() - expected[name]).norm() / measure.norm()
            worst = worst_of(worst, difference)
    return worst


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("tp", "dp"), LAYOUTS, ids=[f"TP{t}xDP{d}" for t, d in LAYOUTS])
def test_equals_one_process(ranks: Ranks, tp: int, dp: int, dtype: torch.dtype) -> None:
    setting = Setting(tp=tp, dp=dp, dtype=dtype)
    assert errors(ranks, setting, model()) < TOLERANCE[dtype]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    "scale_mode", ["spectral", "unit_rms_norm", "shape_scaling", "match_rms_adamw"]
)
def test_every_variant_of_the_rule(ranks: Ranks, nesterov: bool, scale_mode: str) -> None:
    setting = Setting(
        tp=2, dp=2, dtype=torch.float64, nesterov=nesterov, scale_mode=scale_mode, steps=6
    )
    assert errors(ranks, setting, model()) < 1e-10


@pytest.mark.parametrize("bucket", [1, 700, 10**6], ids=["one-each", "several", "single"])
def test_any_bucket_size(ranks: Ranks, bucket: int) -> None:
    """Ranges cut matrices in the middle of a row, and some ranks own nothing of a matrix."""
    setting = Setting(tp=2, dp=3, dtype=torch.float64, bucket=bucket, steps=4)
    assert errors(ranks, setting, model()) < 1e-10


def test_large_batches_are_computed_part_by_part(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_muon.optim.muon_memory.MOST_ELEMENTS", 300)
    setting = Setting(tp=2, dp=1, dtype=torch.float64, steps=4)
    assert errors(ranks, setting, model()) < 1e-10


def test_many_waves_within_the_buffer(ranks: Ranks) -> None:
    """A buffer for few matrices results in many waves; the result is the same."""
    setting = Setting(tp=2, dp=2, dtype=torch.float64, layers=4, buffer_mb=0.06, steps=4)
    entries = model(4)
    assert len(plan_of(setting, entries).main.waves) >= 4
    assert errors(ranks, setting, entries) < 1e-10


def test_more_ranks_than_matrices(ranks: Ranks) -> None:
    setting = Setting(tp=2, dp=4, dtype=torch.float64, steps=4)
    entries = [Whole(name="layers.0.linear_proj.weight", shape=(12, 16), tp_dim=1)]
    assert errors(ranks, setting, entries) < 1e-10


def test_a_rank_without_any_element(ranks: Ranks) -> None:
    """Buckets smaller than one shard per rank leave only padding on the last ranks."""
    setting = Setting(tp=1, dp=4, dtype=torch.float64, steps=4, bucket=1)
    entries = [Whole(name="layers.0.small.weight", shape=(3, 5), tp_dim=None)]
    (parameter,) = plan_of(setting, entries).parameters
    assert (0, 0) in parameter.ranges
    assert errors(ranks, setting, entries) < 1e-10


@pytest.mark.parametrize("nesterov", [False, True])
def test_only_one_copy_is_a_source(ranks: Ranks, nesterov: bool) -> None:
    """Other copies of a replicated weight contribute nothing, even if their rank is the owner."""
    setting = Setting(
        tp=2, dp=2, dtype=torch.float64, steps=3, nesterov=nesterov, spoil_copies=True
    )
    entries = [
        Whole(name=f"layers.{n}.linear_down.weight", shape=(7, 24), tp_dim=None) for n in range(6)
    ]
    owners = {scheme.owner for scheme in plan_of(setting, entries).schemes}
    assert {owner % setting.tp for owner in owners} == {0, 1}
    assert errors(ranks, setting, entries) < 1e-10


def test_no_matrix_at_all(ranks: Ranks) -> None:
    setting = Setting(tp=2, dp=2, dtype=torch.float64, steps=2)
    results = ranks(4, run_rank, setting, [])
    assert all(r["masters"] == {} and r["counters"][-1].messages == 0 for r in results)


@pytest.mark.parametrize(("tp", "dp"), [(4, 1), (2, 3)])
@pytest.mark.parametrize("split", ["none", "heads"])
def test_other_splits(ranks: Ranks, split: SplitMode, tp: int, dp: int) -> None:
    """One matrix in the global order of its rows, or one for every attention head."""
    setting = Setting(tp=tp, dp=dp, dtype=torch.float64, split=split, steps=4)
    assert errors(ranks, setting, model()) < 1e-10


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (4, 1), (2, 2), (2, 3)])
@pytest.mark.parametrize(
    ("buffer_mb", "momentum"),
    [(16.0, torch.float32), (0.06, torch.float32), (16.0, torch.bfloat16), (0.03, torch.bfloat16)],
    ids=str,
)
def test_counts_equal_the_prediction(
    ranks: Ranks, tp: int, dp: int, buffer_mb: float, momentum: torch.dtype
) -> None:
    """Bytes and orthogonalizations are counted at run time; the plan predicts them.

    So are the copies in which 16-bit momenta are summed, as many at a time as fit.
    """
    setting = Setting(
        tp=tp,
        dp=dp,
        dtype=torch.float32,
        steps=2,
        layers=4,
        buffer_mb=buffer_mb,
        momentum_dtype=momentum,
    )
    entries = model(4)
    plan = plan_of(setting, entries)
    results = ranks(tp * dp, run_rank, setting, entries)
    for load, result in zip(plan.loads, results, strict=True):
        for counters in result["counters"]:
            assert counters.sent_bytes == load.sent_bytes
            assert counters.received_bytes == load.received_bytes
            assert counters.matrices == load.matrices
            assert counters.peak_buffer_bytes <= load.peak_buffer_bytes <= buffer_mb * 2**20
            if tp * dp > 1:
                assert counters.peak_buffer_bytes == load.peak_buffer_bytes
    total = sum(result["counters"][-1].matrices for result in results)
    assert total == len(plan.matrices) == 4 * 22


class TestAWrongVariantFails:
    """The equality tests can fail: defects of other implementations are far outside the bound."""

    setting = Setting(tp=2, dp=2, dtype=torch.float64, steps=3)

    def test_blockwise_per_tp_shard(self, ranks: Ranks) -> None:
        entries = [Whole(name="layers.0.linear_proj.weight", shape=(24, 32), tp_dim=0)]
        blockwise = [dataclasses.replace(e, packing=units(a=12, b=12)) for e in entries]
        assert errors(ranks, self.setting, entries) < 1e-10
        expected = reference(self.setting, entries)
        results = ranks(4, run_rank, self.setting, blockwise)
        got = assemble(results, self.setting, blockwise, "masters")
        (name,) = expected
        assert (got[name][0] - expected[name]).norm() / expected[name].norm() > 1e-3

    def test_qkv_not_split(self, ranks: Ranks) -> None:
        wrong = dataclasses.replace(self.setting, split="none")
        entries = model(1)
        results = ranks(4, run_rank, wrong, entries)
        got = assemble(results, wrong, entries, "masters")["layers.0.linear_qkv.weight"][0]
        expected = reference(self.setting, entries)["layers.0.linear_qkv.weight"]
        assert (got - expected).norm() / expected.norm() > 1e-3

    def test_one_wave_dropped(self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron_muon.exchange import runner

        setting = dataclasses.replace(self.setting, layers=4, buffer_mb=0.06)
        entries = model(4)
        original = runner.Exchange.__init__

        def forgets_the_last_wave(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            main, split = self._order
            self._order = [main._replace(messages=main.messages[:-1]), split]

        assert errors(ranks, setting, entries) < 1e-10
        monkeypatch.setattr(runner.Exchange, "__init__", forgets_the_last_wave)
        assert errors(ranks, setting, entries) > 1e-3
