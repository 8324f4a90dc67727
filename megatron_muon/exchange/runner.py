"""Runs a plan: pack, exchange, assemble, compute, return, apply; two waves in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from megatron_muon.exchange.messenger import ExchangeCounters, Flight, Messenger
from megatron_muon.exchange.pieces import (
    ApplyFunction,
    PackFunction,
    buffer_view,
    copy_all,
    patch_view,
    piece_buffers,
)
from megatron_muon.exchange.shared_runner import PanelFunction, SharedExchange
from megatron_muon.exchange.transport import Transport
from megatron_muon.exchange.wave_memory import WaveMemory
from megatron_muon.placement import Plan
from megatron_muon.placement.program import WaveProgram, compile_wave

ComputeFunction = Callable[[torch.Tensor], torch.Tensor]
"""Maps a batch (B, m, n) of whole matrices to their updates, same shape.

It may be overwritten, and the result need not outlive the next call.
"""


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
        squares_dtype: Element type of what travels among the ranks that share a matrix; ``dtype``
            by default.
        scalars_dtype: Element type of the norms among them; ``dtype`` by default.
        small_side_first: Of assembled tall matrices the transpose is contiguous.
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
        squares_dtype: torch.dtype | None = None,
        scalars_dtype: torch.dtype | None = None,
        small_side_first: bool = False,
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
        self._shared = SharedExchange(
            plan,
            rank=rank,
            messenger=self._messenger,
            squares_dtype=squares_dtype or dtype,
            scalars_dtype=scalars_dtype or dtype,
        )
        self._device = device
        self._dtype = dtype
        self._keep_buffers = keep_buffers
        self._small_side_first = small_side_first
        self._memory: WaveMemory | None = None

    @property
    def counters(self) -> ExchangeCounters:
        """Counts of the last ``run``."""
        return self._messenger.counters

    def run(
        self,
        *,
        pack: PackFunction,
        compute: ComputeFunction,
        apply: ApplyFunction,
        panel: PanelFunction | None = None,
    ) -> None:
        """One step: every matrix is assembled at its owner, computed, and sent back.

        While wave k is computed, wave k+1 is on its way to the owners and wave k-1 back. Shared
        matrices are computed in between, evenly spread: ranks that have a part of one have fewer
        matrices of their own, so that all come to the end of a wave at the same time.

        Args:
            pack: Called once per wave before it departs.
            compute: Called once per wave and shape that this rank owns.
            apply: Called once per wave after its return.
            panel: Computes this rank's part of a shared matrix; needed where the plan has any.
        """
        self._messenger.reset()
        programs = self._programs
        shared = self._spread_shared(pack, panel, apply)
        memory = self._memory
        if memory is None and programs:
            memory = self._memory = WaveMemory(
                programs,
                size=self.plan.group.size,
                dtype=self._dtype,
                device=self._device,
                small_side_first=self._small_side_first,
            )
        if memory is not None:
            self._run_waves(memory, pack, compute, apply, shared)
        for _ in shared:
            pass
        if not self._keep_buffers:
            self._memory = None
            self._shared.let_go()

    def _spread_shared(
        self, pack: PackFunction, panel: PanelFunction | None, apply: ApplyFunction
    ) -> Iterator[None]:
        """The work on shared matrices, in as many portions as there are waves, and a rest.

        The last message is the rest's: it brings home what the last wave need not wait for.
        """
        if not self._shared.messages:
            return
        assert panel is not None, "the plan has shared matrices"
        waves, total = max(1, len(self._programs)), self._shared.messages - 1
        work = self._shared.run(pack, panel, apply)
        for wave in range(waves):
            for _ in range(total * wave // waves, total * (wave + 1) // waves):
                next(work)
            yield
        for _ in work:
            pass

    def _run_waves(
        self,
        memory: WaveMemory,
        pack: PackFunction,
        compute: ComputeFunction,
        apply: ApplyFunction,
        between: Iterator[None],
    ) -> None:
        programs = self._programs
        self._messenger.hold(memory.numel)
        outgoing = self._depart(memory, 0, pack)
        returning: Flight | None = None
        for k, program in enumerate(programs):
            arriving = outgoing
            if k + 1 < len(programs):
                outgoing = self._depart(memory, k + 1, pack)
            # Before this wave's return is started: what follows it may have to wait for others.
            next(between, None)
            batches = memory.batches(program)
            self._assemble(program, batches, arriving)
            back = self._compute(memory, k, batches, compute)
            if returning is not None:
                self._land(programs[k - 1], returning, apply)
            returning = back
        if returning is not None:
            self._land(programs[-1], returning, apply)
        self._messenger.forget(memory.numel)

    def _depart(self, memory: WaveMemory, wave: int, pack: PackFunction) -> Flight:
        program = self._programs[wave]
        sent, received = memory.message(wave, program.out)
        pack(program.packed, piece_buffers(sent, program.packed))
        return self._messenger.send(program.out, sent, received)

    def _assemble(
        self, program: WaveProgram, batches: Sequence[torch.Tensor], flight: Flight
    ) -> None:
        received = flight.land()
        copy_all(
            [patch_view(batches[p.batch][p.position], p) for p in program.assembled],
            [buffer_view(received, p) for p in program.assembled],
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
            copy_all(
                [buffer_view(sent, p) for p in patches],
                [patch_view(update[p.position], p) for p in patches],
            )
        return self._messenger.send(program.back, sent, received)

    def _land(self, program: WaveProgram, flight: Flight, apply: ApplyFunction) -> None:
        received = flight.land()
        apply(program.applied, piece_buffers(received, program.applied))
