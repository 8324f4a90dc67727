"""The Plan: who computes what, when, and what is communicated. The same on every rank."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from megatron_muon.matrices import LogicalMatrix, ShardedParameter
from megatron_muon.placement.regions import ExchangeGroup
from megatron_muon.placement.schemes import Round, Scheme

CostFunction = Callable[[int, int], int]
"""Estimated time, or operations, of orthogonalizing one (m, n) matrix."""

ALIGNMENT = 16
"""Every buffer of a wave starts at a multiple of this many bytes."""


def aligned(count: int) -> int:
    """Bytes that a buffer takes in the memory of a wave."""
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """What one rank does in one step.

    Attributes:
        flops: Floating-point operations of its orthogonalizations.
        cost: Estimated time of them, in the unit of ``Plan.costs``.
        sent_bytes: Bytes that leave it, both ways of the exchange, its own pieces not counted.
        received_bytes: Bytes that reach it, its own pieces not counted.
        peak_buffer_bytes: Exchange buffers and assembled matrices.
        matrices: Number of matrices it owns; one that is split counts for the first of its ranks.
    """

    flops: int
    cost: int
    sent_bytes: int
    received_bytes: int
    peak_buffer_bytes: int
    matrices: int


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Waves that run one after another, a few under way at once.

    Attributes:
        waves: For each wave the indices of its matrices.
        slots: Most waves under way at once; each has memory of its own.
    """

    waves: tuple[tuple[int, ...], ...]
    slots: int

    @property
    def used_slots(self) -> int:
        """Slots that are allocated."""
        return min(self.slots, len(self.waves))


