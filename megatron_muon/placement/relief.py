"""Local search: the busiest rank gives work away, or trades it for less, while that helps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

MOST_STEPS_TIMES_RANKS = 1 << 17
"""Bound on the search: at 2,048 ranks it may take a second of planning, no more."""

Change = tuple[int, int, int | None]
"""(work given away, to which rank, work taken for it)."""


def relieve(
    placed: list[list[int]],
    costs: Sequence[int],
    order: Sequence[int],
    ranks: int,
    ranks_per_node: int,
    goal: int,
) -> None:
    """Moves and swaps off the busiest rank, each of which leaves both ranks below its load.

    Args:
        placed: For each work its ranks, all different; changed in place.
        costs: Cost of one part of each work.
        order: The works in an order that does not depend on the one given.
        ranks: Number of ranks.
        ranks_per_node: Where equal, a part stays on its node.
        goal: Load below which nothing needs to come.
    """
    state = _State(placed, costs, order, ranks, ranks_per_node)
    for _ in range(max(16, MOST_STEPS_TIMES_RANKS // ranks)):
        busiest = max(range(ranks), key=lambda r: (state.loads[r], -r))
        if state.loads[busiest] <= goal:
            return
        change = state.best_change(busiest)
        if change is None:
            return
        state.make(busiest, change)


class _State:
    """Who has what, by cost: works of one cost are alike, but for where their other parts are."""

    def __init__(
        self,
        placed: list[list[int]],
        costs: Sequence[int],
        order: Sequence[int],
        ranks: int,
        ranks_per_node: int,
    ) -> None:
        self.loads = [0] * ranks
        self._placed = placed
        self._costs = costs
        self._per_node = ranks_per_node
        self._works: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(ranks)]
        for index in order:
            for rank in placed[index]:
                self._works[rank][costs[index]].append(index)
                self.loads[rank] += costs[index]

    def best_change(self, busiest: int) -> Change | None:
        """The change after which the fuller of the two ranks is emptiest; None if none helps."""
        best: Change | None = None
        load = self.loads[busiest]
        lowest = (load, False, 0)
        for cost in sorted(self._works[busiest], reverse=True):
            for rank, other in enumerate(self.loads):
                if other >= load or not cost:
                    continue
                for taken in (0, *self._works[rank]):
                    if taken >= cost or max(load - cost + taken, other + cost - taken) > lowest[0]:
                        continue
                    change = self._change(busiest, rank, cost, taken)
                    if change is None:
                        continue
                    reached = max(load - cost + taken, other + cost - taken)
                    key = (reached, self._strays(change[0], busiest, rank), rank)
                    if reached < load and key < lowest:
                        best, lowest = change, key
        return best

    def _change(self, busiest: int, rank: int, cost: int, taken: int) -> Change | None:
        """A work of this cost, and one to take for it, that leave the parts of both apart."""
        given = self._free_of(busiest, cost, rank)
        if given is None:
            return None
        if not taken:
            return given, rank, None
        back = self._free_of(rank, taken, busiest)
        return None if back is None else (given, rank, back)

    def _free_of(self, rank: int, cost: int, other: int) -> int | None:
        """The first work of a rank and cost of which another rank has no part."""
        return next((i for i in self._works[rank][cost] if other not in self._placed[i]), None)

    def _strays(self, index: int, source: int, target: int) -> bool:
        shared = len(self._placed[index]) > 1
        return shared and source // self._per_node != target // self._per_node

    def make(self, busiest: int, change: Change) -> None:
        """Carry out a change."""
        given, rank, taken = change
        self._move(given, busiest, rank)
        if taken is not None:
            self._move(taken, rank, busiest)

    def _move(self, index: int, source: int, target: int) -> None:
        cost = self._costs[index]
        self._works[source][cost].remove(index)
        if not self._works[source][cost]:
            del self._works[source][cost]
        self._works[target][cost].append(index)
        self._placed[index][self._placed[index].index(source)] = target
        self.loads[source] -= cost
        self.loads[target] += cost
