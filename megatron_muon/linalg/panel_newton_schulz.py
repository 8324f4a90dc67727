"""Orthogonalizes one matrix on several workers, by columns of X and block rows of squares.

With the smaller side first, X (m×n) is split into panels X_J of columns, one for each of g workers;
the m rows of all squares are split into g blocks R_J. The iteration is that of ``newton_schulz``,
in the same segments and dtypes, and needs few messages::

    ‖X‖              from the largest entry and the norm of every panel
    A = Σ X_J X_Jᵀ   worker J receives R_J of every partial sum and adds them in a fixed order
    A, Z, Q          worker J computes R_J of each product and sends it to the others
    X_J ← Q X_J      local

If the workers are on several nodes, the latter two messages have two steps each, see
``panel_team``. Every block row is computed by one worker, so all have the same bits. Communication
is not implemented here: a worker is a generator that yields a ``PanelRequest`` and continues once
it has been exchanged. Two squares are whole on every worker; each is the message buffer of the
other.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_muon.linalg.coefficients import Schedule
from megatron_muon.linalg.newton_schulz import (
    columns_at_once,
    multiply_,
    power_of_two,
)
from megatron_muon.linalg.norms import frobenius_norm, largest_magnitude
from megatron_muon.linalg.panel_team import RequestKind, Team
from megatron_muon.linalg.precision import full_precision_matmul
from megatron_muon.linalg.products import gram, symmetric_product_flops, temporary_bytes
from megatron_muon.linalg.segments import Segments
from megatron_muon.linalg.workspace import Workspace


class PanelRequest(NamedTuple):
    """An exchange requested by a worker, and at the same time by all workers of its matrix.

    Both tensors are contiguous, 1-D, and have a part for (or from) each of ``Team.partners``, in
    rank order, including itself.
    """

    kind: RequestKind
    sent: Tensor
    received: Tensor


PanelWorker = Generator[PanelRequest, None, Tensor]
"""Yields requests, returns the orthogonalized panel."""

_Steps = Generator[PanelRequest, None, None]


@dataclass(frozen=True, kw_only=True)
class PanelWork:
    """One worker of a matrix.

    Attributes:
        team: All workers.
        number: Index of this worker.
    """

    team: Team
    number: int


def panel_requests(segments: Segments, team: Team) -> tuple[RequestKind, ...]:
    """Returns the kinds of all requests of a worker, in order."""
    found: list[RequestKind] = ["scalars"]
    for segment in segments:
        steps = len(segment)
        squares = 1 if steps == 1 else 2 * steps
        found += [*team.sum_kinds(), *(1 + squares) * tuple(team.share_kinds())]
    return tuple(found)


def panel_flops(
    m: int, n: int, rows: int, segments: Segments, device: torch.device | None = None
) -> int:
    """Returns the floating-point operations of one worker.

    Args:
        m: Smaller side of the matrix.
        n: Columns of the worker's panel.
        rows: Rows of its block.
        segments: The segmented schedule.
        device: Device, which determines the cost of X Xᵀ; CPU by default.
    """
    where = device or torch.device("cpu")
    once = symmetric_product_flops(m, n, where) + 2 * m * m * n
    return sum(once + (4 * len(segment) - 3) * 2 * rows * m * m for segment in segments)


@torch.no_grad()
def orthogonalize_panel_(
    x: Tensor,
    work: PanelWork,
    segments: Segments,
    *,
    compute_dtype: torch.dtype,
    scale: float = 1.0,
    workspace: Workspace,
) -> PanelWorker:
    """Orthogonalizes one panel of a matrix as one of its workers.

    Args:
        x: Panel (m, n_J), m the smaller side of the whole matrix; any floating dtype, contiguous.
            Its content is undefined afterwards.
        work: This worker.
        segments: The segmented schedule, the same for all workers.
        compute_dtype: As for ``newton_schulz``.
        scale: Factor on the result.
        workspace: Temporary memory of this worker only.

    Returns:
        A generator that ends with the panel (m, n_J) of the result in the compute dtype, in the
        memory of x or of the workspace.
    """
    own = _Worker(work, x.shape[0], compute_dtype, workspace, x.device)
    x = yield from _normalize_(own, x)
    for number, segment in enumerate(segments, start=1):
        factor = scale if number == len(segments) else 1.0
        yield from _gram(own, x)
        if len(segment) == 1:
            ((alpha, beta, gamma),) = segment
            own.add_product(own.a_rows, own.a_rows, own.a, beta=beta, alpha=gamma, out=own.z_rows)
            yield from own.share(own.z_rows, into=own.z, through=own.a)
            with own.exact():
                multiply_(
                    x.unsqueeze(0), own.z.unsqueeze(0), workspace, beta=factor * alpha, alpha=factor
                )
        else:
            yield from _carried(own, segment, factor)
            with own.exact():
                multiply_(x.unsqueeze(0), own.z.unsqueeze(0), workspace, beta=0.0, alpha=1.0)
    return x


def panel_bytes(
    m: int,
    n: int,
    work: PanelWork,
    segments: Segments,
    device: torch.device,
    *,
    held: torch.dtype,
    compute: torch.dtype,
) -> list[tuple[int, int]]:
    """Returns the bytes that ``orthogonalize_panel_`` has allocated at each request and its end.

    Args:
        m: Smaller side of the matrix.
        n: Columns of the worker's panel.
        work: The worker.
        segments: The segmented schedule.
        device: Device.
        held: dtype of the panel.
        compute: Compute dtype.

    Returns:
        (peak since the previous request, bytes still allocated).
    """
    team, size = work.team, compute.itemsize
    start, end = team.rows[work.number]
    block_row, part = (end - start) * m * size, m * columns_at_once(1, m, n, size) * size
    wide = torch.promote_types(torch.promote_types(held, torch.float32), compute)
    alive = 2 * team.size * team.longest * m * size + 2 * block_row
    alive += 0 if held in (compute, wide) else m * n * wide.itemsize
    found = [(alive, alive)]
    alive += 0 if compute in (held, wide) else m * n * size
    q_rows = block_row
    shares = len(tuple(team.share_kinds()))
    for segment in segments:
        found.append((alive + temporary_bytes(m, n, device, compute), alive))
        found += [(alive, alive)] * (len(tuple(team.sum_kinds())) + shares - 1)
        if len(segment) > 1:
            alive, q_rows = alive + q_rows, 0
        squares = 1 if len(segment) == 1 else 2 * len(segment)
        found += [(alive, alive)] * (squares * shares)
        alive, part = alive + part, 0
    return [*found, (alive, alive)]


class _Worker:
    """State of one worker: two squares, and its block rows.

    Attributes:
        a: A (m, m), whole.
        z: Z (m, m), whole, or temporary memory.
        a_rows: The worker's rows of A.
        z_rows: Its rows of Z.
    """

    def __init__(
        self,
        work: PanelWork,
        m: int,
        dtype: torch.dtype,
        space: Workspace,
        device: torch.device,
    ) -> None:
        self.team = work.team
        self.start, self.end = work.team.rows[work.number]
        first, last = work.team.group(work.number)
        self.group_rows = last - first
        self.m = m
        self.dtype = dtype
        self.space = space
        self.device = device
        # It fits a block row of the maximum length for every worker.
        square = work.team.size * work.team.longest * m
        self._memory = {one: self.take(one, square) for one in ("a", "z")}
        self.a, self.z = (flat[: m * m].view(m, m) for flat in self._memory.values())
        self.a_rows, self.z_rows = self.rows_named("a rows"), self.rows_named("z rows")

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory of this worker."""
        kind = dtype or self.dtype
        return self.space.take(name, shape, dtype=kind, device=self.device)

    def rows_named(self, name: str) -> Tensor:
        """Return memory for a block row of this worker."""
        return self.take(name, self.end - self.start, self.m)

    def exact(self) -> AbstractContextManager[None]:
        """Enforce true fp32 for products; never held across a ``yield``, where others compute."""
        return full_precision_matmul() if self.dtype == torch.float32 else nullcontext()

    def add_product(
        self,
        add: Tensor,
        left: Tensor,
        right: Tensor,
        *,
        beta: float,
        out: Tensor,
        alpha: float = 1.0,
    ) -> None:
        """Compute ``out`` = beta C + alpha A B of block rows; ``right`` is whole."""
        with self.exact():
            torch.addmm(add, left, right, beta=beta, alpha=alpha, out=out)

    def share(self, rows: Tensor, *, into: Tensor, through: Tensor) -> _Steps:
        """Gather the block rows on all workers; ``through`` is overwritten."""
        whole, scratch = into.view(-1), self._flat(through)
        for kind in self.team.share_kinds():
            across = kind == "blocks"
            copies = self.team.nodes if across else self.team.on_each
            sent = scratch[: copies * rows.numel()]
            sent.view(copies, *rows.shape).copy_(rows)
            received = whole[: self.group_rows * self.m] if across else whole
            yield PanelRequest(kind, sent, received)
            rows = received.view(-1, self.m)

    def add_up(self, partial: Tensor, *, through: Tensor) -> _Steps:
        """Add all partial sums into this worker's rows of A; both squares are overwritten.

        Between nodes the sum of the node replaces the sent partial sums.
        """
        sent, scratch = partial.view(-1), self._flat(through)
        kinds = tuple(self.team.sum_kinds())
        for kind in kinds:
            is_last = kind == kinds[-1]
            count = self.team.nodes if kind == "sums" else self.team.on_each
            total = self.a_rows if is_last else partial[: self.group_rows]
            received = scratch[: count * total.numel()]
            yield PanelRequest(kind, sent, received)
            # A single kernel adds 16-bit parts in fp32 and rounds once.
            torch.sum(received.view(count, *total.shape), dim=0, out=total)
            sent = total.view(-1)

    def _flat(self, square: Tensor) -> Tensor:
        return self._memory["a" if square is self.a else "z"]


