"""One rank's part of one wave, derived from the plan: what it sends, receives, computes, applies.

Both ends of a message derive the same order (by partner, matrix, position in the shard), so nothing
about it has to be communicated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_muon.placement.plan import Plan
from megatron_muon.placement.regions import Piece, Region, Share, merged
from megatron_muon.placement.schemes import CAPTURED, SOURCE, UPDATE, Round, Scheme

Slot = tuple[int, int]
"""(first element, number of elements) in a message buffer."""

Rows = tuple[int, int]
"""(first, end) of some rows of a matrix."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One all-to-all-v as one rank sees it.

    Attributes:
        sent_counts: Elements for every rank.
        received_counts: Elements from every rank.
        sent: (matrix, partner) to the slot in the sent buffer.
        received: (matrix, partner) to the slot in the received buffer.
    """

    sent_counts: tuple[int, ...]
    received_counts: tuple[int, ...]
    sent: Mapping[tuple[int, int], Slot]
    received: Mapping[tuple[int, int], Slot]

    @property
    def is_empty(self) -> bool:
        """True where the rank sends and receives nothing."""
        return not self.sent and not self.received


@dataclass(frozen=True, kw_only=True)
class FlatPiece:
    """Elements of one of this rank's flat ranges, and their place in a message.

    Attributes:
        matrix: Index into ``Plan.matrices``.
        parameter: Index into ``Plan.parameters``.
        start: First element, counted from the start of this rank's range.
        rows: Number of intervals of equal length, ``stride`` apart; contiguous in the message.
        cols: Elements of each of them.
        stride: Elements from the start of one to that of the next, if there are several.
        offset: First element in the message.
    """

    matrix: int
    parameter: int
    start: int
    rows: int
    cols: int
    stride: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.cols


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A region of a matrix (or panel) that this rank computes, and its place in a message.

    Attributes:
        matrix: Index into ``Plan.matrices``.
        region: Rows and columns, counted in the matrix or panel.
        offset: First element in the message.
    """

    matrix: int
    region: Region
    offset: int

    def within(self, rows: Rows) -> Patch | None:
        """What of it is in some rows, counted from the first of them."""
        first, region = _rows_within(self.region, rows)
        if region is None:
            return None
        return Patch(
            matrix=self.matrix, region=region, offset=self.offset + first * self.region.cols
        )


@dataclass(frozen=True, kw_only=True)
class LocalPiece(FlatPiece):
    """Elements of a flat range of this rank that belong to what it computes itself.

    Attributes:
        region: Rows and columns, counted in the matrix or panel.
        is_source: As in ``Share``.
    """

    region: Region
    is_source: bool

    def within(self, rows: Rows) -> LocalPiece | None:
        """What of it is in some rows, counted from the first of them."""
        first, region = _rows_within(self.region, rows)
        if region is None:
            return None
        start = self.start + first * self.stride
        return replace(self, start=start, rows=region.rows, region=region)


def _rows_within(region: Region, rows: Rows) -> tuple[int, Region | None]:
    first, end = max(region.row, rows[0]), min(region.row + region.rows, rows[1])
    if first >= end:
        return 0, None
    return first - region.row, replace(region, row=first - rows[0], rows=end - first)


