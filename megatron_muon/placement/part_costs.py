"""What a part of a split matrix costs its rank: operations, and messages to the other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_muon.linalg import OVER_NETWORK, RequestKind, Team
from megatron_muon.placement.bounds import Options
from megatron_muon.placement.regions import even_cuts

MIN_SPLIT_FLOPS = 1 << 37
"""Operations of a matrix below which splitting it gains nothing.

1.4e11, a third of a millisecond of a GPU at 400 TFLOP/s: about what its messages take, in latency,
and at 200 GB/s also in bytes (a square matrix of 1,700 among eight ranks: each sends 26 m² bytes
for 30 m³ operations).
"""

MOST_SPLIT_RANKS = 16
"""Among which a matrix is split unless the user says otherwise; parts of more are thin.

Two nodes of eight GPUs. Over three each would send a third more over the network for two thirds of
the work.
"""

FLOPS_PER_BYTE = {"cuda": 2000, "cpu": 20}
"""Operations that take as long as a byte between the ranks of a node, by device type.

400 TFLOP/s over 200 GB/s between the GPUs of a node; 20 GFLOP/s over 1 GB/s of gloo on one machine.
"""

FLOPS_PER_NETWORK_BYTE = {"cuda": 10_000, "cpu": 20}
"""The same between nodes.

400 TFLOP/s over 40 GB/s of an adapter of 400 Gb/s for every GPU; 20 GFLOP/s over 1 GB/s.
"""

NETWORK_LATENCY_BYTES = 1 << 20
"""Bytes that take as long over the network as a message takes to set out: 26 µs at 40 GB/s."""


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """What planning has to know of matrices that several ranks compute.

    Attributes:
        most_ranks: Most ranks that compute one matrix; 1 splits none.
        flops: (m, n, ranks, number) to the operations of one of them; number 0 has the most.
        requests: (m, n, their team) to the messages among them, in order: ``scalars`` first.
        itemsize: Bytes of an element of all messages but ``scalars``.
        scalar_itemsize: Bytes of an element of ``scalars``.
        min_flops: Matrices with fewer operations are not split.
        flops_per_byte: Operations that take as long as a byte between the ranks of a node.
        flops_per_network_byte: The same between nodes.
    """

    most_ranks: int
    flops: Callable[[int, int, int, int], int]
    requests: Callable[[int, int, Team], tuple[RequestKind, ...]]
    itemsize: int
    scalar_itemsize: int
    min_flops: int = MIN_SPLIT_FLOPS
    flops_per_byte: int = 0
    flops_per_network_byte: int = 0

    def bytes_moved(self, m: int, n: int, team: Team, number: int) -> tuple[int, int]:
        """Bytes that one of a team sends or receives, whichever is more.

        Returns:
            (bytes within its node, bytes over the network with ``NETWORK_LATENCY_BYTES`` for every
            message).
        """
        near, far = [0, 0], [0, 0]
        for kind, count in Counter(self.requests(m, n, team)).items():
            moved = far if kind in OVER_NETWORK else near
            for other in team.partners(kind, number):
                if other != number:
                    moved[0] += count * self._bytes(kind, team, number, other, min(m, n))
                    moved[1] += count * self._bytes(kind, team, other, number, min(m, n))
            if kind in OVER_NETWORK:
                far = [each + count * NETWORK_LATENCY_BYTES for each in far]
        return max(near), max(far)

    def _bytes(self, kind: RequestKind, team: Team, source: int, target: int, short: int) -> int:
        if kind == "scalars":
            return 2 * self.scalar_itemsize
        return team.rows_sent(kind, source, target) * short * self.itemsize


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One matrix, before it is decided who computes it.

    Attributes:
        name: Name.
        shape: (m, n).
        flops: Operations of the whole matrix.
        cost: Estimated time of the whole matrix.
        held: Elements held by each rank that holds some.
    """

    name: str
    shape: tuple[int, int]
    flops: int
    cost: int
    held: Mapping[int, int]


