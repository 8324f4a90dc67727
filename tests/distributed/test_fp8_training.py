"""FP8 parameter gather on real megatron-core with Transformer Engine's Python, on CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_muon.config import MatrixConfig
from tests.distributed.fp8 import fp8_run, gradient_step, train_fp8, weights_of
from tests.distributed.training import (
    RATES,
    Run,
    build,
    errors_against_reference,
    merged,
)
from tests.reference.muon import QUINTIC
from tests.te.weights import RECIPES, quantizer, update_delayed_scale
from tests.whole_parameters import unwrapped

Ranks = Callable[..., list[Any]]

FIRST_LAYER = ("decoder.layers.0.",)
ALL_BUT_ONE = ("decoder.layers.0.mlp.", "decoder.layers.0.self_attention.linear_qkv")
ONE_LAYER = (("layers", 1),)
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2-DP2": {"tp": 2, "dp": 2, "options": ONE_LAYER, "steps": 3},
    "experts": {"model": "fp8-moe", "dp": 4, "ep": 2, "options": ONE_LAYER},
    "MLA": {"model": "fp8-mla", "tp": 2, "options": ONE_LAYER},
    "PP2": {"pp": 2, "dp": 2},
    "VPP2": {"pp": 2, "vpp": 2, "dp": 2, "options": (("layers", 4),)},
    "two-instances": {"dp": 4, "instances": 2, "options": ONE_LAYER},
    "first-layer-bf16": {"dp": 2, "keep_bf16": FIRST_LAYER, "fp32_gradients": False},
    "rank-without-any": {
        "dp": 2,
        "keep_bf16": ALL_BUT_ONE,
        "options": ONE_LAYER,
        "padded": True,
    },
}
ORTH_DION = MatrixConfig(optimizer="orth_dion", scale_mode="spectral", min_dim=16, rules=RATES)


def _covering() -> list[Any]:
    """Every layout with every recipe; overlap and optimizer so that all pairs of choices occur."""
    cases = []
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        for index, recipe in enumerate(RECIPES):
            overlap = (number + index) % 2 == 1
            orth_dion = (number // 2 + index // 2) % 2 == 1
            config = {"config": ORTH_DION} if orth_dion else {}
            run = fp8_run(recipe, overlap=overlap, **layout, **config)
            words = (name, recipe, "overlap" if overlap else "plain", run.config.optimizer)
            cases.append(pytest.param(run, id="-".join(words)))
    return cases


@pytest.mark.parametrize("run", _covering())
def test_quantized_weights_follow_the_masters(te_ranks: Ranks, run: Run) -> None:
    """What every rank must hold is asserted in ``train_fp8``; the updates are compared here."""
    results = te_ranks(run.world_size, train_fp8, run)
    found = errors_against_reference(run, merged(results, run), QUINTIC)
    assert found.matrix < 1e-5
    assert found.norm < 1e-5
    if run.padded:
        assert sorted(result["owned"] for result in results) == [0, 1]


def test_the_older_transformer_engine_gives_the_same_bits(te_ranks: Ranks) -> None:
    run = fp8_run("blockwise", dp=2, steps=2)
    new, _ = te_ranks(2, train_fp8, run)
    old, _ = te_ranks(2, train_fp8, dataclasses.replace(run, te="2.19.0"))
    assert new["losses"] == old["losses"]
    assert new["codes"].keys() == old["codes"].keys()
    assert all(torch.equal(new["codes"][key], old["codes"][key]) for key in new["codes"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_overlap_changes_no_bit(te_ranks: Ranks, recipe: str) -> None:
    """The overlapped gather is the one that the next forward waits for, with nothing in between."""
    run = fp8_run(recipe, dp=2, overlap=True, overlap_gather=False, steps=3)
    plain, _ = te_ranks(2, train_fp8, run)
    overlapped, _ = te_ranks(2, train_fp8, dataclasses.replace(run, overlap_gather=True))
    assert plain["losses"] == overlapped["losses"]
    assert all(torch.equal(plain["codes"][k], overlapped["codes"][k]) for k in plain["codes"])


def _losses(rank: int, run: Run) -> list[float]:
    chunks, optimizer, schedule = build(run)
    losses = []
    for step in range(run.steps):
        losses.append(gradient_step(chunks, optimizer, run, step))
        assert optimizer.step()[0]
        schedule.step(1)
    return losses


def _losses_of_bf16(rank: int, run: Run, recipe: str) -> list[float]:
    """bf16 weights, quantized and dequantized for the time of forward and backward."""
    from tests.te import loading

    loading.use(run.te)
    chunks, optimizer, schedule = build(run)
    linear = [
        module.weight
        for chunk in chunks
        for name, module in unwrapped(chunk).named_modules()
        if type(module).__name__ in ("ColumnParallelLinear", "RowParallelLinear")
        and ".layers." in name
    ]
    quantizers = [quantizer(recipe) for _ in linear]
    losses = []
    for step in range(run.steps):
        kept = [weight.detach().clone() for weight in linear]
        with torch.no_grad():
            for weight, quantize in zip(linear, quantizers, strict=True):
                weight.copy_(quantize(weight.detach()).dequantize())
        losses.append(gradient_step(chunks, optimizer, run, step))
        with torch.no_grad():
            for weight, value, quantize in zip(linear, kept, quantizers, strict=True):
                weight.copy_(value)
                update_delayed_scale(quantize)
        assert optimizer.step()[0]
        schedule.step(1)
    return losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_those_of_bf16_weights_quantized_in_the_forward(
    te_ranks: Ranks, recipe: str
) -> None:
    run = fp8_run(recipe, steps=4)
    plain = dataclasses.replace(run, fp8=None)
    (expected,) = te_ranks(1, _losses_of_bf16, plain, recipe)
    assert te_ranks(1, _losses, run) == [expected]
    sharded = te_ranks(4, _losses, dataclasses.replace(run, tp=2, dp=2))
    # TP rounds sums of bf16 in another order, and quantizes its own part of a matrix.
    for losses in sharded:
        assert losses == pytest.approx(expected, rel=1e-2)


def _with_mutant(rank: int, run: Run, mutant: str) -> None:
    """Train with one thing wrong."""
    from tests.te import loading

    loading.use(run.te)
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from transformer_engine.pytorch.tensor import utils

    cast: Any = utils.cast_master_weights_to_fp8

    def by_owner_only(models: Any, mains: Any, starts: Any, group: Any, **options: Any) -> None:
        import torch.distributed as dist

        alone = dist.new_subgroups(1)[0]
        owned = [i for i, main in enumerate(mains) if main is not None]
        lists = ([values[i] for i in owned] for values in (models, mains, starts))
        cast(*lists, alone, **options)

    class NoReduction:
        def __getattr__(self, name: str) -> Any:
            if name == "distributed":
                return type("Silent", (), {"ReduceOp": torch.distributed.ReduceOp, **_SILENT})
            return getattr(torch, name)

    if mutant == "no reduction of maxima":
        utils.torch = NoReduction()
    elif mutant == "quantized by the owner only":
        utils.cast_master_weights_to_fp8 = by_owner_only
    elif mutant == "stale transposed copy":
        utils.post_all_gather_processing = lambda weights: None
    else:
        DistributedOptimizer._copy_main_params_to_param_buffer = lambda self: None
    train_fp8(rank, run)


_SILENT = {"all_reduce": staticmethod(lambda *args, **kwargs: None)}


@pytest.mark.parametrize(
    ("mutant", "recipe", "what"),
    [
        ("no reduction of maxima", "blockwise", "_rowwise_scale_inv of"),
        ("no reduction of maxima", "delayed", "amax of"),
        ("quantized by the owner only", "tensorwise", "_scale_inv of"),
        ("stale transposed copy", "tensorwise", "_transpose of"),
        ("gather without staging", "mxfp8", "_rowwise_data of"),
    ],
)
def test_what_is_wrong_is_found(te_ranks: Ranks, mutant: str, recipe: str, what: str) -> None:
    from tests.ranks import RankFailed

    with pytest.raises(RankFailed) as found:
        te_ranks(2, _with_mutant, fp8_run(recipe, dp=2, steps=1), mutant)
    assert "AssertionError" in str(found.value) and what in str(found.value)


def test_every_weight_of_the_decoder_is_quantized(te_ranks: Ranks) -> None:
    """What the other tests compare is there."""

    def body(rank: int) -> int:
        chunks, _, _ = build(fp8_run("blockwise"))
        return len(list(weights_of(chunks)))

    assert te_ranks(1, body) == [8]