@dataclass(frozen=True, kw_only=True)
class HeldMatrix:
    """A matrix that this rank holds a share of.

    Attributes:
        index: Index into ``Plan.matrices``.
        parameter: Index into ``Plan.parameters``.
        range_start: First element of this rank's range in its shard; pieces count from the shard.
        share: What this rank holds.
        scheme: How the matrix is communicated.
    """

    index: int
    parameter: int
    range_start: int
    share: Share
    scheme: Scheme

    def pieces(self, slot: Slot, region: Region | None = None) -> Iterator[FlatPiece]:
        """The elements of the share (inside a region), in a slot of a message."""
        placed: list[tuple[Piece, int]] = []
        offset = slot[0]
        for piece in self.share.pieces(region):
            placed.append((piece, offset))
            offset += piece.numel
        for start, rows, cols, stride, first in merged(placed):
            yield FlatPiece(
                matrix=self.index,
                parameter=self.parameter,
                start=start - self.range_start,
                rows=rows,
                cols=cols,
                stride=stride,
                offset=first,
            )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Matrices of one shape that this rank assembles and computes together.

    Attributes:
        shape: (m, n).
        matrices: Indices into ``Plan.matrices``.
    """

    shape: tuple[int, int]
    matrices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class WaveProgram:
    """What one rank does in one wave.

    Attributes:
        held: Matrices that it holds a share of.
        batches: Matrices that it assembles and computes alone, by shape.
        factored: Matrices whose factors it computes from products that it receives.
        part: Index of the matrix that it computes a panel of, None without one.
        messages: What it sends and receives; the same rounds on every rank, ascending.
        local: Elements that it holds of what it computes; they are in no message.
        held_elements: Elements of its ranges that each message carries or brings elements for.
        computed_elements: Where the elements of each message belong in what it computes.
    """

    held: tuple[HeldMatrix, ...]
    batches: tuple[Batch, ...]
    factored: tuple[int, ...]
    part: int | None
    messages: Mapping[Round, Message]
    local: tuple[LocalPiece, ...]
    held_elements: Mapping[Round, tuple[FlatPiece, ...]]
    computed_elements: Mapping[Round, tuple[Patch, ...]]


def compile_wave(plan: Plan, wave: Sequence[int], rank: int) -> WaveProgram:
    """Derive one rank's program of a wave.

    Args:
        plan: The plan.
        wave: Indices of the matrices.
        rank: Rank in the exchange group.
    """
    number = {parameter.name: i for i, parameter in enumerate(plan.parameters)}
    dp_rank = rank // plan.group.tp
    held = []
    for index in wave:
        parameter = number[plan.matrices[index].parameter]
        held += [
            HeldMatrix(
                index=index,
                parameter=parameter,
                range_start=plan.parameters[parameter].ranges[dp_rank][0],
                share=share,
                scheme=plan.schemes[index],
            )
            for share in plan.schemes[index].shares
            if share.rank == rank
        ]
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    factored, part = [], None
    for index in wave:
        scheme = plan.schemes[index]
        if rank not in scheme.ranks:
            continue
        if len(scheme.ranks) > 1:
            part = index
        elif scheme.assembles:
            by_shape[plan.matrices[index].shape].append(index)
        else:
            factored.append(index)
    rounds = sorted({where for index in wave for where in plan.schemes[index].messages})
    messages = {where: _message(plan, wave, rank, where) for where in rounds}
    elements = [
        (where, messages[where], where == SOURCE)
        for where in (SOURCE, UPDATE, CAPTURED)
        if where in messages
    ]
    return WaveProgram(
        held=tuple(held),
        batches=tuple(
            Batch(shape=shape, matrices=tuple(by_shape[shape])) for shape in sorted(by_shape)
        ),
        factored=tuple(factored),
        part=part,
        messages=messages,
        local=tuple(_elements_kept(held, rank)),
        held_elements={
            where: tuple(_elements_held(held, where, message.sent if out else message.received))
            for where, message, out in elements
        },
        computed_elements={
            where: tuple(
                _elements_computed(plan, rank, where, message.received if out else message.sent)
            )
            for where, message, out in elements
        },
    )


def _message(plan: Plan, wave: Sequence[int], rank: int, where: Round) -> Message:
    outgoing, incoming = [], []
    for index in wave:
        for source, target, elements in plan.schemes[index].messages.get(where, ()):
            if elements and source == rank:
                outgoing.append((target, index, elements))
            if elements and target == rank:
                incoming.append((source, index, elements))
    sent, sent_counts = _slots(outgoing, plan.group.size)
    received, received_counts = _slots(incoming, plan.group.size)
    return Message(
        sent_counts=sent_counts, received_counts=received_counts, sent=sent, received=received
    )


def _slots(
    entries: list[tuple[int, int, int]], size: int
) -> tuple[dict[tuple[int, int], Slot], tuple[int, ...]]:
    """Places of (partner, matrix, elements) in a buffer, and the elements of each partner."""
    counts = [0] * size
    slots: dict[tuple[int, int], Slot] = {}
    offset = 0
    for partner, index, elements in sorted(entries):
        slots[index, partner] = (offset, elements)
        counts[partner] += elements
        offset += elements
    return slots, tuple(counts)


def _elements_kept(held: Sequence[HeldMatrix], rank: int) -> Iterator[LocalPiece]:
    """This rank's elements of the matrices and panels that it computes."""
    for entry in held:
        scheme = entry.scheme
        if rank not in scheme.ranks or not scheme.assembles:
            continue
        whole = scheme.region(scheme.ranks.index(rank))
        for piece in entry.share.pieces(whole):
            yield LocalPiece(
                parameter=entry.parameter,
                start=piece.start - entry.range_start,
                rows=piece.rows,
                cols=piece.cols,
                stride=piece.stride,
                offset=0,
                matrix=entry.index,
                region=_inside(piece, whole),
                is_source=entry.share.is_source,
            )


def _inside(piece: Region, whole: Region) -> Region:
    """A region with rows and columns counted in another that contains it."""
    return Region(
        row=piece.row - whole.row,
        rows=piece.rows,
        col=piece.col - whole.col,
        cols=piece.cols,
    )


def _elements_held(
    held: Sequence[HeldMatrix], where: Round, slots: Mapping[tuple[int, int], Slot]
) -> Iterator[FlatPiece]:
    """This rank's elements of every slot, in the order of the message."""
    by_index = {entry.index: entry for entry in held}
    for (index, partner), slot in slots.items():
        entry = by_index[index]
        scheme = entry.scheme
        if scheme.carries_elements(where, entry.share):
            region = scheme.region(scheme.ranks.index(partner))
            yield from entry.pieces(slot, region)


def _elements_computed(
    plan: Plan, rank: int, where: Round, slots: Mapping[tuple[int, int], Slot]
) -> Iterator[Patch]:
    """Regions of the matrices and panels that this rank computes, for every slot."""
    for (index, partner), (offset, _) in slots.items():
        scheme = plan.schemes[index]
        (share,) = (share for share in scheme.shares if share.rank == partner)
        if not scheme.carries_elements(where, share):
            continue
        whole = scheme.region(scheme.ranks.index(rank))
        for piece in share.pieces(whole):
            yield Patch(matrix=index, region=_inside(piece, whole), offset=offset)
            offset += piece.numel