def _normalize_(own: _Worker, x: Tensor) -> PanelWorker:
    """Divides the panel by the norm of the whole matrix, as in ``newton_schulz``."""
    wide = torch.promote_types(torch.promote_types(x.dtype, torch.float32), own.dtype)
    if x.dtype != own.dtype and x.dtype != wide:
        x = own.take("x", *x.shape, dtype=wide).copy_(x)
    scalars = x.new_zeros(2, dtype=wide)
    if x.numel():
        scalars[0] = power_of_two(largest_magnitude(x.unsqueeze(0)).view(()))
        x.div_(scalars[0])
        scalars[1] = frobenius_norm(x.unsqueeze(0)).view(())
    everyone = torch.empty(own.team.size, 2, dtype=wide, device=x.device)
    yield PanelRequest("scalars", scalars.repeat(own.team.size), everyone.view(-1))
    # In units of the overall largest entry; same numbers in the same order on every worker.
    top = everyone[:, 0].amax()
    shares = everyone[:, 0] / top.masked_fill(top == 0, 1.0)
    total: Tensor = torch.linalg.vector_norm(everyone[:, 1] * shares)
    mine = scalars[0] / top.masked_fill(top == 0, 1.0)
    x.mul_(mine).div_(total.masked_fill(total == 0, 1.0))
    return x if x.dtype == own.dtype else own.take("narrow", *x.shape).copy_(x)


