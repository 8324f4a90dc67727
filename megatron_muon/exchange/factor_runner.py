"""Runs a factor plan: the messages of a wave, one after another, two waves under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from megatron_muon.exchange.messenger import ExchangeCounters, Flight, Messenger, interleave
from megatron_muon.exchange.transport import Transport
from megatron_muon.placement.factor_program import FactorWave, compile_factor_wave
from megatron_muon.placement.factors import FactorPlan, Round


class WaveMail:
    """The messages of one wave as one rank sees them.

    Attributes:
        program: What the rank holds and owns.
    """

    def __init__(self, program: FactorWave, messenger: Messenger) -> None:
        self.program = program
        self._messenger = messenger
        self._received: dict[Round, torch.Tensor] = {}
        self._held = 0

    def has(self, where: Round) -> bool:
        """Whether the wave has this message, on any rank."""
        return where in self.program.rounds

    def buffer(self, *shape: int) -> torch.Tensor:
        """A buffer that counts until the wave is over."""
        self._held += torch.Size(shape).numel()
        return self._messenger.buffer(*shape)

    def hold(self, numel: int) -> None:
        """Count elements that were allocated elsewhere, until the wave is over."""
        self._held += numel
        self._messenger.hold(numel)

    def outbox(self, where: Round) -> torch.Tensor:
        """The buffer of a message, to be filled slot by slot."""
        return self.buffer(sum(self.program.rounds[where].message.sent_counts))

    def outgoing(self, where: Round, outbox: torch.Tensor, index: int, to: int) -> torch.Tensor:
        """The slot of a matrix and a partner in an outbox."""
        start, numel = self.program.rounds[where].sent[index, to]
        return outbox[start : start + numel]

    def incoming(self, where: Round, index: int, of: int) -> torch.Tensor:
        """What a partner sent for a matrix."""
        start, numel = self.program.rounds[where].received[index, of]
        return self._received[where][start : start + numel]

    def exchange(self, where: Round, outbox: torch.Tensor) -> Iterator[Flight]:
        """Send, let others work, go on once it has landed."""
        message = self.program.rounds[where].message
        flight = self._messenger.send(message, outbox)
        if flight.received is not outbox:
            self._held += flight.received.numel()
        yield flight
        self._received[where] = flight.received

    def finish(self) -> None:
        """Give up everything that the wave held."""
        self._messenger.counters.matrices += len(self.program.owned)
        self._messenger.forget(self._held)
        self._received.clear()
        self._held = 0


class FactorExchange:
    """One rank's side of a factor plan.

    Args:
        plan: The plan.
        rank: This rank in the exchange group.
        transport: How messages travel; not used when the group has one rank.
        dtype: Element type of the exchange; its size must be the plan's.
        device: Device of the buffers.
    """

    def __init__(
        self,
        plan: FactorPlan,
        *,
        rank: int,
        transport: Transport,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if dtype.itemsize != plan.itemsize:
            raise ValueError(f"plan counts {plan.itemsize} bytes an element, {dtype} has others")
        self.plan = plan
        self.dtype = dtype
        self._messenger = Messenger(
            size=plan.group.size, rank=rank, transport=transport, dtype=dtype, device=device
        )
        self._programs = tuple(compile_factor_wave(plan, wave, rank) for wave in plan.waves)

    @property
    def counters(self) -> ExchangeCounters:
        """Counts of the last ``run``."""
        return self._messenger.counters

    def run(self, wave: Callable[[WaveMail], Iterator[Flight]]) -> None:
        """One step: every wave from its first message to its last.

        Args:
            wave: Generator of one wave; every rank calls it for every wave, also where it neither
                holds nor owns anything.
        """
        self._messenger.reset()
        interleave(self._one(wave, program) for program in self._programs)

    def _one(
        self, wave: Callable[[WaveMail], Iterator[Flight]], program: FactorWave
    ) -> Iterator[Flight]:
        mail = WaveMail(program, self._messenger)
        yield from wave(mail)
        mail.finish()
