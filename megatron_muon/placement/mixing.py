"""Numbers of parts that differ among equal matrices: found by climbing, from one number for all.

Equal matrices need not be cut alike. If two of three parts fill a rank and one does not, some are
better cut into three, and others into four; in how many is a question of counts, since equal
matrices differ in nothing but their names.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

MOST_STEPS = 1 << 20
"""Parts placed and ranks looked at in one search: some tenths of a second."""

Counts = tuple[tuple[int, ...], ...]
"""For each kind the number of its matrices that are cut into 1, 2, … parts."""

_Score = tuple[int, int]


def mix_parts(costs: Sequence[Sequence[int]], counts: Counts, *, ranks: int, target: int) -> Counts:
    """Change the numbers of parts step by step, while less work is left above a target.

    In every step the best of all changes is made: of the matrices of one kind all, half, a quarter
    and so on go from one number of parts to another. How good that is, longest first tells. Then
    matrices are put together again as far as no more work comes to be above the target.

    Args:
        costs: For each kind the cost of a part at 1, 2, … parts.
        counts: Where to start.
        ranks: Number of ranks; no matrix has more parts.
        target: Load that no rank is to exceed.

    Returns:
        The counts reached; those of the start where no step helps.
    """
    search = _Search(costs, ranks, target)
    score = search.score(counts)
    start = score
    while score[0] and (found := search.best_change(counts, score)):
        score, counts = found
    if score == start:
        return counts
    while fewer := search.fewer_parts(counts, score):
        counts = fewer
    return counts


class _Search:
    """Changes of counts, and how good they are, for a bounded number of steps."""

    def __init__(self, costs: Sequence[Sequence[int]], ranks: int, target: int) -> None:
        self._costs = costs
        self._ranks = ranks
        self._target = target
        self._left = MOST_STEPS

    def best_change(self, counts: Counts, score: _Score) -> tuple[_Score, Counts] | None:
        """The change with the lowest score, if it is below one."""
        best: tuple[_Score, Counts] | None = None
        for changed in self._changes(counts):
            found = self.score(changed)
            if found < score and (best is None or found < best[0]):
                best = found, changed
        return best

    def fewer_parts(self, counts: Counts, score: _Score) -> Counts | None:
        """The first change to fewer parts whose score is no worse than one."""
        for changed in self._changes(counts):
            if _parts(changed) < _parts(counts) and self.score(changed) <= score:
                return changed
        return None

    def score(self, counts: Counts) -> _Score:
        """(work above the target, largest load) after longest first."""
        loads = _longest_first(self._costs, counts, self._ranks)
        above = sum(load - self._target for load in loads if load > self._target)
        return above, max(max(loads), self._target)

    def _changes(self, counts: Counts) -> Iterator[Counts]:
        for kind, row in enumerate(counts):
            for source, there in enumerate(row):
                for target in range(len(row)):
                    moved = there if target != source else 0
                    while moved:
                        changed = list(row)
                        changed[source] -= moved
                        changed[target] += moved
                        self._left -= self._ranks + _parts(counts)
                        if self._left < 0:
                            return
                        yield (*counts[:kind], tuple(changed), *counts[kind + 1 :])
                        moved = 0 if moved == 1 else (moved + 1) // 2


def _parts(counts: Counts) -> int:
    return sum(k * number for row in counts for k, number in enumerate(row, start=1))


def _longest_first(costs: Sequence[Sequence[int]], counts: Counts, ranks: int) -> list[int]:
    """Loads, in no order."""
    works = sorted(
        (
            (costs[kind][parts - 1], parts, number)
            for kind, row in enumerate(counts)
            for parts, number in enumerate(row, start=1)
            if number
        ),
        reverse=True,
    )
    loads = [0] * ranks
    for cost, parts, number in works:
        for _ in range(number):
            emptiest = [heapq.heappop(loads) for _ in range(parts)]
            for load in emptiest:
                heapq.heappush(loads, load + cost)
    return loads
