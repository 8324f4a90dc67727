"""The Plan: who computes what, when, and what travels. The same on every rank."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from megatron_muon.matrices import LogicalMatrix, ShardedParameter
from megatron_muon.placement.segments import ExchangeGroup, Segment
from megatron_muon.placement.shared import (
    SHARED_SLOTS,
    Itemsizes,
    SharedMatrix,
    SharedTraffic,
    crossing_bytes,
    shared_peaks,
    shared_traffic,
)
from megatron_muon.placement.waves import EMPTY, Footprint, peak_elements

CostFunction = Callable[[int, int], int]
"""Estimated time of orthogonalizing one (m, n) matrix, in any unit."""


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """What one rank does in one step.

    Attributes:
        flops: Floating-point operations of its orthogonalizations.
        cost: Estimated time of them, in the unit of ``Plan.costs``.
        sent_bytes: Bytes that leave it, both ways of the exchange, its own pieces not counted.
        received_bytes: Bytes that reach it, its own pieces not counted.
        peak_buffer_bytes: Largest sum of exchange buffers and assembled matrices alive at once.
        matrices: Number of matrices it owns; one that is shared counts for the first of its ranks.
    """

    flops: int
    cost: int
    sent_bytes: int
    received_bytes: int
    peak_buffer_bytes: int
    matrices: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One stage's exchange, from names, shapes and group sizes alone.

    Attributes:
        group: Sizes of the exchange group.
        parameters: The parameters, sorted by name.
        matrices: The logical matrices in forward order (natural order of their names).
        owners: Rank in the group that orthogonalizes each matrix; the first of those that share it.
        waves: For each wave the indices of its matrices, shared ones left out.
        gathers: For each matrix the runs that go to its owner.
        scatters: For each matrix the runs that receive its update.
        costs: Estimated time of each matrix, as a whole.
        itemsize: Bytes of one element on the wire.
        ranks_per_node: Neighbouring ranks that are on one node, as far as is known.
        flops: Floating-point operations of each matrix, as a whole; empty where costs are such.
        possible: Cost that the busiest rank has in any placement, see ``bounds``.
        shared: Matrices that several ranks compute together.
        shared_waves: For each wave of those their positions in ``shared``.
        shared_slots: Such waves under way at once.
        shared_itemsizes: Bytes of an element of (partial sums and block rows, norms).
    """

    group: ExchangeGroup
    parameters: tuple[ShardedParameter, ...]
    matrices: tuple[LogicalMatrix, ...]
    owners: tuple[int, ...]
    waves: tuple[tuple[int, ...], ...]
    gathers: tuple[tuple[Segment, ...], ...]
    scatters: tuple[tuple[Segment, ...], ...]
    costs: tuple[int, ...]
    itemsize: int
    ranks_per_node: int
    flops: tuple[int, ...] = ()
    possible: int
    shared: tuple[SharedMatrix, ...] = ()
    shared_waves: tuple[tuple[int, ...], ...] = ()
    shared_slots: int = SHARED_SLOTS
    shared_itemsizes: tuple[int, int] = (0, 0)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of inputs and choices; equal on all ranks or the job must not start."""
        # The runs follow from parameters, matrices and group, and are by far the longest part.
        decided = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("gathers", "scatters")
        }
        return hashlib.sha256(repr(decided).encode()).hexdigest()

    def whole_matrix_traffic(self) -> tuple[list[int], list[int]]:
        """Bytes (sent, received) by every rank of matrices that travel whole, both ways."""
        sent, received = [0] * self.group.size, [0] * self.group.size
        in_parts = {matrix.index for matrix in self.shared}
        for index, owner in enumerate(self.owners):
            if index in in_parts:
                continue
            for segment in self.gathers[index]:
                if segment.rank != owner:
                    sent[segment.rank] += segment.numel * self.itemsize
                    received[owner] += segment.numel * self.itemsize
            for segment in self.scatters[index]:
                if segment.rank != owner:
                    sent[owner] += segment.numel * self.itemsize
                    received[segment.rank] += segment.numel * self.itemsize
        return sent, received

    @cached_property
    def traffic_of_shared(self) -> tuple[SharedTraffic, ...]:
        """What travels between holders and the ranks of each shared matrix."""
        return tuple(
            shared_traffic(m, self.gathers[m.index], self.scatters[m.index]) for m in self.shared
        )

    @property
    def itemsizes(self) -> Itemsizes:
        """Bytes of an element of everything that travels."""
        squares, scalars = self.shared_itemsizes
        return Itemsizes(exchange=self.itemsize, squares=squares, scalars=scalars)

    @cached_property
    def loads(self) -> tuple[RankLoad, ...]:
        """Predicted work, traffic and memory of every rank."""
        size = self.group.size
        flops, costs, owned = [0] * size, [0] * size, [0] * size
        in_parts = {matrix.index for matrix in self.shared}
        for index, owner in enumerate(self.owners):
            owned[owner] += 1
            if index not in in_parts:
                flops[owner] += (self.flops or self.costs)[index]
                costs[owner] += self.costs[index]
        for matrix in self.shared:
            for number, rank in enumerate(matrix.ranks):
                flops[rank] += matrix.flops[number]
                costs[rank] += matrix.costs[number]
        sent, received = self.whole_matrix_traffic()
        more_sent, more_received = crossing_bytes(
            self.shared, self.traffic_of_shared, self.itemsizes, size
        )
        footprints = wave_footprints(
            self.waves, self.matrices, self.owners, self.gathers, self.scatters, size
        )
        peaks = shared_peaks(
            self.shared,
            self.traffic_of_shared,
            self.shared_waves,
            self.itemsizes,
            size,
            self.shared_slots,
        )
        return tuple(
            RankLoad(
                flops=flops[rank],
                cost=costs[rank],
                sent_bytes=sent[rank] + more_sent[rank],
                received_bytes=received[rank] + more_received[rank],
                peak_buffer_bytes=wave_peak(footprints, rank) * self.itemsize + peaks[rank],
                matrices=owned[rank],
            )
            for rank in range(size)
        )

    @property
    def balance(self) -> tuple[float, float]:
        """(max/mean estimated time reached, what no placement can beat/mean)."""
        costs = [load.cost for load in self.loads]
        if not any(costs):
            return 1.0, 1.0
        mean = sum(costs) / self.group.size
        return max(costs) / mean, max(mean, self.possible) / mean


def wave_footprints(
    waves: Sequence[Sequence[int]],
    matrices: Sequence[LogicalMatrix],
    owners: Sequence[int],
    gathers: Sequence[Sequence[Segment]],
    scatters: Sequence[Sequence[Segment]],
    size: int,
) -> list[Mapping[int, Footprint]]:
    """For each wave, what each rank with anything to do in it holds."""
    result: list[Mapping[int, Footprint]] = []
    for wave in waves:
        outbound: dict[int, int] = defaultdict(int)
        assembled: dict[int, int] = defaultdict(int)
        inbound: dict[int, int] = defaultdict(int)
        for index in wave:
            owner = owners[index]
            assembled[owner] += matrices[index].numel
            for elements, runs in ((outbound, gathers[index]), (inbound, scatters[index])):
                for segment in runs:
                    elements[segment.rank] += segment.numel
                    # Alone, what is sent is what is received.
                    elements[owner] += segment.numel * (size > 1)
        result.append(
            {
                rank: Footprint(
                    outbound=outbound[rank], matrices=assembled[rank], inbound=inbound[rank]
                )
                for rank in sorted({*outbound, *assembled, *inbound})
            }
        )
    return result


def wave_peak(footprints: Sequence[Mapping[int, Footprint]], rank: int) -> int:
    """Elements that a rank holds for waves in which it has these footprints."""
    return peak_elements([wave.get(rank, EMPTY) for wave in footprints])
