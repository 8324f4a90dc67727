"""Orth-Dion through plan and exchange: gradients zero, deficient, tiny, huge and not finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_muon.matrices import logical_matrices
from tests.distributed.prescribed import (
    Whole,
    assemble,
    gradient,
    initial,
    model,
    rates,
    sharded_parameters,
)
from tests.distributed.prescribed_dion import DionSetting, rule_of, run_dion_rank

Ranks = Callable[..., list[Any]]
GradientOf = Callable[[Whole, int, torch.dtype], torch.Tensor]

FP64, FP32 = torch.float64, torch.float32
SCHEMES = pytest.mark.parametrize("scheme", ["factors", "matrix"])
ISOMETRIES = pytest.mark.parametrize("kind", ["qr", "polar"])

ODD = [
    Whole(name="column", shape=(33, 1), tp_dim=None),
    Whole(name="row", shape=(1, 33), tp_dim=None),
    Whole(name="single", shape=(1, 1), tp_dim=None),
    Whole(name="square", shape=(16, 16), tp_dim=0),
    Whole(name="tall", shape=(34, 7), tp_dim=0),
    Whole(name="wide", shape=(5, 26), tp_dim=1),
    Whole(name="prime", shape=(13, 11), tp_dim=None),
]


def setting_of(scheme: Any, kind: str = "qr", **changes: Any) -> DionSetting:
    """TP2 x DP2, one step without weight decay."""
    whole: dict[str, Any] = {
        "tp": 2,
        "dp": 2,
        "dtype": FP64,
        "steps": 1,
        "weight_decay": 0.0,
        "scheme": scheme,
        "right_factor": kind,
    }
    return DionSetting(**(whole | changes))


def updates(
    ranks: Ranks, setting: DionSetting, entries: list[Whole], gradient_of: GradientOf
) -> dict[str, torch.Tensor]:
    """Return the total update by logical matrix, without learning rate and scale."""
    results = ranks(setting.tp * setting.dp, run_dion_rank, setting, entries, gradient_of)
    wholes = assemble(results, setting, entries, "masters")
    rule = rule_of(setting)
    by_name = {e.name: e for e in entries}
    found = {}
    for parameter in sharded_parameters(entries, tp=1, dp=1, bucket=1):
        entry = by_name[parameter.name]
        start = initial(entry, setting.dtype).double()
        copies = wholes[entry.name]
        assert all(torch.allclose(c, copies[0], rtol=0, atol=0, equal_nan=True) for c in copies)
        moved = (start - copies[0].double()) / rates(setting, entry.name)[0]
        for matrix in logical_matrices(parameter, split=setting.split):
            rows = torch.cat(
                [torch.arange(b.shard_row, b.shard_row + b.rows) for b in matrix.blocks]
            )
            order = torch.cat([torch.arange(b.row, b.row + b.rows) for b in matrix.blocks])
            update = torch.empty(matrix.shape, dtype=torch.float64)
            update[order] = moved[rows]
            found[matrix.name] = update / rule.scale(*matrix.shape)
    return found


def one_process(setting: DionSetting) -> DionSetting:
    """Return the same for whole matrices."""
    return replace(setting, tp=1, dp=1)


@SCHEMES
@ISOMETRIES
def test_a_zero_matrix_stays_and_no_other_changes(ranks: Ranks, scheme: Any, kind: str) -> None:
    zeroed = "layers.0.linear_proj.weight"

    def some(entry: Whole, step: int, dtype: torch.dtype) -> torch.Tensor:
        grad = gradient(entry, step, dtype)
        return torch.zeros_like(grad) if entry.name == zeroed else grad

    setting = setting_of(scheme, kind, steps=2)
    found, whole = (
        updates(ranks, chosen, model(1), some) for chosen in (setting, one_process(setting))
    )
    assert not found[zeroed].any()
    for name, update in found.items():
        assert (update - whole[name]).abs().max() < 1e-10, name
        assert update.any() or name == zeroed


@SCHEMES
@ISOMETRIES
def test_a_gradient_that_is_zero_on_one_tp_rank(ranks: Ranks, scheme: Any, kind: str) -> None:
    """Its update there is zero too: nothing is decided on a shard."""

    def half(entry: Whole, step: int, dtype: torch.dtype) -> torch.Tensor:
        grad = gradient(entry, step, dtype)
        rows, cols = grad.shape
        grad[
            : rows // 2 if entry.tp_dim != 1 else rows, : cols // 2 if entry.tp_dim == 1 else cols
        ] = 0
        return grad

    entries = [e for e in model(1) if e.packing.parts == () and e.stack is None]
    found = updates(ranks, setting_of(scheme, kind), entries, half)
    whole = updates(ranks, one_process(setting_of(scheme, kind)), entries, half)
    for entry in entries:
        update = found[entry.name]
        assert (update - whole[entry.name]).abs().max() < 1e-10
        zero = update.T if entry.tp_dim == 1 else update
        # Householder vectors of some CPUs' QR leave 1e-16 there.
        assert zero[: len(zero) // 2].abs().max() < 1e-14
        assert torch.linalg.matrix_norm(update, ord=2) == pytest.approx(1.0, abs=1e-9)


@SCHEMES
@ISOMETRIES
@pytest.mark.parametrize(("dtype", "bound"), [(FP64, 1e-9), (FP32, 1e-4)], ids=str)
def test_a_rank_deficient_gradient_gives_noise_no_weight(
    ranks: Ranks, scheme: Any, kind: str, dtype: torch.dtype, bound: float
) -> None:
    def deficient(entry: Whole, step: int, dtype: torch.dtype) -> torch.Tensor:
        grad = gradient(entry, step, torch.float64)
        generator = torch.Generator().manual_seed(len(entry.name))
        right = torch.randn(2, grad.shape[1], dtype=torch.float64, generator=generator)
        return (grad[:, :2] @ right).to(dtype)

    setting = setting_of(scheme, kind, dtype=dtype, rank_fraction=0.5)
    for name, update in updates(ranks, setting, model(1), deficient).items():
        sigma = torch.linalg.svdvals(update)
        assert sigma[0] <= 1 + 1e-4, name
        assert (sigma[:2] - 1).abs().max() < 1e-4, name
        assert not len(sigma) > 2 or sigma[2] < bound, name


@SCHEMES
@pytest.mark.parametrize("kind", ["qr", "polar", "colnorm"])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_one_entry_moves_one_entry(ranks: Ranks, scheme: Any, kind: str, size: float) -> None:
    def single(entry: Whole, step: int, dtype: torch.dtype) -> torch.Tensor:
        grad = torch.zeros(entry.view, dtype=dtype)
        grad[-1, 0] = -size
        return grad

    setting = setting_of(scheme, kind, dtype=FP32, split="none")
    for name, update in updates(ranks, setting, ODD, single).items():
        expected = torch.zeros_like(update)
        expected[-1, 0] = -1.0
        # The weight of about 1 is moved by 0.01 or more in fp32.
        assert (update - expected).abs().max() < 1e-4, name


@SCHEMES
@pytest.mark.parametrize("kind", ["qr", "polar", "colnorm"])
@pytest.mark.parametrize("fraction", [1e-9, 0.4, 1.0])
def test_odd_shapes_and_ranks(ranks: Ranks, scheme: Any, kind: str, fraction: float) -> None:
    setting = setting_of(scheme, kind, steps=6, rank_fraction=fraction)
    found = updates(ranks, setting, ODD, gradient)
    whole = updates(ranks, one_process(setting), ODD, gradient)
    for name, update in found.items():
        assert (update - whole[name]).abs().max() < 1e-9, name


@SCHEMES
def test_a_nan_on_one_rank_is_seen_by_all_holders_of_its_matrix_only(
    ranks: Ranks, scheme: Any
) -> None:
    """The optimizer skips such a step; here it runs: nothing hangs, no other matrix is affected."""

    def spoilt(entry: Whole, step: int, dtype: torch.dtype) -> torch.Tensor:
        grad = gradient(entry, step, dtype)
        if entry.name == "layers.0.linear_fc2.weight":
            grad[0, 0] = torch.nan
        return grad

    setting = setting_of(scheme)
    found = updates(ranks, setting, model(1), spoilt)
    clean = updates(ranks, setting, model(1), gradient)
    for name, update in found.items():
        if name == "layers.0.linear_fc2.weight":
            assert update.isnan().all()
        else:
            assert (update - clean[name]).abs().max() < 1e-10, name
