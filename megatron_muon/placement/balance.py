"""Owners: which rank orthogonalizes which matrix, or which ranks share one."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_muon.placement.relief import relieve


@dataclass(frozen=True, kw_only=True)
class Work:
    """One matrix to be placed.

    Attributes:
        name: Breaks ties, so that the result does not depend on the order given.
        cost: Estimated time of one part, any unit.
        parts: Number of ranks that share it.
        held: Elements held by each rank that holds some.
    """

    name: str
    cost: int
    parts: int = 1
    held: Mapping[int, int]


def assign_owners(
    *,
    names: Sequence[str],
    costs: Sequence[int],
    held: Sequence[Mapping[int, int]],
    ranks: int,
    ranks_per_node: int | None = None,
) -> tuple[int, ...]:
    """``assign_ranks`` of matrices that are not shared.

    Returns:
        The owner of each matrix.
    """
    works = [
        Work(name=name, cost=cost, held=pieces)
        for name, cost, pieces in zip(names, costs, held, strict=True)
    ]
    found = assign_ranks(works, ranks=ranks, ranks_per_node=ranks_per_node or ranks)
    return tuple(owner for (owner,) in found)


def assign_ranks(
    works: Sequence[Work], *, ranks: int, ranks_per_node: int
) -> tuple[tuple[int, ...], ...]:
    """Longest processing time first, a local search, then equal costs trade places to stay at home.

    Args:
        works: The matrices.
        ranks: Number of ranks.
        ranks_per_node: Neighbouring ranks that are on one node. Ranks that share a matrix are on
            the same one where that costs no time, and an owner is on that of the matrix's pieces.

    Returns:
        For each matrix the ranks that compute its parts, ascending.
    """
    goal = smallest_load([w.cost for w in works], [w.parts for w in works], ranks)
    order = sorted(range(len(works)), key=lambda i: (-works[i].cost, works[i].name))
    placed = _longest_first(works, order, ranks, ranks_per_node, goal)
    relieve(placed, [w.cost for w in works], order, ranks, ranks_per_node, goal)
    by_cost: dict[int, list[int]] = defaultdict(list)
    for index in order:
        if works[index].parts == 1:
            by_cost[works[index].cost].append(index)
    held = [work.held for work in works]
    for members in by_cost.values():
        slots = [placed[index][0] for index in members]
        for index, rank in _stay_home(members, slots, held, ranks_per_node):
            placed[index] = [rank]
    return tuple(tuple(sorted(chosen)) for chosen in placed)


def smallest_load(costs: Sequence[int], parts: Sequence[int], ranks: int) -> int:
    """What the busiest rank has at least: the mean, rounded up, or the largest part."""
    total = sum(cost * count for cost, count in zip(costs, parts, strict=True))
    return max(-(-total // ranks), max(costs, default=0))


def _longest_first(
    works: Sequence[Work], order: Sequence[int], ranks: int, ranks_per_node: int, goal: int
) -> list[list[int]]:
    loads = _Loads(ranks, ranks_per_node)
    placed: list[list[int]] = [[] for _ in works]
    for index in order:
        work = works[index]
        placed[index] = loads.emptiest(work.parts, work.cost, goal)
        loads.add(placed[index], work.cost)
    return placed


class _Loads:
    """Loads of all ranks, and the emptiest of them, overall and on every node."""

    def __init__(self, ranks: int, ranks_per_node: int) -> None:
        self._loads = [0] * ranks
        self._per_node = ranks_per_node
        self._heap = [(0, rank) for rank in range(ranks)]
        self._nodes = [
            [(0, rank) for rank in range(first, min(first + ranks_per_node, ranks))]
            for first in range(0, ranks, ranks_per_node)
        ]

    def emptiest(self, count: int, cost: int, goal: int) -> list[int]:
        """The emptiest ranks; those of one node if they are not above them, or the goal, after."""
        chosen: list[tuple[int, int]] = []
        while len(chosen) < count:
            load, rank = heapq.heappop(self._heap)
            # Entries of former loads stay in the heap until they come up.
            if self._loads[rank] == load and (load, rank) not in chosen:
                chosen.append((load, rank))
        for entry in chosen:
            heapq.heappush(self._heap, entry)
        if count > 1:
            fitting = [node for node in self._nodes if len(node) >= count]
            best = min(fitting, key=lambda node: (node[count - 1], node[0]), default=None)
            if best and best[count - 1][0] + cost <= max(chosen[-1][0] + cost, goal):
                chosen = best[:count]
        return [rank for _, rank in chosen]

    def add(self, ranks: Sequence[int], cost: int) -> None:
        """Add a part of the cost to each rank."""
        for rank in ranks:
            node = self._nodes[rank // self._per_node]
            del node[bisect_left(node, (self._loads[rank], rank))]
            self._loads[rank] += cost
            insort(node, (self._loads[rank], rank))
            heapq.heappush(self._heap, (self._loads[rank], rank))


def _stay_home(
    members: Sequence[int],
    slots: Sequence[int],
    held: Sequence[Mapping[int, int]],
    ranks_per_node: int,
) -> list[tuple[int, int]]:
    """Deal slots of equal cost to matrices: largest piece at home first, or in order of names.

    The first way is greedy and can lose to the second; what keeps more elements at home is taken.
    """
    by_name = list(zip(members, slots, strict=True))
    by_piece = _largest_piece_first(members, slots, held, ranks_per_node)
    return max(
        (by_name, by_piece),
        key=lambda dealt: sum(held[index].get(rank, 0) for index, rank in dealt),
    )


def _largest_piece_first(
    members: Sequence[int],
    slots: Sequence[int],
    held: Sequence[Mapping[int, int]],
    ranks_per_node: int,
) -> list[tuple[int, int]]:
    free: dict[int, int] = defaultdict(int)
    for rank in slots:
        free[rank] += 1
    wishes = sorted(
        (-elements, position, rank)
        for position, index in enumerate(members)
        for rank, elements in held[index].items()
    )
    dealt: dict[int, int] = {}
    for _, position, rank in wishes:
        if position not in dealt and free[rank]:
            dealt[position] = rank
            free[rank] -= 1
    _deal_by_node(members, held, ranks_per_node, free, dealt)
    remaining = iter(_with_multiplicity(slots, free))
    return [
        (index, dealt[position] if position in dealt else next(remaining))
        for position, index in enumerate(members)
    ]


def _deal_by_node(
    members: Sequence[int],
    held: Sequence[Mapping[int, int]],
    ranks_per_node: int,
    free: dict[int, int],
    dealt: dict[int, int],
) -> None:
    """Of those without a place at home: largest piece on the same node first."""
    on_node: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(free, reverse=True):
        on_node[rank // ranks_per_node] += [rank] * free[rank]
    wishes = []
    for position, index in enumerate(members):
        if position not in dealt:
            elements: dict[int, int] = defaultdict(int)
            for rank, count in held[index].items():
                elements[rank // ranks_per_node] += count
            wishes += [(-count, position, node) for node, count in elements.items()]
    for _, position, node in sorted(wishes):
        if position not in dealt and on_node[node]:
            dealt[position] = on_node[node].pop()
            free[dealt[position]] -= 1


def _with_multiplicity(slots: Sequence[int], free: Mapping[int, int]) -> list[int]:
    """The slots still free, each as often as it is free, in the order in which they were made."""
    left = dict(free)
    result = []
    for rank in slots:
        if left[rank]:
            left[rank] -= 1
            result.append(rank)
    return result
