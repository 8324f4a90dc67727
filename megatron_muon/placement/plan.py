"""The Plan: who computes what, when, and what is communicated. The same on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from megatron_muon.matrices import LogicalMatrix, ShardedParameter
from megatron_muon.placement.regions import ExchangeGroup
from megatron_muon.placement.schemes import Scheme

CostFunction = Callable[[int, int], int]
"""Estimated time, or operations, of orthogonalizing one (m, n) matrix."""


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """What one rank does in one step.

    Attributes:
        flops: Floating-point operations of its orthogonalizations.
        cost: Estimated time of them, in the unit of ``Plan.costs``.
        sent_bytes: Bytes that leave it, both ways of the exchange, its own pieces not counted.
        received_bytes: Bytes that reach it, its own pieces not counted.
        peak_buffer_bytes: Most bytes that it allocates at once.
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
    """Waves that run one after another, a few under way at once; see ``lane_schedule``.

    Attributes:
        waves: For each wave the indices of its matrices.
        slots: Most waves under way at once.
        alone: Whether one wave at a time is computed.
    """

    waves: tuple[tuple[int, ...], ...]
    slots: int
    alone: bool = True


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
        home: Indices of the matrices that are in no wave: nobody but their owner holds any of them.
        home_elements: Elements of them that an owner computes at once, or one matrix.
        costs: Estimated time of each matrix, as a whole.
        flops: Floating-point operations of each matrix, as a whole.
        possible: Cost that the busiest rank has in any placement, see ``bounds``.
        itemsizes: Bytes of an element of a message, by ``Round.kind``.
        peak_bytes: Most bytes that every rank allocates at once for a step: messages, assembled
            matrices, and what they are computed in.
        ranks_per_node: Neighbouring ranks that are on one node, as far as is known.
    """

    group: ExchangeGroup
    parameters: tuple[ShardedParameter, ...]
    matrices: tuple[LogicalMatrix, ...]
    schemes: tuple[Scheme, ...]
    main: Lane
    split: Lane
    home: tuple[int, ...]
    home_elements: int
    costs: tuple[int, ...]
    flops: tuple[int, ...]
    possible: int
    itemsizes: Mapping[str, int]
    peak_bytes: tuple[int, ...]
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
            for rank, operations, cost in scheme.work:
                flops[rank] += operations
                costs[rank] += cost
            for where, messages in scheme.messages.items():
                itemsize = self.itemsizes[where.kind]
                for source, target, elements in messages:
                    if source != target:
                        sent[source] += elements * itemsize
                        received[target] += elements * itemsize
        return tuple(
            RankLoad(
                flops=flops[rank],
                cost=costs[rank],
                sent_bytes=sent[rank],
                received_bytes=received[rank],
                peak_buffer_bytes=self.peak_bytes[rank],
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


def _fields(data: Any, *, but: str) -> list[tuple[str, Any]]:
    return [(f.name, getattr(data, f.name)) for f in fields(data) if f.name != but]
