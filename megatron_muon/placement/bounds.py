"""What no placement can beat: a proven bound on the busiest rank, with matrices whole or in parts.

For a load T every matrix has the numbers of parts whose parts fit into T. What a rank can hold is
measured by dual feasible functions: of parts that fit together into T, the sum of the function is
at most one. The identity says that all work fits into all ranks; u_j says that of parts above
T / (j + 1) a rank holds j; U_s says that a part above T - s has a rank to itself, but for parts
below s, which it leaves out (Fekete and Schepers, "New classes of fast lower bounds for bin packing
problems", 2001). If even the cheapest numbers of parts exceed the ranks, T is impossible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

Options = tuple[tuple[int, int], ...]
"""(parts, cost of one of them) for every number of parts that a matrix may be cut into."""

_MOST_TOGETHER = 16


def smallest_possible(matrices: Iterable[Options], ranks: int) -> int:
    """A load that the busiest rank has at least, whatever goes where.

    Args:
        matrices: For each matrix the ways of cutting it; one way where it stays whole.
        ranks: Number of ranks.
    """
    kinds = Counter(matrices)
    if not kinds:
        return 0
    work = sum(n * min(k * cost for k, cost in options) for options, n in kinds.items())
    # Below the mean, and below the smallest part of any matrix, nothing is possible.
    low = max(-(-work // ranks), max(min(cost for _, cost in options) for options in kinds))
    high = max(low, sum(n * options[0][1] for options, n in kinds.items()))
    while low < high:
        middle = (low + high) // 2
        if _may_fit(kinds, middle, ranks):
            high = middle
        else:
            low = middle + 1
    return low


def _may_fit(kinds: Counter[Options], load: int, ranks: int) -> bool:
    if load == 0:
        return all(cost == 0 for options in kinds for _, cost in options)
    fitting = {options: [(k, cost) for k, cost in options if cost <= load] for options in kinds}
    if not all(fitting.values()):
        return False

    def is_room(share: Callable[[int], int], most: int) -> bool:
        needed = sum(
            count * min(k * share(cost) for k, cost in fitting[options])
            for options, count in kinds.items()
        )
        return needed <= ranks * most

    if not all(
        is_room(partial(_share, load=load, together=together), load * max(together, 1))
        for together in range(_MOST_TOGETHER + 1)
    ):
        return False
    # Of those that give one part a rank to itself, the functions that leave least out.
    smallest = {load - cost + 1 for ways in fitting.values() for _, cost in ways}
    return all(
        is_room(partial(_alone, load=load, smallest=size), load)
        for size in sorted(smallest)
        if 2 * size <= load
    )


def _alone(cost: int, load: int, smallest: int) -> int:
    """What a part takes of a rank, times ``load``: U_s with s the smallest part that counts."""
    if cost > load - smallest:
        return load
    return cost if cost >= smallest else 0


def _share(cost: int, load: int, together: int) -> int:
    """What a part takes of a rank, times ``load`` and the largest denominator; 0 for identity."""
    if together == 0:
        return cost
    times, rest = divmod((together + 1) * cost, load)
    return cost * together if rest == 0 else times * load
