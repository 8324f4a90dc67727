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
matrix's owner, as whole factors; what travels is chosen by the plan (``placement.factors``).

Source: Orth-Dion, arXiv 2605.16341; Dion, arXiv 2504.05295. Orth-Dion's β that decays the residual
is 1 for μ = 0 here; code that writes ``M −= β U Wᵀ`` has β = 1 − μ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, MutableMapping, Sequence

import torch

from megatron_muon.exchange import FactorExchange, Flight, WaveMail
from megatron_muon.linalg import full_precision_matmul, orthonormal_basis, right_factor
from megatron_muon.optim.dion_rule import OrthDionRule, seeded_right_factor
from megatron_muon.optim.dion_shares import (
    add_rows,
    products,
    take_elements,
    take_rows,
    u_spans,
    update_factors,
    update_parts,
    v_spans,
)
from megatron_muon.optim.muon import MatrixRange
from megatron_muon.placement.factor_program import HeldMatrix, OwnedMatrix
from megatron_muon.placement.factors import FactorPlan, Round
from megatron_muon.placement.shares import Share, share_blocks, source_rectangles


@torch.no_grad()
def orth_dion_step(
    rule: OrthDionRule,
    ranges: Sequence[MatrixRange | None],
    exchange: FactorExchange,
    right_factors: MutableMapping[str, torch.Tensor],
) -> None:
    """One step of all matrices of a stage.

    Args:
        rule: Hyper-parameters.
        ranges: For each parameter of the plan this rank's range, None where it owns no element;
            ``momentum`` is M.
        exchange: The plan's exchange; entered also by a rank that owns nothing.
        right_factors: V (short side x r) of every matrix that this rank owns, by name; replaced.
    """
    owned = [r for r in ranges if r is not None]
    if owned:
        # M becomes B; what U captured of it is taken out again below.
        torch._foreach_add_([r.momentum for r in owned], [r.grad for r in owned])
        for r in owned:
            r.master.mul_(1.0 - r.lr * r.weight_decay)
    step = _Step(rule, ranges, exchange.plan, right_factors, exchange.dtype)
    with full_precision_matmul():
        exchange.run(step.wave)


