"""Muon: momentum, orthogonalization, scale, decoupled weight decay.

For every logical matrix W (m x n) with gradient G, momentum M (zeros at start), learning rate η,
weight decay λ and momentum factor β::

    M ← β M + (1 − β) G                            # exponential moving average, in flat ranges
    B = M,  or with Nesterov  β M + (1 − β) G      # sent to the owner
    O = NewtonSchulz(B)                            # on the whole matrix, by its owner
    W ← (1 − η λ) W − η · extra · s(m, n) · O      # in flat ranges again

Sources: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024); momentum
convention and scale modes as in megatron-core's ``muon`` and Emerging-Optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_muon.exchange import (
    Exchange,
    Flight,
    Mailbox,
    copy_all,
    pass_requests,
    piece_of,
    serve,
    take_panel,
)
from megatron_muon.linalg import (
    MemoryPool,
    PanelWork,
    Workspace,
    orthogonalize_,
    orthogonalize_panel_,
)
from megatron_muon.optim.muon_memory import (
    MOST_ELEMENTS_AHEAD,
    is_in_place,
    matrices_at_once,
    widened_at_once,
)
from megatron_muon.optim.rule import MatrixRange, add_all, decay_weights, range_of
from megatron_muon.placement import Panels
from megatron_muon.placement.program import FlatPiece
from megatron_muon.placement.schemes import SOURCE, UPDATE

if TYPE_CHECKING:
    from megatron_muon.optim.muon_rule import MuonRule


@torch.no_grad()
def muon_step(rule: MuonRule, ranges: Sequence[MatrixRange | None], exchange: Exchange) -> None:
    """One step on this rank's flat ranges; see ``MatrixRule.step``."""

    def before(mail: Mailbox) -> Iterator[None]:
        owned = [r for r in ranges if r is not None]
        if owned:
            _update_momenta(rule, owned, mail.memory, most_bytes=max(exchange.plan.peak_bytes))
            decay_weights(owned)
        yield

    exchange.run(_Step(rule, ranges, exchange).wave, before)


def _update_momenta(
    rule: MuonRule, ranges: Sequence[MatrixRange], memory: MemoryPool, *, most_bytes: int
) -> None:
    """M ← β M + (1 − β) G; where M is kept in 16 bits, summed in fp32 and rounded to nearest.

    1 − β is far above half a unit in the last place, so that nothing stalls.
    """
    weight = 1.0 - rule.momentum
    if all(r.momentum.dtype == r.grad.dtype for r in ranges):
        torch._foreach_lerp_([r.momentum for r in ranges], [r.grad for r in ranges], weight)
        return
    for group in widened_at_once([r.momentum.numel() for r in ranges], most_bytes):
        momenta = [ranges[index].momentum[start:stop] for index, start, stop in group]
        grads = [ranges[index].grad[start:stop] for index, start, stop in group]
        counts = [grad.numel() for grad in grads]
        buffer = memory.take(sum(counts), dtype=grads[0].dtype)
        wide = list(torch.split(buffer, counts))
        torch._foreach_copy_(wide, momenta)
        torch._foreach_lerp_(wide, grads, weight)
        torch._foreach_copy_(momenta, wide)
        del wide
        memory.release(buffer)