def _gram(own: _Worker, x: Tensor) -> _Steps:
    """Computes A = Σ X_J X_Jᵀ, whole on every worker; Z is overwritten."""
    with own.exact():
        gram(x.unsqueeze(0), out=own.z.unsqueeze(0))
    yield from own.add_up(own.z, through=own.a)
    yield from own.share(own.a_rows, into=own.a, through=own.z)


def _carried(own: _Worker, segment: Schedule, factor: float) -> _Steps:
    """Computes Q of a segment times a factor, whole in Z; A is overwritten.

    Until the end a worker needs only its own rows of Y and Q: all are polynomials of A and commute,
    so that Z, which is whole, can be the right factor.
    """
    q, y = own.rows_named("q rows"), own.z_rows
    for index, (alpha, beta, gamma) in enumerate(segment):
        own.add_product(own.a_rows, own.a_rows, own.a, beta=beta, alpha=gamma, out=own.z_rows)
        yield from own.share(own.z_rows, into=own.z, through=own.a)
        if index == 0:
            q.copy_(own.z_rows)
            q[:, own.start : own.end].diagonal().add_(alpha)
        else:
            own.add_product(q, q, own.z, beta=alpha, out=y)
            q.copy_(y)
        if index + 1 < len(segment):
            own.add_product(own.a_rows, own.a_rows, own.z, beta=alpha, out=y)
            own.add_product(y, y, own.z, beta=alpha, out=own.a_rows)
            yield from own.share(own.a_rows, into=own.a, through=own.z)
    if factor != 1.0:
        q.mul_(factor)
    yield from own.share(q, into=own.z, through=own.a)
