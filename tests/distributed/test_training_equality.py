"""DMuon on real megatron-core: every step equals one float64 process, at every TP x DP layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_muon.config import MatrixConfig
from tests.distributed.training import RATES, Run, errors_against_reference, train
from tests.reference.muon import QUINTIC
from tests.worst import worst_of

Ranks = Callable[..., list[Any]]

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4)]
RULES = MatrixConfig(min_dim=1, rules=RATES)
SEVERAL_WAVES = [MatrixConfig(exchange_buffer_mb=mb, min_dim=1, rules=RATES) for mb in (0.06, 0.04)]
"""So small that the tiny GPT needs several waves on two to eight ranks."""


def variant(tp: int, dp: int, *, demanding: bool) -> Run:
    """Plain with active clipping; or overlap, several buckets and waves, sequence parallel."""
    if demanding:
        return Run(
            options=(("layers", 4),),
            tp=tp,
            dp=dp,
            overlap=True,
            sequence_parallel=True,
            clip_grad=100.0,
            config=RULES if tp * dp == 1 else SEVERAL_WAVES[tp * dp > 4],
        )
    return Run(tp=tp, dp=dp, clip_grad=0.5, config=RULES)


@pytest.mark.parametrize("demanding", [False, True], ids=["plain-clipped", "overlap-sp-waves"])
@pytest.mark.parametrize(
    ("tp", "dp", "steps"),
    [
        pytest.param(tp, dp, steps, id=f"TP{tp}xDP{dp}, {steps} steps", marks=marks)
        for tp, dp in LAYOUTS
        for steps, marks in ((6, ()), (20, pytest.mark.slow))
        if steps == 20 or tp * dp <= 4
    ],
)
def test_every_update_equals_the_reference(
    ranks: Ranks, tp: int, dp: int, steps: int, demanding: bool
) -> None:
    run = dataclasses.replace(variant(tp, dp, demanding=demanding), steps=steps)
    results = ranks(run.world_size, train, run)
    found = errors_against_reference(run, results[0], QUINTIC)
    assert found.matrix < 1e-5
    # Not ours: Adam's updates of weights near 1 are as small as the rounding of fp32 allows.
    assert found.scalar < 2e-4
    assert found.norm < 1e-5
    assert found.zeros == 0
    clips = [norm > run.clip_grad for norm in results[0]["norms"]]
    assert any(clips) != demanding
    orthogonalized = sum(c.matrices for r in results for c, _ in r["counters"])
    assert orthogonalized == (4 if demanding else 2) * 7
    for result in results:
        for counters, load in result["counters"]:
            assert counters.sent_bytes == load.sent_bytes
            assert counters.received_bytes == load.received_bytes
            assert counters.peak_buffer_bytes <= load.peak_buffer_bytes
            if bound := run.config.exchange_buffer_mb:
                assert load.peak_buffer_bytes <= bound * 2**20
            if demanding and tp * dp > 1:
                assert counters.messages >= 2 * 2
    assert_replicas_bit_equal(results, run)


def assert_replicas_bit_equal(results: list[dict[str, Any]], run: Run) -> None:
    """After every step, all copies of a shard: over DP, CP, instances, and TP where not cut."""
    for step in range(run.steps):
        seen: dict[Any, bytes] = {}
        for result in results:
            for shard, value in result["hashes"][step].items():
                assert value == seen.setdefault(shard, value), f"copies of {shard}, step {step}"


@pytest.mark.parametrize(("tp", "dp"), [(2, 2), (4, 1), (1, 4)])
def test_bf16_replicas_are_bit_equal(ranks: Ranks, tp: int, dp: int) -> None:
    run = Run(
        tp=tp,
        dp=dp,
        overlap=True,
        sequence_parallel=True,
        dtype=torch.bfloat16,
        steps=8,
        keep="last",
        config=SEVERAL_WAVES[0],
    )
    results = ranks(run.world_size, train, run)
    assert_replicas_bit_equal(results, run)
    assert results[0]["losses"][-1] < results[0]["losses"][0]


@pytest.mark.parametrize(
    ("compute", "exchange", "bound"),
    [("fp16", "auto", 0.02), ("bf16", "auto", 0.1), ("fp32", "bf16", 0.02), ("bf16", "fp32", 0.1)],
)
@pytest.mark.parametrize(("tp", "dp"), [(2, 2), pytest.param(1, 3, marks=pytest.mark.slow)])
def test_sixteen_bits_are_near_the_reference_and_the_same_on_all_ranks(
    ranks: Ranks, tp: int, dp: int, compute: str, exchange: str, bound: float
) -> None:
    """bf16 messages are counted as such; an owner's own elements are rounded as well."""
    config = MatrixConfig(compute_dtype=compute, exchange_dtype=exchange, min_dim=1, nesterov=True)
    run = Run(tp=tp, dp=dp, steps=4, overlap=True, config=config)
    results = ranks(run.world_size, train, run)
    found = errors_against_reference(run, results[0], QUINTIC)
    assert 1e-4 < found.matrix < bound
    assert_replicas_bit_equal(results, run)
    wide = dataclasses.replace(run, config=dataclasses.replace(config, exchange_dtype="fp32"))
    in_fp32 = ranks(wide.world_size, train, wide)
    narrow = exchange == "bf16" or exchange == "auto"
    for result, other in zip(results, in_fp32, strict=True):
        (counters, load), (counters_32, _) = result["counters"][0], other["counters"][0]
        assert counters.sent_bytes == load.sent_bytes
        assert counters.sent_bytes * (2 if narrow else 1) == counters_32.sent_bytes


