"""Runs a plan: waves of messages, a few under way at once, in the same order on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from megatron_muon.exchange.mailbox import ExchangeCounters, Flight, Mailbox, Wire
from megatron_muon.exchange.transport import Transport
from megatron_muon.linalg import MemoryPool
from megatron_muon.placement import Plan
from megatron_muon.placement.program import WaveProgram, compile_wave
from megatron_muon.placement.schedule import LaneOrder, step_schedule

WaveFunction = Callable[[Mailbox], Iterator[Flight]]
"""One wave of an update rule: yields each message that it has sent, ends when all is applied."""

HomeFunction = Callable[[Mailbox], Iterator[None]]
"""Matrices that are in no wave: what comes before its ``yield`` is done before the waves."""


class Exchange:
    """One rank's side of a plan.

    The order of collectives is the same on every rank and does not depend on what a rank holds:
    ranks without pieces or matrices send and receive zero elements.

    Attributes:
        plan: The plan.
        rank: This rank in the exchange group.
        counters: Counts of the last ``run``.
        memory: Where all memory of a step is allocated and counted.

    Args:
        plan: The plan.
        rank: This rank in the exchange group.
        transport: How messages are sent; not used when the group has one rank.
        dtypes: Element type of a message, by ``Round.kind``; the sizes must be the plan's.
        device: Device of the buffers.
        small_side_first: Of assembled tall matrices the transpose is contiguous.

    Raises:
        ValueError: A dtype has another size than the plan counts.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        rank: int,
        transport: Transport,
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        small_side_first: bool = False,
    ) -> None:
        for kind, itemsize in plan.itemsizes.items():
            if dtypes[kind].itemsize != itemsize:
                raise ValueError(
                    f"plan counts {itemsize} bytes an element of {kind}, {dtypes[kind]} has others"
                )
        self.plan = plan
        self.rank = rank
        self.counters = ExchangeCounters()
        self._wire = Wire(
            rank=rank,
            size=plan.group.size,
            transport=transport,
            dtypes=dtypes,
            small_side_first=small_side_first,
        )
        self.memory = MemoryPool(device)
        self._home = compile_wave(plan, plan.home, rank)
        lanes = plan.main, plan.split
        self._programs = [[compile_wave(plan, wave, rank) for wave in lane.waves] for lane in lanes]
        self._order = [
            LaneOrder([len(program.messages) for program in programs], lane.slots, lane.alone)
            for lane, programs in zip(lanes, self._programs, strict=True)
        ]

    def run(self, wave: WaveFunction, at_home: HomeFunction | None = None) -> None:
        """One step: every wave from its first message to its last, in the order of the schedule.

        Args:
            wave: Generator of one wave; every rank calls it for every wave, also where it neither
                holds nor computes anything.
            at_home: Computes what is in no wave; needed where the plan has such matrices.
        """
        self.counters = ExchangeCounters()
        self.memory.reset()
        around = at_home(self._mailbox(self._home)) if at_home is not None else iter(())
        next(around, None)
        flying: dict[tuple[int, int], tuple[Mailbox, Iterator[Flight], Flight]] = {}
        passed: list[Flight] = []
        for lane, number, sent in step_schedule(*self._order):
            if not sent:
                mail = self._mailbox(self._programs[lane][number])
                steps = wave(mail)
            else:
                mail, steps, flight = flying.pop((lane, number))
                if flight.sent.numel() or flight.received.numel():
                    flight.land()
                else:
                    # Nothing for this rank, or of it: waited for at the end.
                    passed.append(flight)
                del flight
            following = next(steps, None)
            if following is None:
                mail.finish()
            else:
                flying[lane, number] = mail, steps, following
            del following
        for flight in passed:
            flight.land()
        for _ in around:
            pass
        self.counters.peak_buffer_bytes = self.memory.peak

    def _mailbox(self, program: WaveProgram) -> Mailbox:
        return Mailbox(program, wire=self._wire, memory=self.memory, counters=self.counters)
