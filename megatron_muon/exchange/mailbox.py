"""The messages of one wave as one rank sees them: buffers, slots in them, the exchange itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_muon.exchange.transport import Pending, Transport
from megatron_muon.linalg import MemoryPool
from megatron_muon.placement.program import (
    Batch,
    FlatPiece,
    LocalPiece,
    Patch,
    Rows,
    WaveProgram,
)
from megatron_muon.placement.regions import Region
from megatron_muon.placement.schemes import SOURCE, Round

Elements = tuple[Sequence[FlatPiece], list[torch.Tensor]]
"""Elements of this rank's flat ranges, and their places elsewhere, shaped as ``piece_of``."""

NOTHING = (0, 0)
"""The slot of a partner that neither sends nor receives anything."""


@dataclass(kw_only=True)
class ExchangeCounters:
    """What the last step did on this rank, counted where it happened.

    Attributes:
        sent_bytes: Bytes sent to other ranks, both ways.
        received_bytes: Bytes received from other ranks, both ways.
        peak_buffer_bytes: Most bytes allocated at once.
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
    """A message under way; its buffers live until it has been waited for."""

    pending: Pending | None
    sent: torch.Tensor
    received: torch.Tensor

    def land(self) -> None:
        """Wait, once."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How the messages of an exchange are sent.

    Attributes:
        rank: This rank in the exchange group.
        size: Number of ranks; alone, what is sent is what is received.
        transport: Starts an all-to-all.
        dtypes: Element type of a message, by ``Round.kind``.
        small_side_first: Of assembled tall matrices the transpose is contiguous.
    """

    rank: int
    size: int
    transport: Transport
    dtypes: Mapping[str, torch.dtype]
    small_side_first: bool = False


class Mailbox:
    """Buffers and messages of one wave.

    Attributes:
        program: What the rank holds, computes, sends and receives.
        memory: Where buffers are allocated and counted.

    Args:
        program: As above.
        wire: How messages are sent.
        memory: As above.
        counters: Counts of the step.
    """

    def __init__(
        self, program: WaveProgram, *, wire: Wire, memory: MemoryPool, counters: ExchangeCounters
    ) -> None:
        self.program = program
        self.memory = memory
        self._wire = wire
        self._counters = counters
        self._sent: dict[Round, torch.Tensor] = {}
        self._received: dict[Round, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []

    def has(self, where: Round) -> bool:
        """Whether the wave has this message, on any rank."""
        return where in self.program.messages

    def keep(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A buffer that lives as long as the wave, of the source's dtype by default."""
        buffer = self.memory.take(*shape, dtype=dtype or self._wire.dtypes[SOURCE.kind])
        self._kept.append(buffer)
        return buffer

    def close(self, where: Round) -> None:
        """Release what was received."""
        buffer = self._received.pop(where, None)
        if buffer is not None:
            self.memory.release(buffer)

    def release_kept(self) -> None:
        """Release what was kept."""
        while self._kept:
            self.memory.release(self._kept.pop())

    def finish(self) -> None:
        """Release everything that is left of the wave."""
        for where in list(self._received):
            self.close(where)
        self.release_kept()

    # ---- one slot of a message ----------------------------------------------------------------

    def outgoing(self, where: Round, matrix: int, to: int) -> torch.Tensor:
        """What a partner is to get for a matrix, 1-D, to be filled before the exchange."""
        start, numel = self.program.messages[where].sent.get((matrix, to), NOTHING)
        return self._outbox(where)[start : start + numel]

    def incoming(self, where: Round, matrix: int, of: int) -> torch.Tensor:
        """What a partner sent for a matrix, 1-D."""
        start, numel = self.program.messages[where].received.get((matrix, of), NOTHING)
        return self._received[where][start : start + numel]

    # ---- elements -----------------------------------------------------------------------------

    def packed(self, where: Round) -> Elements:
        """Elements of this rank's ranges that a message carries, and their places in it."""
        return _with_views(self.program.held_elements[where], self._outbox(where))

    def applied(self, where: Round) -> Elements:
        """Elements of this rank's ranges that a message has brought elements for, and those."""
        return _with_views(self.program.held_elements[where], self._received[where])

    def local(
        self,
        matrices: Mapping[int, torch.Tensor],
        rows: Rows | None = None,
        *,
        only_sources: bool = False,
    ) -> Elements:
        """Elements of this rank's ranges that it computes itself, and their places.

        Args:
            matrices: Matrices or panels, by index.
            rows: Rows that they consist of, all by default.
            only_sources: Leave out what is a copy of another rank's elements.
        """
        found: list[LocalPiece] = []
        for piece in self.program.local:
            if piece.matrix in matrices and (piece.is_source or not only_sources):
                inside = piece if rows is None else piece.within(rows)
                found += [] if inside is None else [inside]
        views = [view_of(matrices[piece.matrix], piece.region) for piece in found]
        return found, [v[0] if p.rows == 1 else v for p, v in zip(found, views, strict=True)]

    def assemble(self) -> list[tuple[Batch, torch.Tensor]]:
        """The matrices that this rank computes, (B, m, n) for each shape, as far as in SOURCE.

        The rest is ``local``. The caller releases each.
        """
        found = []
        matrices: dict[int, torch.Tensor] = {}
        for batch in self.program.batches:
            m, n = batch.shape
            count, turned = len(batch.matrices), m > n and self._wire.small_side_first
            shape = (count, n, m) if turned else (count, m, n)
            values = self.memory.take(*shape, dtype=self._wire.dtypes[SOURCE.kind])
            values = values.mT if turned else values
            found.append((batch, values))
            matrices.update(zip(batch.matrices, values, strict=True))
        self.place(matrices)
        self.count_matrices(len(matrices))
        return found

    def place(self, matrices: Mapping[int, torch.Tensor], rows: Rows | None = None) -> None:
        """Copy the elements of SOURCE into matrices or panels (or some rows of them), by index."""
        patches = self._patches(SOURCE, matrices, rows)
        copy_all(
            [view_of(matrices[p.matrix], p.region) for p in patches],
            [_patch_view(self._received[SOURCE], p) for p in patches],
        )

    def give_back(
        self, where: Round, matrices: Mapping[int, torch.Tensor], rows: Rows | None = None
    ) -> None:
        """Copy the elements of updates (or of their panels, or rows) into a message, by index."""
        patches = self._patches(where, matrices, rows)
        sent = self._outbox(where)
        copy_all(
            [_patch_view(sent, p) for p in patches],
            [view_of(matrices[p.matrix], p.region) for p in patches],
        )

    def _patches(
        self, where: Round, matrices: Mapping[int, torch.Tensor], rows: Rows | None
    ) -> list[Patch]:
        found = [p for p in self.program.computed_elements[where] if p.matrix in matrices]
        if rows is None:
            return found
        return [inside for p in found if (inside := p.within(rows)) is not None]

    # ---- the exchange -------------------------------------------------------------------------

    def exchange(self, where: Round) -> Iterator[Flight]:
        """Send and receive; let other waves work, and go on once it has landed."""
        sent = self._outbox(where)
        del self._sent[where]
        if self._wire.size == 1:
            # What a rank sends to itself alone is there.
            yield Flight(pending=None, sent=sent, received=sent)
            self._received[where] = sent
            return
        count = sum(self.program.messages[where].received_counts)
        received = self.memory.take(count, dtype=sent.dtype)
        yield from self.send(where, sent, received)
        self.memory.release(sent)
        self._received[where] = received

    def send(self, where: Round, sent: torch.Tensor, received: torch.Tensor) -> Iterator[Flight]:
        """``exchange`` of given buffers, 1-D and contiguous."""
        message = self.program.messages[where]
        pending = self._wire.transport.all_to_all(
            received=received,
            sent=sent,
            received_counts=message.received_counts,
            sent_counts=message.sent_counts,
        )
        own = message.sent_counts[self._wire.rank]
        self._counters.sent_bytes += (sent.numel() - own) * sent.element_size()
        self._counters.received_bytes += (received.numel() - own) * received.element_size()
        self._counters.messages += 1
        yield Flight(pending=pending, sent=sent, received=received)

    def count_matrices(self, count: int = 1) -> None:
        """Count matrices that this rank has computed."""
        self._counters.matrices += count

    def _outbox(self, where: Round) -> torch.Tensor:
        """The buffer of what is sent, allocated when first asked for."""
        if where not in self._sent:
            count = sum(self.program.messages[where].sent_counts)
            self._sent[where] = self.memory.take(count, dtype=self._wire.dtypes[where.kind])
        return self._sent[where]


