"""Muon: momentum, orthogonalization, scale, decoupled weight decay.

For every logical matrix W (m x n) with gradient G, momentum M (zeros at start), learning rate η,
weight decay λ and momentum factor β::

    M ← β M + (1 − β) G                            # exponential moving average, in flat ranges
    B = M,  or with Nesterov  β M + (1 − β) G      # what travels to the owner
    O = NewtonSchulz(B)                            # on the whole matrix, by its owner
    W ← (1 − η λ) W − η · extra · s(m, n) · O      # in flat ranges again

Sources: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024); momentum
convention and scale modes as in megatron-core's ``muon`` and Emerging-Optimizers.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from megatron_muon.exchange import Exchange, piece_of
from megatron_muon.linalg import (
    PanelRequest,
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
from megatron_muon.placement import FLOPS_PER_BYTE, Sharing, even_cuts
from megatron_muon.placement.program import Piece
from megatron_muon.placement.shared_program import SharedPart

MOST_ELEMENTS = 1 << 27
"""Of matrices that are orthogonalized in one go; the iteration needs two to four times as much."""


@dataclass(frozen=True, kw_only=True)
class MuonRule:
    """Hyper-parameters that are the same for every matrix.

    Attributes:
        momentum: β.
        nesterov: Orthogonalize β M + (1 − β) G instead of M.
        schedule: Coefficients (a, b, c) of each Newton-Schulz step.
        scale_mode: Name of s(m, n), see ``linalg.scales``.
        extra_scale_factor: Further factor on the update.
        compute_dtype: Element type of the iteration.
        exchange_dtype: Element type of what travels, and of the assembled matrices.
    """

    momentum: float
    nesterov: bool
    schedule: tuple[tuple[float, float, float], ...]
    scale_mode: str
    extra_scale_factor: float
    compute_dtype: torch.dtype
    exchange_dtype: torch.dtype = torch.float32

    def scale(self, m: int, n: int) -> float:
        """``extra · s(m, n)``, the factor of the orthogonalized matrix."""
        return self.extra_scale_factor * update_scale(self.scale_mode, m, n)

    def cost(self, m: int, n: int, device: torch.device) -> int:
        """Operations of the orthogonalization of one m x n matrix."""
        return newton_schulz_flops(m, n, self._segments(m, n, device), device)

    def _segments(self, m: int, n: int, device: torch.device) -> Segments:
        return cheapest_segments(m, n, self.schedule, self.compute_dtype, device)

    @property
    def scalars_dtype(self) -> torch.dtype:
        """Element type of norms."""
        wide = torch.promote_types(self.exchange_dtype, torch.float32)
        return torch.promote_types(wide, self.compute_dtype)

    def sharing(
        self,
        most_ranks: int,
        device: torch.device,
        *,
        min_flops: int,
        flops_per_byte: int | None = None,
    ) -> Sharing:
        """How several ranks share a matrix.

        Args:
            most_ranks: Most ranks that share one.
            device: Where they compute.
            min_flops: Operations of a matrix below which it is not shared.
            flops_per_byte: ``FLOPS_PER_BYTE`` of the device by default.
        """

        def flops(m: int, n: int, ranks: int, number: int) -> int:
            short, long = sorted((m, n))
            start, end = even_cuts(short, ranks)[number]
            first, last = even_cuts(long, ranks)[number]
            segments = self._segments(m, n, device)
            return panel_flops(short, last - first, end - start, segments, device)

        return Sharing(
            most_ranks=most_ranks,
            flops=flops,
            requests=lambda m, n: panel_requests(self._segments(m, n, device)),
            itemsize=self.compute_dtype.itemsize,
            scalar_itemsize=self.scalars_dtype.itemsize,
            min_flops=min_flops,
            flops_per_byte=(
                FLOPS_PER_BYTE[device.type] if flops_per_byte is None else flops_per_byte
            ),
        )

    def update_panel(
        self, panel: torch.Tensor, part: SharedPart, slot: int, workspace: Workspace
    ) -> Generator[PanelRequest, Sequence[torch.Tensor], torch.Tensor]:
        """``update`` of one panel of a shared matrix; see ``exchange.PanelFunction``.

        Args:
            panel: The panel, the smaller side of the whole matrix first; overwritten.
            part: What it is of.
            slot: Which of those under way at once it is.
            workspace: Memory to work in.
        """
        return orthogonalize_panel_(
            panel,
            PanelWork(rows=part.rows, number=part.number),
            self._segments(*part.shape, panel.device),
            compute_dtype=self.compute_dtype,
            scale=self.scale(*part.shape),
            workspace=workspace,
            name=f"shared{slot}.",
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


@dataclass(kw_only=True)
class MatrixRange:
    """This rank's flat range of one parameter.

    Attributes:
        master: Master weights, 1-D, updated in place.
        momentum: M, same shape, updated in place.
        grad: Gradient after clipping, same shape; read only.
        lr: η.
        weight_decay: λ.
    """

    master: torch.Tensor
    momentum: torch.Tensor
    grad: torch.Tensor
    lr: float
    weight_decay: float


@torch.no_grad()
def muon_step(
    rule: MuonRule,
    ranges: Sequence[MatrixRange | None],
    exchange: Exchange,
    workspace: Workspace | None = None,
) -> None:
    """One step of all matrices of a stage.

    Args:
        rule: Hyper-parameters.
        ranges: For each parameter of the plan this rank's range, None where it owns no element.
        exchange: The plan's exchange; entered also by a rank that owns nothing.
        workspace: Memory of the orthogonalization, kept from step to step.
    """
    space = workspace or Workspace()
    owned = [r for r in ranges if r is not None]
    if owned:
        torch._foreach_lerp_(
            [r.momentum for r in owned], [r.grad for r in owned], 1.0 - rule.momentum
        )
        for r in owned:
            r.master.mul_(1.0 - r.lr * r.weight_decay)

    def at(piece: Piece) -> MatrixRange:
        found = ranges[piece.parameter]
        assert found is not None, "the plan gives this rank a piece of a range it does not own"
        return found

    def pack(pieces: Sequence[Piece], views: Sequence[torch.Tensor]) -> None:
        if not pieces:
            return
        held = [at(p) for p in pieces]
        momenta = [piece_of(r.momentum, p) for r, p in zip(held, pieces, strict=True)]
        if not rule.nesterov:
            torch._foreach_copy_(list(views), momenta)
            return
        grads = [piece_of(r.grad, p) for r, p in zip(held, pieces, strict=True)]
        if views[0].dtype == momenta[0].dtype:
            torch._foreach_copy_(list(views), grads)
            torch._foreach_lerp_(list(views), momenta, rule.momentum)
        else:
            # What travels is narrower: rounded once, after the sum.
            ahead = torch._foreach_lerp(grads, momenta, rule.momentum)
            torch._foreach_copy_(list(views), list(ahead))

    def apply(pieces: Sequence[Piece], views: Sequence[torch.Tensor]) -> None:
        by_lr: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for piece, view in zip(pieces, views, strict=True):
            r = at(piece)
            targets, updates = by_lr.setdefault(r.lr, ([], []))
            targets.append(piece_of(r.master, piece))
            updates.append(view)
        for lr, (targets, updates) in by_lr.items():
            torch._foreach_add_(targets, updates, alpha=-lr)

    exchange.run(
        pack=pack,
        compute=lambda matrices: rule.update(matrices, space),
        apply=apply,
        panel=lambda panel, part, slot: rule.update_panel(panel, part, slot, space),
    )
