"""One rank's part of one wave: which elements it packs, receives, assembles and applies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from megatron_muon.placement.plan import Plan
from megatron_muon.placement.segments import Segment, rectangles


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of this rank's flat range of one parameter, and its place in a message buffer.

    Attributes:
        parameter: Index into ``Plan.parameters``.
        start: First element, counted from the start of this rank's range.
        numel: Number of elements.
        offset: First element in the buffer.
        rows: Number of runs of equal length that it is made of, one ``stride`` after another;
            contiguous in the buffer.
        stride: Elements from the start of one of these runs to that of the next, if several.
    """

    parameter: int
    start: int
    numel: int
    offset: int
    rows: int = 1
    stride: int = 0


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A rectangle of an owned matrix, and its place in a message buffer.

    Attributes:
        batch: Index into ``WaveProgram.batches``.
        position: Index of the matrix in its batch.
        row: First row.
        rows: Number of rows.
        col: First column.
        cols: Number of columns.
        offset: First element in the buffer.
    """

    batch: int
    position: int
    row: int
    rows: int
    col: int
    cols: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Owned matrices of one shape, orthogonalized together.

    Attributes:
        shape: (m, n).
        matrices: Indices into ``Plan.matrices``.
    """

    shape: tuple[int, int]
    matrices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Message:
    """One direction of an all-to-all-v as one rank sees it.

    Attributes:
        sent_counts: Elements for every rank.
        received_counts: Elements from every rank.
    """

    sent_counts: tuple[int, ...]
    received_counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class WaveProgram:
    """What one rank does in one wave.

    Attributes:
        batches: The matrices it owns, by shape.
        out: Counts of the message to the owners.
        packed: Pieces that it packs into that message.
        assembled: Where the received elements go in its matrices.
        back: Counts of the message from the owners.
        returned: Where the elements of that message come from in its matrices.
        applied: Pieces that it applies the received update to.
    """

    batches: tuple[Batch, ...]
    out: Message
    packed: tuple[Piece, ...]
    assembled: tuple[Patch, ...]
    back: Message
    returned: tuple[Patch, ...]
    applied: tuple[Piece, ...]


def compile_wave(plan: Plan, wave: Iterable[int], rank: int) -> WaveProgram:
    """Derive one rank's program from the plan.

    Both ends of a message derive the same order: by partner, then matrix, then position in the
    shard; so nothing about it has to be communicated.
    """
    wave = tuple(wave)
    owned = [index for index in wave if plan.owners[index] == rank]
    shapes = sorted({plan.matrices[index].shape for index in owned})
    batches = tuple(
        Batch(
            shape=shape,
            matrices=tuple(i for i in owned if plan.matrices[i].shape == shape),
        )
        for shape in shapes
    )
    place = {
        index: (number, position)
        for number, batch in enumerate(batches)
        for position, index in enumerate(batch.matrices)
    }
    held_out, out_counts = _held(plan, wave, rank, plan.gathers)
    assembled, in_counts = _owned(plan, owned, place, plan.gathers)
    returned, return_counts = _owned(plan, owned, place, plan.scatters)
    applied, applied_counts = _held(plan, wave, rank, plan.scatters)
    return WaveProgram(
        batches=batches,
        out=Message(sent_counts=out_counts, received_counts=in_counts),
        packed=held_out,
        assembled=assembled,
        back=Message(sent_counts=return_counts, received_counts=applied_counts),
        returned=returned,
        applied=applied,
    )


def _held(
    plan: Plan, wave: tuple[int, ...], rank: int, runs: tuple[tuple[Segment, ...], ...]
) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """The pieces that this rank holds, ordered by owner, and the elements for each owner."""
    number = {parameter.name: i for i, parameter in enumerate(plan.parameters)}
    dp_rank = rank // plan.group.tp
    pieces: list[Piece] = []
    counts = [0] * plan.group.size
    offset = 0
    for index in sorted(wave, key=lambda i: (plan.owners[i], i)):
        parameter = number[plan.matrices[index].parameter]
        range_start = plan.parameters[parameter].ranges[dp_rank][0]
        for segment in runs[index]:
            if segment.rank != rank:
                continue
            pieces.append(
                Piece(
                    parameter=parameter,
                    start=segment.start - range_start,
                    numel=segment.numel,
                    offset=offset,
                )
            )
            counts[plan.owners[index]] += segment.numel
            offset += segment.numel
    return tuple(pieces), tuple(counts)


def _owned(
    plan: Plan,
    owned: list[int],
    place: dict[int, tuple[int, int]],
    runs: tuple[tuple[Segment, ...], ...],
) -> tuple[tuple[Patch, ...], tuple[int, ...]]:
    """The patches of the owned matrices, ordered by holder, and the elements of each holder."""
    counts = [0] * plan.group.size
    for index in owned:
        for segment in runs[index]:
            counts[segment.rank] += segment.numel
    offsets = [0, *accumulate(counts)][: plan.group.size]
    patches: list[Patch] = []
    for index in owned:
        batch, position = place[index]
        for segment in runs[index]:
            patches.extend(
                Patch(
                    batch=batch,
                    position=position,
                    row=rectangle.row,
                    rows=rectangle.rows,
                    col=rectangle.col,
                    cols=rectangle.cols,
                    offset=offsets[segment.rank] + rectangle.offset,
                )
                for rectangle in rectangles(segment)
            )
            offsets[segment.rank] += segment.numel
    return tuple(patches), tuple(counts)