def team_of(shape: tuple[int, int], ranks: int, ranks_per_node: int) -> Team:
    """How so many ranks are arranged to compute an (m, n) matrix: on one node, or on whole ones."""
    nodes = 1 if ranks <= ranks_per_node else ranks // ranks_per_node
    return Team(rows=even_cuts(min(shape), ranks), nodes=nodes)


def part_cost(candidate: Candidate, splitting: Splitting, team: Team, number: int = 0) -> int:
    """Estimated time of one part, messages among its ranks included.

    Of the whole matrix's time, as its operations are of the whole's.
    """
    if team.size == 1:
        return candidate.cost
    m, n = candidate.shape
    near, far = splitting.bytes_moved(m, n, team, number)
    moved = near * splitting.flops_per_byte + far * splitting.flops_per_network_byte
    operations = splitting.flops(m, n, team.size, number) + moved
    return -(-candidate.cost * operations // max(1, candidate.flops))


class PartCosts:
    """Costs of parts, by matrix and number of parts; equal shapes are asked for once.

    Args:
        candidates: The matrices.
        splitting: How matrices can be split; None splits none.
        ranks: Number of ranks.
        ranks_per_node: Neighbouring ranks that are on one node.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        splitting: Splitting | None,
        *,
        ranks: int,
        ranks_per_node: int,
    ) -> None:
        self.candidates = candidates
        self.splitting = splitting
        self._ranks = ranks
        self._per_node = min(ranks_per_node, ranks)
        self._known: dict[tuple[tuple[int, int], int, int, int], int] = {}

    def __call__(self, index: int, count: int, number: int = 0) -> int:
        """Cost of one of ``count`` parts, the largest by default."""
        candidate = self.candidates[index]
        if count == 1 or self.splitting is None:
            return candidate.cost
        key = (candidate.shape, candidate.cost, count, number)
        if key not in self._known:
            team = team_of(candidate.shape, count, self._per_node)
            self._known[key] = part_cost(candidate, self.splitting, team, number)
        return self._known[key]

    def flops(self, index: int, count: int) -> int:
        """Operations of the largest of ``count`` parts."""
        candidate = self.candidates[index]
        if count == 1 or self.splitting is None:
            return candidate.flops
        return self.splitting.flops(*candidate.shape, count, 0)

    def counts(self, index: int, most: int) -> list[int]:
        """Numbers of parts that a matrix may have: all that fit on a node, and whole nodes."""
        if self.splitting is None:
            return [1]
        most = min(most, self.splitting.most_ranks, self._ranks, max(self.candidates[index].shape))
        whole_nodes = range(2 * self._per_node, most + 1, self._per_node)
        return [*range(1, min(most, self._per_node) + 1), *whole_nodes]

    def options(self, index: int, most: int) -> Options:
        """(parts, cost of the largest of them) for every number of parts."""
        return tuple((count, self(index, count)) for count in self.counts(index, most))

    def smallest(self, index: int, most: int) -> Options:
        """(parts, cost of the smallest of them) for every number of parts."""
        return tuple((count, self(index, count, count - 1)) for count in self.counts(index, most))

    def most_parts(self, index: int, most: int) -> int:
        """Number of parts, up to ``most``, at which a part of a matrix takes least."""
        candidate = self.candidates[index]
        if self.splitting is None or candidate.flops < self.splitting.min_flops:
            return 1
        return min(self.counts(index, most), key=lambda count: self(index, count))

    def least_parts(self, index: int, most_elements: int | None) -> int:
        """Number of parts that have no more elements than allowed, or as many as there may be."""
        if self.splitting is None or most_elements is None:
            return 1
        m, n = self.candidates[index].shape
        counts = self.counts(index, self._ranks)
        return next((count for count in counts if count * most_elements >= m * n), counts[-1])
