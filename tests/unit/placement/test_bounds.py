"""The bound on the busiest rank: below every placement, and as good as it is known to be."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest

from megatron_muon.placement.bounds import Options, smallest_possible


def options_of(costs: list[int]) -> Options:
    """From the cost of a part at 1, 2, … parts."""
    return tuple(enumerate(costs, start=1))


def _best(matrices: list[Options], ranks: int) -> int:
    """Smallest load of the busiest rank, by trying every number of parts and every place."""
    best = sum(options[0][1] for options in matrices)
    for chosen in product(*matrices):
        places = [list(combinations(range(ranks), count)) for count, _ in chosen]
        for placed in product(*places):
            loads = [0] * ranks
            for (_, cost), where in zip(chosen, placed, strict=True):
                for rank in where:
                    loads[rank] += cost
            best = min(best, max(loads))
    return best


@pytest.mark.parametrize("seed", range(60))
def test_no_placement_is_below(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    matrices = []
    for _ in range(rng.randint(1, 4)):
        whole = rng.randint(1, 40)
        # A part costs more than its share, and fewer than before.
        costs = [whole, *(-(-whole * 13 // (10 * k)) for k in range(2, rng.randint(1, ranks) + 1))]
        matrices.append(options_of(costs))
    best = _best(matrices, ranks)
    bound = smallest_possible(matrices, ranks)
    assert bound <= best
    assert bound >= best / 1.5


def test_whole_matrices_above_half_are_one_to_a_rank() -> None:
    """The mean is 3.75, the largest 5; five of 3 on four ranks: one rank has two of them."""
    assert smallest_possible([((1, 3),)] * 5, 4) == 6


def test_equal_matrices_are_counted() -> None:
    """576 experts on 128 ranks: some rank has five, though the mean is 4.5."""
    assert smallest_possible([((1, 1000),)] * 576, 128) == 5000


def test_parts_that_cost_more_than_their_share() -> None:
    """24 matrices on 64 ranks: in two parts of 646 they fit, three parts of 529 are too many."""
    options = options_of([1000, 646, 529, 470])
    assert smallest_possible([options] * 24, 64) == 646


def test_large_parts_leave_no_room_for_parts_of_others() -> None:
    """The work is 13 for each of three ranks, but two parts of 8 have a rank each to themselves."""
    matrices = [options_of([22, 8, 7]), options_of([9, 6]), options_of([9, 6])]
    assert smallest_possible(matrices, 3) == _best(matrices, 3) == 14


def test_the_mean_and_the_largest() -> None:
    assert smallest_possible([((1, 5),), ((1, 1),), ((1, 1),)], 3) == 5
    assert smallest_possible([((1, 2),)] * 3, 1) == 6


def test_nothing_to_place() -> None:
    assert smallest_possible([], 4) == 0
    assert smallest_possible([((1, 0),)] * 3, 2) == 0