def piece_of(owned: torch.Tensor, piece: FlatPiece) -> torch.Tensor:
    """A piece of this rank's flat range: (numel,), or (rows, cols) if it has several rows."""
    if piece.rows == 1:
        return owned[piece.start : piece.start + piece.cols]
    end = piece.start + (piece.rows - 1) * piece.stride + piece.cols
    return owned[piece.start : end].unfold(0, piece.cols, piece.stride)


def view_of(matrix: torch.Tensor, region: Region) -> torch.Tensor:
    """A region of a matrix."""
    return matrix[region.row_slice, region.col_slice]


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target, at once where the device can.

    One pair of other strides would make torch copy the whole list one by one.
    """
    alike: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    others: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for target, source in zip(targets, sources, strict=True):
        found = alike if target.is_contiguous() and source.is_contiguous() else others
        found[0].append(target)
        found[1].append(source)
    for found in (alike, others):
        if found[0]:
            torch._foreach_copy_(*found)


def _with_views(pieces: Sequence[FlatPiece], buffer: torch.Tensor) -> Elements:
    """The pieces, and their places in a message, each contiguous."""
    views = [
        buffer[p.offset : p.offset + p.numel]
        if p.rows == 1
        else buffer[p.offset : p.offset + p.numel].view(p.rows, p.cols)
        for p in pieces
    ]
    return pieces, views


def _patch_view(buffer: torch.Tensor, patch: Patch) -> torch.Tensor:
    """The place of a patch in a message, (rows, cols), contiguous."""
    region = patch.region
    flat = buffer[patch.offset : patch.offset + region.numel]
    return flat.view(region.rows, region.cols)
