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

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
    PanelWork,
    Segments,
    Workspace,
    cheapest_segments,
    columns_at_once,
    newton_schulz_bytes,
    newton_schulz_flops,
    orthogonalize_,
    orthogonalize_panel_,
    panel_bytes,
    panel_flops,
    panel_requests,
    update_scale,
)
from megatron_muon.optim.rule import (
    MOST_CONVERTED,
    MatrixRange,
    OwnedState,
    add_all,
    decay_weights,
    dtype_name,
    range_of,
)
from megatron_muon.placement import (
    FLOPS_PER_BYTE,
    CostFunction,
    Method,
    Panels,
    Plan,
    Splitting,
    even_cuts,
)
from megatron_muon.placement.memory import Phase, WaveUse
from megatron_muon.placement.program import FlatPiece
from megatron_muon.placement.schemes import SOURCE, UPDATE

MOST_ELEMENTS_AHEAD = 1 << 23
"""Of β M + (1 − β) G that are made at once where they are sent in a narrower dtype."""

MOST_ELEMENTS = 1 << 27
"""Of matrices that are orthogonalized in one go; the iteration needs two to four times as much."""


@dataclass(frozen=True, kw_only=True)
class MuonRule:
    """Hyper-parameters that are the same for every matrix.

    Attributes:
        momentum: β.
        nesterov: Orthogonalize β M + (1 − β) G instead of M.
        schedule: Coefficients (a, b, c) of each Newton-Schulz step.
        coefficient_type: Name of the schedule.
        scale_mode: Name of s(m, n), see ``linalg.scales``.
        extra_scale_factor: Further factor on the update.
        compute_dtype: Element type of the iteration.
        exchange_dtype: Element type of what is exchanged, and of the assembled matrices.
    """

    momentum: float
    nesterov: bool
    schedule: tuple[tuple[float, float, float], ...]
    coefficient_type: str = "custom"
    scale_mode: str
    extra_scale_factor: float
    compute_dtype: torch.dtype
    exchange_dtype: torch.dtype = torch.float32

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """See ``MatrixRule``."""
        wide = torch.promote_types(self.exchange_dtype, torch.float32)
        return {
            "source": self.exchange_dtype,
            "update": self.exchange_dtype,
            "scalars": torch.promote_types(wide, self.compute_dtype),
            "squares": self.compute_dtype,
        }

    @property
    def description(self) -> str:
        """See ``MatrixRule``."""
        return (
            f"update: {self.scale_mode} scale x {self.extra_scale_factor:.15g}, "
            f"{len(self.schedule)} Newton-Schulz steps ({self.coefficient_type}), computed in "
            f"{dtype_name(self.compute_dtype)}, exchanged in {dtype_name(self.exchange_dtype)}; "
            f"momentum {self.momentum:.15g}{' (Nesterov)' if self.nesterov else ''}"
        )

    def scale(self, m: int, n: int) -> float:
        """``extra · s(m, n)``, the factor of the orthogonalized matrix."""
        return self.extra_scale_factor * update_scale(self.scale_mode, m, n)

    def rank(self, m: int, n: int) -> None:
        """Full rank."""
        return

    def first_state(self, plan: Plan, rank: int, device: torch.device) -> OwnedState:
        """None: momenta are in flat ranges."""
        return {}

    def flops(self, m: int, n: int, device: torch.device) -> int:
        """Operations of the orthogonalization of one m x n matrix."""
        return newton_schulz_flops(m, n, self._segments(m, n, device), device)

    def _segments(self, m: int, n: int, device: torch.device) -> Segments:
        return cheapest_segments(m, n, self.schedule, self.compute_dtype, device)

    def method(
        self,
        device: torch.device,
        *,
        cost: CostFunction | None = None,
        splitting: Splitting | None = None,
    ) -> Method:
        """What planning has to know.

        Args:
            device: Where matrices are computed.
            cost: Estimated time of a matrix; its operations by default.
            splitting: What ``splitting`` gives; None for one owner a matrix.
        """

        def flops(m: int, n: int) -> int:
            return self.flops(m, n, device)

        return Method(
            cost=cost or flops,
            flops=flops,
            itemsizes={kind: dtype.itemsize for kind, dtype in self.dtypes.items()},
            phases=lambda use: self.phases(use, device),
            splitting=splitting,
        )

    def splitting(
        self,
        most_ranks: int,
        device: torch.device,
        *,
        min_flops: int,
        flops_per_byte: int | None = None,
    ) -> Splitting:
        """How several ranks compute a matrix.

        Args:
            most_ranks: Most ranks that compute one.
            device: Where they compute.
            min_flops: Operations of a matrix below which it is not split.
            flops_per_byte: ``FLOPS_PER_BYTE`` of the device by default.
        """

        def flops(m: int, n: int, ranks: int, number: int) -> int:
            short, long = sorted((m, n))
            start, end = even_cuts(short, ranks)[number]
            first, last = even_cuts(long, ranks)[number]
            segments = self._segments(m, n, device)
            return panel_flops(short, last - first, end - start, segments, device)

        return Splitting(
            most_ranks=most_ranks,
            flops=flops,
            requests=lambda m, n: panel_requests(self._segments(m, n, device)),
            itemsize=self.dtypes["squares"].itemsize,
            scalar_itemsize=self.dtypes["scalars"].itemsize,
            min_flops=min_flops,
            flops_per_byte=(
                FLOPS_PER_BYTE[device.type] if flops_per_byte is None else flops_per_byte
            ),
        )

    def update(self, matrices: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """``extra · s(m, n) · NewtonSchulz(B)`` of a batch (B, m, n), which is overwritten.

        The result may lie in the workspace.
        """
        _, m, n = matrices.shape
        parts = torch.split(matrices, _matrices_at_once(m, n))
        for part in parts:
            update = orthogonalize_(
                part,
                self.schedule,
                compute_dtype=self.compute_dtype,
                scale=self.scale(m, n),
                workspace=workspace,
            )
            if len(parts) == 1:
                return update
            part.copy_(update)
        return matrices

    def phases(self, use: WaveUse, device: torch.device) -> list[Phase]:
        """Memory of a wave on one rank, see ``_Step.wave``."""
        sent, received = use.sent, use.received
        arriving, returning = sent[SOURCE] + received[SOURCE], sent[UPDATE] + received[UPDATE]
        there, back = received[SOURCE], received[UPDATE]
        ahead = 0
        if self.nesterov and self.exchange_dtype.itemsize < 4:
            ahead = 4 * MOST_ELEMENTS_AHEAD
        converted = 0
        if self.exchange_dtype.itemsize < 4:
            converted = min(4 * MOST_CONVERTED, 2 * back)
        first = Phase(peak=arriving + ahead, held=arriving)
        last = Phase(peak=back + converted, held=0)
        panel = next(((s, j) for s, j in use.computed if isinstance(s, Panels)), None)
        if panel is not None:
            held = panel[0].panels[panel[1]].numel * self.exchange_dtype.itemsize
            space = self._panel_bytes(*panel)
            while_computed = Phase(peak=held + space, held=held + space)
            begin = Phase(peak=max(there + held, held + space), held=held + space)
            end = Phase(peak=max(held + space + sent[UPDATE], returning), held=returning)
            middle = [while_computed] * (use.messages - 3)
            return [first, begin, *middle, end, last]
        shapes = Counter(scheme.region(0).shape for scheme, _ in use.computed)
        total = sum(m * n * count for (m, n), count in shapes.items())
        assembled = total * self.exchange_dtype.itemsize
        peak, waiting = there + assembled, assembled + ahead
        for number, shape in enumerate(sorted(shapes)):
            space = self._batch_bytes(shapes[shape], *shape, device)
            before = sent[UPDATE] if number else 0
            # A result that lies in the batch outlives the workspace.
            after = 0 if self._is_in_place(shapes[shape], *shape) else space
            peak = max(peak, waiting + space + before, waiting + after + sent[UPDATE])
            waiting -= shapes[shape] * shape[0] * shape[1] * self.exchange_dtype.itemsize
        middle = [Phase(peak=max(peak, returning), held=returning)]
        if use.messages > 2:
            # Another rank's panels: requests are passed with nothing in memory.
            middle = [Phase(peak=there, held=0)] + [Phase(0, 0)] * (use.messages - 3)
            middle.append(Phase(peak=returning, held=returning))
        return [first, *middle, last]

    def _batch_bytes(self, count: int, m: int, n: int, device: torch.device) -> int:
        return newton_schulz_bytes(
            min(count, _matrices_at_once(m, n)),
            m,
            n,
            self._segments(m, n, device),
            held=self.exchange_dtype,
            compute=self.compute_dtype,
        )

    def _is_in_place(self, count: int, m: int, n: int) -> bool:
        """Whether ``update`` leaves its result in the batch."""
        at_once, (small, large) = _matrices_at_once(m, n), sorted((m, n))
        itemsize = self.compute_dtype.itemsize
        return count > at_once or (
            self.exchange_dtype == self.compute_dtype
            and columns_at_once(count, small, large, itemsize) < large
        )

    def _panel_bytes(self, scheme: Panels, number: int) -> int:
        (start, end), panel = scheme.rows[number], scheme.panels[number]
        m = min(scheme.shape)
        return panel_bytes(
            m,
            panel.numel // m,
            end - start,
            len(scheme.ranks),
            held=self.exchange_dtype,
            compute=self.compute_dtype,
        )

    @torch.no_grad()
    def step(
        self,
        ranges: Sequence[MatrixRange | None],
        exchange: Exchange,
        state: OwnedState,
    ) -> None:
        """See ``MatrixRule``."""
        owned = [r for r in ranges if r is not None]
        if owned:
            torch._foreach_lerp_(
                [r.momentum for r in owned], [r.grad for r in owned], 1.0 - self.momentum
            )
            decay_weights(owned)
        exchange.run(_Step(self, ranges, exchange).wave)


def _matrices_at_once(m: int, n: int) -> int:
    return max(1, MOST_ELEMENTS // (m * n))


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
            update = self.rule.update(matrices, workspace)
            if self.rule._is_in_place(*update.shape):
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
            PanelWork(rows=scheme.rows, number=scheme.ranks.index(self.rank)),
            self.rule._segments(*scheme.shape, panel.device),
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
        if places[0].dtype == momenta[0].dtype:
            copy_all(places, grads)
            torch._foreach_lerp_(places, momenta, self.rule.momentum)
            return
        # What is sent is narrower: rounded once, after the sum.
        for place, grad, momentum in zip(places, grads, momenta, strict=True):
            count = max(1, MOST_ELEMENTS_AHEAD // max(1, place[0].numel()))
            parts = (torch.split(whole, count) for whole in (place, grad, momentum))
            for target, g, m in zip(*parts, strict=True):
                target.copy_(torch.lerp(g, m, self.rule.momentum))

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
