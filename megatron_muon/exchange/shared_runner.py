"""Runs the shared matrices of a plan: panels out, messages among the ranks of each, updates back.

All messages go over the whole exchange group, in an order that is the same on every rank; ranks
without a part send and receive nothing in them, and do not wait for them either: they compute their
own matrices meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Protocol

import torch

from megatron_muon.exchange.messenger import Flight, Messenger
from megatron_muon.exchange.pieces import (
    ApplyFunction,
    PackFunction,
    buffer_view,
    copy_all,
    patch_view,
    piece_buffers,
)
from megatron_muon.placement import Plan
from megatron_muon.placement.program import Message
from megatron_muon.placement.shared_program import (
    RequestProgram,
    SharedPart,
    SharedWave,
    compile_shared_wave,
)


class Request(Protocol):
    """What a rank wants to have exchanged with those that share its matrix."""

    @property
    def kind(self) -> str:
        """``scalars``, ``partials`` or ``rows``."""

    @property
    def tensor(self) -> torch.Tensor:
        """(2,) for scalars, otherwise (m, m) with m the smaller side of the matrix."""


PanelFunction = Callable[
    [torch.Tensor, SharedPart, int], Generator[Request, Sequence[torch.Tensor], torch.Tensor]
]
"""Maps (panel, what it is of, slot) to its update, by requests and answers.

The panel comes with the smaller side of the whole matrix first, contiguous; it may be overwritten.
Two slots may be under way at once. The answer to ``scalars`` is every rank's tensor, to
``partials`` every rank's part of the own block row, each until the next request; ``rows`` are
written into the tensor.
"""


class SharedExchange:
    """One rank's side of the shared matrices of a plan.

    Args:
        plan: The plan.
        rank: This rank in the exchange group.
        messenger: Sends and counts.
        squares_dtype: Element type of partial sums and block rows.
        scalars_dtype: Element type of norms.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        rank: int,
        messenger: Messenger,
        squares_dtype: torch.dtype,
        scalars_dtype: torch.dtype,
    ) -> None:
        if plan.shared and plan.shared_itemsizes != (
            squares_dtype.itemsize,
            scalars_dtype.itemsize,
        ):
            raise ValueError(
                f"plan counts {plan.shared_itemsizes} bytes an element, {squares_dtype} and "
                f"{scalars_dtype} have others"
            )
        self._messenger = messenger
        self._squares_dtype = squares_dtype
        self._scalars_dtype = scalars_dtype
        self._programs = tuple(compile_shared_wave(plan, w, rank) for w in plan.shared_waves)
        self._slots = min(plan.shared_slots, len(self._programs))
        self._memory: list[_SlotMemory] = []
        self._idle: list[Flight] = []
        self._first_of = {m.index: m.ranks[0] == rank for m in plan.shared}

    @property
    def messages(self) -> int:
        """Number of messages of a step; the same on every rank."""
        return sum(2 + len(program.requests) for program in self._programs)

    def run(self, pack: PackFunction, panel: PanelFunction, apply: ApplyFunction) -> Iterator[None]:
        """All waves, as many under way at once as there are slots; yields once a message.

        Args:
            pack: Called once per wave before it departs.
            panel: Computes this rank's part of a wave, if it has one.
            apply: Called once per wave after its return.
        """
        if not self._memory:
            self._memory = [
                _SlotMemory(self._programs, self._messenger, self._itemsize)
                for _ in range(self._slots)
            ]
        held = sum(memory.nbytes for memory in self._memory)
        self._messenger.hold_bytes(held)
        flying: list[tuple[int, Iterator[Flight], Flight]] = []
        waiting = deque(self._programs)
        # Waves differ in their number of messages, so a later one may end before an earlier one.
        free = deque(range(self._slots))
        while flying or waiting:
            if free and waiting:
                slot = free.popleft()
                wave = self._wave(waiting.popleft(), slot, pack, panel, apply)
            else:
                slot, wave, flight = flying.pop(0)
                flight.land()
            following = next(wave, None)
            if following is None:
                free.append(slot)
            else:
                flying.append((slot, wave, following))
                yield
        for flight in self._idle:
            flight.land()
        self._idle.clear()
        self._messenger.forget_bytes(held)

    def let_go(self) -> None:
        """Give the buffers up until the next step."""
        self._memory.clear()

    def _itemsize(self, request: RequestProgram) -> int:
        return (self._scalars_dtype if request.is_scalars else self._squares_dtype).itemsize

    def _wave(
        self,
        program: SharedWave,
        slot: int,
        pack: PackFunction,
        panel: PanelFunction,
        apply: ApplyFunction,
    ) -> Iterator[Flight]:
        memory, dtype = self._memory[slot], self._messenger.dtype
        sent, received = memory.message(program.out, dtype)
        pack(program.packed, piece_buffers(sent, program.packed))
        flight = self._messenger.send(program.out, sent, received)
        yield flight
        update = None
        if program.part is None:
            for request in program.requests:
                yield self._pass(request.message)
        else:
            # As it lies in the whole matrix, to be filled; and with its smaller side first.
            placed, oriented = memory.panel(program.part)
            copy_all(
                [patch_view(placed, p) for p in program.assembled],
                [buffer_view(received, p) for p in program.assembled],
            )
            worker = panel(oriented, program.part, slot)
            update = yield from self._requests(worker, program, memory)
            self._messenger.counters.matrices += self._first_of[program.part.index]
        sent, received = memory.message(program.back, dtype)
        if update is not None:
            m, n = program.part.shape if program.part else (0, 0)
            result = update.mT if m > n else update
            copy_all(
                [buffer_view(sent, p) for p in program.returned],
                [patch_view(result, p) for p in program.returned],
            )
        yield self._messenger.send(program.back, sent, received)
        apply(program.applied, piece_buffers(received, program.applied))

    def _requests(
        self,
        worker: Generator[Request, Sequence[torch.Tensor], torch.Tensor],
        program: SharedWave,
        memory: _SlotMemory,
    ) -> Generator[Flight, None, torch.Tensor]:
        """Serve a worker to its end, then pass what other matrices of the wave still need."""
        assert program.part is not None
        update: torch.Tensor | None = None
        request = next(worker)
        for expected in program.requests:
            if not expected.kind:
                yield self._pass(expected.message)
                continue
            assert request.kind == expected.kind, "a worker asks for another message than planned"
            sent, received = memory.message(expected.message, request.tensor.dtype)
            _fill(sent, request, expected, program.part)
            yield self._messenger.send(expected.message, sent, received)
            try:
                request = worker.send(_answer(received, request, expected, program.part))
            except StopIteration as stopped:
                update = stopped.value
        assert update is not None, "a worker asks for more messages than planned"
        return update

    def _pass(self, message: Message) -> Flight:
        """Enter a message in which this rank sends and receives nothing, without waiting for it."""
        nothing = torch.empty(0, dtype=self._squares_dtype, device=self._messenger.device)
        flight = self._messenger.send(message, nothing, nothing.clone())
        self._idle.append(flight)
        return Flight(pending=None, sent=nothing, received=nothing)


