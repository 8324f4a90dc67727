"""Reports from other implementations, shown not to apply here; see ``tests/known_bugs.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.config import MatrixConfig
from megatron_muon.matrices import Rule
from tests import tiny_gpt
from tests.distributed.checkpointing import train_between
from tests.distributed.training import Run, build, gather, train
from tests.ranks import layout
from tests.reference.muon import QUINTIC, orthogonalize

Ranks = Callable[..., list[Any]]

ONE_MATRIX = MatrixConfig(
    min_dim=1,
    rules=(
        Rule(pattern="*", optimizer="adam"),
        Rule(pattern="decoder.layers.1.*.linear_proj.weight", optimizer="matrix"),
    ),
)


def test_no_parameter_moves_in_its_buffer(ranks: Ranks) -> None:
    """M#4840, M#4889: kernels fail on parameters that do not start on 64-element boundaries."""

    def places(rank: int, optimizer: str) -> Any:
        chunks, _, _ = build(Run(dp=2, ep=2, model="moe", optimizer=optimizer, overlap=True))
        (chunk,) = chunks
        names = {p: n for n, p in chunk.named_parameters()}
        return {
            names[p]: place
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
            for p, place in buffer.param_index_map.items()
        }

    assert ranks(2, places, "dmuon") == ranks(2, places, "adam")


def test_padding_of_buckets_never_reaches_a_matrix(ranks: Ranks) -> None:
    """M#6740: all padding of the gradient buffers is nan."""

    def body(rank: int) -> bool:
        (chunk,), optimizer, _ = build(
            Run(dp=3, model="gpt", overlap=True, sequence_parallel=False)
        )
        optimizer.zero_grad()
        tiny_gpt.forward_backward(chunk, tiny_gpt.batch(0, global_batch=6, micro_batch=1))
        poisoned = 0
        for buffer in chunk.buffers:
            for bucket in buffer.buckets:
                padding = torch.ones(bucket.grad_data.numel(), dtype=torch.bool)
                for start, stop in bucket.param_to_index.values():
                    padding[start:stop] = False
                bucket.grad_data[padding] = float("nan")
                poisoned += int(padding.sum())
        assert poisoned
        assert optimizer.step()[0]
        return all(bool(t.isfinite().all()) for t in gather([chunk]).values())

    assert ranks(3, body) == [True] * 3


def test_overlap_on_and_off_give_the_same_bits(ranks: Ranks) -> None:
    """M#4609: an overlapped gather pollutes gradients."""
    runs = [
        Run(dp=2, ep=2, model="moe", steps=4, clip_grad=0.0, overlap=reduce, overlap_gather=early)
        for reduce, early in [(False, False), (True, False), (True, True)]
    ]
    first, *others = (ranks(2, train, run) for run in runs)
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert one["hashes"] == two["hashes"]


