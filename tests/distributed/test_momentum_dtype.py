"""``--matrix-momentum-dtype bf16``: rounded to nearest, and the same bits after a load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.config import MatrixConfig
from tests import tiny_gpt
from tests.distributed.checkpointing import (
    Whole,
    load,
    poison,
    save,
    train_between,
    whole_state,
)
from tests.distributed.training import RATES, Run, build, gather, lr_of, rates_of
from tests.reference.muon import QUINTIC, clip, orthogonalize
from tests.tiny_models import MODELS, is_matrix
from tests.worst import worst_of

Ranks = Callable[..., list[Any]]

BF16 = MatrixConfig(min_dim=1, rules=RATES, momentum_dtype="bf16")
NESTEROV = dataclasses.replace(BF16, nesterov=True)


def _kept(optimizer: Any) -> set[torch.dtype]:
    return {
        state["momentum_buffer"].dtype
        for child in optimizer.chained_optimizers
        for state in child.optimizer.state.values()
        if "momentum_buffer" in state
    }


def _steps(rank: int, run: Run) -> list[tuple[Any, Whole, float]]:
    """(gradients, state afterwards, learning rate) of every step; whole tensors."""
    chunks, optimizer, schedule = build(run)
    found: list[Any] = [(None, whole_state(chunks, optimizer), 0.0)]
    for step in range(run.steps):
        optimizer.zero_grad()
        batches = tiny_gpt.batch(step, global_batch=16, micro_batch=16 // run.dp // 2)
        tiny_gpt.forward_backward(chunks, batches, optimizer)
        gradients = gather(chunks, "main_grad")
        rates = {f: lr_of(schedule, run, f) for f in (1.0, 1.5, 2.0)}
        assert optimizer.step()[0]
        schedule.step(1)
        found.append((gradients, whole_state(chunks, optimizer), rates))
        assert _kept(optimizer) == {torch.bfloat16}
    return found


@pytest.mark.parametrize("config", [BF16, NESTEROV], ids=["plain", "nesterov"])
def test_momenta_are_rounded_to_nearest_and_updates_are_those_of_them(
    ranks: Ranks, config: MatrixConfig
) -> None:
    run = Run(tp=2, dp=2, overlap=True, sequence_parallel=True, steps=6, config=config)
    (_, before, _), *steps = ranks(4, _steps, run)[0]
    beta, worst = config.momentum, 0.0
    for gradients, after, rates in steps:
        clipped, _ = clip({n: g.double() for n, g in gradients.items()}, run.clip_grad)
        for name, grad in clipped.items():
            if not is_matrix(name, grad):
                continue
            old = before["momentum_buffer", name].double()
            kept = after["momentum_buffer", name]
            exact = beta * old + (1 - beta) * grad
            # But where fp32 and float64 are on two sides of the middle of two values.
            same = kept == exact.float().bfloat16().float()
            assert same.double().mean() > 0.999
            assert torch.allclose(kept.double(), exact, rtol=2.0**-7, atol=1e-9)
            factor, decay = rates_of(run, name, grad)
            source = kept.double()
            if config.nesterov:
                source = beta * source + (1 - beta) * grad
            lr = rates[factor]
            master = before["fp32_param", name].double()
            for rows in MODELS["gpt"].parts(name, grad.shape).values():
                part = source[rows]
                update = orthogonalize(part, QUINTIC) * max(part.shape) ** 0.5
                expected = -lr * update - lr * decay * master[rows]
                got = after["fp32_param", name][rows].double() - master[rows]
                worst = worst_of(worst, (got - expected).norm() / expected.norm())
        before = after
    assert worst < 1e-5


def test_a_resumed_run_is_bit_equal(ranks: Ranks, tmp_path: Path) -> None:
    run = Run(tp=2, dp=2, dtype=torch.bfloat16, overlap=True, config=NESTEROV)
    straight = ranks(4, train_between, run, 0, 6, None, None)
    ranks(4, train_between, run, 0, 3, None, tmp_path)
    resumed = ranks(4, train_between, run, 3, 6, tmp_path, None)
    for first, after in zip(straight, resumed, strict=True):
        assert first["losses"][3:] == after["losses"]
        assert first["weights"] == after["weights"]
        assert first["state"] == after["state"]


def _saved(rank: int, run: Run, folder: Path) -> Whole:
    chunks, optimizer, schedule = build(run)
    for step in range(2):
        tiny_gpt.train_step(chunks, optimizer, step, global_batch=16, micro_batch=4)
        schedule.step(1)
    gather(chunks)
    save(chunks, optimizer, schedule, folder)
    return whole_state(chunks, optimizer)


def _loaded(rank: int, run: Run, folder: Path) -> tuple[Whole, set[torch.dtype]]:
    chunks, optimizer, schedule = build(run)
    poison(chunks, optimizer)
    load(chunks, optimizer, schedule, folder)
    return whole_state(chunks, optimizer), _kept(optimizer)


@pytest.mark.parametrize(
    ("first", "then"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")], ids=str
)
def test_a_checkpoint_loads_into_either_element_type(
    ranks: Ranks, tmp_path: Path, first: str, then: str
) -> None:
    """At another layout: bf16 into fp32 exactly, fp32 into bf16 rounded once."""
    configs = [dataclasses.replace(BF16, momentum_dtype=kind) for kind in (first, then)]
    saved = ranks(2, _saved, Run(tp=2, config=configs[0]), tmp_path)[0]
    found, kept = ranks(2, _loaded, Run(dp=2, config=configs[1]), tmp_path)[0]
    assert kept == {torch.bfloat16 if then == "bf16" else torch.float32}
    assert saved.keys() == found.keys()
    for (state, name), value in saved.items():
        is_rounded = state == "momentum_buffer" and then == "bf16"
        expected = value.bfloat16().float() if is_rounded else value
        assert torch.equal(expected, found[state, name]), (state, name)