class _SlotMemory:
    """Buffers of one wave under way: its largest message, either way, and its panel."""

    def __init__(
        self,
        programs: Sequence[SharedWave],
        messenger: Messenger,
        itemsize: Callable[[RequestProgram], int],
    ) -> None:
        self._dtype = messenger.dtype
        size = messenger.dtype.itemsize
        panels = max(0 if p.part is None else p.part.panel.numel for p in programs)
        message = max(
            max(
                _elements(p.out) * size,
                _elements(p.back) * size,
                *(_elements(r.message) * itemsize(r) for r in p.requests),
            )
            for p in programs
        )
        self._panel = torch.empty(panels, dtype=messenger.dtype, device=messenger.device)
        self._message = torch.empty(message, dtype=torch.uint8, device=messenger.device)

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self._panel.nbytes + self._message.nbytes

    def message(self, message: Message, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers to send and to receive."""
        sent = sum(message.sent_counts)
        whole = self._message[: _elements(message) * dtype.itemsize].view(dtype)
        return whole[:sent], whole[sent:]

    def panel(self, part: SharedPart) -> tuple[torch.Tensor, torch.Tensor]:
        """The panel as it lies in its matrix, and with the matrix's smaller side first."""
        rows, cols = part.panel.rows, part.panel.cols
        flat = self._panel[: rows * cols]
        m, n = part.shape
        oriented = flat.view(rows, cols) if m <= n else flat.view(cols, rows)
        return (oriented if m <= n else oriented.mT), oriented


def _elements(message: Message) -> int:
    return sum(message.sent_counts) + sum(message.received_counts)


def _fill(sent: torch.Tensor, request: Request, program: RequestProgram, part: SharedPart) -> None:
    """Copy what each partner is to have."""
    own = slice(*part.rows[part.number])
    for other, (start, numel) in enumerate(program.sent):
        if not numel:
            continue
        source = request.tensor
        if request.kind != "scalars":
            source = source[slice(*part.rows[other]) if request.kind == "partials" else own]
        sent[start : start + numel].view(source.shape).copy_(source)


def _answer(
    received: torch.Tensor, request: Request, program: RequestProgram, part: SharedPart
) -> Sequence[torch.Tensor]:
    """What the partners sent: written into the tensor, or theirs and the own in order."""
    tensor = request.tensor
    own = slice(*part.rows[part.number])
    parts = []
    for other, (start, numel) in enumerate(program.received):
        slot = received[start : start + numel]
        if request.kind == "scalars":
            parts.append(tensor if other == part.number else slot)
        elif request.kind == "partials":
            mine = tensor[own]
            parts.append(mine if other == part.number else slot.view(mine.shape))
        elif numel:
            target = tensor[slice(*part.rows[other])]
            target.copy_(slot.view(target.shape))
    return parts