class _Step:
    """What the waves of one step share."""

    def __init__(
        self,
        rule: MuonRule,
        ranges: Sequence[MatrixRange | None],
        exchange: Exchange,
    ) -> None:
        self.rule = rule
        self.ranges = ranges
        self.rank = exchange.rank
        self.schemes = exchange.plan.schemes

    def wave(self, mail: Mailbox) -> Iterator[Flight]:
        """B to the owners, O = NewtonSchulz(B) there, O to the ranges."""
        if mail.program.part is not None:
            yield from self._wave_of_panels(mail, mail.program.part)
            return
        self._fill(*mail.packed(SOURCE))
        yield from mail.exchange(SOURCE)
        self._update_matrices(mail)
        yield from pass_requests(mail)
        yield from mail.exchange(UPDATE)
        self._apply(*mail.applied(UPDATE))

    def _update_matrices(self, mail: Mailbox) -> None:
        """O = NewtonSchulz(B), batch by batch."""
        batches, workspace = mail.assemble(), Workspace(mail.memory)
        mail.close(SOURCE)
        while batches:
            batch, matrices = batches.pop(0)
            places = dict(zip(batch.matrices, matrices, strict=True))
            self._fill(*mail.local(places, only_sources=True))
            update = orthogonalized_update(self.rule, matrices, workspace)
            rule = self.rule
            if is_in_place(*update.shape, held=rule.exchange_dtype, compute=rule.compute_dtype):
                workspace.clear()
            updates = dict(zip(batch.matrices, update, strict=True))
            mail.give_back(UPDATE, updates)
            self._apply(*mail.local(updates))
            del update, updates, places
            workspace.clear()
            mail.memory.release(matrices)
            del matrices

    def _wave_of_panels(self, mail: Mailbox, matrix: int) -> Iterator[Flight]:
        """The same, where this rank computes a panel of a matrix."""
        scheme = self.schemes[matrix]
        assert isinstance(scheme, Panels)
        self._fill(*mail.packed(SOURCE))
        yield from mail.exchange(SOURCE)
        (placed, panel), workspace = take_panel(mail, scheme, self.rank), Workspace(mail.memory)
        mail.place({matrix: placed})
        mail.close(SOURCE)
        self._fill(*mail.local({matrix: placed}, only_sources=True))
        worker = orthogonalize_panel_(
            panel,
            PanelWork(team=scheme.team, number=scheme.ranks.index(self.rank)),
            self.rule.segments(*scheme.shape, panel.device),
            compute_dtype=self.rule.compute_dtype,
            scale=self.rule.scale(*scheme.shape),
            workspace=workspace,
        )
        del placed, panel
        update = yield from serve(mail, scheme, worker)
        mail.count_matrices(int(scheme.ranks[0] == self.rank))
        m, n = scheme.shape
        updates = {matrix: update.mT if m > n else update}
        mail.give_back(UPDATE, updates)
        self._apply(*mail.local(updates))
        del worker, update, updates
        workspace.clear()
        mail.release_kept()
        yield from mail.exchange(UPDATE)
        self._apply(*mail.applied(UPDATE))

    def _fill(self, pieces: Sequence[FlatPiece], places: list[torch.Tensor]) -> None:
        """B = M, or β M + (1 − β) G."""
        if not pieces:
            return
        held = [range_of(self.ranges, piece.parameter) for piece in pieces]
        momenta = [piece_of(r.momentum, p) for r, p in zip(held, pieces, strict=True)]
        if not self.rule.nesterov:
            copy_all(places, momenta)
            return
        grads = [piece_of(r.grad, p) for r, p in zip(held, pieces, strict=True)]
        if places[0].dtype == momenta[0].dtype == grads[0].dtype:
            copy_all(places, grads)
            torch._foreach_lerp_(places, momenta, self.rule.momentum)
            return
        # What is sent or kept is narrower: rounded once, after the sum.
        for place, grad, momentum in zip(places, grads, momenta, strict=True):
            count = max(1, MOST_ELEMENTS_AHEAD // max(1, place[0].numel()))
            parts = (torch.split(whole, count) for whole in (place, grad, momentum))
            for target, g, m in zip(*parts, strict=True):
                target.copy_(torch.lerp(g, m.to(g.dtype), self.rule.momentum))

    def _apply(self, pieces: Sequence[FlatPiece], updates: Sequence[torch.Tensor]) -> None:
        """W ← W − η O, weight decay being applied already."""
        by_lr: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for piece, update in zip(pieces, updates, strict=True):
            r = range_of(self.ranges, piece.parameter)
            masters, here = by_lr.setdefault(r.lr, ([], []))
            masters.append(piece_of(r.master, piece))
            here.append(update)
        for lr, (masters, here) in by_lr.items():
            add_all(masters, here, -lr)


def orthogonalized_update(
    rule: MuonRule, matrices: torch.Tensor, workspace: Workspace
) -> torch.Tensor:
    """``extra · s(m, n) · NewtonSchulz(B)`` of a batch (B, m, n), which is overwritten.

    The result may lie in the workspace.
    """
    _, m, n = matrices.shape
    parts = torch.split(matrices, matrices_at_once(m, n))
    for part in parts:
        update = orthogonalize_(
            part,
            rule.schedule,
            compute_dtype=rule.compute_dtype,
            scale=rule.scale(m, n),
            workspace=workspace,
        )
        if len(parts) == 1:
            return update
        part.copy_(update)
    return matrices
