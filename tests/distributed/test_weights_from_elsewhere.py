"""Other writers and readers of weights in megatron-core 0.19 keep the optimizer correct.

What writes weights of which the optimizer keeps fp32 masters is refused, see
``megatron_muon.integration.refusals`` (--qk-clip and others). What is left, read in its source:
router biases, which are buffers; weights that are loaded without optimizer state; the broadcast
of initial weights; and features that only look at weights and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.config import MatrixConfig
from tests.distributed import training
from tests.distributed.test_pretrain import DMUON, pretrain_with_hooks
from tests.distributed.training import Run, errors_against_reference, gather, merged, train
from tests.reference.muon import QUINTIC
from tests.tiny_gpt import train_step

Ranks = Callable[..., list[Any]]

LOOKS_ONLY = """
    --check-weight-hash-across-dp-replicas-interval 1 --rerun-mode validate_results
    --save-wgrads-interval 1 --log-params-norm --log-num-zeros-in-grad --data-parallel-random-init
    --ddp-num-buckets 3 --ddp-pad-buckets-for-high-nccl-busbw --ddp-average-in-collective
"""


def test_features_that_only_look_change_no_bit(ranks: Ranks, tmp_path: Path) -> None:
    """Megatron's own check compares the weights of all replicas after every step as well."""

    def run(name: str, flags: str) -> list[Any]:
        arguments = (tmp_path / name, tmp_path / name, 2, 1, 3, (*DMUON, *flags.split()))
        return ranks(4, pretrain_with_hooks, *arguments, init_process_group=False)

    assert run("looked-at", LOOKS_ONLY) == run("plain", "")


def _train_and_tell_biases(rank: int, run: Run) -> Any:
    kept: list[Any] = []
    original = training.build

    def build(run: Run) -> Any:
        kept.append(original(run))
        return kept[0]

    training.build = build  # type: ignore[assignment]
    record = train(rank, run)
    return record, {
        name: buffer.clone()
        for chunk in kept[0][0]
        for name, buffer in chunk.named_buffers()
        if name.endswith(("expert_bias", "qb_beta"))
    }


@pytest.mark.parametrize(
    "options",
    [
        (
            ("moe_router_enable_expert_bias", True),
            ("moe_router_score_function", "sigmoid"),
            ("moe_router_bias_update_rate", 0.01),
        ),
        (("moe_router_load_balancing_type", "quantile_balancing"),),
    ],
    ids=["expert bias", "quantile balancing"],
)
def test_router_biases_move_beside_the_optimizer(ranks: Ranks, options: Any) -> None:
    run = Run(model="moe", dp=2, ep=2, steps=4, overlap=True, options=options)
    results = ranks(2, _train_and_tell_biases, run)
    errors = errors_against_reference(run, merged([r for r, _ in results], run), QUINTIC)
    assert errors.matrix < 1e-5
    assert errors.norm < 1e-5
    (_, first), (_, second) = results
    assert len(first) == 2
    for name, bias in first.items():
        assert bias.any(), name
        assert torch.equal(bias, second[name]), name


def _reloaded(rank: int, run: Run, source: str) -> tuple[int, int, bool]:
    """Weights written elsewhere: (updated masters, masters, a step is correct)."""
    chunks, optimizer, _ = training.build(run)
    train_step(chunks, optimizer, 0, global_batch=16)
    gather(chunks)
    generator = torch.Generator().manual_seed(3)
    exact = {}
    for parameter in chunks[0].parameters():
        whole = torch.randn(parameter.shape, generator=generator)
        exact[parameter] = whole
        with torch.no_grad():
            parameter.copy_(whole)
    state = None
    if source == "state dict":
        names = {p: n.removeprefix("module.") for n, p in chunks[0].module.named_parameters()}
        state = {"model": {names[p]: whole for p, whole in exact.items()}}
    optimizer.reload_model_params(state_dict=state)
    followed, masters = 0, 0
    for child in optimizer.chained_optimizers:
        for parameter, main in child._main_shards.items():
            place = child._get_model_param_range_map(parameter)["param"]
            expected = exact[parameter] if source == "state dict" else parameter.detach().float()
            followed += torch.equal(main, expected.view(-1)[place.start : place.end])
            masters += 1
    # A step goes on from there: no weight goes back to where it was before.
    train_step(chunks, optimizer, 1, global_batch=16)
    gather(chunks)
    near = all((p.float() - exact[p]).norm() < exact[p].norm() / 2 for p in exact)
    return followed, masters, near


@pytest.mark.parametrize("model", ["gpt", "moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("source", ["weights", "state dict"])
def test_masters_follow_weights_that_were_loaded_alone(
    ranks: Ranks, model: str, dtype: torch.dtype, source: str
) -> None:
    """--no-load-optim, --finetune, --pretrained-checkpoint; --load-main-params-from-ckpt."""
    config = MatrixConfig(min_dim=1)
    run = Run(model=model, tp=1, dp=2, dtype=dtype, overlap=True, config=config)
    for followed, masters, near in ranks(2, _reloaded, run, source):
        assert followed == masters > 0
        assert near


@pytest.mark.parametrize("precision", ["", "--bf16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize("flag", ["--no-load-optim", "--finetune"])
def test_a_run_that_loads_weights_alone_starts_where_adam_would(
    ranks: Ranks, tmp_path: Path, precision: str, flag: str
) -> None:
    """The first losses are those of the loaded weights, the second those of our update of them."""

    def run(save: str, iterations: int, *words: str) -> list[list[float]]:
        arguments = (tmp_path / "first", tmp_path / save, 1, 1, iterations)
        flags = (*words, *precision.split())
        results = ranks(2, pretrain_with_hooks, *arguments, flags, init_process_group=False)
        return [losses for losses, _ in results]

    run("first", 3, *DMUON)
    ours = run("second", 5, *DMUON, flag)
    adam = run("third", 5, "--optimizer", "adam", flag)
    for losses, theirs in zip(ours, adam, strict=True):
        assert losses[:2] == theirs[:2]
        assert losses[2:] != theirs[2:]
