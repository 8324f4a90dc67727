"""Owners: which rank orthogonalizes which matrix."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence


def assign_owners(
    *,
    names: Sequence[str],
    costs: Sequence[int],
    held: Sequence[Mapping[int, int]],
    ranks: int,
) -> tuple[int, ...]:
    """Longest processing time first, then matrices of equal cost trade places to stay at home.

    Args:
        names: Name of each matrix; breaks ties, so the result does not depend on the order given.
        costs: Estimated time of each matrix, any unit.
        held: For each matrix, elements held by each rank that holds some.
        ranks: Number of ranks.

    Returns:
        The owner of each matrix.
    """
    order = sorted(range(len(names)), key=lambda i: (-costs[i], names[i]))
    loads = [(0, rank) for rank in range(ranks)]
    slots: dict[int, list[int]] = defaultdict(list)
    for index in order:
        load, rank = heapq.heappop(loads)
        slots[costs[index]].append(rank)
        heapq.heappush(loads, (load + costs[index], rank))
    owners = [0] * len(names)
    by_cost: dict[int, list[int]] = defaultdict(list)
    for index in order:
        by_cost[costs[index]].append(index)
    for cost, members in by_cost.items():
        for index, rank in _stay_home(members, slots[cost], held):
            owners[index] = rank
    return tuple(owners)


def _stay_home(
    members: Sequence[int], slots: Sequence[int], held: Sequence[Mapping[int, int]]
) -> list[tuple[int, int]]:
    """Deal slots of equal cost to matrices: largest piece at home first, or in order of names.

    The first way is greedy and can lose to the second; what keeps more elements at home is taken.
    """
    by_name = list(zip(members, slots, strict=True))
    by_piece = _largest_piece_first(members, slots, held)
    return max(
        (by_name, by_piece),
        key=lambda dealt: sum(held[index].get(rank, 0) for index, rank in dealt),
    )


def _largest_piece_first(
    members: Sequence[int], slots: Sequence[int], held: Sequence[Mapping[int, int]]
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
    remaining = iter(_with_multiplicity(slots, free))
    return [
        (index, dealt[position] if position in dealt else next(remaining))
        for position, index in enumerate(members)
    ]


def _with_multiplicity(slots: Sequence[int], free: Mapping[int, int]) -> list[int]:
    """The slots still free, each as often as it is free, in the order in which they were made."""
    left = dict(free)
    result = []
    for rank in slots:
        if left[rank]:
            left[rank] -= 1
            result.append(rank)
    return result
