"""Which matrices several ranks compute, and how many ranks: chosen by modelled time."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_muon.placement.bounds import smallest_possible
from megatron_muon.placement.mixing import mix_parts
from megatron_muon.placement.owners import Work, assign_ranks
from megatron_muon.placement.part_costs import Candidate, PartCosts, Splitting

WORTH_SPLITTING = (90, 100)
"""Largest load with split matrices, over that with whole ones, from which on they are split.

The same of matrices split among several nodes, over that with matrices split on one node only.
"""

NEAR_ENOUGH = (102, 100)
"""Largest load over what is possible at which no more matrices are split: messages cost too."""

# Largest parts that are tried one after another, in percent of the smallest possible load.
_SIZES = (400, 270, 200, 160, 133, 115, 107, 103, 100, 67, 50, 40, 33, 28, 24, 20, 17, 14, 12)

# Loads, in the same unit, for which equal matrices are cut into different numbers of parts.
_TARGETS = (102, 105, 110, 120)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Who computes what.

    Attributes:
        ranks: For each matrix the ranks that compute it, ascending; one where it is not split.
        load: Of the busiest rank.
        possible: Load that the busiest rank has in any placement, see ``bounds``.
    """

    ranks: tuple[tuple[int, ...], ...]
    load: int
    possible: int


def choose_ranks(
    candidates: Sequence[Candidate],
    *,
    ranks: int,
    ranks_per_node: int,
    splitting: Splitting | None,
    most_elements: int | None = None,
) -> Choice:
    """Owners, and several ranks for a matrix where whole matrices would take longer.

    A matrix is split among the ranks of several nodes only where no placement with matrices split
    on one node is nearly as fast.

    Args:
        candidates: The matrices.
        ranks: Number of ranks.
        ranks_per_node: As for ``assign_ranks``.
        splitting: How matrices can be split; None splits none.
        most_elements: Of a part, as far as there may be so many parts; for want of memory.
    """
    per_node = min(ranks_per_node, ranks)
    costs = PartCosts(candidates, splitting, ranks=ranks, ranks_per_node=per_node)
    every = range(len(candidates))
    least = [costs.least_parts(i, most_elements) for i in every]
    near, far = (
        [max(least[i], costs.most_parts(i, most)) for i in every] for most in (per_node, ranks)
    )
    space = _Space(costs=costs, ranks=ranks, ranks_per_node=per_node)
    found = _fastest(space, least, near)
    if far != near:
        few, many = WORTH_SPLITTING
        possible = space.possible(far)
        if possible * many <= found.load * few:
            over_network = _fastest(space, least, far)
            if over_network.load * many <= found.load * few:
                found = over_network
        found = replace(found, possible=possible)
    return _with_fewer_operations(space, found, near)


