"""Runs a plan: waves of messages, a few under way at once, in the same order on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from megatron_muon.exchange.mailbox import ExchangeCounters, Flight, Mailbox, Wire
from megatron_muon.exchange.memory import LaneArenas
from megatron_muon.exchange.transport import Transport
from megatron_muon.placement import Plan
from megatron_muon.placement.plan import Lane, LaneMemory
from megatron_muon.placement.program import WaveProgram, compile_wave

WaveFunction = Callable[[Mailbox], Iterator[Flight]]
"""One wave of an update rule: yields each message that it has sent, ends when all is applied."""


@dataclass(kw_only=True)
class _Wave:
    steps: Iterator[Flight]
    slot: int
    flight: Flight


class Exchange:
    """One rank's side of a plan.

    The order of collectives is the same on every rank and does not depend on what a rank holds:
    ranks without pieces or matrices send and receive zero elements.

    Args:
        plan: The plan.
        rank: This rank in the exchange group.
        transport: How messages are sent; not used when the group has one rank.
        dtypes: Element type of a message, by ``Round.kind``; the sizes must be the plan's.
        device: Device of the buffers.
        keep_buffers: Whether they stay allocated between steps. On CUDA they need not: torch's
            allocator hands the same memory out again, and to activations meanwhile.
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
        keep_buffers: bool = True,
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
        self._device = device
        self._keep_buffers = keep_buffers
        self._lanes = (
            _LaneProgram(plan, plan.main, plan.main_memory[rank], rank),
            _LaneProgram(plan, plan.split, plan.split_memory[rank], rank),
        )

    def run(self, wave: WaveFunction) -> None:
        """One step: every wave from its first message to its last.

        The waves of split matrices are spread evenly between those of the others: ranks that have
        a part of one have fewer matrices of their own, so that all end at the same time.

        Args:
            wave: Generator of one wave; every rank calls it for every wave, also where it neither
                holds nor computes anything.
        """
        self.counters = ExchangeCounters()
        for lane in self._lanes:
            lane.allocate(self._device)
            self.counters.peak_buffer_bytes += lane.nbytes
        main, split = (self._run_lane(lane, wave) for lane in self._lanes)
        of_main, of_split = (lane.messages for lane in self._lanes)
        # The last message of the split lane is left for the end: it brings home what the last
        # wave of the other need not wait for.
        rest, done = max(0, of_split - 1), 0
        for number, _ in enumerate(main, start=1):
            while done < rest * number // of_main:
                next(split)
                done += 1
        for _ in split:
            pass
        if not self._keep_buffers:
            for lane in self._lanes:
                lane.release()

    def _run_lane(self, lane: _LaneProgram, wave: WaveFunction) -> Iterator[None]:
        """Run the waves of a lane; pauses after each message that was started.

        In turn the next wave is started and those under way are advanced by one message, the newest
        first: so wave k+1 is on its way to the owners while wave k is computed, and wave k-1 on its
        way back.
        """
        waiting = deque(lane.programs)
        free = deque(range(lane.lane.used_slots))
        flying: list[_Wave] = []
        passed: list[Flight] = []
        while waiting or flying:
            older = list(flying)
            if waiting and free:
                slot = free.popleft()
                steps = wave(self._mailbox(lane, waiting.popleft(), slot))
                flying.insert(0, _Wave(steps=steps, slot=slot, flight=next(steps)))
                yield
            for entry in older:
                self._land(entry.flight, passed)
                following = next(entry.steps, None)
                if following is None:
                    flying.remove(entry)
                    free.append(entry.slot)
                else:
                    entry.flight = following
                    yield
        for flight in passed:
            flight.land()

    def _land(self, flight: Flight, passed: list[Flight]) -> None:
        """Wait for a message; for one that has nothing for this rank or of it, at the end only."""
        if flight.sent.numel() or flight.received.numel():
            flight.land()
        else:
            passed.append(flight)

    def _mailbox(self, lane: _LaneProgram, program: WaveProgram, slot: int) -> Mailbox:
        return Mailbox(
            program,
            slot=slot,
            wire=self._wire,
            arena=lane.arenas.slots[slot],
            computed=lane.arenas.computed,
            counters=self.counters,
            reuses_messages=self.plan.reuses_messages,
        )


class _LaneProgram:
    """One rank's part of the waves of a lane, and their memory."""

    def __init__(self, plan: Plan, lane: Lane, need: LaneMemory, rank: int) -> None:
        self.lane = lane
        self.programs = tuple(compile_wave(plan, wave, rank) for wave in lane.waves)
        self._need = need
        self._arenas: LaneArenas | None = None

    @property
    def messages(self) -> int:
        """Messages of all waves, the same on every rank."""
        return sum(len(program.messages) for program in self.programs)

    @property
    def arenas(self) -> LaneArenas:
        """The memory, allocated."""
        assert self._arenas is not None
        return self._arenas

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self._arenas is None else self._arenas.nbytes

    def allocate(self, device: torch.device) -> None:
        """Allocate the memory unless it is there."""
        if self._arenas is None:
            self._arenas = LaneArenas(self.lane, self._need, device)

    def release(self) -> None:
        """Release the memory until the next step."""
        self._arenas = None
