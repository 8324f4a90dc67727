"""What the owner of a matrix does in a step of Orth-Dion: U = orth(B V), V = right(Bᵀ U).

B V and Bᵀ U come as partial sums from the holders, or the owner assembles B and computes them
itself, for all matrices of a shape together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_muon.exchange import Mailbox
from megatron_muon.linalg import Basis, Refresh, RightFactor
from megatron_muon.optim.factors import (
    Spans,
    add_rows,
    factor_slots,
    take_rows,
    u_spans,
    v_spans,
)
from megatron_muon.optim.rule import OwnedState
from megatron_muon.placement import FactorShape, Plan, Share
from megatron_muon.placement.program import FlatPiece, Rows
from megatron_muon.placement.schemes import BASIS, RESPONSE, SOURCE, UPDATE, WARM, Round

if TYPE_CHECKING:
    from megatron_muon.optim.dion_rule import OrthDionRule

MOST_ELEMENTS = 1 << 24
"""Of B and of products that are in memory at once."""

Fill = Callable[[Sequence[FlatPiece], list[torch.Tensor]], None]
"""Copies elements of B that this rank holds to their places."""

Apply = Callable[[Sequence[FlatPiece], list[torch.Tensor]], None]
"""Applies elements of a product to this rank's ranges."""


class Block(NamedTuple):
    """Some matrices of a group, or some rows of one of them."""

    part: slice
    """Places of the matrices in the group."""

    rows: Rows
    """(first, end) of the rows."""