@dataclass(frozen=True, kw_only=True)
class _Space:
    """Where matrices are placed, and what their parts cost.

    Attributes:
        costs: Of the parts of all matrices.
        ranks: Number of ranks.
        ranks_per_node: As for ``assign_ranks``.
    """

    costs: PartCosts
    ranks: int
    ranks_per_node: int

    def place(self, parts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Ranks of the matrices in these numbers of parts."""
        works = [
            Work(name=c.name, cost=self.costs(i, count), parts=count, held=c.held)
            for i, (c, count) in enumerate(zip(self.costs.candidates, parts, strict=True))
        ]
        return assign_ranks(works, ranks=self.ranks, ranks_per_node=self.ranks_per_node)

    def loads(
        self, placed: Sequence[Sequence[int]], of_part: Callable[[int, int], int]
    ) -> list[int]:
        """What (matrix, number of parts) to the load of one part gives for every rank."""
        loads = [0] * self.ranks
        for index, chosen in enumerate(placed):
            load = of_part(index, len(chosen))
            for rank in chosen:
                loads[rank] += load
        return loads

    def possible(self, limits: Sequence[int]) -> int:
        """Load that the busiest rank has in any placement with so many parts at most."""
        ways = (self.costs.smallest(i, limit) for i, limit in enumerate(limits))
        return smallest_possible(ways, self.ranks)


def _fastest(space: _Space, least: Sequence[int], limits: Sequence[int]) -> Choice:
    """Of several ways to split the fastest, or the first one if it is hardly slower.

    The search ends with one that is near enough to what is possible, and begins with those that
    split least.

    Args:
        space: Where, and what it costs.
        least: The fewest parts of each matrix.
        limits: The most parts of each matrix.
    """
    possible = space.possible(limits)
    best = _Best(space, possible)
    for parts in _ways(space, limits, possible):
        best.try_parts(tuple(map(max, parts, least)))
        if best.is_near_enough:
            break
    for percent in _TARGETS:
        target = possible * percent // 100
        if limits == least or best.is_near_enough or target >= best.load:
            break
        mixed = _mixed(space, limits, best.parts, target)
        best.try_parts(tuple(map(max, mixed, least)))
    load, placed = best.worth_it
    return Choice(ranks=placed, load=load, possible=possible)


def _with_fewer_operations(space: _Space, choice: Choice, limits: Sequence[int]) -> Choice:
    """More parts of what is split, while the rank with most operations gets fewer of them.

    Operations are counted and the time of messages is a guess: of placements of one load the one
    with fewer operations is better. So ranks that would have nothing to do get something.

    Args:
        space: Where, and what it costs.
        choice: What was found.
        limits: The most parts of each matrix; one with as many or more is left.
    """
    costs = space.costs
    while True:
        operations = space.loads(choice.ranks, costs.flops)
        busiest = max(range(space.ranks), key=lambda rank: operations[rank])
        largest = max(
            (i for i, chosen in enumerate(choice.ranks) if busiest in chosen),
            key=lambda i: costs.flops(i, len(choice.ranks[i])),
            default=None,
        )
        if largest is None:
            return choice
        before, shape = len(choice.ranks[largest]), costs.candidates[largest].shape
        more = next((k for k in costs.counts(largest, limits[largest]) if k > before), None)
        if before == 1 or more is None:
            return choice
        parts = [
            more if (len(chosen), candidate.shape) == (before, shape) else len(chosen)
            for chosen, candidate in zip(choice.ranks, costs.candidates, strict=True)
        ]
        placed = space.place(parts)
        is_slower = max(space.loads(placed, costs)) > choice.load
        if is_slower or max(space.loads(placed, costs.flops)) >= operations[busiest]:
            return choice
        choice = replace(choice, ranks=placed)


class _Best:
    """The fastest placement so far."""

    def __init__(self, space: _Space, possible: int) -> None:
        self._space = space
        self._possible = possible
        self.parts: tuple[int, ...] = ()
        self.placed: tuple[tuple[int, ...], ...] = ()
        self.load = -1
        self._first: tuple[int, tuple[tuple[int, ...], ...]] | None = None

    def try_parts(self, parts: tuple[int, ...]) -> None:
        """Place matrices in these numbers of parts; kept if no placement before was as fast."""
        placed = self._space.place(parts)
        load = max(self._space.loads(placed, self._space.costs))
        if self._first is None:
            self._first = load, placed
        if self.load < 0 or load < self.load:
            self.parts, self.placed, self.load = parts, placed, load

    @property
    def worth_it(self) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """Load and places of the fastest placement, or of the first one if it is hardly slower."""
        assert self._first is not None
        few, many = WORTH_SPLITTING
        is_faster = self.load * many <= self._first[0] * few
        return (self.load, self.placed) if is_faster else self._first

    @property
    def is_near_enough(self) -> bool:
        """Whether splitting more is not worth its messages."""
        return self.load * NEAR_ENOUGH[1] <= self._possible * NEAR_ENOUGH[0]


def _ways(space: _Space, limits: Sequence[int], possible: int) -> Iterator[tuple[int, ...]]:
    """Numbers of parts of all matrices: none; those too large or left over; all above a size."""
    costs = space.costs
    whole = (1,) * len(limits)
    yield whole
    seen = {whole}
    left_over = _left_over(space, limits, possible)
    for percent in _SIZES:
        every = [
            _parts(costs, i, limit, possible * percent // 100) for i, limit in enumerate(limits)
        ]
        few = [
            count if i in left_over or costs(i, 1) > possible else 1
            for i, count in enumerate(every)
        ]
        for parts in (tuple(few), tuple(every)):
            if parts not in seen:
                seen.add(parts)
                yield parts


def _left_over(space: _Space, limits: Sequence[int], possible: int) -> set[int]:
    """Matrices that no rank has room for, the largest first, once those too large are cut."""
    costs = space.costs
    parts = [_parts(costs, i, limit, possible) for i, limit in enumerate(limits)]
    loads = [(0, rank) for rank in range(space.ranks)]
    found = set()
    for index in sorted(
        range(len(parts)), key=lambda i: (-costs(i, parts[i]), costs.candidates[i].name)
    ):
        emptiest = [heapq.heappop(loads) for _ in range(parts[index])]
        cost = costs(index, parts[index])
        if parts[index] == 1 and emptiest[0][0] + cost > possible:
            found.add(index)
            cost = 0
        for load, rank in emptiest:
            heapq.heappush(loads, (load + cost, rank))
    return found


def _mixed(
    space: _Space, limits: Sequence[int], parts: Sequence[int], target: int
) -> tuple[int, ...]:
    """Other numbers of parts, also of equal matrices, with less work above a load."""
    costs = space.costs
    kinds: dict[tuple[tuple[int, int], int], list[int]] = defaultdict(list)
    for index in sorted(range(len(parts)), key=lambda i: costs.candidates[i].name):
        candidate = costs.candidates[index]
        kinds[candidate.shape, candidate.cost].append(index)
    # Longest first, whatever the order of names: what is found must not depend on it.
    members = [kinds[kind] for kind in sorted(kinds, key=lambda kind: (-kind[1], kind[0]))]
    options = [costs.options(found[0], limits[found[0]]) for found in members]
    counts = []
    for found, ways in zip(members, options, strict=True):
        of_each = Counter(parts[index] for index in found)
        counts.append(tuple(of_each[count] for count, _ in ways))
    mixed = mix_parts(options, tuple(counts), ranks=space.ranks, target=target)
    result = list(parts)
    for found, ways, row in zip(members, options, mixed, strict=True):
        dealt = (count for (count, _), number in zip(ways, row, strict=True) for _ in range(number))
        for index, count in zip(found, dealt, strict=True):
            result[index] = count
    return tuple(result)


def _parts(costs: PartCosts, index: int, limit: int, size: int) -> int:
    """The fewest parts that are no larger than ``size``, or the most that there may be."""
    counts = costs.counts(index, limit)
    return next((count for count in counts if costs(index, count) <= size), counts[-1])
