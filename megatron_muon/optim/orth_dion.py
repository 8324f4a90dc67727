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

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_muon.exchange import Exchange, Flight, Mailbox, copy_all, piece_of
from megatron_muon.linalg import RightFactor, full_precision_matmul, orthonormal_basis, right_factor
from megatron_muon.optim.factors import (
    Spans,
    add_rows,
    gather_rows,
    low_rank,
    take_rows,
    u_spans,
    v_spans,
)
from megatron_muon.optim.rule import MatrixRange, OwnedState, range_of
from megatron_muon.placement import FactorShape, Share
from megatron_muon.placement.program import HeldMatrix
from megatron_muon.placement.schemes import BASIS, RESPONSE, SOURCE, UPDATE, WARM, Round

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
        # M becomes B; what U captured of it is taken out again in ``_apply``.
        torch._foreach_add_([r.momentum for r in owned], [r.grad for r in owned])
        for r in owned:
            r.master.mul_(1.0 - r.lr * r.weight_decay)
    step = _Step(rule, ranges, exchange, right_factors)
    with full_precision_matmul():
        exchange.run(step.wave)


class _Step:
    """What the waves of one step share."""

    def __init__(
        self,
        rule: OrthDionRule,
        ranges: Sequence[MatrixRange | None],
        exchange: Exchange,
        right_factors: OwnedState,
    ) -> None:
        self.rule = rule
        self.ranges = ranges
        self.plan = exchange.plan
        self.right_factors = right_factors
        # A factor of lower precision is widened for the products.
        self.dtype = torch.float64 if exchange.plan.itemsizes["warm"] == 8 else torch.float32

    def wave(self, mail: Mailbox) -> Iterator[Flight]:
        """All matrices of one wave, from V to the update."""
        by_factors = [e for e in mail.program.held if not e.scheme.sends_elements(SOURCE)]
        if mail.has(WARM):
            self._send_right_factors(mail)
            yield from mail.exchange(WARM)
        padded = self._send_sources(mail, by_factors)
        yield from mail.exchange(SOURCE)
        self._update_whole_matrices(mail)
        if mail.has(BASIS):
            self._send_bases(mail)
            yield from mail.exchange(BASIS)
            self._send_responses(mail, by_factors, padded)
            yield from mail.exchange(RESPONSE)
            self._send_refreshed(mail)
        yield from mail.exchange(UPDATE)
        for entry in mail.program.held:
            self._apply(mail, entry)

    # ---- whole matrices, on their owner -------------------------------------------------------

    def _update_whole_matrices(self, mail: Mailbox) -> None:
        """U = orth(B V), W = Bᵀ U, V = right(W) of every matrix that has been assembled."""
        for batch, matrices in mail.assemble():
            m, n = batch.shape
            b = matrices if m >= n else matrices.mT
            v = self._stacked_right_factors(batch.matrices)
            p, w = (self._computed(mail, *b.shape[:1], side, v.shape[-1]) for side in b.shape[1:])
            u = orthonormal_basis(torch.bmm(b, v, out=p))
            refreshed = self._refresh(batch.matrices, torch.bmm(b.mT, u, out=w), v)
            for index, basis, update, core in zip(
                batch.matrices, u, refreshed.update, refreshed.core, strict=True
            ):
                for share in self.plan.schemes[index].shares:
                    self._return_to(mail, index, share, basis, update, core)

    def _return_to(
        self,
        mail: Mailbox,
        index: int,
        share: Share,
        u: torch.Tensor,
        v: torch.Tensor,
        core: torch.Tensor,
    ) -> None:
        """A share's elements of U Vᵀ and U Wᵀ, or its rows of U and V, and C."""
        shape, slot = self._factors(index), mail.outgoing(UPDATE, index, share.rank)
        u_rows, v_rows = u_spans(shape, share), v_spans(shape, share)
        if not shape.returns_elements(share):
            here, there, rest = _factor_slots(shape, share, slot)
            take_rows(here, u, u_rows)
            take_rows(there, v, v_rows)
            rest.copy_(core.reshape(-1))
            return
        found = low_rank(shape, gather_rows(u, u_rows), gather_rows(v, v_rows), core)
        for half, left in zip(slot.view(2, -1), (found.update, found.captured), strict=True):
            if share.is_dense:
                torch.mm(left, found.right.T, out=half.view(share.rows, share.cols))
                continue
            whole, offset = torch.mm(left, found.right.T), 0
            for piece in share.padded_pieces():
                target = half[offset : offset + piece.numel].view(piece.rows, piece.cols)
                target.copy_(whole[piece.row_slice, piece.col_slice])
                offset += piece.numel

    # ---- products with factors: owner -> holders -> owner -> holders -> owner -> holders --------

    def _send_right_factors(self, mail: Mailbox) -> None:
        """V, to the holders."""
        for index in mail.program.factored:
            shape, v = self._factors(index), self._right_factor(index)
            for share in self._sources(index):
                take_rows(mail.outgoing(WARM, index, share.rank), v, v_spans(shape, share))

    def _send_sources(
        self, mail: Mailbox, by_factors: Sequence[HeldMatrix]
    ) -> dict[int, torch.Tensor]:
        """B V of what this rank holds, or B itself; returns the padded B of the former."""
        pieces, places = mail.packed()
        momenta = [range_of(self.ranges, piece.parameter).momentum for piece in pieces]
        copy_all(places, [piece_of(m, p) for m, p in zip(momenta, pieces, strict=True)])
        padded: dict[int, torch.Tensor] = {}
        for entry in by_factors:
            if entry.share.is_source:
                padded[entry.index] = b = self._padded(mail, entry)
                r, owner = self._factors(entry.index).rank, entry.scheme.ranks[0]
                v = mail.incoming(WARM, entry.index, owner).view(-1, r)
                p = mail.outgoing(SOURCE, entry.index, owner).view(-1, r)
                torch.mm(b, v, out=p)
        return padded

    def _padded(self, mail: Mailbox, entry: HeldMatrix) -> torch.Tensor:
        """B of what this rank holds, on the longer side first; where it is dense, as it lies."""
        share = entry.share
        momentum = range_of(self.ranges, entry.parameter).momentum
        if share.is_dense and momentum.dtype == self.dtype:
            start = share.runs[0].start - entry.range_start
            whole = momentum[start : start + share.numel].view(share.rows, share.cols)
        else:
            whole = mail.keep(share.rows, share.cols).zero_()
            for piece in share.padded_pieces():
                start = piece.start - entry.range_start
                values = momentum[start : start + piece.numel].view(piece.rows, piece.cols)
                whole[piece.row_slice, piece.col_slice].copy_(values)
        return whole.T if self._factors(entry.index).transposed else whole

    def _send_bases(self, mail: Mailbox) -> None:
        """U = orth(Σ B V), to the holders."""
        for shape, matrices in self._by_shape(mail.program.factored):
            p = self._summed(mail, SOURCE, matrices, shape.long, u_spans)
            for index, u in zip(matrices, orthonormal_basis(p), strict=True):
                for share in self.plan.schemes[index].shares:
                    take_rows(mail.outgoing(BASIS, index, share.rank), u, u_spans(shape, share))

    def _send_responses(
        self, mail: Mailbox, by_factors: Sequence[HeldMatrix], padded: dict[int, torch.Tensor]
    ) -> None:
        """Bᵀ U of what this rank holds."""
        for entry in by_factors:
            if entry.share.is_source:
                r, owner = self._factors(entry.index).rank, entry.scheme.ranks[0]
                u = mail.incoming(BASIS, entry.index, owner).view(-1, r)
                w = mail.outgoing(RESPONSE, entry.index, owner).view(-1, r)
                torch.mm(padded[entry.index].T, u, out=w)

    def _send_refreshed(self, mail: Mailbox) -> None:
        """V = right(Σ Bᵀ U) and the core, to the holders."""
        mail.computed.rewind()
        for shape, matrices in self._by_shape(mail.program.factored):
            w = self._summed(mail, RESPONSE, matrices, shape.short, v_spans)
            refreshed = self._refresh(matrices, w, self._stacked_right_factors(matrices))
            for index, v, core in zip(matrices, refreshed.update, refreshed.core, strict=True):
                for share in self.plan.schemes[index].shares:
                    slot = mail.outgoing(UPDATE, index, share.rank)
                    rows = shape.v_rows(share) * shape.rank
                    take_rows(slot[:rows], v, v_spans(shape, share))
                    slot[rows:].copy_(core.reshape(-1))

    def _summed(
        self,
        mail: Mailbox,
        where: Round,
        matrices: Sequence[int],
        rows: int,
        spans: Callable[[FactorShape, Share], Spans],
    ) -> torch.Tensor:
        """(B, rows, r): what the holders have sent, added up."""
        shape = self._factors(matrices[0])
        found = self._computed(mail, len(matrices), rows, shape.rank).zero_()
        for index, total in zip(matrices, found, strict=True):
            for share in self._sources(index):
                add_rows(total, mail.incoming(where, index, share.rank), spans(shape, share))
        mail.count_matrices(len(matrices) * (where == SOURCE))
        return found

    def _refresh(self, matrices: Sequence[int], w: torch.Tensor, v: torch.Tensor) -> RightFactor:
        """V = right(W); it is also what the next step starts from."""
        found = right_factor(w, v, self.rule.right_factor)
        for index, kept in zip(matrices, found.kept, strict=True):
            self.right_factors[self.plan.matrices[index].name] = kept.to(self.rule.state_dtype)
        return found

    # ---- the flat ranges ----------------------------------------------------------------------

    def _apply(self, mail: Mailbox, entry: HeldMatrix) -> None:
        """M −= (1 − μ) U Wᵀ and X −= η s U Vᵀ on what this rank holds."""
        held, share = range_of(self.ranges, entry.parameter), entry.share
        shape, owner = self._factors(entry.index), entry.scheme.ranks[0]
        is_whole = entry.scheme.sends_elements(SOURCE)
        m, n = self.plan.matrices[entry.index].shape
        forget, step = self.rule.momentum - 1.0, -held.lr * self.rule.scale(m, n)
        slot = mail.incoming(UPDATE, entry.index, owner)
        if is_whole and shape.returns_elements(share):
            update, captured = slot.view(2, -1)
            for flat in entry.pieces((0, share.numel)):
                here = slice(flat.offset, flat.offset + flat.numel)
                piece_of(held.momentum, flat).view(-1).add_(captured[here], alpha=forget)
                piece_of(held.master, flat).view(-1).add_(update[here], alpha=step)
            return
        if is_whole:
            u, v, core = _factor_slots(shape, share, slot)
        else:
            u = mail.incoming(BASIS, entry.index, owner)
            v, core = slot[: -(shape.rank**2)], slot[-(shape.rank**2) :]
        mail.computed.rewind()
        found = low_rank(
            shape,
            u.view(-1, shape.rank),
            v.view(-1, shape.rank),
            core.view(shape.rank, -1),
            out=self._computed(mail, share.rows, shape.rank),
        )
        for piece in share.padded_pieces():
            start = piece.start - entry.range_start
            here, right = slice(start, start + piece.numel), found.right[piece.col_slice].T
            for values, left, factor in (
                (held.momentum, found.captured, forget),
                (held.master, found.update, step),
            ):
                part = values[here].view(piece.rows, -1)
                torch.addmm(part, left[piece.row_slice], right, alpha=factor, out=part)

    # ---- what belongs to a matrix ---------------------------------------------------------------

    def _factors(self, index: int) -> FactorShape:
        found = self.plan.schemes[index].factors
        assert found is not None, "the plan is one of another optimizer"
        return found

    def _sources(self, index: int) -> list[Share]:
        return [share for share in self.plan.schemes[index].shares if share.is_source]

    def _by_shape(self, matrices: Sequence[int]) -> Iterator[tuple[FactorShape, list[int]]]:
        groups: dict[FactorShape, list[int]] = defaultdict(list)
        for index in matrices:
            groups[self._factors(index)].append(index)
        yield from groups.items()

    def _right_factor(self, index: int) -> torch.Tensor:
        return self.right_factors[self.plan.matrices[index].name].to(self.dtype)

    def _stacked_right_factors(self, matrices: Sequence[int]) -> torch.Tensor:
        return torch.stack([self._right_factor(index) for index in matrices])

    def _computed(self, mail: Mailbox, *shape: int) -> torch.Tensor:
        return mail.computed.take(*shape, dtype=self.dtype)


def _factor_slots(
    shape: FactorShape, share: Share, slot: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where an update message of a whole matrix has rows of U, rows of V, and C."""
    u, v = shape.u_rows(share) * shape.rank, shape.v_rows(share) * shape.rank
    return slot[:u], slot[u : u + v], slot[u + v :]
