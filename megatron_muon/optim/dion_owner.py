"""What the owner of a matrix does in a step of Orth-Dion: U = orth(B V), V = right(Bᵀ U).

B V and Bᵀ U come as partial sums from the holders, or the owner assembles B and computes them
itself, for all matrices of a shape together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_muon.exchange import Mailbox, copy_all
from megatron_muon.linalg import Basis, Refresh, RightFactor
from megatron_muon.optim.dion_state import Flags, RightFactors
from megatron_muon.optim.factors import Spans, factor_slots, paired_rows, u_spans, v_spans
from megatron_muon.optim.rule import add_all
from megatron_muon.placement import FactorShape, Plan, Share
from megatron_muon.placement.program import FlatPiece, Rows
from megatron_muon.placement.schemes import BASIS, RESPONSE, SOURCE, UPDATE, WARM, Round

if TYPE_CHECKING:
    from megatron_muon.optim.dion_rule import OrthDionRule

MOST_ELEMENTS = 1 << 24
"""Of B and of products that are in memory at once."""

MOST_SENT = 1 << 24
"""Elements of factors that are brought into the order of messages before they are sent."""

Fill = Callable[[Sequence[FlatPiece], list[torch.Tensor]], None]
"""Copies elements of B that this rank holds to their places."""

Apply = Callable[[Sequence[FlatPiece], list[torch.Tensor]], None]
"""Applies elements of a product to this rank's ranges."""

Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Places in messages, and what is to be copied to each."""


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
        flags: Reads what the host has to know.
    """

    def __init__(
        self,
        rule: OrthDionRule,
        plan: Plan,
        mail: Mailbox,
        right_factors: RightFactors,
        flags: Flags,
    ) -> None:
        self._rule = rule
        self._plan = plan
        self._mail = mail
        self._right_factors = right_factors
        self._flags = flags
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
        for group in self._groups:
            if not group.is_assembled:
                v = self._right_factors.stacked(group.matrices)
                _copy(self._rows_sent(group, WARM, v))

    def find_bases(self, fill: Fill) -> None:
        """U = orth(B V)."""
        for group in self._groups:
            p = self._product(group, SOURCE, fill)
            group.basis = Basis(p, overwrite=True)
            self._mail.memory.release(p)
            del p
        is_unsettled = self._flags.read([group.basis.unsettled for group in self._groups])
        for group in self._groups:
            group.u = group.basis.settled(is_unsettled)
            del group.basis
        if not any(group.is_assembled for group in self._groups):
            self._mail.close(SOURCE)

    def send_bases(self) -> None:
        """U, to the holders; of these matrices the owner needs it no longer."""
        for group in self._groups:
            if not group.is_assembled:
                _copy(self._rows_sent(group, BASIS, group.u))
                del group.u

    def refresh(self, fill: Fill) -> None:
        """W = Bᵀ U and V = right(W), and factors for those holders that need them."""
        for group in self._groups:
            w = self._product(group, RESPONSE, fill)
            v = self._right_factors.stacked(group.matrices)
            group.refreshed = Refresh(w, v, self._rule.right_factor, overwrite=True)
            self._mail.memory.release(w)
            del w, v
        self._mail.close(SOURCE)
        self._mail.close(RESPONSE)
        is_unsettled = self._flags.read([group.refreshed.unsettled for group in self._groups])
        for group in self._groups:
            found = group.refreshed.settled(is_unsettled)
            del group.refreshed
            self._right_factors.keep(group.matrices, found.kept)
            _copy(self._factors_sent(group, found))
            if group.is_assembled:
                group.v, group.w = found.update, torch.bmm(found.update, found.core)
            del found
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
            self._add_up(group, where, found.zero_())
            return found
        # B V has the rows of B, and Bᵀ U its columns, unless B is transposed.
        by_rows = shape.transposed == (where == RESPONSE)
        for block in group.blocks:
            part, rows = block.part, slice(*block.rows)
            b = self._assemble(group, block, fill)
            factor = (
                self._right_factors.stacked(group.matrices[part])
                if where == SOURCE
                else group.u[part]
            )
            if by_rows:
                torch.bmm(b, factor, out=found[part, rows])
            elif rows.start == 0:
                torch.bmm(b.mT, factor[:, rows], out=found[part])
            else:
                found[part].baddbmm_(b.mT, factor[:, rows])
            self._mail.memory.release(b)
            # Before the next block is assembled.
            del b, factor
        return found

    def _add_up(self, group: _Group, where: Round, totals: torch.Tensor) -> None:
        """Add what the holders have sent: of every matrix the first one's, then the second's."""
        sources = [self._sources(index) for index in group.matrices]
        for theirs in zip_longest(*sources):
            targets, terms = [], []
            for index, share, total in zip(group.matrices, theirs, totals, strict=True):
                if share is not None:
                    slot = self._mail.incoming(where, index, share.rank)
                    for term, target in paired_rows(slot, total, _spans(where, group.shape, share)):
                        targets.append(target)
                        terms.append(term)
            if len(targets) == 1:
                targets[0].add_(terms[0])
            else:
                add_all(targets, terms, 1.0)

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

    def _rows_sent(self, group: _Group, where: Round, factors: torch.Tensor) -> Pairs:
        """Rows of V (WARM) or U (BASIS) for every holder."""
        factors = self._as_sent(factors)
        for index, factor in zip(group.matrices, factors, strict=True):
            for share in self._plan.schemes[index].shares:
                if share.is_source or where == BASIS:
                    slot = self._mail.outgoing(where, index, share.rank)
                    yield from paired_rows(slot, factor, _spans(where, group.shape, share))

    def _as_sent(self, factors: torch.Tensor) -> torch.Tensor:
        """Factors as they lie in messages, where they are small: their copies are one launch then.

        QR gives columns one after another.
        """
        if factors.numel() > MOST_SENT:
            return factors
        return factors.to(self._rule.exchange_dtype, memory_format=torch.contiguous_format)

    def _factors_sent(self, group: _Group, found: RightFactor) -> Pairs:
        """V and C for every holder that applies factors, and U where it does not have it."""
        shape = group.shape
        vs, cores = self._as_sent(found.update), self._as_sent(found.core)
        us = self._as_sent(group.u) if group.is_assembled else None
        for position, index in enumerate(group.matrices):
            v, core = vs[position], cores[position]
            scheme = self._plan.schemes[index]
            for share in scheme.shares:
                if scheme.carries_elements(UPDATE, share):
                    continue
                slot = self._mail.outgoing(UPDATE, index, share.rank)
                if us is not None:
                    here, there, rest = factor_slots(shape, share, slot)
                    yield from paired_rows(here, us[position], u_spans(shape, share))
                else:
                    there, rest = slot[: -core.numel()], slot[-core.numel() :]
                yield from paired_rows(there, v, v_spans(shape, share))
                yield rest.view(core.shape), core

    # ---- what belongs to a matrix -------------------------------------------------------------

    def _shape(self, index: int) -> FactorShape:
        found = self._plan.schemes[index].factors
        assert found is not None, "the plan is one of another optimizer"
        return found

    def _sources(self, index: int) -> list[Share]:
        return [share for share in self._plan.schemes[index].shares if share.is_source]


def _spans(where: Round, shape: FactorShape, share: Share) -> Spans:
    """Rows of a factor that a message carries for a share."""
    return u_spans(shape, share) if where in (SOURCE, BASIS) else v_spans(shape, share)


def _copy(pairs: Pairs) -> None:
    found = list(pairs)
    copy_all([place for place, _ in found], [value for _, value in found])
