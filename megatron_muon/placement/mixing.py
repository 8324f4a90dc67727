"""Numbers of parts that differ among equal matrices: found by climbing, from one number for all.

Equal matrices need not be cut alike. If two of three parts fill a rank and one does not, some are
better cut into three, and others into four; in how many is a question of counts, since equal
matrices differ in nothing but their names.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from megatron_muon.placement.bounds import Options

MOST_STEPS = 1 << 20
"""Parts placed and ranks looked at in one search: some tenths of a second."""

Counts = tuple[tuple[int, ...], ...]
"""For each kind the number of its matrices that are cut in each of the ways that there are."""

_Score = tuple[int, int]


def mix_parts(options: Sequence[Options], counts: Counts, *, ranks: int, target: int) -> Counts:
    """Change the numbers of parts step by step, while less work is left above a target.

    In every step the best of all changes is made: of the matrices of one kind all, half, a quarter
    and so on go from one number of parts to another. How good that is, longest first tells. Then
    matrices are put together again as far as no more work comes to be above the target.

    Args:
        options: For each kind the ways of cutting one.
        counts: Where to start.
        ranks: Number of ranks; no matrix has more parts.
        target: Load that no rank is to exceed.

    Returns:
        The counts reached; those of the start where no step helps.
    """
    search = _Search(options, ranks, target)
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

    def __init__(self, options: Sequence[Options], ranks: int, target: int) -> None:
        self._options = options
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
            if self._parts(changed) < self._parts(counts) and self.score(changed) <= score:
                return changed
        return None

    def score(self, counts: Counts) -> _Score:
        """(work above the target, largest load) after longest first."""
        loads = _longest_first(self._options, counts, self._ranks)
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
                        self._left -= self._ranks + self._parts(counts)
                        if self._left < 0:
                            return
                        yield (*counts[:kind], tuple(changed), *counts[kind + 1 :])
                        moved = 0 if moved == 1 else (moved + 1) // 2

    def _parts(self, counts: Counts) -> int:
        return sum(
            parts * number
            for ways, row in zip(self._options, counts, strict=True)
            for (parts, _), number in zip(ways, row, strict=True)
        )


def _longest_first(options: Sequence[Options], counts: Counts, ranks: int) -> list[int]:
    """Loads, in no order."""
    works = sorted(
        (
            (cost, parts, number)
            for ways, row in zip(options, counts, strict=True)
            for (parts, cost), number in zip(ways, row, strict=True)
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
