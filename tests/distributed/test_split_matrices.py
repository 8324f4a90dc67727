"""Matrices split among several ranks, against one float64 process; rule and exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_muon.exchange import mailbox
from megatron_muon.linalg import panel_newton_schulz
from megatron_muon.placement import Panels
from tests.distributed.prescribed import (
    GROUPS,
    HEAD_DIM,
    HEADS,
    Setting,
    Whole,
    gate_up,
    model,
    plan_of,
    run_rank,
    units,
)
from tests.distributed.test_rule_alone import TOLERANCE, errors

Ranks = Callable[..., list[Any]]

# One to three matrices, so that the largest is above the mean load of a rank.
STAGES: dict[str, list[Whole]] = {
    "wide, rows": [Whole(name="l.0.a.weight", shape=(24, 61), tp_dim=0)],
    "wide, columns": [Whole(name="l.0.b.weight", shape=(13, 36), tp_dim=1)],
    "tall, rows": [Whole(name="l.0.c.weight", shape=(60, 11), tp_dim=0)],
    "tall, columns": [Whole(name="l.0.d.weight", shape=(53, 24), tp_dim=1)],
    "square": [Whole(name="l.0.e.weight", shape=(24, 24), tp_dim=0)],
    "more ranks than rows": [Whole(name="l.0.f.weight", shape=(2, 36), tp_dim=1)],
    "replicated": [
        Whole(name="l.0.g.weight", shape=(9, 25), tp_dim=None),
        Whole(name="l.0.h.weight", shape=(25, 9), tp_dim=None),
    ],
    "packed": [
        Whole(
            name="l.0.qkv.weight",
            shape=((HEADS + 2 * GROUPS) * HEAD_DIM, 24),
            tp_dim=0,
            packing=units(q=HEADS // GROUPS * HEAD_DIM, k=HEAD_DIM, v=HEAD_DIM),
        ),
        Whole(name="l.0.fc1.weight", shape=(240, 20), tp_dim=0, packing=gate_up(120)),
    ],
    "large and small": [
        Whole(name="l.0.large.weight", shape=(48, 96), tp_dim=1),
        Whole(name="l.0.small.weight", shape=(12, 24), tp_dim=0),
        Whole(name="l.1.small.weight", shape=(24, 12), tp_dim=1),
        Whole(name="l.2.large.weight", shape=(96, 48), tp_dim=0),
    ],
}
LAYOUTS = [(1, 2), (1, 4), (4, 1), (2, 2), (1, 3), (2, 3)]
QUICK = [(2, 2), (1, 3)]


def setting_of(tp: int, dp: int, **changes: Any) -> Setting:
    values: dict[str, Any] = {"dtype": torch.float64, "steps": 3, "bucket": 500, "most_ranks": 8}
    return Setting(tp=tp, dp=dp, **(values | changes))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("tp", "dp"),
    [
        pytest.param(
            tp, dp, id=f"TP{tp}xDP{dp}", marks=[] if (tp, dp) in QUICK else [pytest.mark.slow]
        )
        for tp, dp in LAYOUTS
    ],
)
def test_equals_one_process(ranks: Ranks, tp: int, dp: int, stage: str) -> None:
    # On two ranks two equal matrices are one for each.
    entries = STAGES[stage][: 1 if tp * dp == 2 else None]
    # A scale that tells rows from columns.
    setting = setting_of(tp, dp, scale_mode="unit_rms_norm")
    assert plan_of(setting, entries).split.waves, "nothing is split"
    assert errors(ranks, setting, entries) < TOLERANCE[torch.float64]


def split_among_nodes(setting: Setting, entries: list[Whole]) -> set[int]:
    """Return the number of nodes of each split matrix."""
    schemes = plan_of(setting, entries).schemes
    return {scheme.team.nodes for scheme in schemes if isinstance(scheme, Panels)}


NODES = [(2, 2, 2), (1, 4, 1), (2, 3, 2), (2, 3, 3), (2, 4, 4)]
"""(TP, DP, ranks of a node)."""


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("tp", "dp", "per_node"),
    [
        pytest.param(
            *nodes,
            id="TP{}xDP{} on nodes of {}".format(*nodes),
            marks=[] if nodes == NODES[0] else [pytest.mark.slow],
        )
        for nodes in NODES
    ],
)
def test_on_several_nodes_it_equals_one_process(
    ranks: Ranks, tp: int, dp: int, per_node: int, stage: str
) -> None:
    entries = STAGES[stage][:1]
    setting = setting_of(tp, dp, scale_mode="unit_rms_norm", ranks_per_node=per_node)
    assert tp * dp // per_node in split_among_nodes(setting, entries)
    assert errors(ranks, setting, entries) < TOLERANCE[torch.float64]


@pytest.mark.parametrize(("tp", "dp"), [(1, 4), (2, 2), (2, 3)])
def test_in_fp32(ranks: Ranks, tp: int, dp: int) -> None:
    setting = setting_of(tp, dp, dtype=torch.float32)
    entries = [e for stage in ("tall, columns", "large and small") for e in STAGES[stage]]
    assert plan_of(setting, entries).split.waves
    assert errors(ranks, setting, entries) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("exchange", "compute", "bound"),
    [
        (torch.bfloat16, torch.bfloat16, 0.1),
        (torch.bfloat16, torch.float32, 0.02),
        (torch.float32, torch.float16, 0.02),
        (torch.float32, torch.float64, 1e-5),
    ],
    ids=str,
)
def test_other_dtypes(
    ranks: Ranks, exchange: torch.dtype, compute: torch.dtype, bound: float
) -> None:
    """Messages, products and norms have different dtypes."""
    setting = setting_of(2, 2, dtype=exchange, compute_dtype=compute, steps=1)
    entries = STAGES["large and small"]
    assert plan_of(setting, entries).split.waves
    # The weights of this test are of the exchange's dtype: in bf16 the error is theirs.
    assert errors(ranks, setting, entries) < (bound if exchange == torch.float32 else 0.3)


@pytest.mark.parametrize("bucket", [1, 10**6], ids=["one-each", "single"])
@pytest.mark.parametrize(("tp", "dp"), [(1, 4), (2, 3)])
def test_any_bucket_size(ranks: Ranks, tp: int, dp: int, bucket: int) -> None:
    """Some ranks have no elements of a matrix of which they compute a part, or none at all."""
    entries = [Whole(name="l.0.tiny.weight", shape=(4, 6), tp_dim=None), *STAGES["tall, columns"]]
    setting = setting_of(tp, dp, bucket=bucket)
    assert errors(ranks, setting, entries) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_whole_model_in_several_waves(ranks: Ranks, nesterov: bool) -> None:
    """Split matrices are computed between waves of others."""
    entries = [*model(2), Whole(name="layers.2.large.weight", shape=(96, 120), tp_dim=1)]
    setting = setting_of(2, 2, buffer_mb=0.5, nesterov=nesterov, steps=4)
    plan = plan_of(setting, entries)
    assert plan.split.waves and plan.main.waves
    assert errors(ranks, setting, entries) < TOLERANCE[torch.float64]


@pytest.mark.parametrize(("tp", "dp"), [(1, 4), (2, 2)])
def test_later_waves_that_end_before_earlier_ones(ranks: Ranks, tp: int, dp: int) -> None:
    """A square matrix needs more messages than a long one; waves must not share buffers."""
    entries = [
        Whole(name=f"l.{number}.weight", shape=shape, tp_dim=0)
        for number, shape in enumerate([(96, 96), (48, 192), (48, 192), (96, 96), (48, 192)])
    ]
    setting = setting_of(tp, dp)
    plan = plan_of(setting, entries)
    lengths = [
        max(len(plan.schemes[i].requests) for i in wave)  # type: ignore[attr-defined]
        for wave in plan.split.waves
    ]
    under_way = plan.split.slots
    assert any(lengths[at] > lengths[at + 1] for at in range(len(lengths) - under_way)), (
        "no wave ends before an earlier one while there is another to come"
    )
    assert errors(ranks, setting, entries) < TOLERANCE[torch.float64]


@pytest.mark.parametrize(
    ("tp", "dp", "per_node"), [(1, 4, None), (2, 2, None), (2, 3, None), (2, 2, 2), (2, 3, 2)]
)
def test_counts_equal_the_prediction(ranks: Ranks, tp: int, dp: int, per_node: int | None) -> None:
    """Bytes, buffers and operations are counted at run time; the plan predicts them."""
    # On several nodes with one large matrix only: of two each node has one.
    entries = STAGES["large and small"][: None if per_node is None else 2] + STAGES["replicated"]
    setting = setting_of(tp, dp, dtype=torch.float32, steps=2, ranks_per_node=per_node)
    plan = plan_of(setting, entries)
    assert (max(split_among_nodes(setting, entries)) > 1) == (per_node is not None)
    assert plan.split.waves and plan.main.waves
    results = ranks(tp * dp, run_rank, setting, entries, count_flops=True)
    for load, result in zip(plan.loads, results, strict=True):
        assert set(result["flops"]) == {load.flops}
        for counters in result["counters"]:
            assert counters.sent_bytes == load.sent_bytes
            assert counters.received_bytes == load.received_bytes
            assert 0.8 * load.peak_buffer_bytes <= counters.peak_buffer_bytes
            assert counters.peak_buffer_bytes <= load.peak_buffer_bytes
            assert counters.matrices == load.matrices
    assert sum(result["counters"][-1].matrices for result in results) == len(plan.matrices)
    assert len({result["counters"][-1].messages for result in results}) == 1


@pytest.mark.parametrize("per_node", [None, 2, 1], ids=["one node", "two", "four"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_runs_and_copies_have_the_same_bits(
    ranks: Ranks, dtype: torch.dtype, per_node: int | None
) -> None:
    setting = setting_of(2, 2, dtype=dtype, ranks_per_node=per_node)
    entries = STAGES["replicated"] + STAGES["large and small"]
    first, second = (ranks(4, run_rank, setting, entries) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        for what in ("masters", "momenta"):
            for name, tensor in one[what].items():
                assert torch.equal(tensor, other[what][name])
    for name in ("l.0.g.weight", "l.0.h.weight"):
        for dp_rank in range(2):
            copies = [first[2 * dp_rank + tp_rank]["masters"].get(name) for tp_rank in range(2)]
            assert copies[0] is None or torch.equal(copies[0], copies[1])


class TestAWrongVariantFails:
    """The equality tests can fail."""

    setting = setting_of(1, 4)
    on_nodes = setting_of(1, 4, ranks_per_node=2)
    entries = STAGES["wide, rows"]

    def broken(
        self,
        ranks: Ranks,
        monkeypatch: pytest.MonkeyPatch,
        place: Any,
        name: str,
        wrong: Any,
        setting: Setting = setting,
    ) -> float:
        assert errors(ranks, setting, self.entries) < 1e-10
        monkeypatch.setattr(place, name, wrong(getattr(place, name)))
        return errors(ranks, setting, self.entries)

    def test_one_partial_sum_forgotten(self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(original: Any) -> Any:
            def add_up(own: Any, partial: torch.Tensor, *, through: torch.Tensor) -> Any:
                steps = original(own, partial, through=through)
                request = next(steps)
                yield request
                request.received.view(own.team.size, -1)[-1].zero_()
                yield from steps

            return add_up

        assert self.broken(ranks, monkeypatch, panel_newton_schulz._Worker, "add_up", wrong) > 1e-3

    @pytest.mark.parametrize("kind", ["partials", "sums"])
    def test_one_sum_of_a_node_or_between_nodes_forgotten(
        self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        def wrong(original: Any) -> Any:
            def add_up(own: Any, partial: torch.Tensor, *, through: torch.Tensor) -> Any:
                for request in original(own, partial, through=through):
                    yield request
                    if request.kind == kind:
                        request.received.view(2, -1)[-1].zero_()

            return add_up

        worker = panel_newton_schulz._Worker
        found = self.broken(ranks, monkeypatch, worker, "add_up", wrong, self.on_nodes)
        assert found > 1e-3

    def test_nodes_in_another_order(self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
        """Block rows of a group arrive with its nodes in reverse order."""

        def wrong(original: Any) -> Any:
            def share(own: Any, rows: torch.Tensor, **squares: torch.Tensor) -> Any:
                for request in original(own, rows, **squares):
                    yield request
                    if request.kind == "blocks":
                        parts = request.received.view(2, -1)
                        parts.copy_(parts.flip(0))

            return share

        worker = panel_newton_schulz._Worker
        found = self.broken(ranks, monkeypatch, worker, "share", wrong, self.on_nodes)
        assert found > 1e-3

    def test_block_rows_in_another_order(
        self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A rank sends the rows of its block in reverse order."""

        def wrong(original: Any) -> Any:
            def share(own: Any, rows: torch.Tensor, **squares: torch.Tensor) -> Any:
                return original(own, rows.flip(0), **squares)

            return share

        worker = panel_newton_schulz._Worker
        assert self.broken(ranks, monkeypatch, worker, "share", wrong) > 1e-3

    def test_columns_of_panels_in_another_order(
        self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Columns are reversed when copied into a panel and out of its update."""

        def wrong(original: Any) -> Any:
            def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
                original(targets, [source.flip(-1) for source in sources])

            return copy

        assert self.broken(ranks, monkeypatch, mailbox, "copy_all", wrong) > 1e-3