class LaneMemory(NamedTuple):
    """Bytes that one rank allocates for a lane.

    Attributes:
        slot: For one wave under way: its messages, and what is kept from its first to its last.
        computed: For the matrices that are being computed.
    """

    slot: int = 0
    computed: int = 0

    def total(self, lane: Lane) -> int:
        """Bytes of all slots together."""
        return lane.used_slots * self.slot + self.computed


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One stage's exchange, from names, shapes and group sizes alone.

    Attributes:
        group: Sizes of the exchange group.
        parameters: The parameters, sorted by name.
        matrices: The logical matrices in forward order (natural order of their names).
        schemes: How each matrix is communicated, and which ranks compute it.
        main: Waves of the matrices that one rank computes.
        split: Waves of the matrices that several ranks compute; they run between the main ones.
        costs: Estimated time of each matrix, as a whole.
        flops: Floating-point operations of each matrix, as a whole.
        possible: Cost that the busiest rank has in any placement, see ``bounds``.
        itemsizes: Bytes of an element of a message, by ``Round.kind``.
        reuses_messages: Whether the buffers of a wave's rounds share their memory.
        ranks_per_node: Neighbouring ranks that are on one node, as far as is known.
    """

    group: ExchangeGroup
    parameters: tuple[ShardedParameter, ...]
    matrices: tuple[LogicalMatrix, ...]
    schemes: tuple[Scheme, ...]
    main: Lane
    split: Lane
    costs: tuple[int, ...]
    flops: tuple[int, ...]
    possible: int
    itemsizes: Mapping[str, int]
    reuses_messages: bool
    ranks_per_node: int

    @cached_property
    def digest(self) -> str:
        """SHA-256 of inputs and choices; equal on all ranks or the job must not start."""
        # What the ranks hold follows from parameters, matrices and group, and is very long.
        decided = _fields(self, but="schemes")
        schemes = [
            (type(scheme).__name__, _fields(scheme, but="shares")) for scheme in self.schemes
        ]
        return hashlib.sha256(repr((decided, schemes)).encode()).hexdigest()

    @property
    def owners(self) -> tuple[int, ...]:
        """Rank that computes each matrix; the first one of those that are split."""
        return tuple(scheme.ranks[0] for scheme in self.schemes)

    def whole_matrix_bytes(self) -> list[int]:
        """Bytes that every rank would send if elements of all matrices were exchanged."""
        sent = [0] * self.group.size
        for scheme in self.schemes:
            owner = scheme.ranks[0]
            for share in scheme.shares:
                if share.rank != owner:
                    sent[share.rank] += share.numel * self.itemsizes["source"] * share.is_source
                    sent[owner] += share.numel * self.itemsizes["update"]
        return sent

    @cached_property
    def loads(self) -> tuple[RankLoad, ...]:
        """Predicted work, communication and memory of every rank."""
        size = self.group.size
        flops, costs, owned = [0] * size, [0] * size, [0] * size
        sent, received = [0] * size, [0] * size
        for scheme in self.schemes:
            owned[scheme.ranks[0]] += 1
            for rank, operations, cost in zip(
                scheme.ranks, scheme.flops, scheme.costs, strict=True
            ):
                flops[rank] += operations
                costs[rank] += cost
            for where, messages in scheme.messages.items():
                itemsize = self.itemsizes[where.kind]
                for source, target, elements in messages:
                    if source != target:
                        sent[source] += elements * itemsize
                        received[target] += elements * itemsize
        peaks = self.peak_bytes
        return tuple(
            RankLoad(
                flops=flops[rank],
                cost=costs[rank],
                sent_bytes=sent[rank],
                received_bytes=received[rank],
                peak_buffer_bytes=peaks[rank],
                matrices=owned[rank],
            )
            for rank in range(size)
        )

    @cached_property
    def peak_bytes(self) -> list[int]:
        """Bytes of every rank's exchange buffers and assembled matrices."""
        return [
            main.total(self.main) + split.total(self.split)
            for main, split in zip(self.main_memory, self.split_memory, strict=True)
        ]

    @cached_property
    def main_memory(self) -> list[LaneMemory]:
        """What every rank allocates for the waves of matrices with one owner."""
        return self._lane_memory(self.main)

    @cached_property
    def split_memory(self) -> list[LaneMemory]:
        """What every rank allocates for the waves of split matrices."""
        return self._lane_memory(self.split)

    def _lane_memory(self, lane: Lane) -> list[LaneMemory]:
        slots, computed = [0] * self.group.size, [0] * self.group.size
        for wave in lane.waves:
            for rank, need in self._wave_memory(wave).items():
                slots[rank] = max(slots[rank], need.slot)
                computed[rank] = max(computed[rank], need.computed)
        return list(map(LaneMemory, slots, computed))

    def _wave_memory(self, wave: Sequence[int]) -> dict[int, LaneMemory]:
        sent: dict[tuple[int, Round], int] = defaultdict(int)
        received: dict[tuple[int, Round], int] = defaultdict(int)
        kept: dict[int, int] = defaultdict(int)
        computed: dict[int, int] = defaultdict(int)
        for index in wave:
            scheme = self.schemes[index]
            for where, messages in scheme.messages.items():
                for source, target, elements in messages:
                    sent[source, where] += elements
                    # Alone, what is sent is what is received.
                    received[target, where] += elements * (self.group.size > 1)
            for rank, elements in scheme.kept_elements():
                kept[rank] += aligned(elements * self.itemsizes["source"])
            for rank, elements in scheme.computed_elements():
                computed[rank] += aligned(elements * self.itemsizes["source"])
        buffers: dict[int, int] = defaultdict(int)
        for rank, where in sent.keys() | received.keys():
            itemsize = self.itemsizes[where.kind]
            both = aligned(sent[rank, where] * itemsize) + aligned(received[rank, where] * itemsize)
            buffers[rank] = (
                max(buffers[rank], both) if self.reuses_messages else buffers[rank] + both
            )
        return {
            rank: LaneMemory(slot=buffers[rank] + kept[rank], computed=computed[rank])
            for rank in {*buffers, *kept, *computed}
        }

    @property
    def balance(self) -> tuple[float, float]:
        """(max/mean estimated time reached, what no placement can beat/mean)."""
        costs = [load.cost for load in self.loads]
        if not any(costs):
            return 1.0, 1.0
        mean = sum(costs) / self.group.size
        return max(costs) / mean, max(mean, self.possible) / mean


def _fields(data: Any, *, but: str) -> list[tuple[str, Any]]:
    return [(f.name, getattr(data, f.name)) for f in fields(data) if f.name != but]
