"""Orth-Dion: low-rank orthonormal updates with error feedback.

For every logical matrix X (m x n, m >= n; else transposed) with gradient G, state M (zeros) and V
(n x r, seeded by the matrix's name), learning rate η, weight decay λ, momentum μ::

    B = M + G
    U = orth(B V)                       # any orthonormal basis
    W = Bᵀ U
    M ← B − (1 − μ) U Wᵀ                # error feedback: only the captured part decays
    V ← right(W)                        # orthonormal: QR with R_ii > 0, or the polar factor
    X ← (1 − η λ) X − η · extra · s(m, n) · U Vᵀ

B, M and X stay in the flat ranges of the distributed optimizer. U, W and V are computed by the
matrix's owner, as whole factors; what is exchanged is chosen by the plan (``placement.schemes``).

Source: Orth-Dion, arXiv 2605.16341; Dion, arXiv 2504.05295. Orth-Dion's β that decays the residual
is 1 for μ = 0 here; code that writes ``M −= β U Wᵀ`` has β = 1 − μ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_muon.exchange import Exchange, Flight, Mailbox, copy_all, piece_of
from megatron_muon.linalg import full_precision_matmul
from megatron_muon.optim.dion_home import update_at_home
from megatron_muon.optim.dion_owner import OwnedMatrices
from megatron_muon.optim.dion_state import Flags, RightFactors
from megatron_muon.optim.factors import HeldElements, factor_slots, low_rank
from megatron_muon.optim.held_batch import HeldBatch, batches
from megatron_muon.optim.rule import MatrixRange, OwnedState, add_all, decay_weights, range_of
from megatron_muon.placement.program import FlatPiece, HeldMatrix
from megatron_muon.placement.schemes import (
    BASIS,
    CAPTURED,
    RESPONSE,
    SOURCE,
    UPDATE,
    WARM,
    Round,
)

if TYPE_CHECKING:
    from megatron_muon.optim.dion_rule import OrthDionRule


@torch.no_grad()
def orth_dion_step(
    rule: OrthDionRule,
    ranges: Sequence[MatrixRange | None],
    exchange: Exchange,
    right_factors: OwnedState,
) -> None:
    """See ``MatrixRule.step``; the state is V (short side x r) of every owned matrix."""
    owned = [r for r in ranges if r is not None]
    if owned:
        # M becomes B; what U captured of it is taken out again in ``_take_out``.
        torch._foreach_add_([r.momentum for r in owned], [r.grad for r in owned])
        decay_weights(owned)
    step = OrthDionStep(rule, ranges, exchange, right_factors)
    with full_precision_matmul():
        exchange.run(step.wave, lambda mail: update_at_home(step, mail))


class OrthDionStep:
    """What the waves of one step share; here is what holders do, ``dion_owner`` has the owners."""

    def __init__(
        self,
        rule: OrthDionRule,
        ranges: Sequence[MatrixRange | None],
        exchange: Exchange,
        right_factors: OwnedState,
    ) -> None:
        self.rule = rule
        self.ranges = ranges
        self.rank = exchange.rank
        self.plan = exchange.plan
        self.right_factors = RightFactors(exchange.plan, right_factors, rule.factor_dtype)
        self.flags = Flags()

    def wave(self, mail: Mailbox) -> Iterator[Flight]:
        """All matrices of one wave, from V to the update."""
        owned = OwnedMatrices(self.rule, self.plan, mail, self.right_factors, self.flags)
        by_factors = _together([e for e in mail.program.held if not e.scheme.assembles])
        if mail.has(WARM):
            owned.send_right_factors()
            yield from mail.exchange(WARM)
        self.fill(*mail.packed(SOURCE))
        for entries in by_factors:
            self._send_products(mail, entries, SOURCE, WARM)
        mail.close(WARM)
        yield from mail.exchange(SOURCE)
        owned.find_bases(self.fill)
        if mail.has(BASIS):
            owned.send_bases()
            yield from mail.exchange(BASIS)
            for entries in by_factors:
                self._send_products(mail, entries, RESPONSE, BASIS)
            yield from mail.exchange(RESPONSE)
        owned.refresh(self.fill)
        owned.give_back(UPDATE, self.step_along)
        yield from mail.exchange(UPDATE)
        for entries in _together(
            [e for e in mail.program.held if not e.scheme.carries_elements(UPDATE, e.share)]
        ):
            self._apply_factors(mail, entries)
        self.step_along(*mail.applied(UPDATE))
        mail.close(BASIS)
        mail.close(UPDATE)
        if mail.has(CAPTURED):
            owned.give_back(CAPTURED, self._take_out)
            yield from mail.exchange(CAPTURED)
            self._take_out(*mail.applied(CAPTURED))

    def fill(self, pieces: Sequence[FlatPiece], places: list[torch.Tensor]) -> None:
        """Elements of B = M + G, which the momenta hold now."""
        momenta = [range_of(self.ranges, piece.parameter).momentum for piece in pieces]
        copy_all(places, [piece_of(m, p) for m, p in zip(momenta, pieces, strict=True)])

    def _send_products(
        self, mail: Mailbox, entries: list[HeldMatrix], product: Round, of: Round
    ) -> None:
        """B V of what this rank holds (SOURCE), or Bᵀ U (RESPONSE)."""
        sources = [entry for entry in entries if entry.share.is_source]
        if not sources:
            return
        batch = HeldBatch(sources)
        slots = [mail.incoming(of, e.index, e.scheme.ranks[0]) for e in sources]
        factor = batch.stacked(slots, self.rule.factor_dtype)
        # U is on the longer side, V on the shorter.
        by_columns = batch.shape.transposed == (product == RESPONSE)
        if len(sources) == 1:
            (entry,) = sources
            momentum = range_of(self.ranges, entry.parameter).momentum
            alone = HeldElements.of(entry.share, momentum, entry.range_start)
            times = alone.times if by_columns else alone.transposed_times
            found = times(factor[0]).unsqueeze(0)
        else:
            b = mail.memory.take(*batch.size, dtype=factor.dtype).zero_()
            self.fill(*batch.elements(b))
            found = torch.bmm(b if by_columns else b.mT, factor)
            mail.memory.release(b)
        places = [
            mail.outgoing(product, e.index, e.scheme.ranks[0]).view(-1, batch.shape.rank)
            for e in sources
        ]
        copy_all(places, [rows[: len(p)] for rows, p in zip(found, places, strict=True)])

    def _apply_factors(self, mail: Mailbox, entries: list[HeldMatrix]) -> None:
        """M −= (1 − μ) U Wᵀ and X −= η s U Vᵀ, from factors of both."""
        batch = HeldBatch(entries)
        slots = zip(*(self._factor_slots(mail, entry) for entry in entries), strict=True)
        factors = (batch.stacked(part, self.rule.factor_dtype) for part in slots)
        found = low_rank(batch.shape, *factors)
        if len(entries) > 1:
            product = mail.memory.take(*batch.size, dtype=found.right.dtype)
            pieces, places = batch.elements(product)
            for left, apply in (
                (found.captured, self._take_out),
                (found.update, self.step_along),
            ):
                torch.bmm(left, found.right.mT, out=product)
                apply(pieces, places)
            mail.memory.release(product)
            return
        (entry,) = entries
        held = range_of(self.ranges, entry.parameter)
        for flat, left, factor in (
            (held.momentum, found.captured, self.rule.momentum - 1.0),
            (held.master, found.update, -held.lr * self._scale(entry.index)),
        ):
            alone = HeldElements.of(entry.share, flat, entry.range_start)
            alone.add_product(left[0], found.right[0], factor)

    def _factor_slots(
        self, mail: Mailbox, entry: HeldMatrix
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of U, rows of V, and C, as they have come."""
        shape, owner = entry.scheme.factors, entry.scheme.ranks[0]
        assert shape is not None, "the plan is one of another optimizer"
        slot = mail.incoming(UPDATE, entry.index, owner)
        if entry.scheme.assembles:
            return factor_slots(shape, entry.share, slot)
        v, core = slot[: -(shape.rank**2)], slot[-(shape.rank**2) :]
        return mail.incoming(BASIS, entry.index, owner), v, core

    def _take_out(self, pieces: Sequence[FlatPiece], captured: list[torch.Tensor]) -> None:
        """M ← B − (1 − μ) U Wᵀ, from elements of U Wᵀ."""
        momenta = [range_of(self.ranges, piece.parameter).momentum for piece in pieces]
        targets = [piece_of(m, p) for m, p in zip(momenta, pieces, strict=True)]
        add_all(targets, captured, self.rule.momentum - 1.0)

    def step_along(self, pieces: Sequence[FlatPiece], update: list[torch.Tensor]) -> None:
        """X ← X − η s U Vᵀ, from elements of U Vᵀ."""
        by_factor: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for piece, here in zip(pieces, update, strict=True):
            held = range_of(self.ranges, piece.parameter)
            factor = -held.lr * self._scale(piece.matrix)
            targets, terms = by_factor.setdefault(factor, ([], []))
            targets.append(piece_of(held.master, piece))
            terms.append(here)
        for factor, (targets, terms) in by_factor.items():
            add_all(targets, terms, factor)

    def _scale(self, index: int) -> float:
        return self.rule.scale(*self.plan.matrices[index].shape)


def _together(entries: Sequence[HeldMatrix]) -> list[list[HeldMatrix]]:
    """Entries whose products are computed together."""
    held = [(entry.scheme, entry.share) for entry in entries]
    return [[entries[position] for position in positions] for positions in batches(held)]
