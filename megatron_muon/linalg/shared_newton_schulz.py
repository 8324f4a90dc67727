"""One matrix orthogonalized by several workers: columns of X, and block rows of what is square.

With the smaller side first, X (m×n) is cut into panels X_J of columns, one for each of g workers;
the m rows of everything square are cut into g blocks R_J. The iteration is that of
``newton_schulz``, in the same segments and dtypes, and needs few messages::

    ‖X‖              from the largest entry and the norm of every panel
    A = Σ X_J X_Jᵀ   R_J of every partial sum goes to worker J, which adds them in a fixed order
    Z, A, Q          R_J of each product is computed by worker J, then sent to the others
    X_J ← Q X_J      alone

Every block row is computed by one worker, so all have the same bits. Nothing here knows how
messages travel: a worker is a generator that yields a ``PanelRequest`` and is given the answer.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_muon.linalg.coefficients import Schedule
from megatron_muon.linalg.newton_schulz import Segments
from megatron_muon.linalg.norms import frobenius_norm, largest_magnitude
from megatron_muon.linalg.precision import full_precision_matmul
from megatron_muon.linalg.products import gram, symmetric_product_flops
from megatron_muon.linalg.workspace import Workspace

RequestKind = Literal["scalars", "partials", "rows"]


class PanelRequest(NamedTuple):
    """What a worker wants to have exchanged; all workers of a matrix want the same at once.

    ``scalars``: ``tensor`` (2,) goes to all. The answer is everyone's, in the order of workers.
    ``partials``: block row R_K of ``tensor`` (m, m) goes to worker K. The answer is everyone's
    part of the block row R_J of this worker, in the order of workers.
    ``rows``: block row R_J of ``tensor`` (m, m) goes to all; theirs are written into it. The answer
    is empty.
    """

    kind: RequestKind
    tensor: Tensor


PanelWorker = Generator[PanelRequest, Sequence[Tensor], Tensor]
"""Yields requests, takes answers, returns the orthogonalized panel."""


@dataclass(frozen=True, kw_only=True)
class PanelWork:
    """One worker's place in a matrix.

    Attributes:
        rows: (first, end) of the block rows of all workers; they cover 0 … m, some may be empty.
        number: Index of this worker.
    """

    rows: tuple[tuple[int, int], ...]
    number: int


def panel_requests(segments: Segments) -> tuple[RequestKind, ...]:
    """Returns the kinds of all requests of a worker, in order."""
    found: list[RequestKind] = ["scalars"]
    for segment in segments:
        steps = len(segment)
        squares = 1 if steps == 1 else 2 * steps
        found += ["partials", "rows", *(["rows"] * squares)]  # type: ignore[list-item]
    return tuple(found)


def panel_flops(
    m: int, n: int, rows: int, segments: Segments, device: torch.device | None = None
) -> int:
    """Returns the floating-point operations of one worker.

    Args:
        m: Smaller side of the matrix.
        n: Columns of the worker's panel.
        rows: Rows of its block.
        segments: The schedule as it is computed.
        device: Where, which decides what X Xᵀ costs; CPU by default.
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
    name: str = "",
) -> PanelWorker:
    """``orthogonalize_`` of one panel of a matrix, by one of its workers.

    Args:
        x: Panel (m, n_J), m the smaller side of the whole matrix; any floating dtype, contiguous.
            Its content is undefined afterwards.
        work: This worker's place.
        segments: The schedule as it is computed, the same for all workers.
        compute_dtype: As for ``newton_schulz``.
        scale: Factor on the result.
        workspace: Memory to work in.
        name: Prefix of the names in the workspace; two workers at once have different ones.

    Returns:
        A generator that ends with the panel (m, n_J) of the result in the compute dtype, in the
        memory of x or of the workspace.
    """
    own = _Worker(work, compute_dtype, workspace, name, x.device)
    wide = torch.promote_types(torch.promote_types(x.dtype, torch.float32), compute_dtype)
    x = x if x.dtype == wide else own.take("x", *x.shape, dtype=wide).copy_(x)
    x = yield from _normalize_(own, x)
    following = own.take("following", *x.shape)
    m = x.shape[0]
    a, z = own.take("a", m, m), own.take("z", m, m)
    for number, segment in enumerate(segments, start=1):
        factor = scale if number == len(segments) else 1.0
        yield from _gram(own, x, z, a)
        if len(segment) == 1:
            ((alpha, beta, gamma),) = segment
            yield from own.square_plus(a, alpha=gamma, beta=beta, out=z)
            with own.exact():
                torch.addmm(x, z, x, beta=factor * alpha, alpha=factor, out=following)
        else:
            q = yield from _carried(own, segment, a, z, factor)
            with own.exact():
                torch.mm(q, x, out=following)
        x, following = following, x
    return x


