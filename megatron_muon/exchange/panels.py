"""The messages among the ranks that compute the panels of one matrix."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Protocol

import torch

from megatron_muon.exchange.mailbox import Flight, Mailbox
from megatron_muon.placement.schemes import SOURCE, UPDATE, Panels, Round


class Request(Protocol):
    """What a rank wants to have exchanged with those that compute the same matrix."""

    @property
    def kind(self) -> str:
        """What is sent among them; those of ``Panels.requests``."""

    @property
    def sent(self) -> torch.Tensor:
        """A part for each of its partners, in the order of their ranks, itself included; 1-D."""

    @property
    def received(self) -> torch.Tensor:
        """Where a part of each of them goes, in the same order; 1-D."""


PanelWorker = Generator[Request, None, torch.Tensor]
"""Yields requests, goes on when they have been exchanged, returns the updated panel."""


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
    mail: Mailbox, scheme: Panels, worker: PanelWorker
) -> Generator[Flight, None, torch.Tensor]:
    """Run a worker to its end, and exchange what it requests.

    Args:
        mail: The wave.
        scheme: The matrix.
        worker: Computes this rank's panel.

    Returns:
        The updated panel.
    """
    for where, kind in zip(_requests(mail), scheme.requests, strict=False):
        request = next(worker)
        assert request.kind == kind, "a worker requests another message than planned"
        yield from mail.send(where, request.sent, request.received)
    try:
        next(worker)
    except StopIteration as stopped:
        update: torch.Tensor = stopped.value
    else:
        raise AssertionError("a worker requests more messages than planned")
    yield from pass_requests(mail, after=len(scheme.requests))
    return update


def _requests(mail: Mailbox) -> list[Round]:
    return [where for where in mail.program.messages if where not in (SOURCE, UPDATE)]
