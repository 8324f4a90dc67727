"""Runs a plan: pack, exchange, assemble, compute, return, apply; two waves in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_muon.exchange.messenger import ExchangeCounters, Flight, Messenger
from megatron_muon.exchange.transport import Transport
from megatron_muon.exchange.wave_memory import WaveMemory
from megatron_muon.placement import Plan
from megatron_muon.placement.program import Patch, Piece, WaveProgram, compile_wave

PackFunction = Callable[[Sequence[Piece], Sequence[torch.Tensor]], None]
"""Fills the buffer views (1-D, one per piece) with what the owners need."""

ComputeFunction = Callable[[torch.Tensor], torch.Tensor]
"""Maps a batch (B, m, n) of whole matrices to their updates, same shape.

The smaller side comes first in memory: of tall matrices the transpose is contiguous. The batch may
be overwritten, and the result need not outlive the next call.
"""

ApplyFunction = Callable[[Sequence[Piece], Sequence[torch.Tensor]], None]
"""Applies the updates (1-D views, one per piece) to this rank's ranges."""


class Exchange:
    """One rank's side of a plan.

    The order of collectives is the same on every rank and does not depend on what a rank holds:
    ranks without pieces or matrices send and receive zero elements.

    Args:
        plan: The plan.
        rank: This rank in the exchange group.
        transport: How messages travel; not used when the group has one rank.
        dtype: Element type of the exchange; its size must be the plan's.
        device: Device of the buffers.
        keep_buffers: Whether they stay allocated between steps. On CUDA they need not: torch's
            allocator hands the same memory out again, and to activations meanwhile.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        rank: int,
        transport: Transport,
        dtype: torch.dtype,
        device: torch.device,
        keep_buffers: bool = True,
    ) -> None:
        if dtype.itemsize != plan.itemsize:
            raise ValueError(f"plan counts {plan.itemsize} bytes an element, {dtype} has others")
        self.plan = plan
        self.rank = rank
        self._messenger = Messenger(
            size=plan.group.size, rank=rank, transport=transport, dtype=dtype, device=device
        )
        self._programs = tuple(compile_wave(plan, wave, rank) for wave in plan.waves)
        self._returned = tuple(
            tuple(
                [patch for patch in program.returned if patch.batch == number]
                for number in range(len(program.batches))
            )
            for program in self._programs
        )
        self._device = device
        self._dtype = dtype
        self._keep_buffers = keep_buffers
        self._memory: WaveMemory | None = None

    @property
    def counters(self) -> ExchangeCounters:
        """Counts of the last ``run``."""
        return self._messenger.counters

    def run(self, *, pack: PackFunction, compute: ComputeFunction, apply: ApplyFunction) -> None:
        """One step: every matrix is assembled at its owner, computed, and sent back.

        While wave k is computed, wave k+1 is on its way to the owners and wave k-1 back.

        Args:
            pack: Called once per wave before it departs.
            compute: Called once per wave and shape that this rank owns.
            apply: Called once per wave after its return.
        """
        self._messenger.reset()
        programs = self._programs
        if not programs:
            return
        if self._memory is None:
            self._memory = WaveMemory(
                programs, size=self.plan.group.size, dtype=self._dtype, device=self._device
            )
        memory = self._memory
        self._messenger.hold(memory.numel)
        outgoing = self._depart(memory, 0, pack)
        returning: Flight | None = None
        for k, program in enumerate(programs):
            arriving = outgoing
            if k + 1 < len(programs):
                outgoing = self._depart(memory, k + 1, pack)
            batches = memory.batches(program)
            self._assemble(program, batches, arriving)
            back = self._compute(memory, k, batches, compute)
            if returning is not None:
                self._land(programs[k - 1], returning, apply)
            returning = back
        if returning is not None:
            self._land(programs[-1], returning, apply)
        self._messenger.forget(memory.numel)
        if not self._keep_buffers:
            self._memory = None

    def _depart(self, memory: WaveMemory, wave: int, pack: PackFunction) -> Flight:
        program = self._programs[wave]
        sent, received = memory.message(wave, program.out)
        pack(program.packed, [sent[p.offset : p.offset + p.numel] for p in program.packed])
        return self._messenger.send(program.out, sent, received)

    def _assemble(
        self, program: WaveProgram, batches: Sequence[torch.Tensor], flight: Flight
    ) -> None:
        received = flight.land()
        _copy(
            [_patch_view(batches[p.batch], p) for p in program.assembled],
            [_buffer_view(received, p) for p in program.assembled],
        )

    def _compute(
        self,
        memory: WaveMemory,
        wave: int,
        batches: Sequence[torch.Tensor],
        compute: ComputeFunction,
    ) -> Flight:
        """Compute one batch after the other, and send all updates home."""
        program = self._programs[wave]
        sent, received = memory.message(wave, program.back)
        for number, batch in enumerate(batches):
            update = compute(batch)
            self.counters.matrices += batch.shape[0]
            patches = self._returned[wave][number]
            _copy(
                [_buffer_view(sent, p) for p in patches],
                [_patch_view(update, p) for p in patches],
            )
        return self._messenger.send(program.back, sent, received)

    def _land(self, program: WaveProgram, flight: Flight, apply: ApplyFunction) -> None:
        received = flight.land()
        apply(program.applied, [received[p.offset : p.offset + p.numel] for p in program.applied])


def _patch_view(batch: torch.Tensor, patch: Patch) -> torch.Tensor:
    matrix = batch[patch.position]
    return matrix[patch.row : patch.row + patch.rows, patch.col : patch.col + patch.cols]


def _buffer_view(buffer: torch.Tensor, patch: Patch) -> torch.Tensor:
    numel = patch.rows * patch.cols
    return buffer[patch.offset : patch.offset + numel].view(patch.rows, patch.cols)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