class _Worker:
    """What the steps of one worker share."""

    def __init__(
        self,
        work: PanelWork,
        dtype: torch.dtype,
        space: Workspace,
        name: str,
        device: torch.device,
    ) -> None:
        start, end = work.rows[work.number]
        self.start, self.end = start, end
        self.dtype = dtype
        self.device = device
        self._space = space
        self._name = name

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory of this worker."""
        kind = dtype or self.dtype
        return self._space.take(f"{self._name}{name}", shape, dtype=kind, device=self.device)

    def rows(self, square: Tensor) -> Tensor:
        """The worker's block row."""
        return square[self.start : self.end]

    def exact(self) -> AbstractContextManager[None]:
        """For products; never held over a ``yield``, where others compute."""
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
        """The worker's rows of ``out`` = beta C + alpha A B; ``right`` must be whole."""
        with self.exact():
            torch.addmm(
                self.rows(add), self.rows(left), right, beta=beta, alpha=alpha, out=self.rows(out)
            )

    def square_plus(self, a: Tensor, *, alpha: float, beta: float, out: Tensor) -> _Steps:
        """``out`` = beta A + alpha A², whole everywhere."""
        self.add_product(a, a, a, beta=beta, alpha=alpha, out=out)
        yield PanelRequest("rows", out)


_Steps = Generator[PanelRequest, Sequence[Tensor], None]


def _normalize_(own: _Worker, x: Tensor) -> PanelWorker:
    """Divides the panel by the norm of the whole matrix, as ``newton_schulz`` does it."""
    largest = largest_magnitude(x).view(()) if x.numel() else x.new_zeros(())
    x.div_(largest.masked_fill(largest == 0, 1.0))
    norm = frobenius_norm(x).view(())
    answers = yield PanelRequest("scalars", torch.stack((largest, norm)))
    # In units of the largest entry of all: the same order of the same numbers for every worker.
    everyone = torch.stack(tuple(answers))
    top = everyone[:, 0].amax()
    shares = everyone[:, 0] / top.masked_fill(top == 0, 1.0)
    total: Tensor = torch.linalg.vector_norm(everyone[:, 1] * shares)
    mine = largest / top.masked_fill(top == 0, 1.0)
    x.mul_(mine).div_(total.masked_fill(total == 0, 1.0))
    if x.dtype == own.dtype:
        return x
    return own.take("narrow", *x.shape).copy_(x)


def _gram(own: _Worker, x: Tensor, partial: Tensor, a: Tensor) -> _Steps:
    """A = Σ X_J X_Jᵀ, whole everywhere; ``partial`` is overwritten."""
    with own.exact():
        gram(x.unsqueeze(0), out=partial.unsqueeze(0))
    first, *others = yield PanelRequest("partials", partial)
    # Of 16-bit parts the sum is rounded once.
    wide = torch.promote_types(own.dtype, torch.float32)
    total = own.take("sum", *first.shape, dtype=wide).copy_(first)
    for part in others:
        total.add_(part)
    own.rows(a).copy_(total)
    yield PanelRequest("rows", a)


def _carried(own: _Worker, segment: Schedule, a: Tensor, z: Tensor, factor: float) -> PanelWorker:
    """Q of a segment, from its A; A and Z are overwritten.

    Of Y and Q a worker needs its own rows only, until the end: all are polynomials of A and
    commute, so that Z, which is whole, can stand on the right.
    """
    y, q = own.take("y", *a.shape), own.take("q", *a.shape)
    for index, (alpha, beta, gamma) in enumerate(segment):
        yield from own.square_plus(a, alpha=gamma, beta=beta, out=z)
        if index + 1 < len(segment):
            own.add_product(a, a, z, beta=alpha, out=y)
            own.add_product(y, y, z, beta=alpha, out=a)
            yield PanelRequest("rows", a)
        if index == 0:
            own.rows(q).copy_(own.rows(z))
            own.rows(q)[:, own.start : own.end].diagonal().add_(alpha)
        else:
            own.add_product(q, q, z, beta=alpha, out=y)
            q, y = y, q
    if factor != 1.0:
        own.rows(q).mul_(factor)
    yield PanelRequest("rows", q)
    return q
