"""Owners: which rank computes which matrix, or which ranks compute the parts of one.

Longest processing time first, then a local search (the busiest rank gives work away, or trades it
for less), then matrices of equal cost trade places to stay where their elements are.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_STEPS_TIMES_RANKS = 1 << 17
"""Bound on the local search: planning takes seconds, not minutes, at thousands of ranks."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One matrix to be placed.

    Attributes:
        name: Breaks ties, so that the result does not depend on the order given.
        cost: Estimated time of one part, any unit.
        parts: Number of ranks that compute it.
        held: Elements held by each rank that holds some.
    """

    name: str
    cost: int
    parts: int = 1
    held: Mapping[int, int]


def assign_ranks(
    works: Sequence[Work], *, ranks: int, ranks_per_node: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Place every part of every matrix.

    Args:
        works: The matrices.
        ranks: Number of ranks.
        ranks_per_node: Neighbouring ranks that are on one node, all by default. The ranks of one
            matrix are on the same one, or are all of several whole ones; and an owner is on that of
            the matrix's pieces where that costs no time.

    Returns:
        For each matrix the ranks that compute its parts, ascending.
    """
    per_node = min(ranks_per_node or ranks, ranks)
    goal = max(
        -(-sum(work.cost * work.parts for work in works) // ranks),
        max((work.cost for work in works), default=0),
    )
    order = sorted(range(len(works)), key=lambda i: (-works[i].cost, works[i].name))
    loads = _Loads(ranks, per_node)
    placed: list[list[int]] = [[] for _ in works]
    for index in order:
        placed[index] = loads.emptiest(works[index].parts)
        loads.add(placed[index], works[index].cost)
    _LocalSearch(placed, works, order, ranks, per_node).run(goal)
    by_cost: dict[int, list[int]] = defaultdict(list)
    for index in order:
        if works[index].parts == 1:
            by_cost[works[index].cost].append(index)
    held = [work.held for work in works]
    for members in by_cost.values():
        slots = [placed[index][0] for index in members]
        for index, rank in _stay_home(members, slots, held, per_node):
            placed[index] = [rank]
    return tuple(tuple(sorted(chosen)) for chosen in placed)


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

    def emptiest(self, count: int) -> list[int]:
        """The emptiest ranks; several are on one node, or all of several nodes."""
        if count == 1:
            while self._loads[(entry := self._heap[0])[1]] != entry[0]:
                # Entries of former loads stay in the heap until they come up.
                heapq.heappop(self._heap)
            return [entry[1]]
        each = min(count, self._per_node)
        fitting = [node for node in self._nodes if len(node) >= each]
        best = heapq.nsmallest(
            -(-count // each), fitting, key=lambda node: (node[each - 1][0], node[:each])
        )
        return [rank for node in best for _, rank in node[:each]]

    def add(self, ranks: Sequence[int], cost: int) -> None:
        """Add a part of the cost to each rank."""
        for rank in ranks:
            node = self._nodes[rank // self._per_node]
            del node[bisect_left(node, (self._loads[rank], rank))]
            self._loads[rank] += cost
            insort(node, (self._loads[rank], rank))
            heapq.heappush(self._heap, (self._loads[rank], rank))


_Change = tuple[int, int, int | None]
"""(work given away, to which rank, work taken for it)."""


class _LocalSearch:
    """Moves and swaps off the busiest rank, each of which leaves both ranks below its load.

    Works of one cost are alike, but for where their other parts are.

    Args:
        placed: For each work its ranks, all different; changed in place.
        works: The matrices.
        order: Indices of the works in an order that does not depend on the one given.
        ranks: Number of ranks.
        ranks_per_node: A part stays on its node.
    """

    def __init__(
        self,
        placed: list[list[int]],
        works: Sequence[Work],
        order: Sequence[int],
        ranks: int,
        ranks_per_node: int,
    ) -> None:
        self._loads = [0] * ranks
        self._placed = placed
        self._costs = [work.cost for work in works]
        self._per_node = ranks_per_node
        self._works: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(ranks)]
        for index in order:
            for rank in placed[index]:
                self._works[rank][self._costs[index]].append(index)
                self._loads[rank] += self._costs[index]

    def run(self, goal: int) -> None:
        """Change until no rank is above the goal, or nothing helps."""
        ranks = len(self._loads)
        for _ in range(max(16, MOST_STEPS_TIMES_RANKS // ranks)):
            busiest = max(range(ranks), key=lambda r: (self._loads[r], -r))
            if self._loads[busiest] <= goal:
                return
            change = self._best_change(busiest)
            if change is None:
                return
            given, rank, taken = change
            self._move(given, busiest, rank)
            if taken is not None:
                self._move(taken, rank, busiest)

    def _best_change(self, busiest: int) -> _Change | None:
        """The change after which the fuller of the two ranks is emptiest; None if none helps."""
        best: _Change | None = None
        load = self._loads[busiest]
        lowest = (load, 0)
        for cost in sorted(self._works[busiest], reverse=True):
            for rank, other in enumerate(self._loads):
                if other >= load or not cost:
                    continue
                for taken in (0, *self._works[rank]):
                    reached = max(load - cost + taken, other + cost - taken)
                    if taken >= cost or reached > lowest[0] or reached >= load:
                        continue
                    change = self._change(busiest, rank, cost, taken)
                    if change is None:
                        continue
                    if (reached, rank) < lowest:
                        best, lowest = change, (reached, rank)
        return best

    def _change(self, busiest: int, rank: int, cost: int, taken: int) -> _Change | None:
        """A work of this cost, and one to take for it, that leave the parts of both apart."""
        given = self._movable(busiest, cost, rank)
        if given is None:
            return None
        if not taken:
            return given, rank, None
        back = self._movable(rank, taken, busiest)
        return None if back is None else (given, rank, back)

    def _movable(self, rank: int, cost: int, other: int) -> int | None:
        """The first work of a rank and cost that another rank can have instead.

        One of which it has no part, and of those that are split only one of its own node.
        """
        is_near = rank // self._per_node == other // self._per_node
        return next(
            (
                index
                for index in self._works[rank][cost]
                if other not in (ranks := self._placed[index]) and (is_near or len(ranks) == 1)
            ),
            None,
        )

    def _move(self, index: int, source: int, target: int) -> None:
        cost = self._costs[index]
        self._works[source][cost].remove(index)
        if not self._works[source][cost]:
            del self._works[source][cost]
        self._works[target][cost].append(index)
        self._placed[index][self._placed[index].index(source)] = target
        self._loads[source] -= cost
        self._loads[target] += cost


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
    free: dict[int, int] = defaultdict(int)
    for rank in slots:
        free[rank] += 1
    dealt: dict[int, int] = {}
    wishes = [
        (-elements, position, rank)
        for position, index in enumerate(members)
        for rank, elements in held[index].items()
    ]
    for _, position, rank in sorted(wishes):
        if position not in dealt and free[rank]:
            dealt[position] = rank
            free[rank] -= 1
    _deal_by_node(members, held, ranks_per_node, free, dealt)
    # Of equal slots of one rank none is taken twice.
    remaining = iter([rank for rank in dict.fromkeys(slots) for _ in range(free[rank])])
    by_piece = [
        (index, dealt[position] if position in dealt else next(remaining))
        for position, index in enumerate(members)
    ]
    return max(
        (by_name, by_piece),
        key=lambda dealt: sum(held[index].get(rank, 0) for index, rank in dealt),
    )


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
