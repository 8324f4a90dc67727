"""The messages of one wave as one rank sees them: buffers, slots in them, the exchange itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_muon.exchange.memory import Arena
from megatron_muon.exchange.transport import Pending, Transport
from megatron_muon.placement.program import Batch, FlatPiece, Patch, WaveProgram
from megatron_muon.placement.regions import Region
from megatron_muon.placement.schemes import SOURCE, UPDATE, Round

NOTHING = (0, 0)
"""The slot of a partner that neither sends nor receives anything."""


@dataclass(kw_only=True)
class ExchangeCounters:
    """What the last step did on this rank, counted where it happened.

    Attributes:
        sent_bytes: Bytes sent to other ranks, both ways.
        received_bytes: Bytes received from other ranks, both ways.
        peak_buffer_bytes: Bytes allocated for messages and assembled matrices.
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
        slot: Which of the waves under way at once it is.
        computed: Memory for what is computed; released when the wave computes again.

    Args:
        program: As above.
        slot: As above.
        wire: How messages are sent.
        arena: Memory of the wave.
        computed: As above.
        counters: Counts of the step.
        reuses_messages: Whether a round's buffers take the place of those of the round before.
    """

    def __init__(
        self,
        program: WaveProgram,
        *,
        slot: int,
        wire: Wire,
        arena: Arena,
        computed: Arena,
        counters: ExchangeCounters,
        reuses_messages: bool,
    ) -> None:
        self.program = program
        self.slot = slot
        self.computed = computed
        self._wire = wire
        self._arena = arena
        self._counters = counters
        self._reuses_messages = reuses_messages
        self._boxes: dict[Round, tuple[torch.Tensor, torch.Tensor]] = {}
        self._floor = 0
        arena.rewind()

    def has(self, where: Round) -> bool:
        """Whether the wave has this message, on any rank."""
        return where in self.program.messages

    def keep(self, *shape: int) -> torch.Tensor:
        """A buffer of the source's dtype that lives as long as the wave."""
        assert not (self._reuses_messages and self._boxes), "kept buffers precede the messages"
        buffer = self._arena.take(*shape, dtype=self._wire.dtypes[SOURCE.kind])
        self._floor = self._arena.used
        return buffer

    # ---- one slot of a message ----------------------------------------------------------------

    def outgoing(self, where: Round, matrix: int, to: int) -> torch.Tensor:
        """What a partner is to get for a matrix, 1-D, to be filled before the exchange."""
        start, numel = self.program.messages[where].sent.get((matrix, to), NOTHING)
        return self._open(where)[0][start : start + numel]

    def incoming(self, where: Round, matrix: int, of: int) -> torch.Tensor:
        """What a partner sent for a matrix, 1-D."""
        start, numel = self.program.messages[where].received.get((matrix, of), NOTHING)
        return self._boxes[where][1][start : start + numel]

    # ---- elements -----------------------------------------------------------------------------

    def packed(self) -> tuple[Sequence[FlatPiece], list[torch.Tensor]]:
        """Elements of this rank's ranges that SOURCE carries, and their places in it."""
        return _with_views(self.program.packed, self._open(SOURCE)[0])

    def applied(self) -> tuple[Sequence[FlatPiece], list[torch.Tensor]]:
        """Elements of this rank's ranges that UPDATE has carried elements for, and those."""
        return _with_views(self.program.applied, self._boxes[UPDATE][1])

    def assemble(self) -> list[tuple[Batch, torch.Tensor]]:
        """The matrices that this rank computes, (B, m, n) for each shape, from SOURCE."""
        self.computed.rewind()
        dtype, found = self._wire.dtypes[SOURCE.kind], []
        matrices: dict[int, torch.Tensor] = {}
        for batch in self.program.batches:
            m, n = batch.shape
            count, turned = len(batch.matrices), m > n and self._wire.small_side_first
            flat = self.computed.take(count, *((n, m) if turned else (m, n)), dtype=dtype)
            values = flat.mT if turned else flat
            found.append((batch, values))
            matrices.update(zip(batch.matrices, values, strict=True))
        self.place(matrices)
        self.count_matrices(len(matrices))
        return found

    def place(self, matrices: Mapping[int, torch.Tensor]) -> None:
        """Copy the elements of SOURCE into matrices (or panels), by index."""
        received = self._boxes[SOURCE][1]
        patches = self.program.assembled
        copy_all(
            [view_of(matrices[p.matrix], p.region) for p in patches],
            [_patch_view(received, p) for p in patches],
        )

    def give_back(self, matrices: Mapping[int, torch.Tensor]) -> None:
        """Copy the elements of updates (or of their panels) into UPDATE, by index."""
        sent = self._open(UPDATE)[0]
        patches = [p for p in self.program.returned if p.matrix in matrices]
        copy_all(
            [_patch_view(sent, p) for p in patches],
            [view_of(matrices[p.matrix], p.region) for p in patches],
        )

    # ---- the exchange -------------------------------------------------------------------------

    def exchange(self, where: Round) -> Iterator[Flight]:
        """Send and receive; let other waves work, and go on once it has landed."""
        message, (sent, received) = self.program.messages[where], self._open(where)
        if self._wire.size == 1:
            yield Flight(pending=None, sent=sent, received=received)
            return
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

    def _open(self, where: Round) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers to send and to receive, allocated when first asked for."""
        if where not in self._boxes:
            if self._reuses_messages:
                self._arena.rewind(self._floor)
            message, dtype = self.program.messages[where], self._wire.dtypes[where.kind]
            sent = self._arena.take(sum(message.sent_counts), dtype=dtype)
            # Alone, what is sent is what is received.
            received = (
                sent
                if self._wire.size == 1
                else self._arena.take(sum(message.received_counts), dtype=dtype)
            )
            self._boxes[where] = sent, received
        return self._boxes[where]


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
    """Copy each source into its target, at once where the device can."""
    if targets:
        torch._foreach_copy_(targets, sources)


def _with_views(
    pieces: Sequence[FlatPiece], buffer: torch.Tensor
) -> tuple[Sequence[FlatPiece], list[torch.Tensor]]:
    """The pieces, and their places in a message: of the shapes of ``piece_of``, contiguous."""
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
