"""Conversion of momenta equals accumulation in the target's convention from the start."""

from __future__ import annotations

import argparse

import pytest
import torch

from megatron_muon.offline.common_state import CommonState
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.momenta import Convention, conversion_factor, matrix_convention
from megatron_muon.offline.right_factors import EXACT_SIDE, leading_right_subspace
from megatron_muon.offline.safe_pickle import Loaded
from tests.reference.orth_dion import orth_dion_step

AVERAGE, SUM, DION = (Convention(kind=kind, factor=0.9) for kind in ("average", "sum", "dion"))


def kept(convention: Convention, gradients: torch.Tensor) -> torch.Tensor:
    """Return the momentum after all gradients; Orth-Dion's at full rank, by the reference."""
    if convention.kind == "dion":
        momentum, v = torch.zeros_like(gradients[0]), torch.eye(4, dtype=torch.float64)
        for gradient in gradients:
            momentum, _, v = orth_dion_step(
                momentum, gradient, v, momentum=convention.factor, kind="qr"
            )
        return momentum
    momentum = torch.zeros_like(gradients[0])
    weight = 1.0 - convention.factor if convention.kind == "average" else 1.0
    for gradient in gradients:
        momentum = convention.factor * momentum + weight * gradient
    return momentum


@pytest.mark.parametrize("source", [AVERAGE, SUM, DION], ids=lambda c: c.kind)
@pytest.mark.parametrize("target", [AVERAGE, DION], ids=lambda c: c.kind)
def test_a_converted_momentum_matches_the_target(source: Convention, target: Convention) -> None:
    gradients = torch.randn(
        5, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    factor = conversion_factor(source, target)
    assert factor is not None
    torch.testing.assert_close(kept(source, gradients) * factor, kept(target, gradients))


def test_momentum_zero_has_no_conversion() -> None:
    assert conversion_factor(Convention(kind="dion", factor=0.0), AVERAGE) is None


def common(**arguments: object) -> CommonState:
    value = {"args": argparse.Namespace(**arguments)}
    return CommonState(in_file=False, loaded=Loaded(value=value, inert=frozenset()))


def test_where_the_factor_is_found() -> None:
    assert matrix_convention("muon", common(), [{"momentum": 0.8}], None).factor == 0.8
    assert matrix_convention("dmuon", common(muon_momentum=0.7), [{}], None).factor == 0.7
    dion = matrix_convention("orth_dion", common(orth_dion_momentum=0.6), [], None)
    assert dion == Convention(kind="dion", factor=0.6)
    assert matrix_convention("dmuon", common(), [], 0.5) == Convention(kind="sum", factor=0.5)
    with pytest.raises(CheckpointError, match=r"--heavy-ball is 1\.5"):
        matrix_convention("dmuon", common(), [], 1.5)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (EXACT_SIDE + 60, EXACT_SIDE + 20)])
def test_the_leading_right_singular_subspace(shape: tuple[int, int]) -> None:
    """With a spectral gap at the rank; a matrix with m < n is transposed."""
    generator = torch.Generator().manual_seed(0)
    m, n = shape
    short, rank = min(shape), 8
    u = torch.linalg.qr(torch.randn(m, short, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(n, short, generator=generator)).Q
    values = torch.cat([torch.full((rank,), 1.0), torch.full((short - rank,), 0.1)])
    matrix = (u * values) @ v.T
    start = torch.randn(short, rank, generator=generator)
    found = leading_right_subspace(matrix, start)
    exact = (v if m >= n else u)[:, :rank]
    assert found.shape == start.shape
    torch.testing.assert_close(found.T @ found, torch.eye(rank), atol=1e-5, rtol=0)
    torch.testing.assert_close(found @ found.T, exact @ exact.T, atol=1e-4, rtol=0)


def test_a_zero_momentum_gives_the_start() -> None:
    start = torch.randn(4, 2)
    assert leading_right_subspace(torch.zeros(6, 4), start) is start
