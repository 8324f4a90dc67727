"""fp16 parameters with Megatron's dynamic loss scaling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.config import MatrixConfig
from tests.distributed.checkpointing import load, save, state_bytes
from tests.distributed.fp8 import gradient_step, masters
from tests.distributed.training import (
    RATES,
    Run,
    build,
    errors_against_reference,
    gather,
    lr_of,
    replica_hashes,
)
from tests.reference.muon import QUINTIC

Ranks = Callable[..., list[Any]]
OVERFLOWS = 2.0**24
"""A first scale at which the gradients of this model overflow, a few steps long."""


def fp16_run(**changes: Any) -> Run:
    settings: dict[str, Any] = {
        "tp": 2,
        "dp": 2,
        "dtype": torch.float16,
        "overlap": True,
        "fp32_gradients": False,
        "sequence_parallel": True,
        "loss_scale": OVERFLOWS,
        "config": MatrixConfig(min_dim=1, rules=RATES),
    }
    return Run(**settings | changes)


def _train(rank: int, run: Run, start: int, stop: int, folder: Path | None) -> dict[str, Any]:
    """Steps of a run, saved at the end, or loaded at the start where there is something to load."""
    chunks, optimizer, schedule = build(run)
    if folder is not None and start:
        load(chunks, optimizer, schedule, folder)
    factors = {1.0} | {r.lr_mult for r in run.config.rules if r.lr_mult is not None}
    record: dict[str, Any] = {key: [] for key in ("losses", "scales", "norms", "zeros", "lrs")}
    record |= {"steps": [], "skipped": [], "first": masters(chunks, optimizer)}
    for step in range(start, stop):
        record["losses"].append(gradient_step(chunks, optimizer, run, step))
        scale = float(optimizer.get_loss_scale())
        gradients = {name: g.float() / scale for name, g in gather(chunks, "main_grad").items()}
        before = state_bytes(optimizer), replica_hashes(chunks)
        lrs = {factor: lr_of(schedule, run, factor) for factor in factors}
        succeeded, norm, zeros = optimizer.step()
        record["scales"].append(scale)
        record["skipped"].append(not succeeded)
        if not succeeded:
            assert (state_bytes(optimizer), replica_hashes(chunks)) == before
            continue
        schedule.step(1)
        record["lrs"].append(lrs)
        record["norms"].append(float(norm))
        record["zeros"].append(float(zeros))
        record["steps"].append((gradients, masters(chunks, optimizer)))
    for name, weight in gather(chunks).items():
        if record["steps"]:
            assert torch.equal(weight, record["steps"][-1][1][name].half()), name
    record["hashes"] = replica_hashes(chunks)
    record["state"] = state_bytes(optimizer)
    if folder is not None and not start:
        save(chunks, optimizer, schedule, folder)
    return record


@pytest.mark.parametrize("optimizer", ["dmuon", "orth_dion"])
def test_overflows_change_no_byte_and_every_update_is_the_references(
    ranks: Ranks, optimizer: str
) -> None:
    run = fp16_run(config=MatrixConfig(optimizer=optimizer, min_dim=1, rules=RATES))
    results = ranks(4, _train, run, 0, 10, None)
    skipped = results[0]["skipped"]
    assert any(skipped) and not all(skipped), results[0]["scales"]
    assert all(result["skipped"] == skipped for result in results)
    halved = [b / a for a, b in zip(results[0]["scales"], results[0]["scales"][1:], strict=False)]
    assert halved == [0.5 if skip else 1.0 for skip in skipped[:-1]]
    found = errors_against_reference(run, results[0], QUINTIC)
    assert found.matrix < (1e-5 if optimizer == "dmuon" else 1e-4)
    assert found.norm < 1e-4
    seen: dict[Any, bytes] = {}
    for result in results:
        for shard, value in result["hashes"].items():
            assert value == seen.setdefault(shard, value), f"copies of {shard}"


def test_the_scaler_survives_a_resume(ranks: Ranks, tmp_path: Path) -> None:
    run = fp16_run()
    straight = ranks(4, _train, run, 0, 10, None)
    ranks(4, _train, run, 0, 6, tmp_path)
    resumed = ranks(4, _train, run, 6, 10, tmp_path)
    for first, after in zip(straight, resumed, strict=True):
        assert first["scales"][6:] == after["scales"]
        assert first["scales"][6] < OVERFLOWS
        assert first["losses"][6:] == after["losses"]
        assert first["state"] == after["state"]
        assert first["hashes"] == after["hashes"]
