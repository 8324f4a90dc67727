"""The messages among the ranks that compute the panels of one matrix."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Protocol

import torch

from megatron_muon.exchange.mailbox import Flight, Mailbox
from megatron_muon.placement.schemes import SOURCE, UPDATE, Panels, Round


class Request(Protocol):
    """What a rank wants to have exchanged with those that compute the same matrix."""

    @property
    def kind(self) -> str:
        """``scalars``, ``partials`` or ``rows``."""

    @property
    def tensor(self) -> torch.Tensor:
        """(2,) for scalars, otherwise (m, m) with m the smaller side of the matrix."""


PanelWorker = Generator[Request, Sequence[torch.Tensor], torch.Tensor]
"""Yields requests, takes answers, returns the updated panel.

The answer to ``scalars`` is every rank's tensor, to ``partials`` every rank's part of the own block
row, each until the next request; ``rows`` are written into the tensor.
"""


def take_panel(mail: Mailbox, scheme: Panels, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of this rank's panel: as it lies in its matrix, and with the smaller side first."""
    panel, (m, n) = scheme.panels[scheme.ranks.index(rank)], scheme.shape
    if m <= n:
        oriented = mail.keep(panel.rows, panel.cols)
        return oriented, oriented
    oriented = mail.keep(panel.cols, panel.rows)
    return oriented.mT, oriented


def pass_requests(mail: Mailbox, *, after: int = 0) -> Iterator[Flight]:
    """Enter the messages of other matrices of the wave, in which this rank sends nothing."""
    for where in _requests(mail)[after:]:
        yield from mail.exchange(where)


def serve(
    mail: Mailbox, scheme: Panels, rank: int, worker: PanelWorker
) -> Generator[Flight, None, torch.Tensor]:
    """Run a worker to its end, and send what it requests.

    Args:
        mail: The wave.
        scheme: The matrix.
        rank: This rank in the exchange group.
        worker: Computes this rank's panel.

    Returns:
        The updated panel.
    """
    matrix, number = mail.program.part, scheme.ranks.index(rank)
    assert matrix is not None
    asked = next(worker)
    for where, kind in zip(_requests(mail), scheme.requests, strict=False):
        assert asked.kind == kind, "a worker requests another message than planned"
        for other, partner in enumerate(scheme.ranks):
            if other != number:
                source = _sent(asked, scheme, number, other)
                mail.outgoing(where, matrix, partner).view(source.shape).copy_(source)
        yield from mail.exchange(where)
        answers = [
            _answer(asked, scheme, number, other, mail.incoming(where, matrix, partner))
            if other != number
            else _own(asked, scheme, number)
            for other, partner in enumerate(scheme.ranks)
        ]
        try:
            asked = worker.send([] if kind == "rows" else answers)
        except StopIteration as stopped:
            update: torch.Tensor = stopped.value
            yield from pass_requests(mail, after=len(scheme.requests))
            return update
    raise AssertionError("a worker requests more messages than planned")


def _requests(mail: Mailbox) -> list[Round]:
    return [where for where in mail.program.messages if where not in (SOURCE, UPDATE)]


def _rows(scheme: Panels, number: int) -> slice:
    return slice(*scheme.rows[number])


def _sent(asked: Request, scheme: Panels, number: int, other: int) -> torch.Tensor:
    """What another rank is to get."""
    if asked.kind == "scalars":
        return asked.tensor
    return asked.tensor[_rows(scheme, other if asked.kind == "partials" else number)]


def _own(asked: Request, scheme: Panels, number: int) -> torch.Tensor:
    return asked.tensor if asked.kind == "scalars" else asked.tensor[_rows(scheme, number)]


def _answer(
    asked: Request, scheme: Panels, number: int, other: int, received: torch.Tensor
) -> torch.Tensor:
    """What another rank has sent; block rows are written into the tensor."""
    if asked.kind == "scalars":
        return received
    if asked.kind == "partials":
        return received.view(asked.tensor[_rows(scheme, number)].shape)
    target = asked.tensor[_rows(scheme, other)]
    return target.copy_(received.view(target.shape))