def test_buffers_of_another_group_are_refused(ranks: Ranks) -> None:
    """M#6048: the layout had more shards than the group that reduces."""

    def body(rank: int) -> str:
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.process_groups_config import ProcessGroupCollection

        import megatron_muon

        layout(tp=2)
        wrapped = tiny_gpt.wrap_ddp(tiny_gpt.build_gpt())
        groups = ProcessGroupCollection.use_mpu_process_groups()
        groups.dp = groups.dp_cp = groups.intra_dp_cp = groups.cp
        config = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True)
        with pytest.raises(ValueError) as refused:
            megatron_muon.get_matrix_optimizer(
                config, [wrapped], pg_collection=groups, use_gloo_process_groups=False
            )
        return str(refused.value)

    for message in ranks(4, body):
        assert "dense gradient buffers are sharded over 2 ranks" in message


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(Run(dp=4, ep=4, model="moe"), id="expert-DP 1"),
        pytest.param(Run(dp=4, config=ONE_MATRIX), id="ranks that hold nothing"),
        pytest.param(
            Run(tp=2, dp=4, ep=4, etp=2, model="moe", sequence_parallel=True),
            id="expert-DP 1, expert-TP 2",
            marks=pytest.mark.slow,
        ),
        pytest.param(Run(pp=2, vpp=2, overlap=True), id="VPP", marks=pytest.mark.slow),
        pytest.param(
            Run(dp=4, ep=2, instances=2, model="moe"), id="instances", marks=pytest.mark.slow
        ),
        pytest.param(
            Run(tp=2, cp=2, model="gpt-cp"), id="context parallel", marks=pytest.mark.slow
        ),
        pytest.param(
            Run(tp=2, dp=2, model="mla", sequence_parallel=True), id="MLA", marks=pytest.mark.slow
        ),
    ],
)
def test_steps_save_and_load_give_the_same_bits(ranks: Ranks, tmp_path: Path, run: Run) -> None:
    """M#4138 expert-DP 1; dion#74 ranks that hold nothing; M#6920 no gather after the load."""
    straight = ranks(run.world_size, train_between, run, 0, 4, None, None)
    ranks(run.world_size, train_between, run, 0, 2, None, tmp_path)
    resumed = ranks(run.world_size, train_between, run, 2, 4, tmp_path, None)
    for rank, (expected, found) in enumerate(zip(straight, resumed, strict=True)):
        assert expected["losses"][2:] == found["losses"]
        assert expected["weights"] == found["weights"], rank
        assert expected["state"] == found["state"], rank


@pytest.mark.parametrize(
    "run", [Run(), Run(tp=2, sequence_parallel=True), Run(model="moe", dp=2, ep=2)]
)
def test_a_loud_gate_leaves_up_its_update(ranks: Ranks, run: Run) -> None:
    """M#6688, M#7077, M#7078: with gate gradients 30 times larger up gets 5 % of its update."""
    name = ".linear_fc1."

    def body(rank: int) -> Any:
        plain = dataclasses.replace(
            run, clip_grad=0.0, config=MatrixConfig(min_dim=1, momentum=0.0)
        )
        (chunk,), optimizer, _ = build(plain)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        before = gather([chunk])
        optimizer.zero_grad()
        tiny_gpt.forward_backward(
            chunk, tiny_gpt.batch(0, global_batch=4, micro_batch=1), optimizer
        )
        for parameter_name, parameter in chunk.named_parameters():
            if name in parameter_name:
                half = parameter.main_grad.shape[0] // 2
                parameter.main_grad[:half] *= 30.0
        gradients = gather([chunk], "main_grad")
        lr = optimizer.param_groups[0]["lr"]
        assert optimizer.step()[0]
        after = gather([chunk])
        return [(gradients[n], (before[n] - after[n]) / lr) for n in before if name in n]

    for result in ranks(run.world_size, body):
        for gradient, update in result:
            for grad, got in zip(gradient.double().chunk(2), update.double().chunk(2), strict=True):
                expected = max(grad.shape) ** 0.5 * orthogonalize(grad, QUINTIC)
                assert (got - expected).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize(("pp", "model"), [(1, "gpt-tied"), (2, "gpt-tied"), (2, "mtp")])
def test_embeddings_and_heads_go_to_adam_on_every_stage(ranks: Ranks, pp: int, model: str) -> None:
    """M#4641, M#4642, M#5034: the copy of a tied embedding, or that of an MTP head, is a matrix."""

    def body(rank: int) -> list[str]:
        tied = (("tied", True),)
        _, optimizer, _ = build(Run(pp=pp, model=model, options=tied))
        return [p.name for c in optimizer.chained_optimizers for p in c.plan.parameters]

    results = ranks(pp, body)
    names = [name for stage in results for name in stage]
    assert names and not any("embedding" in n or "output_layer" in n for n in names)
    assert any(n.startswith("mtp.layers.0.eh_proj") for n in names) == (model == "mtp")