def distance(results: list[dict[str, Any]], base: dict[str, Any]) -> float:
    """Return the final distance from the one-process run relative to that run's total change."""
    end, start, other = base["last"], base["first"], results[0]["last"]
    gone = sum(float((end[n].double() - start[n].double()).norm() ** 2) for n in end) ** 0.5
    off = sum(float((end[n].double() - other[n].double()).norm() ** 2) for n in end) ** 0.5
    return off / gone


@pytest.mark.parametrize(
    ("steps", "layouts"),
    [
        (8, [(1, 1), (2, 1), (1, 2), (2, 2)]),
        pytest.param(20, [s for s in LAYOUTS if s[0] * s[1] <= 4], marks=pytest.mark.slow),
    ],
    ids=["short", "long"],
)
def test_layouts_differ_no_more_than_adamw_does(
    ranks: Ranks, steps: int, layouts: list[tuple[int, int]]
) -> None:
    """Whole runs at several layouts end as close together as AdamW's, times three."""
    worst = {}
    for optimizer in ("adam", "dmuon"):
        runs = [
            Run(tp=tp, dp=dp, optimizer=optimizer, overlap=True, keep="last", steps=steps)
            for tp, dp in layouts
        ]
        base, *others = (ranks(run.world_size, train, run) for run in runs)
        worst[optimizer] = worst_of(*(distance(other, base[0]) for other in others))
    assert 0.0 < worst["dmuon"] <= 3.0 * worst["adam"]


def test_norm_and_zero_count_equal_adams(ranks: Ranks) -> None:
    """The first step's global norm and zeros do not depend on optimizer or layout."""
    seen = []
    for optimizer in ("adam", "dmuon"):
        for tp, dp in [(1, 1), (2, 2)]:
            run = Run(tp=tp, dp=dp, optimizer=optimizer, steps=1, keep="last")
            seen.append(ranks(run.world_size, train, run)[0])
    assert len({record["zeros"][0] for record in seen}) == 1
    norms = [record["norms"][0] for record in seen]
    assert max(norms) == pytest.approx(min(norms), rel=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_pipeline_stages_have_plans_of_their_own(ranks: Ranks, nesterov: bool) -> None:
    """PP2 x TP2 ends where one process ends."""
    config = MatrixConfig(nesterov=nesterov)
    base = Run(steps=8, keep="last", config=config)
    run = Run(tp=2, pp=2, steps=8, keep="last", config=config)
    one = ranks(1, train, base)[0]["last"]
    many = ranks(run.world_size, train, run)
    found = {name: tensor for result in many for name, tensor in result["last"].items()}
    assert found.keys() == one.keys()
    for name, tensor in one.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-4), name


class TestAWrongVariantFails:
    """Defects of other implementations are far outside the bound of the equality test."""

    run = Run(tp=2, dp=2, overlap=True, steps=3)

    def error(self, ranks: Ranks, run: Run | None = None) -> float:
        run = run or self.run
        return errors_against_reference(run, ranks(4, train, run)[0], QUINTIC).matrix

    def test_blockwise_per_tp_shard(self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron_muon.integration import stage

        original = stage.logical_matrices

        def one_matrix_per_tp_shard(parameter: Any, *, split: bool) -> Any:
            import dataclasses

            found = []
            for matrix in original(parameter, split=split):
                for tp_rank in range(parameter.tp):
                    blocks = [b for b in matrix.blocks if b.tp_rank == tp_rank]
                    top, left = min(b.row for b in blocks), min(b.col for b in blocks)
                    moved = tuple(
                        dataclasses.replace(b, row=b.row - top, col=b.col - left) for b in blocks
                    )
                    shape = (sum(b.rows for b in blocks), blocks[0].cols)
                    found.append(
                        dataclasses.replace(
                            matrix, name=f"{matrix.name}@{tp_rank}", blocks=moved, shape=shape
                        )
                    )
            return tuple(found)

        monkeypatch.setattr(stage, "logical_matrices", one_matrix_per_tp_shard)
        assert self.error(ranks) > 1e-2

    def test_qkv_not_split(self, ranks: Ranks) -> None:
        import dataclasses

        run = dataclasses.replace(self.run, config=MatrixConfig(split_qkv=False))
        assert self.error(ranks, run) > 1e-2

    def test_gate_and_up_not_split(self, ranks: Ranks) -> None:
        import dataclasses

        run = dataclasses.replace(self.run, config=MatrixConfig(split_gate_up=False))
        assert self.error(ranks, run) > 1e-2

    def test_one_wave_dropped(self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
        import dataclasses

        from megatron_muon.exchange import runner

        original = runner.Exchange.__init__

        def forgets_the_last_wave(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            main, split = self._order
            self._order = [main._replace(messages=main.messages[:-1]), split]

        run = dataclasses.replace(self.run, config=SEVERAL_WAVES[0])
        assert self.error(ranks, run) < 1e-5
        monkeypatch.setattr(runner.Exchange, "__init__", forgets_the_last_wave)
        assert self.error(ranks, run) > 1e-2