def blocks(shape: FactorShape, count: int) -> Iterator[Block]:
    """Cut matrices of one shape into blocks of no more than ``MOST_ELEMENTS``, or one row."""
    m, n = shape.region.shape
    at_once = max(1, MOST_ELEMENTS // (m * n))
    rows = min(m, max(1, MOST_ELEMENTS // n))
    for start in range(0, count, at_once):
        for first in range(0, m, rows):
            yield Block(slice(start, min(start + at_once, count)), (first, min(first + rows, m)))


@dataclass(kw_only=True)
class _Group:
    """Matrices of one shape, all assembled or none.

    Attributes:
        shape: Shape of their factors.
        matrices: Indices into ``Plan.matrices``.
        is_assembled: Whether the owner assembles B.
        basis: U before the flag is known.
        u: U (B, long, r).
        refreshed: V before the flag is known.
        v: V of the update.
        w: W, as far as it is captured: V C.
    """

    shape: FactorShape
    matrices: list[int]
    is_assembled: bool
    basis: Basis = field(init=False)
    u: torch.Tensor = field(init=False)
    refreshed: Refresh = field(init=False)
    v: torch.Tensor = field(init=False)
    w: torch.Tensor = field(init=False)

    @property
    def blocks(self) -> Iterator[Block]:
        """What of them is in memory at once."""
        return blocks(self.shape, len(self.matrices))


class OwnedMatrices:
    """The matrices of a wave that this rank owns.

    Args:
        rule: Hyper-parameters.
        plan: The plan.
        mail: The wave.
        right_factors: V of every owned matrix; replaced by ``refresh``.
    """

    def __init__(
        self, rule: OrthDionRule, plan: Plan, mail: Mailbox, right_factors: OwnedState
    ) -> None:
        self._rule = rule
        self._plan = plan
        self._mail = mail
        self._right_factors = right_factors
        by_shape: dict[tuple[FactorShape, bool], list[int]] = defaultdict(list)
        for index in mail.program.factored:
            by_shape[self._shape(index), False].append(index)
        for batch in mail.program.batches:
            by_shape[self._shape(batch.matrices[0]), True] += batch.matrices
        self._groups = [
            _Group(shape=shape, matrices=matrices, is_assembled=is_assembled)
            for (shape, is_assembled), matrices in by_shape.items()
        ]

    def send_right_factors(self) -> None:
        """V, to the holders."""
        for index in self._mail.program.factored:
            for share in self._sources(index):
                slot = self._mail.outgoing(WARM, index, share.rank)
                take_rows(slot, self._right_factor(index), v_spans(self._shape(index), share))

    def find_bases(self, fill: Fill) -> None:
        """U = orth(B V)."""
        for group in self._groups:
            p = self._product(group, SOURCE, fill)
            group.basis = Basis(p, overwrite=True)
            self._mail.memory.release(p)
            del p
        is_unsettled = _read_together([group.basis.is_unsettled for group in self._groups])
        for group in self._groups:
            group.u = group.basis.settled(is_unsettled)
            del group.basis
        if not any(group.is_assembled for group in self._groups):
            self._mail.close(SOURCE)

    def send_bases(self) -> None:
        """U, to the holders; of these matrices the owner needs it no longer."""
        for group in self._groups:
            if group.is_assembled:
                continue
            for index, u in zip(group.matrices, group.u, strict=True):
                for share in self._plan.schemes[index].shares:
                    slot = self._mail.outgoing(BASIS, index, share.rank)
                    take_rows(slot, u, u_spans(group.shape, share))
            del u, group.u

    def refresh(self, fill: Fill) -> None:
        """W = Bᵀ U and V = right(W), and factors for those holders that need them."""
        for group in self._groups:
            w = self._product(group, RESPONSE, fill)
            v = self._stacked_right_factors(group.matrices)
            group.refreshed = Refresh(w, v, self._rule.right_factor, overwrite=True)
            self._mail.memory.release(w)
            del w, v
        self._mail.close(SOURCE)
        self._mail.close(RESPONSE)
        flags = [group.refreshed.is_unsettled for group in self._groups]
        is_unsettled = _read_together(flags)
        for group in self._groups:
            found = group.refreshed.settled(is_unsettled)
            del group.refreshed
            for position, index in enumerate(group.matrices):
                name = self._plan.matrices[index].name
                self._right_factors[name] = found.kept[position].to(
                    self._rule.state_dtype, copy=True
                )
                self._send_factors(group, found, position)
            if group.is_assembled:
                group.v, group.w = found.update, torch.bmm(found.update, found.core)
        self._groups = [group for group in self._groups if group.is_assembled]
        self._mail.count_matrices(
            len(self._mail.program.factored)
            + sum(len(batch.matrices) for batch in self._mail.program.batches)
        )

    def give_back(self, where: Round, apply: Apply) -> None:
        """Elements of U Vᵀ (UPDATE) or U Wᵀ (CAPTURED): to their holders, and to own ranges.

        Those are rounded like what is sent, for copies of them are on other ranks.
        """
        for group in self._groups:
            right = group.v if where == UPDATE else group.w
            for block in group.blocks:
                rows = slice(*block.rows)
                u, other = group.u[block.part], right[block.part]
                product = (
                    torch.bmm(other[:, rows], u.mT)
                    if group.shape.transposed
                    else torch.bmm(u[:, rows], other.mT)
                ).to(self._rule.exchange_dtype)
                matrices = dict(zip(group.matrices[block.part], product, strict=True))
                self._mail.give_back(where, matrices, block.rows)
                apply(*self._mail.local(matrices, block.rows))
                del product, matrices

    # ---- products -----------------------------------------------------------------------------

    def _product(self, group: _Group, where: Round, fill: Fill) -> torch.Tensor:
        """B V (SOURCE) or Bᵀ U (RESPONSE) of a group; the caller releases it."""
        shape, dtype = group.shape, self._rule.factor_dtype
        height = shape.long if where == SOURCE else shape.short
        found = self._mail.memory.take(len(group.matrices), height, shape.rank, dtype=dtype)
        if not group.is_assembled:
            spans = u_spans if where == SOURCE else v_spans
            for index, total in zip(group.matrices, found.zero_(), strict=True):
                self._add_up(where, index, spans, total)
            return found
        # B V has the rows of B, and Bᵀ U its columns, unless B is transposed.
        by_rows = shape.transposed == (where == RESPONSE)
        for block in group.blocks:
            part, rows = block.part, slice(*block.rows)
            b = self._assemble(group, block, fill)
            factor = (
                self._stacked_right_factors(group.matrices[part])
                if where == SOURCE
                else group.u[part]
            )
            if by_rows:
                found[part, rows] = torch.bmm(b, factor)
            elif rows.start == 0:
                found[part] = torch.bmm(b.mT, factor[:, rows])
            else:
                found[part].baddbmm_(b.mT, factor[:, rows])
            self._mail.memory.release(b)
        return found

    def _add_up(
        self,
        where: Round,
        index: int,
        spans: Callable[[FactorShape, Share], Spans],
        total: torch.Tensor,
    ) -> None:
        """Add what the holders have sent, in the order of ranks."""
        for share in self._sources(index):
            slot = self._mail.incoming(where, index, share.rank)
            add_rows(total, slot, spans(self._shape(index), share))

    def _assemble(self, group: _Group, block: Block, fill: Fill) -> torch.Tensor:
        """A block of B, from SOURCE and from own elements."""
        indices, rows = group.matrices[block.part], block.rows
        b = self._mail.memory.take(
            len(indices),
            rows[1] - rows[0],
            group.shape.region.cols,
            dtype=self._rule.factor_dtype,
        )
        places = dict(zip(indices, b, strict=True))
        self._mail.place(places, rows)
        fill(*self._mail.local(places, rows, only_sources=True))
        return b

    def _send_factors(self, group: _Group, found: RightFactor, position: int) -> None:
        """V and C to every holder that applies factors, and U where it does not have it."""
        index, shape = group.matrices[position], group.shape
        v, core = found.update[position], found.core[position]
        scheme = self._plan.schemes[index]
        for share in scheme.shares:
            slot = self._mail.outgoing(UPDATE, index, share.rank)
            if not group.is_assembled:
                rows = shape.v_rows(share) * shape.rank
                take_rows(slot[:rows], v, v_spans(shape, share))
                slot[rows:].copy_(core.reshape(-1))
            elif not scheme.carries_elements(UPDATE, share):
                here, there, rest = factor_slots(shape, share, slot)
                take_rows(here, group.u[position], u_spans(shape, share))
                take_rows(there, v, v_spans(shape, share))
                rest.copy_(core.reshape(-1))

    # ---- what belongs to a matrix -------------------------------------------------------------

    def _shape(self, index: int) -> FactorShape:
        found = self._plan.schemes[index].factors
        assert found is not None, "the plan is one of another optimizer"
        return found

    def _sources(self, index: int) -> list[Share]:
        return [share for share in self._plan.schemes[index].shares if share.is_source]

    def _right_factor(self, index: int) -> torch.Tensor:
        name = self._plan.matrices[index].name
        return self._right_factors[name].to(self._rule.factor_dtype)

    def _stacked_right_factors(self, matrices: Sequence[int]) -> torch.Tensor:
        return torch.stack([self._right_factor(index) for index in matrices])


def _read_together(flags: Sequence[torch.Tensor]) -> bool:
    """Whether any flag is set; the host waits once."""
    return bool(torch.stack(list(flags)).any()) if flags else False