def first_right_factors(
    plan: FactorPlan, rank: int, *, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """V (short side x r) of every matrix that a rank owns, before the first step.

    Seeded by the matrix's name alone, so it is the same whatever rank owns it.
    """
    return {
        matrix.name: seeded_right_factor(matrix.name, shape.short, shape.rank, dtype=dtype).to(
            device
        )
        for matrix, shape, owner in zip(plan.matrices, plan.shapes, plan.owners, strict=True)
        if owner == rank
    }


class _Step:
    """The state that the waves of one step share."""

    def __init__(
        self,
        rule: OrthDionRule,
        ranges: Sequence[MatrixRange | None],
        plan: FactorPlan,
        right_factors: MutableMapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        self.rule = rule
        self.ranges = ranges
        self.plan = plan
        self.right_factors = right_factors
        self.dtype = dtype

    def wave(self, mail: WaveMail) -> Iterator[Flight]:
        """All matrices of one wave, from V to the update."""
        held, owned = mail.program.held, mail.program.owned
        if mail.has(Round.WARM):
            yield from self._send_right_factors(mail, owned)
        padded = yield from self._send_sources(mail, held)
        projections, wholes = self._project(mail, owned)
        bases = self._bases(mail, owned, projections)
        if mail.has(Round.BASIS):
            yield from self._send_bases(mail, owned, bases)
        if mail.has(Round.RESPONSE):
            yield from self._send_responses(mail, held, padded)
        padded.clear()
        responses = self._respond(mail, owned, wholes, bases)
        wholes.clear()
        yield from self._send_updates(mail, owned, bases, responses)
        for entry in held:
            self._apply(mail, entry)

    # ---- owner -> holders -> owner ------------------------------------------------------------

    def _send_right_factors(self, mail: WaveMail, owned: Sequence[OwnedMatrix]) -> Iterator[Flight]:
        outbox = mail.outbox(Round.WARM)
        for entry, share in _sources(owned, "factors"):
            slot = mail.outgoing(Round.WARM, outbox, entry.index, share.rank)
            take_rows(slot, self._right_factor(entry), v_spans(entry.shape, share))
        yield from mail.exchange(Round.WARM, outbox)

    def _send_sources(
        self, mail: WaveMail, held: Sequence[HeldMatrix]
    ) -> Generator[Flight, None, dict[int, torch.Tensor]]:
        """B V of what this rank holds, or B itself; returns the padded B of the factor scheme."""
        outbox = mail.outbox(Round.SOURCE)
        padded: dict[int, torch.Tensor] = {}
        for entry in held:
            if not entry.share.is_source:
                continue
            slot = mail.outgoing(Round.SOURCE, outbox, entry.index, entry.owner)
            momentum = self._range(entry).momentum
            if entry.scheme == "matrix":
                offset = 0
                for piece in entry.share.pieces:
                    start = piece.start - entry.range_start
                    slot[offset : offset + piece.numel].copy_(momentum[start : start + piece.numel])
                    offset += piece.numel
                continue
            padded[entry.index] = whole = self._padded(mail, entry, momentum)
            warm = mail.incoming(Round.WARM, entry.index, entry.owner).view(-1, entry.shape.rank)
            b = whole.T if entry.shape.transposed else whole
            torch.mm(b, warm, out=slot.view(-1, entry.shape.rank))
        yield from mail.exchange(Round.SOURCE, outbox)
        return padded

    def _padded(self, mail: WaveMail, entry: HeldMatrix, momentum: torch.Tensor) -> torch.Tensor:
        """B of what this rank holds, (rows, cols); where nothing has to be added, as it lies."""
        share = entry.share
        if share.is_dense and momentum.dtype == self.dtype:
            start = share.pieces[0].start - entry.range_start
            return momentum[start : start + share.numel].view(share.rows, share.cols)
        whole = mail.buffer(share.rows, share.cols).zero_()
        for piece in share.pieces:
            start = piece.start - entry.range_start
            whole.view(-1)[piece.offset : piece.offset + piece.numel].copy_(
                momentum[start : start + piece.numel]
            )
        return whole

    def _project(
        self, mail: WaveMail, owned: Sequence[OwnedMatrix]
    ) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """B V of every owned matrix, and B (long x short) of those that came whole."""
        projections: dict[int, torch.Tensor] = {}
        wholes: dict[int, torch.Tensor] = {}
        for entry in owned:
            shape = entry.shape
            projection = mail.buffer(shape.long, shape.rank)
            if entry.scheme == "factors":
                projection.zero_()
                for share in entry.shares:
                    if share.is_source:
                        part = mail.incoming(Round.SOURCE, entry.index, share.rank)
                        add_rows(projection, part, u_spans(shape, share))
            else:
                wholes[entry.index] = whole = self._assemble(mail, entry)
                torch.mm(whole, self._right_factor(entry), out=projection)
            projections[entry.index] = projection
        return projections, wholes

    def _assemble(self, mail: WaveMail, entry: OwnedMatrix) -> torch.Tensor:
        """B (long x short) from the pieces of all holders."""
        whole = mail.buffer(*self.plan.matrices[entry.index].shape)
        for share in entry.shares:
            if not share.is_source:
                continue
            received = mail.incoming(Round.SOURCE, entry.index, share.rank)
            for rectangle in source_rectangles(share):
                end = rectangle.offset + rectangle.rows * rectangle.cols
                whole[
                    rectangle.row : rectangle.row + rectangle.rows,
                    rectangle.col : rectangle.col + rectangle.cols,
                ] = received[rectangle.offset : end].view(rectangle.rows, rectangle.cols)
        return whole.T if entry.shape.transposed else whole

    def _bases(
        self,
        mail: WaveMail,
        owned: Sequence[OwnedMatrix],
        projections: dict[int, torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """U = orth(B V), matrices of one shape together."""
        bases: dict[int, torch.Tensor] = {}
        for group in _by_shape(owned):
            found = orthonormal_basis(torch.stack([projections[e.index] for e in group]))
            mail.hold(found.numel())
            bases |= {e.index: u for e, u in zip(group, found, strict=True)}
        return bases

    def _send_bases(
        self, mail: WaveMail, owned: Sequence[OwnedMatrix], bases: dict[int, torch.Tensor]
    ) -> Iterator[Flight]:
        outbox = mail.outbox(Round.BASIS)
        for entry in owned:
            if entry.scheme == "factors":
                for share in entry.shares:
                    slot = mail.outgoing(Round.BASIS, outbox, entry.index, share.rank)
                    take_rows(slot, bases[entry.index], u_spans(entry.shape, share))
        yield from mail.exchange(Round.BASIS, outbox)

    def _send_responses(
        self, mail: WaveMail, held: Sequence[HeldMatrix], padded: dict[int, torch.Tensor]
    ) -> Iterator[Flight]:
        outbox = mail.outbox(Round.RESPONSE)
        for entry in held:
            if entry.index not in padded:
                continue
            slot = mail.outgoing(Round.RESPONSE, outbox, entry.index, entry.owner)
            basis = mail.incoming(Round.BASIS, entry.index, entry.owner).view(-1, entry.shape.rank)
            whole = padded[entry.index]
            b = whole.T if entry.shape.transposed else whole
            torch.mm(b.T, basis, out=slot.view(-1, entry.shape.rank))
        yield from mail.exchange(Round.RESPONSE, outbox)

    def _respond(
        self,
        mail: WaveMail,
        owned: Sequence[OwnedMatrix],
        wholes: dict[int, torch.Tensor],
        bases: dict[int, torch.Tensor],
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """W = Bᵀ U, then the update's right factor and the core; V is kept for the next step."""
        responses: dict[int, torch.Tensor] = {}
        for entry in owned:
            shape = entry.shape
            response = mail.buffer(shape.short, shape.rank)
            if entry.index in wholes:
                torch.mm(wholes[entry.index].T, bases[entry.index], out=response)
            else:
                response.zero_()
                for share in entry.shares:
                    if share.is_source:
                        part = mail.incoming(Round.RESPONSE, entry.index, share.rank)
                        add_rows(response, part, v_spans(shape, share))
            responses[entry.index] = response
        refreshed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for group in _by_shape(owned):
            found = right_factor(
                torch.stack([responses[e.index] for e in group]),
                torch.stack([self._right_factor(e) for e in group]),
                self.rule.right_factor,
            )
            mail.hold(found.update.numel() + found.kept.numel() + found.core.numel())
            for position, entry in enumerate(group):
                refreshed[entry.index] = (found.update[position], found.core[position])
                name = self.plan.matrices[entry.index].name
                self.right_factors[name] = found.kept[position].to(self.rule.state_dtype)
        return refreshed

    def _send_updates(
        self,
        mail: WaveMail,
        owned: Sequence[OwnedMatrix],
        bases: dict[int, torch.Tensor],
        refreshed: dict[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> Iterator[Flight]:
        outbox = mail.outbox(Round.UPDATE)
        for entry in owned:
            basis, (update, core) = bases[entry.index], refreshed[entry.index]
            factored, whole = _by_return(entry)
            for share in factored:
                slot = mail.outgoing(Round.UPDATE, outbox, entry.index, share.rank)
                u, v, c = update_parts(entry.scheme, entry.shape, share, slot)
                if entry.scheme == "matrix":
                    take_rows(u, basis, u_spans(entry.shape, share))
                take_rows(v, update, v_spans(entry.shape, share))
                c.copy_(core.reshape(-1))
            if whole:
                both = products(entry.shape, basis, update, core)
                mail.hold(sum(product.numel() for product in both))
                for share in whole:
                    slot = mail.outgoing(Round.UPDATE, outbox, entry.index, share.rank)
                    for product, part in zip(both, slot.view(2, -1), strict=True):
                        take_elements(part, product, share)
        yield from mail.exchange(Round.UPDATE, outbox)

    # ---- the flat ranges ----------------------------------------------------------------------

    def _apply(self, mail: WaveMail, entry: HeldMatrix) -> None:
        """M −= (1 − μ) U Wᵀ and X −= η s U Vᵀ on what this rank holds."""
        held, share = self._range(entry), entry.share
        m, n = self.plan.matrices[entry.index].shape
        forget, step = self.rule.momentum - 1.0, -held.lr * self.rule.scale(m, n)
        if entry.scheme == "matrix" and entry.shape.returns_elements(share):
            slot = mail.incoming(Round.UPDATE, entry.index, entry.owner)
            numels = [piece.numel for piece in share.pieces]
            update, captured = (part.split(numels) for part in slot.view(2, -1))
            for piece, x, w in zip(share.pieces, update, captured, strict=True):
                here = slice(piece.start - entry.range_start, None)
                held.momentum[here][: piece.numel].add_(w, alpha=forget)
                held.master[here][: piece.numel].add_(x, alpha=step)
            return
        for_update, for_captured, right = self._received_factors(mail, entry)
        mail.hold(for_captured.numel())
        for block in share_blocks(share):
            start, rows = block.start - entry.range_start, slice(block.row, block.row + block.rows)
            here = slice(start, start + block.rows * block.cols)
            turned = right[block.col : block.col + block.cols].T
            for whole, left, factor in (
                (held.momentum, for_captured, forget),
                (held.master, for_update, step),
            ):
                part = whole[here].view(block.rows, -1)
                torch.addmm(part, left[rows], turned, alpha=factor, out=part)

    def _received_factors(
        self, mail: WaveMail, entry: HeldMatrix
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``update_factors`` of a share's rows and columns."""
        shape = entry.shape
        slot = mail.incoming(Round.UPDATE, entry.index, entry.owner)
        u, v, core = update_parts(entry.scheme, shape, entry.share, slot)
        if entry.scheme == "factors":
            u = mail.incoming(Round.BASIS, entry.index, entry.owner)
        return update_factors(
            shape, u.view(-1, shape.rank), v.view(-1, shape.rank), core.view(shape.rank, -1)
        )

    def _range(self, entry: HeldMatrix) -> MatrixRange:
        found = self.ranges[entry.parameter]
        assert found is not None, "the plan gives this rank a share of a range it does not own"
        return found

    def _right_factor(self, entry: OwnedMatrix) -> torch.Tensor:
        name = self.plan.matrices[entry.index].name
        return self.right_factors[name].to(
            torch.float64 if self.plan.itemsize == 8 else torch.float32
        )


def _sources(owned: Sequence[OwnedMatrix], scheme: str) -> Iterator[tuple[OwnedMatrix, Share]]:
    for entry in owned:
        if entry.scheme == scheme:
            yield from ((entry, share) for share in entry.shares if share.is_source)


def _by_shape(owned: Sequence[OwnedMatrix]) -> list[list[OwnedMatrix]]:
    groups: dict[tuple[int, int, int], list[OwnedMatrix]] = defaultdict(list)
    for entry in owned:
        groups[entry.shape.long, entry.shape.short, entry.shape.rank].append(entry)
    return list(groups.values())


def _by_return(entry: OwnedMatrix) -> tuple[list[Share], list[Share]]:
    """Shares that get factors back, and those that get elements of the products."""
    factored: list[Share] = []
    whole: list[Share] = []
    for share in entry.shares:
        elements = entry.scheme == "matrix" and entry.shape.returns_elements(share)
        (whole if elements else factored).append(share)
    return factored, whole
