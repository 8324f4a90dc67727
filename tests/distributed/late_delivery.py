"""gloo as bad as a network may be: a message reads and writes its buffers at the last moment.

gloo on one machine is quick, and mostly forgives a buffer that is used again too early.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_muon.exchange import GroupTransport


class LateDelivery:
    """Delivers when waited for, and refuses a message whose sent buffer was written meanwhile."""

    def __init__(self, group: Any) -> None:
        self._transport = GroupTransport(group)

    def all_to_all(
        self,
        *,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_counts: Sequence[int],
        sent_counts: Sequence[int],
    ) -> _Late:
        """Start the exchange, of copies."""
        given, arriving = sent.clone(), torch.empty_like(received)
        pending = self._transport.all_to_all(
            received=arriving, sent=given, received_counts=received_counts, sent_counts=sent_counts
        )
        received.fill_(torch.nan)
        return _Late(pending, sent, given, received, arriving)


class _Late:
    def __init__(self, pending: Any, *buffers: torch.Tensor) -> None:
        self._pending, self._buffers = pending, buffers

    def wait(self) -> None:
        self._pending.wait()
        sent, given, received, arriving = self._buffers
        if not torch.equal(sent.view(torch.uint8), given.view(torch.uint8)):
            raise AssertionError("a sent buffer was written before its message had landed")
        received.copy_(arriving)
