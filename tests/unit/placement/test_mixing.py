"""Equal matrices in different numbers of parts: what a search by counts finds, and keeps."""

from __future__ import annotations

import random
from itertools import product

import pytest

from megatron_muon.placement import mixing
from megatron_muon.placement.bounds import Options
from megatron_muon.placement.mixing import Counts, mix_parts


def ways(costs: list[list[int]]) -> list[Options]:
    """From the cost of a part at 1, 2, … parts."""
    return [tuple(enumerate(row, start=1)) for row in costs]


def _largest(costs: list[list[int]], counts: Counts, ranks: int) -> int:
    """Load of the busiest rank, longest first, written plainly."""
    works = sorted(
        (
            (costs[kind][place], place + 1)
            for kind, row in enumerate(counts)
            for place, number in enumerate(row)
            for _ in range(number)
        ),
        reverse=True,
    )
    loads = [0] * ranks
    for cost, parts in works:
        for rank in sorted(range(ranks), key=lambda r: loads[r])[:parts]:
            loads[rank] += cost
    return max(loads)


def test_the_fifth_of_five_equal_matrices_is_cut_into_four() -> None:
    """On four ranks 12 + 4; cut alike they reach 20, whole 24."""
    costs = [[12, 7, 5, 4]]
    for place in range(4):
        alike = (tuple(5 if place == other else 0 for other in range(4)),)
        assert _largest(costs, alike, 4) >= 20
    assert mix_parts(ways(costs), ((5, 0, 0, 0),), ranks=4, target=16) == ((4, 0, 0, 1),)


def test_three_parts_and_four_beside_small_matrices() -> None:
    """On seven ranks 5 and 4 + 2; two matrices in two parts, or in three, or in four, reach 7."""
    costs = [[12, 7, 5, 4], [2]]
    for place in range(1, 4):
        alike = (tuple(2 if place == other else 0 for other in range(4)), (4,))
        assert _largest(costs, alike, 7) >= 7
    assert mix_parts(ways(costs), ((0, 2, 0, 0), (4,)), ranks=7, target=6) == ((0, 0, 1, 1), (4,))


def test_no_more_is_cut_than_the_target_needs() -> None:
    """The change that helps most cuts all of the small ones; three of them are enough."""
    costs = [[100, 50, 34, 25], [20, 10, 7, 5]]
    found = mix_parts(ways(costs), ((0, 0, 0, 1), (7, 0, 0, 0)), ranks=4, target=60)
    assert _largest(costs, found, 4) == 60
    assert found[0] == (0, 0, 0, 1)
    assert found[1][0] >= 4


@pytest.mark.parametrize("seed", range(30))
def test_no_matrix_is_lost_and_a_target_in_reach_is_not_left(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(3, 8)
    costs = [
        [-(-whole * (9 + k) // (10 * k)) for k in range(1, rng.randint(1, 3) + 1)]
        for whole in (rng.randint(5, 40) for _ in range(2))
    ]
    numbers = [rng.randint(1, 4) for _ in costs]
    start = tuple((n, *[0] * (len(row) - 1)) for n, row in zip(numbers, costs, strict=True))
    found = mix_parts(ways(costs), start, ranks=ranks, target=0)
    assert [sum(row) for row in found] == numbers
    # A target that the start reaches is no reason to cut anything.
    reached = _largest(costs, start, ranks)
    assert mix_parts(ways(costs), start, ranks=ranks, target=reached) == start
    every = [
        [row for row in product(range(n + 1), repeat=len(c)) if sum(row) == n]
        for n, c in zip(numbers, costs, strict=True)
    ]
    best = min(_largest(costs, counts, ranks) for counts in product(*every))
    climbed = mix_parts(ways(costs), start, ranks=ranks, target=best)
    assert _largest(costs, climbed, ranks) <= min(reached, best * 13 // 10)


def test_the_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no steps left nothing changes."""
    monkeypatch.setattr(mixing, "MOST_STEPS", 0)
    start = ((5, 0, 0, 0),)
    assert mix_parts(ways([[12, 7, 5, 4]]), start, ranks=4, target=16) == start
