"""One rank's part of one wave of shared matrices: its panel, and what it sends whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_muon.placement.panels import Cut, Panel, PanelRun, panel_runs
from megatron_muon.placement.plan import Plan
from megatron_muon.placement.program import Message, Patch, Piece
from megatron_muon.placement.segments import Segment
from megatron_muon.placement.shared import SharedMatrix

Slot = tuple[int, int]
"""(first element, number of elements) in a message buffer."""


@dataclass(frozen=True, kw_only=True)
class SharedPart:
    """What one rank computes of one shared matrix.

    Attributes:
        index: Index into ``Plan.matrices``.
        shape: (m, n) of the whole matrix.
        number: This rank's place among those that share it.
        rows: Block rows of all of them.
        panel: This rank's panel.
        requests: Kinds of the messages among them, in order.
    """

    index: int
    shape: tuple[int, int]
    number: int
    rows: tuple[Cut, ...]
    panel: Panel
    requests: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RequestProgram:
    """One message among the ranks of every shared matrix of a wave, as one rank sees it.

    Attributes:
        kind: What its part asks for; empty where it has none.
        is_scalars: Whether norms travel, in their own dtype; the same on every rank.
        message: Elements for and from every rank.
        sent: For each rank of its matrix the slot in the sent buffer; its own is empty.
        received: The same in the received buffer.
    """

    kind: str
    is_scalars: bool
    message: Message
    sent: tuple[Slot, ...]
    received: tuple[Slot, ...]


@dataclass(frozen=True, kw_only=True)
class SharedWave:
    """What one rank does in one wave.

    Attributes:
        part: What it computes, None for nothing.
        out: Counts of the message that brings panels together.
        packed: Pieces that it packs into that message.
        assembled: Where the received elements go in its panel.
        requests: The messages among the ranks of a matrix; as many on every rank.
        back: Counts of the message with the updates.
        returned: Where the elements of that message come from in its panel.
        applied: Pieces that it applies the received update to.
    """

    part: SharedPart | None
    out: Message
    packed: tuple[Piece, ...]
    assembled: tuple[Patch, ...]
    requests: tuple[RequestProgram, ...]
    back: Message
    returned: tuple[Patch, ...]
    applied: tuple[Piece, ...]


def compile_shared_wave(plan: Plan, wave: Sequence[int], rank: int) -> SharedWave:
    """Derive one rank's program from the plan.

    Both ends of a message derive the same order: by partner, matrix, position in the shard.
    """
    matrices = [plan.shared[position] for position in wave]
    mine = next((matrix for matrix in matrices if rank in matrix.ranks), None)
    packed, out_counts = _held(plan, matrices, rank, plan.gathers)
    assembled, in_counts = _owned(plan, mine, rank, plan.gathers)
    returned, return_counts = _owned(plan, mine, rank, plan.scatters)
    applied, applied_counts = _held(plan, matrices, rank, plan.scatters)
    longest = max(len(matrix.requests) for matrix in matrices)
    return SharedWave(
        part=None if mine is None else _part(mine, rank),
        out=Message(sent_counts=out_counts, received_counts=in_counts),
        packed=packed,
        assembled=assembled,
        requests=tuple(_request(plan, mine, rank, number) for number in range(longest)),
        back=Message(sent_counts=return_counts, received_counts=applied_counts),
        returned=returned,
        applied=applied,
    )


def _part(matrix: SharedMatrix, rank: int) -> SharedPart:
    number = matrix.ranks.index(rank)
    return SharedPart(
        index=matrix.index,
        shape=matrix.shape,
        number=number,
        rows=matrix.rows,
        panel=matrix.panels[number],
        requests=matrix.requests,
    )


def _runs_by_owner(
    matrices: Sequence[SharedMatrix],
    rank: int,
    runs: Sequence[Sequence[Segment]],
) -> Iterator[tuple[int, int, PanelRun]]:
    """(owner, matrix, rectangle of its panel) of everything that a rank holds."""
    own = {m.index: [s for s in runs[m.index] if s.rank == rank] for m in matrices}
    owners = sorted(
        (owner, matrix.index, number)
        for matrix in matrices
        if own[matrix.index]
        for number, owner in enumerate(matrix.ranks)
    )
    cut = {matrix.index: matrix.panels for matrix in matrices}
    for owner, index, number in owners:
        for segment in own[index]:
            for run in panel_runs(segment, cut[index][number]):
                yield owner, index, run


def _held(
    plan: Plan,
    matrices: Sequence[SharedMatrix],
    rank: int,
    runs: Sequence[Sequence[Segment]],
) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """The pieces that this rank holds, ordered by owner, and the elements for each owner."""
    parameters: Mapping[str, int] = {p.name: i for i, p in enumerate(plan.parameters)}
    dp_rank = rank // plan.group.tp
    pieces: list[Piece] = []
    counts = [0] * plan.group.size
    offset = 0
    for owner, index, run in _runs_by_owner(matrices, rank, runs):
        parameter = parameters[plan.matrices[index].parameter]
        is_flat = run.rows == 1 or run.cols == run.stride
        numel = run.rows * run.cols
        pieces.append(
            Piece(
                parameter=parameter,
                start=run.start - plan.parameters[parameter].ranges[dp_rank][0],
                numel=numel,
                offset=offset,
                rows=1 if is_flat else run.rows,
                stride=0 if is_flat else run.stride,
            )
        )
        counts[owner] += numel
        offset += numel
    return tuple(pieces), tuple(counts)


def _owned(
    plan: Plan,
    matrix: SharedMatrix | None,
    rank: int,
    runs: Sequence[Sequence[Segment]],
) -> tuple[tuple[Patch, ...], tuple[int, ...]]:
    """The patches of this rank's panel, ordered by holder, and the elements of each holder."""
    counts = [0] * plan.group.size
    if matrix is None:
        return (), tuple(counts)
    panel = matrix.panels[matrix.ranks.index(rank)]
    found = [(s.rank, run) for s in runs[matrix.index] for run in panel_runs(s, panel)]
    for holder, run in found:
        counts[holder] += run.rows * run.cols
    offsets = [0, *accumulate(counts)][: plan.group.size]
    patches = []
    for holder, run in found:
        patches.append(
            Patch(
                batch=0,
                position=0,
                row=run.row,
                rows=run.rows,
                col=run.col,
                cols=run.cols,
                offset=offsets[holder],
            )
        )
        offsets[holder] += run.rows * run.cols
    return tuple(patches), tuple(counts)


