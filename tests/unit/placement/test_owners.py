"""Owners: how far from the optimum, what breaks ties, and that staying at home costs nothing."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from itertools import product

import pytest

from megatron_muon.placement.owners import Work, assign_ranks
from tests.distributed.prescribed import Whole, gate_up, units
from tests.unit.placement.stages import stage_of

SEEDS = range(40)


def _owners(
    costs: Sequence[int],
    ranks: int,
    held: Sequence[Mapping[int, int]] | None = None,
    names: Sequence[str] | None = None,
) -> tuple[int, ...]:
    works = [
        Work(name=name, cost=cost, held=pieces)
        for name, cost, pieces in zip(
            names or [f"m{i:02}" for i in range(len(costs))],
            costs,
            held or [{} for _ in costs],
            strict=True,
        )
    ]
    return tuple(owner for (owner,) in assign_ranks(works, ranks=ranks))


def _loads(owners: Sequence[int], costs: Sequence[int], ranks: int) -> list[int]:
    loads = [0] * ranks
    for owner, cost in zip(owners, costs, strict=True):
        loads[owner] += cost
    return loads


def _plain(costs: Sequence[int], ranks: int) -> list[int]:
    """Longest processing time first; equal costs by position; the first of the emptiest ranks."""
    heap = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, owners[index] = heapq.heappop(heap)
        heapq.heappush(heap, (load + costs[index], owners[index]))
    return owners


def _best(costs: Sequence[int], ranks: int) -> int:
    """Smallest possible largest load, by trying everything."""
    everything = product(range(ranks), repeat=len(costs) - 1)
    return min(max(_loads((0, *rest), costs, ranks)) for rest in everything)


def _random_case(seed: int) -> tuple[list[int], int, list[dict[int, int]]]:
    """Few different costs, pieces of random size on random ranks."""
    rng = random.Random(seed)
    ranks = rng.randint(1, 6)
    costs = [rng.choice((3, 5, 8, 20)) for _ in range(rng.randint(1, 20))]
    held = [
        {rank: rng.randint(1, 50) for rank in rng.sample(range(ranks), rng.randint(1, ranks))}
        for _ in costs
    ]
    return costs, ranks, held


def _travelling(owners: Sequence[int], held: Sequence[Mapping[int, int]]) -> int:
    """Elements that are not held by the owner of their matrix."""
    return sum(
        elements
        for owner, pieces in zip(owners, held, strict=True)
        for rank, elements in pieces.items()
        if rank != owner
    )


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_largest_load_is_within_the_bound_of_longest_first(ranks: int, seed: int) -> None:
    rng = random.Random(seed)
    costs = [rng.randint(1, 30) for _ in range(7)]
    reached = max(_loads(_owners(costs, ranks), costs, ranks))
    assert reached <= (4 / 3 - 1 / (3 * ranks)) * _best(costs, ranks)


def test_the_local_search_mends_the_worst_case_of_longest_first() -> None:
    """5, 5, 4, 4, 3, 3, 3 on three ranks: 11 where 9 is possible; so the bound above is tight."""
    costs = [3, 5, 4, 3, 5, 3, 4]
    assert max(_loads(_plain(costs, 3), costs, 3)) == 11
    assert max(_loads(_owners(costs, 3), costs, 3)) == _best(costs, 3) == 9


@pytest.mark.parametrize("seed", SEEDS)
def test_the_local_search_makes_nothing_worse(seed: int) -> None:
    costs, ranks, _ = _random_case(seed)
    before = max(_loads(_plain(costs, ranks), costs, ranks))
    assert max(_loads(_owners(costs, ranks), costs, ranks)) <= before


@pytest.mark.parametrize("seed", SEEDS)
def test_owners_do_not_depend_on_the_order_given(seed: int) -> None:
    costs, ranks, held = _random_case(seed)
    names = [f"m{i:02}" for i in range(len(costs))]
    expected = dict(zip(names, _owners(costs, ranks, held), strict=True))
    order = list(range(len(costs)))
    random.Random(seed).shuffle(order)
    found = _owners(
        [costs[i] for i in order],
        ranks,
        [held[i] for i in order],
        [names[i] for i in order],
    )
    assert dict(zip([names[i] for i in order], found, strict=True)) == expected


def test_ties_are_broken_by_name() -> None:
    assert _owners([1, 1, 1, 1], 4, names=["c", "a", "d", "b"]) == (2, 0, 3, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_staying_at_home_changes_no_load(seed: int) -> None:
    costs, ranks, held = _random_case(seed)
    assert _loads(_owners(costs, ranks, held), costs, ranks) == _loads(
        _owners(costs, ranks), costs, ranks
    )


def test_staying_at_home_never_makes_more_travel() -> None:
    """Against the same slots dealt in the order of the names."""
    for seed in range(3000):
        costs, ranks, held = _random_case(seed)
        costs, held = costs[: 1 + seed % 8], held[: 1 + seed % 8]
        ours = _travelling(_owners(costs, ranks, held), held)
        assert ours <= _travelling(_owners(costs, ranks), held), (costs, ranks, held)


def test_the_largest_piece_at_home_may_not_cost_more_elsewhere() -> None:
    """The large matrix takes rank 0; then 98 elements can stay at home, not only 50."""
    costs = [100, 7, 7]
    held = [{0: 1}, {0: 51, 1: 49}, {1: 50, 2: 49}]
    assert _owners(costs, 3, held) == (0, 1, 2)


def test_every_matrix_that_can_stays_at_home() -> None:
    homes = [3, 1, 0, 2, 1, 3, 2, 0]
    assert _owners([7] * 8, 4, [{home: 10} for home in homes]) == tuple(homes)


def test_the_larger_piece_stays() -> None:
    assert _owners([7, 7], 2, [{0: 4}, {0: 9}]) == (1, 0)
    assert _owners([7, 7], 2, [{0: 9}, {0: 4}]) == (0, 1)


def test_home_without_a_slot_of_equal_cost_is_left() -> None:
    """Balance comes first: the small matrices are at home where the large one is computed."""
    costs = [100, 1, 1]
    assert _owners(costs, 2, [{1: 1}, {0: 5}, {0: 5}]) == (0, 1, 1)


def test_more_ranks_than_matrices_gives_each_its_own() -> None:
    assert sorted(_owners([5, 4, 3], 7)) == [0, 1, 2]


def test_nothing_to_own() -> None:
    assert _owners([], 4) == ()


def test_costs_of_zero_are_owned_too() -> None:
    assert all(0 <= owner < 3 for owner in _owners([0, 0, 0, 0], 3))


def _dense(h: int, ffn: int, layers: int, heads: int) -> list[Whole]:
    """Layers with grouped queries (8 groups of head size 128) and a gated MLP."""
    query = heads // 8 * 128
    return [
        entry
        for layer in range(layers)
        for entry in (
            Whole(
                name=f"layers.{layer}.qkv",
                shape=(8 * (query + 256), h),
                tp_dim=0,
                packing=units(q=query, k=128, v=128),
            ),
            Whole(name=f"layers.{layer}.proj", shape=(h, 8 * query), tp_dim=1),
            Whole(name=f"layers.{layer}.fc1", shape=(2 * ffn, h), tp_dim=0, packing=gate_up(ffn)),
            Whole(name=f"layers.{layer}.fc2", shape=(h, ffn), tp_dim=1),
        )
    ]


def _experts(h: int, ffn: int, layers: int, experts: int) -> list[Whole]:
    return [
        entry
        for layer in range(layers)
        for expert in range(experts)
        for entry in (
            Whole(
                name=f"layers.{layer}.experts.fc1.weight{expert}",
                shape=(2 * ffn, h),
                tp_dim=0,
                packing=gate_up(ffn),
            ),
            Whole(name=f"layers.{layer}.experts.fc2.weight{expert}", shape=(h, ffn), tp_dim=1),
        )
    ]


@pytest.mark.parametrize(
    ("entries", "tp", "dp"),
    [
        pytest.param(_dense(8192, 28672, 20, 64), 8, 8, id="70B stage, TP8 x DP8"),
        pytest.param(_dense(4096, 14336, 32, 32), 2, 8, id="8B, TP2 x DP8"),
        pytest.param(_dense(4096, 14336, 32, 32), 1, 64, id="8B, DP64"),
        pytest.param(_experts(2048, 1408, 6, 16), 1, 8, id="experts, DP8"),
        pytest.param(_experts(4096, 1536, 6, 16), 2, 4, id="experts, TP2 x DP4"),
    ],
)
def test_time_and_memory_are_balanced_on_dense_and_moe_shapes(
    entries: list[Whole], tp: int, dp: int
) -> None:
    """M#6379, M#2162, M#2163: balanced by elements, one owner dominates time or memory.

    Time within 1.2 of the bound, elements owned within 1.2 of the mean, bytes within 1.3 of what
    an even share of all elements out and back would be.
    """
    plan = stage_of(entries, tp=tp, dp=dp, bucket=40_000_000).plan()
    reached, bound = plan.balance
    assert reached <= 1.2 * bound
    owned = [0] * plan.group.size
    for matrix, owner in zip(plan.matrices, plan.owners, strict=True):
        owned[owner] += matrix.numel
    even = sum(owned) / plan.group.size
    assert max(owned) <= 1.2 * even
    assert max(load.sent_bytes for load in plan.loads) <= 1.3 * 2 * even * plan.itemsizes["source"]
    assert (
        max(load.received_bytes for load in plan.loads) <= 1.3 * 2 * even * plan.itemsizes["source"]
    )
