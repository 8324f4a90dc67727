"""Saves and loads with quantized weights, at the same layout and at others, and skipped steps."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_gpt
from tests.distributed.checkpointing import Whole, load, save, state_bytes, whole_state
from tests.distributed.fp8 import (
    codes,
    finish_gather,
    fp8_run,
    gradient_step,
    masters,
    unequal_replicas,
    weights_of,
    wrong_codes,
)
from tests.distributed.test_fp8_training import FIRST_LAYER, ORTH_DION
from tests.distributed.training import Run, build
from tests.te.weights import RECIPES, delayed_scales, tensors_of

Ranks = Callable[..., list[Any]]


def _delayed_scales(chunks: list[Any]) -> dict[str, Any]:
    return {name: held for chunk in chunks for name, held in delayed_scales(chunk).items()}


def _save(chunks: list[Any], optimizer: Any, schedule: Any, folder: Path) -> None:
    finish_gather(chunks, optimizer)
    save(chunks, optimizer, schedule, folder)
    torch.save(_delayed_scales(chunks), folder / f"scales{torch.distributed.get_rank()}")


def _load(chunks: list[Any], optimizer: Any, schedule: Any, folder: Path) -> None:
    """Into a model whose codes and state are all wrong before."""
    for _, _, weight in weights_of(chunks):
        for tensor in tensors_of(weight).values():
            tensor.fill_(7)
    for child in optimizer.chained_optimizers:
        for main, states in child.optimizer.state.items():
            main.data.fill_(float("nan"))
            for value in states.values():
                value.fill_(float("nan"))
    for name, stored in torch.load(folder / f"scales{torch.distributed.get_rank()}").items():
        for mine, theirs in zip(_delayed_scales(chunks)[name], stored, strict=True):
            mine.copy_(theirs)
    load(chunks, optimizer, schedule, folder)


def _train_between(
    rank: int, run: Run, start: int, stop: int, load_from: Path | None, save_to: Path | None
) -> dict[str, Any]:
    chunks, optimizer, schedule = build(dataclasses.replace(run, steps=20))
    if load_from is not None:
        _load(chunks, optimizer, schedule, load_from)
    loaded = codes(chunks)
    tiny_gpt.without_gather(chunks)
    losses = []
    for step in range(start, stop):
        losses.append(gradient_step(chunks, optimizer, run, step))
        tiny_gpt.with_gather(chunks)
        assert optimizer.step()[0]
        schedule.step(1)
    finish_gather(chunks, optimizer)
    if save_to is not None:
        _save(chunks, optimizer, schedule, save_to)
    return {
        "losses": losses,
        "loaded": loaded,
        "codes": codes(chunks),
        "state": state_bytes(optimizer),
    }


RESUMED = [
    fp8_run(recipe, tp=2, dp=2, overlap=number % 2 == 1, options=(("layers", 1),))
    for number, recipe in enumerate(RECIPES)
] + [fp8_run("mxfp8", dp=2, keep_bf16=FIRST_LAYER), fp8_run("blockwise", dp=2, config=ORTH_DION)]


@pytest.mark.parametrize("run", RESUMED, ids=lambda r: f"{r.fp8}-{r.config.optimizer}-TP{r.tp}")
def test_a_resumed_run_is_bit_equal(te_ranks: Ranks, tmp_path: Path, run: Run) -> None:
    world = run.world_size
    straight = te_ranks(world, _train_between, run, 0, 4, None, None)
    stored = te_ranks(world, _train_between, run, 0, 2, None, tmp_path)
    resumed = te_ranks(world, _train_between, run, 2, 4, tmp_path, None)
    for first, before, after in zip(straight, stored, resumed, strict=True):
        assert first["losses"][2:] == after["losses"]
        assert first["state"] == after["state"]
        pairs = ((before["codes"], after["loaded"]), (first["codes"], after["codes"]))
        for expected, found in pairs:
            assert expected.keys() == found.keys()
            assert [k for k in expected if not torch.equal(expected[k], found[k])] == []


def _saved(rank: int, run: Run, folder: Path) -> Whole:
    chunks, optimizer, schedule = build(run)
    for step in range(2):
        gradient_step(chunks, optimizer, run, step)
        assert optimizer.step()[0]
        schedule.step(1)
    _save(chunks, optimizer, schedule, folder)
    return whole_state(chunks, optimizer)


def _loaded(rank: int, run: Run, folder: Path) -> Whole:
    chunks, optimizer, schedule = build(run)
    load(chunks, optimizer, schedule, folder)
    whole = whole_state(chunks, optimizer)
    if run.fp8 not in (None, "delayed"):
        held = {name: value for (state, name), value in whole.items() if state == "fp32_param"}
        assert not (wrong := wrong_codes(chunks, held)), wrong
        assert not (unequal := unequal_replicas(chunks)), unequal
    gradient_step(chunks, optimizer, run, 2)
    assert optimizer.step()[0]
    return whole


BF16 = fp8_run(None, dp=2)
PAIRS = [
    (fp8_run("blockwise", tp=2, dp=1), fp8_run("blockwise", dp=2)),
    (fp8_run("tensorwise", dp=2), fp8_run("tensorwise", tp=2, dp=1)),
    (fp8_run("mxfp8", tp=2, dp=1), fp8_run("mxfp8", pp=2)),
    (fp8_run("delayed", dp=2), fp8_run("mxfp8", dp=2)),
    (BF16, fp8_run("mxfp8", tp=2)),
    (BF16, fp8_run("blockwise", dp=2, keep_bf16=FIRST_LAYER)),
    (fp8_run("mxfp8", dp=2), dataclasses.replace(BF16, tp=2, dp=1)),
    (fp8_run("tensorwise", dp=2), BF16),
]


def _union(parts: list[Whole]) -> Whole:
    return {key: value for part in parts for key, value in part.items()}


def _name(run: Any) -> str:
    return f"{run.fp8 or 'bf16'}-TP{run.tp}-PP{run.pp}-DP{run.dp}"


@pytest.mark.parametrize(("first", "then"), PAIRS, ids=lambda run: _name(run))
def test_masters_and_momenta_are_the_same_in_another_run(
    te_ranks: Ranks, tmp_path: Path, first: Run, then: Run
) -> None:
    """Another layout, another recipe, and between bf16 and FP8: bit by bit, as whole tensors."""
    saved = {
        k: v for w in te_ranks(first.world_size, _saved, first, tmp_path) for k, v in w.items()
    }
    found = {k: v for w in te_ranks(then.world_size, _loaded, then, tmp_path) for k, v in w.items()}
    assert saved.keys() == found.keys()
    assert len(saved) == 2 * 8 + 3 * (2 + 5)
    for key, value in saved.items():
        assert torch.equal(value, found[key]), key


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_the_offline_tool_reads_what_fp8_runs_save(
    te_ranks: Ranks, tmp_path: Path, recipe: str
) -> None:
    from megatron_muon.offline.command import main

    run = fp8_run(recipe, dp=2)
    whole, _ = te_ranks(2, _saved, run, tmp_path)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        main(["inspect", str(tmp_path)])
    assert "dmuon" in text.getvalue() and "momentum_buffer" in text.getvalue()
    name = "decoder.layers.self_attention.linear_proj.weight"
    assert f"optimizer.state.fp32_param.{name}" in text.getvalue() or name in text.getvalue()
    assert ("fp32_param", "decoder.layers.0.self_attention.linear_proj.weight") in whole


# ---- skipped steps ------------------------------------------------------------------------------


def _bytes_held(chunks: list[Any], optimizer: Any) -> dict[Any, Any]:
    held: dict[Any, Any] = dict(state_bytes(optimizer))
    held |= {name: tensor.numpy().tobytes() for name, tensor in codes(chunks).items()}
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if not hasattr(parameter, "_quantizer"):
                value = parameter.detach().contiguous().view(torch.uint8)
                held[number, name] = value.numpy().tobytes()
        if not chunk.ddp_config.reuse_grad_buf_for_mxfp8_param_ag:
            for index, buffer in enumerate(chunk.buffers):
                held[number, index] = buffer.param_data.view(torch.uint8).numpy().tobytes()
    return held


def _skips(rank: int, run: Run) -> None:
    chunks, optimizer, _ = build(run)
    tiny_gpt.without_gather(chunks)
    for step in range(3):
        gradient_step(chunks, optimizer, run, step)
        tiny_gpt.with_gather(chunks)
        if step == 1:
            if rank == 1:
                for buffer in chunks[0].buffers:
                    buffer.grad_data.fill_(float("nan"))
            before = _bytes_held(chunks, optimizer)
            succeeded, *_ = optimizer.step()
            assert not succeeded
            assert _bytes_held(chunks, optimizer) == before
            continue
        assert optimizer.step()[0]
    finish_gather(chunks, optimizer)
    assert not (wrong := wrong_codes(chunks, masters(chunks, optimizer))), wrong


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_skipped_step_changes_no_byte(te_ranks: Ranks, recipe: str, overlap: bool) -> None:
    """And the next step is as ever: MXFP8 weights come from the masters again, not from nan."""
    te_ranks(2, _skips, fp8_run(recipe, dp=2, overlap=overlap))
