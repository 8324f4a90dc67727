"""Every parallelism and every model: each step's update equals the one-process float64 reference.

Every case runs with several buckets and overlapped reduction, and with sequence parallelism where
TP cuts. What was found is written to ``build/layouts.json``, of which ``tools/support_matrix.py``
makes the table of docs/support.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.layouts import CASES, Case
from tests.distributed.training import Run, errors_against_reference, merged, train
from tests.ranks import RankFailed
from tests.reference.muon import QUINTIC

Ranks = Callable[..., list[Any]]

STEPS = 4


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[] if c.quick else [pytest.mark.slow]) for c in CASES],
)
def test_every_update_equals_the_reference(
    ranks: Ranks, case: Case, layouts_tested: Callable[[Case, Any], None]
) -> None:
    run = case.run(steps=STEPS, clip_grad=1.0)
    results = ranks(run.world_size, train, run)
    record = merged(results, run)
    found = errors_against_reference(run, record, QUINTIC)
    layouts_tested(case, found)
    assert found.matrix < 1e-5
    assert found.scalar < 2e-4
    assert found.norm < 1e-5, "a gradient is counted twice, or not at all"
    assert found.zeros == 0, "a zero is counted twice, or not at all"
    for step in range(run.steps):
        seen: dict[Any, bytes] = {}
        for result in results:
            for shard, value in result["hashes"][step].items():
                assert value == seen.setdefault(shard, value), f"copies of {shard}, step {step}"
    computed = sum(c.matrices for r in results for c, _ in r["counters"])
    assert computed == sum(r["matrices"] for r in results), "each matrix once, no more"
    for result in results:
        for counters, load in result["counters"]:
            assert counters.sent_bytes == load.sent_bytes
            assert counters.peak_buffer_bytes <= load.peak_buffer_bytes


class TestAWrongVariantFails:
    """Defects of other implementations are far outside the bound above."""

    def error(self, ranks: Ranks, run: Run) -> float:
        record = merged(ranks(run.world_size, train, run), run)
        return errors_against_reference(run, record, QUINTIC).matrix

    @pytest.mark.parametrize(
        ("linear", "run"),
        [
            ("linear_fc1", Run(model="moe", dp=2, ep=2, steps=2)),
            ("linear_kv_up_proj", Run(model="mla", tp=2, sequence_parallel=True, steps=2)),
            ("linear_qkv", Run(model="gpt-gated-attention", tp=2, steps=2)),
        ],
        ids=["gate and up of experts", "keys and values of MLA", "gated attention"],
    )
    def test_packed_rows_as_one_matrix(
        self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, linear: str, run: Run
    ) -> None:
        from megatron_muon.matrices import WHOLE, known_packings

        assert self.error(ranks, run) < 1e-5
        family, _ = known_packings._BY_NAME[linear]
        monkeypatch.setitem(known_packings._BY_NAME, linear, (family, lambda config, rows: WHOLE))
        assert self.error(ranks, run) > 1e-2

    def test_experts_exchanged_among_half_their_ranks(
        self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Treat the shards of one expert-TP rank as whole matrices."""
        from megatron_muon.integration import model_parameters

        without_expert_tp = property(lambda place: 1 if place.is_expert else place.sizes[0])
        run = Run(model="moe", tp=2, dp=2, ep=2, etp=2, sequence_parallel=True, steps=2)
        assert self.error(ranks, run) < 1e-5
        monkeypatch.setattr(model_parameters._Place, "tp", without_expert_tp)
        with pytest.raises((RankFailed, AssertionError)):
            assert self.error(ranks, run) < 1e-3