def _request(plan: Plan, mine: SharedMatrix | None, rank: int, number: int) -> RequestProgram:
    """The message of one number: for a rank whose matrix needs no more of them, an empty one."""
    sent_counts, received_counts = [0] * plan.group.size, [0] * plan.group.size
    sent: tuple[Slot, ...] = ()
    received: tuple[Slot, ...] = ()
    kind = mine.requests[number] if mine and number < len(mine.requests) else ""
    if mine and kind:
        own = mine.ranks.index(rank)
        for other, partner in enumerate(mine.ranks):
            if other != own:
                sent_counts[partner] = mine.elements(kind, own, other)
                received_counts[partner] = mine.elements(kind, other, own)
        sent = _slots([sent_counts[partner] for partner in mine.ranks])
        received = _slots([received_counts[partner] for partner in mine.ranks])
    return RequestProgram(
        kind=kind,
        is_scalars=number == 0,
        message=Message(sent_counts=tuple(sent_counts), received_counts=tuple(received_counts)),
        sent=sent,
        received=received,
    )


def _slots(counts: Sequence[int]) -> tuple[Slot, ...]:
    """Places of the ranks of a matrix, which are ascending as in the message."""
    return tuple(zip([0, *accumulate(counts)][: len(counts)], counts, strict=True))
