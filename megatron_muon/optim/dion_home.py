"""Matrices that lie whole with their owner: a step of Orth-Dion without messages, many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_muon.exchange import Mailbox, copy_all, piece_of
from megatron_muon.linalg import Basis, Refresh
from megatron_muon.optim.factors import low_rank
from megatron_muon.optim.rule import range_of
from megatron_muon.placement import FactorShape

if TYPE_CHECKING:
    from megatron_muon.optim.orth_dion import OrthDionStep


def update_at_home(step: OrthDionStep, mail: Mailbox) -> Iterator[None]:
    """All matrices that are in no wave; pauses for the waves.

    A matrix with dependent columns takes small steps more, of which the host has to know. It is
    passed over at first, which leaves B in M, and done after the waves: so the host reads all flags
    at once and late.
    """
    chunks = []
    for batch in mail.program.batches:
        m, n = batch.shape
        at_once = max(1, step.plan.home_elements // (m * n))
        for start in range(0, len(batch.matrices), at_once):
            chosen = batch.matrices[start : start + at_once]
            chunks.append((chosen, _update(step, mail, chosen, passes_over=True)))
    step.flags.late += [flags for _, flags in chunks]
    mail.count_matrices(sum(len(chosen) for chosen, _ in chunks))
    yield
    if not step.flags.read_late():
        return
    for chosen, flags in chunks:
        again = [index for index, flag in zip(chosen, flags.tolist(), strict=True) if flag]
        if again:
            _update(step, mail, again, passes_over=False)


def _update(
    step: OrthDionStep, mail: Mailbox, matrices: Sequence[int], *, passes_over: bool
) -> torch.Tensor:
    """Update some matrices of one shape; returns which of them have dependent columns."""
    rule, shape = step.rule, step.plan.schemes[matrices[0]].factors
    assert shape is not None, "the plan is one of another optimizer"
    b = mail.memory.take(len(matrices), *shape.region.shape, dtype=rule.factor_dtype)
    pieces, places = mail.local(dict(zip(matrices, b, strict=True)))
    step.fill(pieces, places)
    tall = b.mT if shape.transposed else b
    v = step.right_factors.stacked(matrices)
    basis = Basis(torch.bmm(tall, v), overwrite=True)
    u = basis.settled(not passes_over)
    refresh = Refresh(torch.bmm(tall.mT, u), v, rule.right_factor, overwrite=True)
    flags: torch.Tensor = basis.unsettled | refresh.unsettled
    del basis, v
    update, kept, core = refresh.settled(not passes_over, skipped=flags if passes_over else None)
    del refresh
    step.right_factors.keep(matrices, kept)
    del kept
    products = low_rank(shape, u, update, core)
    del update, core, u
    # M, then the update, in the memory of B.
    b.baddbmm_(products.captured, products.right.mT, alpha=rule.momentum - 1.0)
    momenta = [range_of(step.ranges, piece.parameter).momentum for piece in pieces]
    copy_all([piece_of(m, p) for m, p in zip(momenta, pieces, strict=True)], places)
    torch.bmm(products.update, products.right.mT, out=b)
    step.step_along(pieces, places)
    mail.memory.release(b)
    return flags


def home_bytes(shapes: Sequence[FactorShape], elements: int, wide: int, *, is_polar: bool) -> int:
    """The most memory that ``update_at_home`` takes.

    Args:
        shapes: Of the factors of all matrices.
        elements: Of matrices that are computed at once, or one matrix.
        wide: Bytes of an element of a factor.
        is_polar: Whether V is a polar factor, which takes more to compute.
    """
    most = 0
    for shape in set(shapes):
        count = min(shapes.count(shape), max(1, elements // shape.region.numel))
        b, r = shape.region.numel, shape.rank
        u, v, core = shape.long * r, shape.short * r, r * r
        finding = v + 2 * (u + core)
        refreshing = u + 3 * v + 3 * core + (2 * v + 4 * core if is_polar else 0)
        applying = (2 * shape.region.rows + shape.region.cols) * r + core
        most = max(most, count * (b + max(finding, refreshing, applying)) * wide)
    return most
