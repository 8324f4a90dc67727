"""Which matrices several ranks compute, and how many ranks: chosen by modelled time."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_muon.placement.bounds import options_of, smallest_possible
from megatron_muon.placement.mixing import mix_parts
from megatron_muon.placement.owners import Work, assign_ranks
from megatron_muon.placement.regions import even_cuts

MIN_SPLIT_FLOPS = 1 << 37
"""Operations of a matrix below which splitting it gains nothing.

1.4e11, a third of a millisecond of a GPU at 400 TFLOP/s: about what its messages take, in latency,
and at 200 GB/s also in bytes (a square matrix of 1,700 among eight ranks: each sends 26 m² bytes
for 30 m³ operations).
"""

FLOPS_PER_BYTE = {"cuda": 2000, "cpu": 20}
"""Operations that take as long as a byte between the ranks of a split matrix, by device type.

400 TFLOP/s over 200 GB/s between the GPUs of a node; 20 GFLOP/s over 1 GB/s of gloo on one machine.
"""

WORTH_SPLITTING = (90, 100)
"""Largest load with split matrices, over that with whole ones, from which on they are split."""

NEAR_ENOUGH = (102, 100)
"""Largest load over what is possible at which no more matrices are split: messages cost too."""

# Largest parts that are tried one after another, in percent of the smallest possible load.
_SIZES = (400, 270, 200, 160, 133, 115, 107, 103, 100, 67, 50, 40, 33, 28, 24, 20, 17, 14, 12)

# Loads, in the same unit, for which equal matrices are cut into different numbers of parts.
_TARGETS = (102, 105, 110, 120)


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """What planning has to know of matrices that several ranks compute.

    Attributes:
        most_ranks: Most ranks that compute one matrix; 1 splits none.
        flops: (m, n, ranks, number) to the operations of one of them; number 0 has the most.
        requests: (m, n) to the messages among them, in order: ``scalars`` first and once, then
            ``partials`` and ``rows``.
        itemsize: Bytes of an element of ``partials`` and ``rows``.
        scalar_itemsize: Bytes of an element of ``scalars``.
        min_flops: Matrices with fewer operations are not split.
        flops_per_byte: Operations that take as long as a byte between the ranks of a matrix.
    """

    most_ranks: int
    flops: Callable[[int, int, int, int], int]
    requests: Callable[[int, int], tuple[str, ...]]
    itemsize: int
    scalar_itemsize: int
    min_flops: int = MIN_SPLIT_FLOPS
    flops_per_byte: int = 0

    def bytes_moved(self, m: int, n: int, ranks: int, number: int) -> int:
        """Bytes that one of the ranks of a matrix sends or receives, whichever is more."""
        short = min(m, n)
        start, end = even_cuts(short, ranks)[number]
        block, others = (end - start) * short, (short - end + start) * short
        sent = received = 0
        for kind in self.requests(m, n):
            if kind == "scalars":
                both = 2 * (ranks - 1) * self.scalar_itemsize
                sent, received = sent + both, received + both
            else:
                mine, theirs = block * (ranks - 1) * self.itemsize, others * self.itemsize
                out, back = (theirs, mine) if kind == "partials" else (mine, theirs)
                sent, received = sent + out, received + back
        return max(sent, received)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One matrix, before it is decided who computes it.

    Attributes:
        name: Name.
        shape: (m, n).
        flops: Operations of the whole matrix.
        cost: Estimated time of the whole matrix.
        held: Elements held by each rank that holds some.
    """

    name: str
    shape: tuple[int, int]
    flops: int
    cost: int
    held: Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Who computes what.

    Attributes:
        ranks: For each matrix the ranks that compute it, ascending; one where it is not split.
        possible: Load that the busiest rank has in any placement, see ``bounds``.
    """

    ranks: tuple[tuple[int, ...], ...]
    possible: int


def part_cost(candidate: Candidate, splitting: Splitting, ranks: int, number: int = 0) -> int:
    """Estimated time of one part, messages among its ranks included.

    Of the whole matrix's time, as its operations are of the whole's.
    """
    if ranks == 1:
        return candidate.cost
    m, n = candidate.shape
    moved = splitting.bytes_moved(m, n, ranks, number) * splitting.flops_per_byte
    operations = splitting.flops(m, n, ranks, number) + moved
    return -(-candidate.cost * operations // max(1, candidate.flops))


def choose_ranks(
    candidates: Sequence[Candidate],
    *,
    ranks: int,
    ranks_per_node: int,
    splitting: Splitting | None,
    most_elements: int | None = None,
) -> Choice:
    """Owners, and several ranks for a matrix where whole matrices would take longer.

    Of several ways to split the fastest is taken; the search ends with one that is near enough to
    what is possible, and begins with those that split least.

    Args:
        candidates: The matrices.
        ranks: Number of ranks.
        ranks_per_node: As for ``assign_ranks``.
        splitting: How matrices can be split; None splits none.
        most_elements: Of a part, as far as there may be so many parts; for want of memory.
    """
    costs = _PartCosts(candidates, splitting)
    least = [_least_parts(c, ranks, splitting, most_elements) for c in candidates]
    limits = [max(least[i], _most_parts(costs, i, ranks)) for i in range(len(candidates))]
    possible = smallest_possible(
        (options_of(costs.smallest(i, limit)) for i, limit in enumerate(limits)), ranks
    )
    best = _Best(costs, ranks, ranks_per_node, possible)
    for parts in _ways(candidates, costs, limits, ranks, possible):
        best.try_parts(tuple(map(max, parts, least)))
        if best.is_near_enough:
            break
    for percent in _TARGETS:
        target = possible * percent // 100
        if limits == least or best.is_near_enough or target >= best.load:
            break
        mixed = _mixed(costs, limits, best.parts, ranks, target)
        best.try_parts(tuple(map(max, mixed, least)))
    return Choice(ranks=best.worth_it, possible=possible)


class _Best:
    """The fastest placement so far."""

    def __init__(self, costs: _PartCosts, ranks: int, ranks_per_node: int, possible: int) -> None:
        self._costs = costs
        self._ranks = ranks
        self._ranks_per_node = ranks_per_node
        self._possible = possible
        self.parts: tuple[int, ...] = ()
        self.placed: tuple[tuple[int, ...], ...] = ()
        self.load = -1
        self._first: tuple[int, tuple[tuple[int, ...], ...]] | None = None

    def try_parts(self, parts: tuple[int, ...]) -> None:
        """Place matrices in these numbers of parts; kept if no placement before was as fast."""
        works = [
            Work(name=c.name, cost=self._costs(i, count), parts=count, held=c.held)
            for i, (c, count) in enumerate(zip(self._costs.candidates, parts, strict=True))
        ]
        placed = assign_ranks(works, ranks=self._ranks, ranks_per_node=self._ranks_per_node)
        load = _largest_load(works, placed, self._ranks)
        if self._first is None:
            self._first = load, placed
        if self.load < 0 or load < self.load:
            self.parts, self.placed, self.load = parts, placed, load

    @property
    def worth_it(self) -> tuple[tuple[int, ...], ...]:
        """The fastest placement, or the first one if it is hardly slower."""
        assert self._first is not None
        load, first = self._first
        few, many = WORTH_SPLITTING
        return self.placed if self.load * many <= load * few else first

    @property
    def is_near_enough(self) -> bool:
        """Whether splitting more is not worth its messages."""
        return self.load * NEAR_ENOUGH[1] <= self._possible * NEAR_ENOUGH[0]


def _ways(
    candidates: Sequence[Candidate],
    costs: _PartCosts,
    limits: Sequence[int],
    ranks: int,
    possible: int,
) -> Iterator[tuple[int, ...]]:
    """Numbers of parts of all matrices: none; those too large or left over; all above a size."""
    whole = (1,) * len(limits)
    yield whole
    seen = {whole}
    left_over = _left_over(candidates, costs, limits, ranks, possible)
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


def _left_over(
    candidates: Sequence[Candidate],
    costs: _PartCosts,
    limits: Sequence[int],
    ranks: int,
    possible: int,
) -> set[int]:
    """Matrices that no rank has room for, the largest first, once those too large are cut."""
    parts = [_parts(costs, i, limit, possible) for i, limit in enumerate(limits)]
    loads = [(0, rank) for rank in range(ranks)]
    found = set()
    for index in sorted(range(len(parts)), key=lambda i: (-costs(i, parts[i]), candidates[i].name)):
        emptiest = [heapq.heappop(loads) for _ in range(parts[index])]
        cost = costs(index, parts[index])
        if parts[index] == 1 and emptiest[0][0] + cost > possible:
            found.add(index)
            cost = 0
        for load, rank in emptiest:
            heapq.heappush(loads, (load + cost, rank))
    return found


def _mixed(
    costs: _PartCosts, limits: Sequence[int], parts: Sequence[int], ranks: int, target: int
) -> tuple[int, ...]:
    """Other numbers of parts, also of equal matrices, with less work above a load."""
    kinds: dict[tuple[tuple[int, int], int], list[int]] = defaultdict(list)
    for index in sorted(range(len(parts)), key=lambda i: costs.candidates[i].name):
        candidate = costs.candidates[index]
        kinds[candidate.shape, candidate.cost].append(index)
    # Longest first, whatever the order of names: what is found must not depend on it.
    members = [kinds[kind] for kind in sorted(kinds, key=lambda kind: (-kind[1], kind[0]))]
    counts = []
    for found in members:
        of_each = Counter(parts[index] for index in found)
        counts.append(tuple(of_each[count] for count in range(1, limits[found[0]] + 1)))
    mixed = mix_parts(
        [[costs(m[0], count) for count in range(1, limits[m[0]] + 1)] for m in members],
        tuple(counts),
        ranks=ranks,
        target=target,
    )
    result = list(parts)
    for found, row in zip(members, mixed, strict=True):
        dealt = (count for count, number in enumerate(row, start=1) for _ in range(number))
        for index, count in zip(found, dealt, strict=True):
            result[index] = count
    return tuple(result)


class _PartCosts:
    """Costs of parts, by matrix and number of parts; equal shapes are asked for once."""

    def __init__(self, candidates: Sequence[Candidate], splitting: Splitting | None) -> None:
        self.candidates = candidates
        self.splitting = splitting
        self._known: dict[tuple[tuple[int, int], int, int], int] = {}
        self._smallest: dict[tuple[tuple[int, int], int, int], list[int]] = {}

    def __call__(self, index: int, count: int) -> int:
        candidate = self.candidates[index]
        if count == 1 or self.splitting is None:
            return candidate.cost
        key = (candidate.shape, candidate.cost, count)
        if key not in self._known:
            self._known[key] = part_cost(candidate, self.splitting, count)
        return self._known[key]

    def smallest(self, index: int, limit: int) -> list[int]:
        """Cost of the smallest part at 1 … ``limit`` parts."""
        candidate = self.candidates[index]
        key = (candidate.shape, candidate.cost, limit)
        if key not in self._smallest:
            counts = range(1, limit + 1)
            splitting = self.splitting
            self._smallest[key] = [
                candidate.cost if splitting is None else part_cost(candidate, splitting, n, n - 1)
                for n in counts
            ]
        return self._smallest[key]


def _most_parts(costs: _PartCosts, index: int, ranks: int) -> int:
    """Number of ranks at which a part of a matrix takes least; 1 where it may not be split."""
    candidate, splitting = costs.candidates[index], costs.splitting
    if splitting is None or candidate.flops < splitting.min_flops:
        return 1
    most = min(splitting.most_ranks, ranks, max(candidate.shape))
    return min(range(1, most + 1), key=lambda count: costs(index, count))


def _least_parts(
    candidate: Candidate, ranks: int, splitting: Splitting | None, most_elements: int | None
) -> int:
    """Number of parts that have no more elements than allowed, or as many as there may be."""
    if splitting is None or most_elements is None:
        return 1
    m, n = candidate.shape
    return min(-(-m * n // most_elements), splitting.most_ranks, ranks, max(m, n))


def _parts(costs: _PartCosts, index: int, limit: int, size: int) -> int:
    """The fewest parts that are no larger than ``size``, or the most that there may be."""
    return next((count for count in range(1, limit) if costs(index, count) <= size), limit)


def _largest_load(works: Sequence[Work], placed: Sequence[Sequence[int]], ranks: int) -> int:
    loads = [0] * ranks
    for work, chosen in zip(works, placed, strict=True):
        for rank in chosen:
            loads[rank] += work.cost
    return max(loads)
