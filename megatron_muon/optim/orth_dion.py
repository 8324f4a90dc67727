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
from megatron_muon.optim.dion_owner import OwnedMatrices
from megatron_muon.optim.factors import HeldElements, factor_slots, low_rank
from megatron_muon.optim.rule import MatrixRange, OwnedState, add_all, decay_weights, range_of
from megatron_muon.placement import FactorShape
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
    step = _Step(rule, ranges, exchange, right_factors)
    with full_precision_matmul():
        exchange.run(step.wave)


class _Step:
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
        self.right_factors = right_factors

    def wave(self, mail: Mailbox) -> Iterator[Flight]:
        """All matrices of one wave, from V to the update."""
        owned = OwnedMatrices(self.rule, self.plan, mail, self.right_factors)
        by_factors = [e for e in mail.program.held if not e.scheme.assembles]
        if mail.has(WARM):
            owned.send_right_factors()
            yield from mail.exchange(WARM)
        self.fill(*mail.packed(SOURCE))
        for entry in by_factors:
            self._send_product(mail, entry, SOURCE, WARM)
        mail.close(WARM)
        yield from mail.exchange(SOURCE)
        owned.find_bases(self.fill)
        if mail.has(BASIS):
            owned.send_bases()
            yield from mail.exchange(BASIS)
            for entry in by_factors:
                self._send_product(mail, entry, RESPONSE, BASIS)
            yield from mail.exchange(RESPONSE)
        owned.refresh(self.fill)
        owned.give_back(UPDATE, self._step_along)
        yield from mail.exchange(UPDATE)
        for entry in mail.program.held:
            self._apply_factors(mail, entry)
        self._step_along(*mail.applied(UPDATE))
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

    def _send_product(self, mail: Mailbox, entry: HeldMatrix, product: Round, of: Round) -> None:
        """B V of what this rank holds (SOURCE), or Bᵀ U (RESPONSE)."""
        if not entry.share.is_source:
            return
        shape, owner = self._factors(entry), entry.scheme.ranks[0]
        factor = self._rows(mail.incoming(of, entry.index, owner), shape)
        momentum = range_of(self.ranges, entry.parameter).momentum
        b = HeldElements.of(entry.share, momentum, entry.range_start)
        # U is on the longer side, V on the shorter.
        by_columns = shape.transposed == (product == RESPONSE)
        found = b.times(factor) if by_columns else b.transposed_times(factor)
        mail.outgoing(product, entry.index, owner).view(found.shape).copy_(found)

    def _apply_factors(self, mail: Mailbox, entry: HeldMatrix) -> None:
        """M −= (1 − μ) U Wᵀ and X −= η s U Vᵀ, from factors of both."""
        share, owner, shape = entry.share, entry.scheme.ranks[0], self._factors(entry)
        if entry.scheme.carries_elements(UPDATE, share):
            return
        slot = mail.incoming(UPDATE, entry.index, owner)
        if entry.scheme.assembles:
            u, v, core = factor_slots(shape, share, slot)
        else:
            u = mail.incoming(BASIS, entry.index, owner)
            v, core = slot[: -(shape.rank**2)], slot[-(shape.rank**2) :]
        found = low_rank(shape, *(self._rows(part, shape) for part in (u, v, core)))
        held = range_of(self.ranges, entry.parameter)
        for flat, left, factor in (
            (held.momentum, found.captured, self.rule.momentum - 1.0),
            (held.master, found.update, -held.lr * self._scale(entry.index)),
        ):
            HeldElements.of(share, flat, entry.range_start).add_product(left, found.right, factor)

    def _take_out(self, pieces: Sequence[FlatPiece], captured: list[torch.Tensor]) -> None:
        """M ← B − (1 − μ) U Wᵀ, from elements of U Wᵀ."""
        momenta = [range_of(self.ranges, piece.parameter).momentum for piece in pieces]
        targets = [piece_of(m, p) for m, p in zip(momenta, pieces, strict=True)]
        add_all(targets, captured, self.rule.momentum - 1.0)

    def _step_along(self, pieces: Sequence[FlatPiece], update: list[torch.Tensor]) -> None:
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

    def _rows(self, part: torch.Tensor, shape: FactorShape) -> torch.Tensor:
        """Rows of a factor, from a message."""
        return part.view(-1, shape.rank).to(self.rule.factor_dtype)

    def _factors(self, entry: HeldMatrix) -> FactorShape:
        found = entry.scheme.factors
        assert found is not None, "the plan is one of another optimizer"
        return found

    def _scale(self, index: int) -> float:
        return self.rule.scale(*self.plan.matrices[index].shape)
