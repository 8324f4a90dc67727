"""Messages of one exchange group: buffers, all-to-alls, and the count of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from megatron_muon.exchange.transport import Pending, Transport
from megatron_muon.placement.program import Message


@dataclass(kw_only=True)
class ExchangeCounters:
    """What the last step did on this rank, counted where it happened.

    Attributes:
        sent_bytes: Bytes sent to other ranks, both ways.
        received_bytes: Bytes received from other ranks, both ways.
        peak_buffer_bytes: Largest sum of message buffers and assembled matrices alive at once.
        matrices: Number of matrices computed here.
        messages: Number of all-to-all calls.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    peak_buffer_bytes: int = 0
    matrices: int = 0
    messages: int = 0


@dataclass(kw_only=True)
class Flight:
    """Buffers of one message; they live until the message has been waited for."""

    pending: Pending | None
    sent: torch.Tensor
    received: torch.Tensor

    def land(self) -> torch.Tensor:
        """Wait, once, and give what was received."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        return self.received


class Messenger:
    """Starts the messages of one rank and counts bytes and buffers.

    Args:
        size: Number of ranks of the exchange group; with one nothing is sent.
        rank: This rank in the group.
        transport: How messages travel.
        dtype: Element type of its own buffers.
        device: Device of all buffers.
    """

    def __init__(
        self,
        *,
        size: int,
        rank: int,
        transport: Transport,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.counters = ExchangeCounters()
        self.size = size
        self.rank = rank
        self.dtype = dtype
        self.device = device
        self._transport = transport
        self._alive = 0

    def reset(self) -> None:
        """Start a step: counts from zero, nothing alive."""
        self.counters = ExchangeCounters()
        self._alive = 0

    def buffer(self, *shape: int) -> torch.Tensor:
        """A counted buffer, not initialized."""
        buffer = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.hold(buffer.numel())
        return buffer

    def hold(self, numel: int) -> None:
        """Count elements that came to be elsewhere."""
        self.hold_bytes(numel * self.dtype.itemsize)

    def hold_bytes(self, count: int) -> None:
        """Count bytes, whatever they are of."""
        self._alive += count
        self.counters.peak_buffer_bytes = max(self.counters.peak_buffer_bytes, self._alive)

    def forget(self, numel: int) -> None:
        """Count elements that are no longer needed."""
        self.forget_bytes(numel * self.dtype.itemsize)

    def forget_bytes(self, count: int) -> None:
        """Count bytes that are no longer needed."""
        self._alive -= count

    def send(
        self, message: Message, sent: torch.Tensor, received: torch.Tensor | None = None
    ) -> Flight:
        """Start an all-to-all; every rank calls it, with zero counts too.

        Args:
            message: Counts.
            sent: What is sent.
            received: Where to, of the same dtype; a counted buffer by default.
        """
        if self.size == 1:
            return Flight(pending=None, sent=sent, received=sent)
        if received is None:
            received = self.buffer(sum(message.received_counts))
        pending = self._transport.all_to_all(
            received=received,
            sent=sent,
            received_counts=message.received_counts,
            sent_counts=message.sent_counts,
        )
        own = message.sent_counts[self.rank]
        self.counters.sent_bytes += (sent.numel() - own) * sent.element_size()
        self.counters.received_bytes += (received.numel() - own) * received.element_size()
        self.counters.messages += 1
        return Flight(pending=pending, sent=sent, received=received)


def interleave(waves: Iterable[Iterator[Flight]], *, depth: int = 2) -> None:
    """Run waves that send several messages each, ``depth`` of them under way at a time.

    A wave yields what it has sent and goes on once that has landed; in between another wave
    works. The order in which messages start follows from the number of messages of each wave
    alone, so it is the same on every rank.

    Args:
        waves: Generators, in the order in which they start.
        depth: Number of waves under way.
    """
    waiting = iter(waves)
    flying: list[tuple[Iterator[Flight], Flight]] = []
    exhausted = False
    while flying or not exhausted:
        while len(flying) < depth and not exhausted:
            wave = next(waiting, None)
            if wave is None:
                exhausted = True
            elif (flight := next(wave, None)) is not None:
                flying.append((wave, flight))
        if flying:
            wave, flight = flying.pop(0)
            flight.land()
            following = next(wave, None)
            if following is not None:
                flying.append((wave, following))
