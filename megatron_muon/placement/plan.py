"""The Plan: who computes what, when, and what travels. The same on every rank."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from megatron_muon.matrices import LogicalMatrix, ShardedParameter, natural_key
from megatron_muon.placement.balance import assign_owners
from megatron_muon.placement.segments import ExchangeGroup, Segment, copies, segments
from megatron_muon.placement.waves import (
    EMPTY,
    Footprint,
    cut_by_owner,
    initial_cap,
    peak_elements,
)

CostFunction = Callable[[int, int], int]
"""Estimated time of orthogonalizing one (m, n) matrix, in any unit."""


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """What one rank does in one step.

    Attributes:
        flops: Floating-point operations of its orthogonalizations.
        sent_bytes: Bytes that leave it, both ways of the exchange, its own pieces not counted.
        received_bytes: Bytes that reach it, its own pieces not counted.
        peak_buffer_bytes: Largest sum of exchange buffers and assembled matrices alive at once.
        matrices: Number of matrices it owns.
    """

    flops: int
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
        owners: Rank in the group that orthogonalizes each matrix.
        waves: For each wave the indices of its matrices.
        gathers: For each matrix the runs that go to its owner.
        scatters: For each matrix the runs that receive its update.
        costs: Estimated time of each matrix.
        itemsize: Bytes of one element on the wire.
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
        """Bytes (sent, received) by every rank where whole matrices travel both ways."""
        sent, received = [0] * self.group.size, [0] * self.group.size
        for index, owner in enumerate(self.owners):
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
    def loads(self) -> tuple[RankLoad, ...]:
        """Predicted work, traffic and memory of every rank."""
        size = self.group.size
        flops, owned = [0] * size, [0] * size
        for index, owner in enumerate(self.owners):
            flops[owner] += self.costs[index]
            owned[owner] += 1
        sent, received = self.whole_matrix_traffic()
        footprints = _footprints(
            self.waves, self.matrices, self.owners, self.gathers, self.scatters, size
        )
        return tuple(
            RankLoad(
                flops=flops[rank],
                sent_bytes=sent[rank],
                received_bytes=received[rank],
                peak_buffer_bytes=_peak(footprints, rank) * self.itemsize,
                matrices=owned[rank],
            )
            for rank in range(size)
        )

    @property
    def balance(self) -> tuple[float, float]:
        """(max/mean estimated time reached, the best possible: max(mean, largest matrix)/mean)."""
        total = sum(self.costs)
        if not total:
            return 1.0, 1.0
        mean = total / self.group.size
        return max(load.flops for load in self.loads) / mean, max(mean, max(self.costs)) / mean


def _footprints(
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


def _peak(footprints: Sequence[Mapping[int, Footprint]], rank: int) -> int:
    return peak_elements([wave.get(rank, EMPTY) for wave in footprints])


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Parameters, matrices and owners in the order of the plan, before waves are cut.

    Attributes:
        parameters: Sorted by name.
        matrices: Sorted by name.
        gathers: For each matrix the runs that go to its owner.
        scatters: For each matrix the runs that receive its update.
        costs: Estimated time of each matrix.
        owners: Rank that computes each matrix.
    """

    parameters: tuple[ShardedParameter, ...]
    matrices: tuple[LogicalMatrix, ...]
    gathers: tuple[tuple[Segment, ...], ...]
    scatters: tuple[tuple[Segment, ...], ...]
    costs: tuple[int, ...]
    owners: tuple[int, ...]


def arrange(
    *,
    group: ExchangeGroup,
    parameters: Sequence[ShardedParameter],
    matrices: Sequence[LogicalMatrix],
    cost: CostFunction,
) -> Arrangement:
    """Sort everything and choose owners; the result does not depend on the order given."""
    parameters = tuple(sorted(parameters, key=lambda p: natural_key(p.name)))
    matrices = tuple(sorted(matrices, key=lambda m: natural_key(m.name)))
    by_name = {parameter.name: parameter for parameter in parameters}
    gathers = tuple(segments(m, by_name[m.parameter], group) for m in matrices)
    scatters = tuple(copies(g, m, group) for g, m in zip(gathers, matrices, strict=True))
    costs = tuple(cost(*m.shape) for m in matrices)
    held: list[dict[int, int]] = []
    for runs in scatters:
        elements: dict[int, int] = defaultdict(int)
        for segment in runs:
            elements[segment.rank] += segment.numel
        held.append(elements)
    owners = assign_owners(
        names=[m.name for m in matrices], costs=costs, held=held, ranks=group.size
    )
    return Arrangement(
        parameters=parameters,
        matrices=matrices,
        gathers=gathers,
        scatters=scatters,
        costs=costs,
        owners=owners,
    )


def make_plan(
    *,
    group: ExchangeGroup,
    parameters: Sequence[ShardedParameter],
    matrices: Sequence[LogicalMatrix],
    cost: CostFunction,
    itemsize: int,
    buffer_bytes: int,
) -> Plan:
    """Choose owners and waves.

    Args:
        group: Sizes of the exchange group.
        parameters: All parameters with matrices, any order.
        matrices: Their logical matrices, any order; the plan does not depend on it.
        cost: Estimated time of one (m, n) matrix.
        itemsize: Bytes of one element on the wire.
        buffer_bytes: Bound on a rank's exchange buffers and assembled matrices.

    Raises:
        ValueError: Even one matrix per owner and wave needs more than ``buffer_bytes``; the
            sentence names the flag, the largest matrix and the value to type.
    """
    found = arrange(group=group, parameters=parameters, matrices=matrices, cost=cost)

    def peak_bytes(waves: Sequence[Sequence[int]]) -> int:
        footprints = _footprints(
            waves, found.matrices, found.owners, found.gathers, found.scatters, group.size
        )
        return itemsize * max(_peak(footprints, rank) for rank in range(group.size))

    return Plan(
        group=group,
        parameters=found.parameters,
        matrices=found.matrices,
        owners=found.owners,
        waves=fitting_waves(found, peak_bytes, buffer_bytes),
        gathers=found.gathers,
        scatters=found.scatters,
        costs=found.costs,
        itemsize=itemsize,
    )


def fitting_waves(
    found: Arrangement,
    peak_bytes: Callable[[Sequence[Sequence[int]]], int],
    buffer_bytes: int,
) -> tuple[tuple[int, ...], ...]:
    """The fewest waves (but enough to overlap) whose peak fits the bound on every rank.

    Args:
        found: Matrices and owners.
        peak_bytes: Bytes alive at once on the rank with the most, for given waves.
        buffer_bytes: The bound.

    Raises:
        ValueError: As ``make_plan``.
    """
    numels = [m.numel for m in found.matrices]
    if not numels:
        return ()
    cap = initial_cap(owners=found.owners, numels=numels)
    smallest = float("inf")
    while True:
        waves = cut_by_owner(owners=found.owners, numels=numels, cap=cap)
        peak = peak_bytes(waves)
        if peak <= buffer_bytes:
            return waves
        smallest = min(smallest, peak)
        if cap <= min(numels):
            largest = max(found.matrices, key=lambda m: m.numel)
            raise ValueError(
                f"--matrix-exchange-buffer-mb {buffer_bytes / 2**20:g} is too small: the largest "
                f"matrix is {largest.name} ({largest.shape[0]}x{largest.shape[1]}), and the "
                f"exchange needs {smallest / 2**20:.3g} MiB at least; type "
                f"--matrix-exchange-buffer-mb {math.ceil(smallest / 2**20)}"
            )
        cap = cap * 3 // 4
