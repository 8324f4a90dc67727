"""Runs a plan: pack, exchange, assemble, compute, return, apply; two waves in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_muon.exchange.messenger import ExchangeCounters, Flight, Messenger
from megatron_muon.exchange.transport import Transport
from megatron_muon.placement import Plan
from megatron_muon.placement.program import Patch, Piece, WaveProgram, compile_wave

PackFunction = Callable[[Sequence[Piece], Sequence[torch.Tensor]], None]
"""Fills the buffer views (1-D, one per piece) with what the owners need."""

ComputeFunction = Callable[[torch.Tensor], torch.Tensor]
"""Maps a batch (B, m, n) of whole matrices to their updates, same shape; may work in place."""

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
    """

    def __init__(
        self,
        plan: Plan,
        *,
        rank: int,
        transport: Transport,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if dtype.itemsize != plan.itemsize:
            raise ValueError(f"plan counts {plan.itemsize} bytes an element, {dtype} has others")
        self.plan = plan
        self.rank = rank
        self._messenger = Messenger(
            size=plan.group.size,
            rank=rank,
            transport=transport,
            dtype=dtype,
            device=device,
            capacity=plan.loads[rank].peak_buffer_bytes // dtype.itemsize,
        )
        self._programs = tuple(compile_wave(plan, wave, rank) for wave in plan.waves)

    @property
    def counters(self) -> ExchangeCounters:
        """Counts of the last ``run``."""
        return self._messenger.counters

    @property
    def reserved_bytes(self) -> int:
        """Bytes of buffers that are held between steps."""
        return self._messenger.reserved_bytes

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
        outgoing = [self._depart(programs[0], pack)]
        returning: tuple[WaveProgram, Flight] | None = None
        for k, program in enumerate(programs):
            if k + 1 < len(programs):
                outgoing.append(self._depart(programs[k + 1], pack))
            # Taken out of the list, so that its buffers are free once it is assembled.
            batches = self._assemble(program, outgoing.pop(0))
            updates = [compute(batch) for batch in batches]
            self.counters.matrices += sum(batch.shape[0] for batch in batches)
            back = self._send_back(program, updates)
            self._messenger.release(*batches)
            del batches, updates
            if returning is not None:
                self._land(*returning, apply)
            returning = (program, back)
        if returning is not None:
            self._land(*returning, apply)

    def _depart(self, program: WaveProgram, pack: PackFunction) -> Flight:
        sent = self._messenger.buffer(sum(program.out.sent_counts))
        pack(program.packed, [sent[p.offset : p.offset + p.numel] for p in program.packed])
        return self._messenger.send(program.out, sent)

    def _assemble(self, program: WaveProgram, flight: Flight) -> list[torch.Tensor]:
        batches = [self._messenger.buffer(len(b.matrices), *b.shape) for b in program.batches]
        received = flight.land()
        _copy(
            [_patch_view(batches, p) for p in program.assembled],
            [_buffer_view(received, p) for p in program.assembled],
        )
        self._messenger.release(*flight.buffers)
        return batches

    def _send_back(self, program: WaveProgram, updates: Sequence[torch.Tensor]) -> Flight:
        sent = self._messenger.buffer(sum(program.back.sent_counts))
        _copy(
            [_buffer_view(sent, p) for p in program.returned],
            [_patch_view(updates, p) for p in program.returned],
        )
        return self._messenger.send(program.back, sent)

    def _land(self, program: WaveProgram, flight: Flight, apply: ApplyFunction) -> None:
        received = flight.land()
        apply(program.applied, [received[p.offset : p.offset + p.numel] for p in program.applied])
        self._messenger.release(*flight.buffers)


def _patch_view(batches: Sequence[torch.Tensor], patch: Patch) -> torch.Tensor:
    matrix = batches[patch.batch][patch.position]
    return matrix[patch.row : patch.row + patch.rows, patch.col : patch.col + patch.cols]


def _buffer_view(buffer: torch.Tensor, patch: Patch) -> torch.Tensor:
    numel = patch.rows * patch.cols
    return buffer[patch.offset : patch.offset + numel].view(patch.rows, patch.cols)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
