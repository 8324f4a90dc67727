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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_muon.exchange import (
    Exchange,
    Flight,
    Mailbox,
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
    newton_schulz_flops,
    orthogonalize_,
    orthogonalize_panel_,
    panel_flops,
    panel_requests,
    update_scale,
)
from megatron_muon.optim.rule import MatrixRange, OwnedState, dtype_name, range_of
from megatron_muon.placement import (
    FLOPS_PER_BYTE,
    CostFunction,
    Method,
    Panels,
    Plan,
    Splitting,
    even_cuts,
)
from megatron_muon.placement.schemes import SOURCE, UPDATE

MOST_ELEMENTS = 1 << 27
"""Of matrices that are orthogonalized in one go; the iteration takes up to 16 bytes more for each
element of a matrix, 40 in fp64."""


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
        parts = torch.split(matrices, max(1, MOST_ELEMENTS // (m * n)))
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

    @torch.no_grad()
    def step(
        self,
        ranges: Sequence[MatrixRange | None],
        exchange: Exchange,
        state: OwnedState,
        workspace: Workspace,
    ) -> None:
        """See ``MatrixRule``."""
        owned = [r for r in ranges if r is not None]
        if owned:
            torch._foreach_lerp_(
                [r.momentum for r in owned], [r.grad for r in owned], 1.0 - self.momentum
            )
            for r in owned:
                r.master.mul_(1.0 - r.lr * r.weight_decay)
        exchange.run(_Step(self, ranges, exchange, workspace).wave)


class _Step:
    """What the waves of one step share."""

    def __init__(
        self,
        rule: MuonRule,
        ranges: Sequence[MatrixRange | None],
        exchange: Exchange,
        workspace: Workspace,
    ) -> None:
        self.rule = rule
        self.ranges = ranges
        self.rank = exchange.rank
        self.schemes = exchange.plan.schemes
        self.workspace = workspace

    def wave(self, mail: Mailbox) -> Iterator[Flight]:
        """B to the owners, O = NewtonSchulz(B) there, O to the ranges."""
        if mail.program.part is not None:
            yield from self._wave_of_panels(mail, mail.program.part)
            return
        self._pack(mail)
        yield from mail.exchange(SOURCE)
        for batch, matrices in mail.assemble():
            updates = self.rule.update(matrices, self.workspace)
            mail.give_back(dict(zip(batch.matrices, updates, strict=True)))
        yield from pass_requests(mail)
        yield from mail.exchange(UPDATE)
        self._apply(mail)

    def _wave_of_panels(self, mail: Mailbox, matrix: int) -> Iterator[Flight]:
        """The same, where this rank computes a panel of a matrix."""
        scheme = self.schemes[matrix]
        assert isinstance(scheme, Panels)
        placed, panel = take_panel(mail, scheme, self.rank)
        self._pack(mail)
        yield from mail.exchange(SOURCE)
        mail.place({matrix: placed})
        worker = orthogonalize_panel_(
            panel,
            PanelWork(rows=scheme.rows, number=scheme.ranks.index(self.rank)),
            self.rule._segments(*scheme.shape, panel.device),
            compute_dtype=self.rule.compute_dtype,
            scale=self.rule.scale(*scheme.shape),
            workspace=self.workspace,
            name=f"split{mail.slot}.",
        )
        update = yield from serve(mail, scheme, self.rank, worker)
        mail.count_matrices(int(scheme.ranks[0] == self.rank))
        m, n = scheme.shape
        mail.give_back({matrix: update.mT if m > n else update})
        yield from mail.exchange(UPDATE)
        self._apply(mail)

    def _pack(self, mail: Mailbox) -> None:
        """B = M, or β M + (1 − β) G."""
        pieces, places = mail.packed()
        if not pieces:
            return
        held = [range_of(self.ranges, piece.parameter) for piece in pieces]
        momenta = [piece_of(r.momentum, p) for r, p in zip(held, pieces, strict=True)]
        if not self.rule.nesterov:
            torch._foreach_copy_(places, momenta)
            return
        grads = [piece_of(r.grad, p) for r, p in zip(held, pieces, strict=True)]
        if places[0].dtype == momenta[0].dtype:
            torch._foreach_copy_(places, grads)
            torch._foreach_lerp_(places, momenta, self.rule.momentum)
        else:
            # What is sent is narrower: rounded once, after the sum.
            ahead = torch._foreach_lerp(grads, momenta, self.rule.momentum)
            torch._foreach_copy_(places, list(ahead))

    def _apply(self, mail: Mailbox) -> None:
        """W ← W − η O, weight decay being applied already."""
        by_lr: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for piece, update in zip(*mail.applied(), strict=True):
            r = range_of(self.ranges, piece.parameter)
            masters, updates = by_lr.setdefault(r.lr, ([], []))
            masters.append(piece_of(r.master, piece))
            updates.append(update)
        for lr, (masters, updates) in by_lr.items():
            torch._foreach_add_(masters, updates, alpha=-lr)
