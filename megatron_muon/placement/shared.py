"""Shared matrices of a plan: who has which panel, which waves they travel in, what that costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_muon.placement.panels import Cut, Panel, even_cuts, panel_elements, panels
from megatron_muon.placement.segments import Segment

SHARED_SLOTS = 2
"""Waves of shared matrices under way at once, where memory allows it."""


@dataclass(frozen=True, kw_only=True)
class SharedMatrix:
    """A matrix that several ranks compute together.

    Attributes:
        index: Index into ``Plan.matrices``.
        shape: (m, n).
        ranks: The ranks; number J of them has panel J and block row J.
        requests: Kinds of the messages among them, in order.
        flops: Operations of each.
        costs: Estimated time of each.
    """

    index: int
    shape: tuple[int, int]
    ranks: tuple[int, ...]
    requests: tuple[str, ...]
    flops: tuple[int, ...]
    costs: tuple[int, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """The panel of every rank."""
        return panels(self.shape, len(self.ranks))

    @property
    def rows(self) -> tuple[Cut, ...]:
        """The block row of every rank, of what is square."""
        return even_cuts(min(self.shape), len(self.ranks))

    def elements(self, kind: str, source: int, target: int) -> int:
        """Elements that rank number ``source`` sends to number ``target`` for one request."""
        if kind == "scalars":
            return 2
        start, end = self.rows[target if kind == "partials" else source]
        return (end - start) * min(self.shape)


@dataclass(frozen=True, kw_only=True)
class SharedTraffic:
    """What travels for one shared matrix, in elements.

    Attributes:
        out: For each holder the elements of every panel that it sends.
        back: For each holder the elements of every panel that it receives the update of.
    """

    out: Mapping[int, tuple[int, ...]]
    back: Mapping[int, tuple[int, ...]]


def shared_traffic(
    matrix: SharedMatrix, gathers: Sequence[Segment], scatters: Sequence[Segment]
) -> SharedTraffic:
    """Counts without enumerating elements or rectangles."""
    out = _by_panel(matrix, gathers)
    return SharedTraffic(out=out, back=out if scatters is gathers else _by_panel(matrix, scatters))


def _by_panel(matrix: SharedMatrix, runs: Sequence[Segment]) -> dict[int, tuple[int, ...]]:
    cut = matrix.panels
    found: dict[int, list[int]] = {}
    for segment in runs:
        counts = found.setdefault(segment.rank, [0] * len(cut))
        for number, panel in enumerate(cut):
            counts[number] += panel_elements(segment, panel)
    return {rank: tuple(counts) for rank, counts in found.items()}


def shared_waves(matrices: Sequence[SharedMatrix]) -> tuple[tuple[int, ...], ...]:
    """Waves in which no rank has more than one part, as few as first fit needs.

    Returns:
        For each wave the positions of its matrices in ``matrices``.
    """
    waves: list[list[int]] = []
    busy: list[set[int]] = []
    for position, matrix in enumerate(matrices):
        ranks = set(matrix.ranks)
        number = next((n for n, taken in enumerate(busy) if not taken & ranks), len(waves))
        if number == len(waves):
            waves.append([])
            busy.append(set())
        waves[number].append(position)
        busy[number] |= ranks
    return tuple(tuple(wave) for wave in waves)


@dataclass(frozen=True, kw_only=True)
class Itemsizes:
    """Bytes of an element.

    Attributes:
        exchange: Of panels and updates.
        squares: Of partial sums and block rows.
        scalars: Of norms.
    """

    exchange: int
    squares: int
    scalars: int

    def of(self, kind: str) -> int:
        """Bytes of an element of one request."""
        return self.scalars if kind == "scalars" else self.squares


def crossing_bytes(
    matrices: Sequence[SharedMatrix],
    traffic: Sequence[SharedTraffic],
    itemsizes: Itemsizes,
    size: int,
) -> tuple[list[int], list[int]]:
    """Bytes (sent, received) by every rank for all shared matrices, its own pieces not counted."""
    sent, received = [0] * size, [0] * size
    for matrix, counts in zip(matrices, traffic, strict=True):
        for number, owner in enumerate(matrix.ranks):
            for there, sources, targets in (
                (counts.out, sent, received),
                (counts.back, received, sent),
            ):
                for rank, elements in there.items():
                    if rank != owner:
                        sources[rank] += elements[number] * itemsizes.exchange
                        targets[owner] += elements[number] * itemsizes.exchange
            out, back = _request_bytes(matrix, number, itemsizes)
            sent[owner] += sum(out)
            received[owner] += sum(back)
    return sent, received


def _request_bytes(
    matrix: SharedMatrix, number: int, itemsizes: Itemsizes
) -> tuple[list[int], list[int]]:
    return request_bytes(matrix.requests, min(matrix.shape), len(matrix.ranks), number, itemsizes)


def request_bytes(
    requests: Sequence[str], short: int, ranks: int, number: int, itemsizes: Itemsizes
) -> tuple[list[int], list[int]]:
    """Bytes (sent, received) by one of the ranks of a matrix for each request.

    Args:
        requests: Kinds of the requests.
        short: Smaller side of the matrix.
        ranks: Number of ranks that share it.
        number: Which of them.
        itemsizes: Bytes of an element.
    """
    start, end = even_cuts(short, ranks)[number]
    mine, theirs = (end - start) * short * (ranks - 1), (short - end + start) * short
    by_kind = {
        "scalars": (2 * (ranks - 1), 2 * (ranks - 1)),
        "partials": (theirs, mine),
        "rows": (mine, theirs),
    }
    both = [
        (by_kind[kind][0] * itemsizes.of(kind), by_kind[kind][1] * itemsizes.of(kind))
        for kind in requests
    ]
    return [out for out, _ in both], [back for _, back in both]


def shared_peaks(
    matrices: Sequence[SharedMatrix],
    traffic: Sequence[SharedTraffic],
    waves: Sequence[Sequence[int]],
    itemsizes: Itemsizes,
    size: int,
    slots: int,
) -> list[int]:
    """Bytes of every rank's buffers: in each slot the largest message and the largest panel."""
    messages, held = [0] * size, [0] * size
    for wave in waves:
        out: dict[int, int] = defaultdict(int)
        back: dict[int, int] = defaultdict(int)
        for position in wave:
            matrix, counts = matrices[position], traffic[position]
            for there, total in ((counts.out, out), (counts.back, back)):
                for rank, elements in there.items():
                    total[rank] += sum(elements) * itemsizes.exchange
                    for number, owner in enumerate(matrix.ranks):
                        total[owner] += elements[number] * itemsizes.exchange
            for number, (owner, panel) in enumerate(zip(matrix.ranks, matrix.panels, strict=True)):
                held[owner] = max(held[owner], panel.numel * itemsizes.exchange)
                both = zip(*_request_bytes(matrix, number, itemsizes), strict=True)
                messages[owner] = max(messages[owner], *(s + r for s, r in both))
        for total in (out, back):
            for rank, count in total.items():
                messages[rank] = max(messages[rank], count)
    return [min(slots, len(waves)) * (m + p) for m, p in zip(messages, held, strict=True)]
