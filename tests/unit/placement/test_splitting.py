"""Matrices that several ranks compute: panels, who computes what, and what the plan says of it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_muon.placement import Panels, Plan, Splitting, buffer_bytes_of, even_cuts, make_plan
from megatron_muon.placement.part_costs import (
    NETWORK_LATENCY_BYTES,
    Candidate,
    part_cost,
    team_of,
)
from megatron_muon.placement.regions import panels
from megatron_muon.placement.splitting import choose_ranks
from tests.distributed.prescribed import Whole
from tests.unit.placement.stages import (
    UNBOUNDED,
    Stage,
    cost,
    numbered,
    random_stage,
    stage_of,
    stored,
    whole_matrices,
    whole_method,
)


def splitting(**changes: Any) -> Splitting:
    """Parts of k cost a k-th, rounded up; three messages."""
    values: dict[str, Any] = {
        "most_ranks": 4,
        "flops": lambda m, n, ranks, number: -(-cost(m, n) // ranks),
        "requests": lambda m, n, team: (
            "scalars",
            *team.sum_kinds(),
            *team.share_kinds(),
        ),
        "itemsize": 4,
        "scalar_itemsize": 4,
        "min_flops": 0,
    }
    return Splitting(**(values | changes))


def plan_of(stage: Stage, *, buffer_bytes: int = UNBOUNDED, **changes: Any) -> Plan:
    nodes = changes.pop("ranks_per_node", None)
    return make_plan(
        group=stage.group,
        parameters=stage.parameters,
        matrices=stage.matrices,
        method=whole_method(changes.get("itemsize", 4), splitting=splitting(**changes)),
        buffer_bytes=buffer_bytes,
        ranks_per_node=nodes,
    )


@pytest.mark.parametrize(("length", "count"), itertools.product((0, 1, 5, 12), (1, 2, 5, 7)))
def test_even_cuts_cover_everything_and_differ_by_one(length: int, count: int) -> None:
    cuts = even_cuts(length, count)
    assert [i for start, end in cuts for i in range(start, end)] == list(range(length))
    sizes = [end - start for start, end in cuts]
    assert len(cuts) == count and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes)[::-1]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("tp", "dp"), [(1, 3), (2, 2), (2, 5)])
def test_panels_get_every_element_once_from_where_it_is_stored(tp: int, dp: int, seed: int) -> None:
    stage = random_stage(seed, tp=tp, dp=dp)
    wholes = numbered(stage.entries)
    matrices = whole_matrices(stage, wholes)
    ranges = {p.name: p.ranges for p in stage.parameters}
    plan = stage.plan()
    for matrix, scheme in zip(plan.matrices, plan.schemes, strict=True):
        expected = matrices[matrix.name]
        for count in (1, 2, 3, 7):
            cut = panels(matrix.shape, count)
            assert sum(panel.numel for panel in cut) == expected.numel()
            for panel in cut:
                found = torch.full((panel.rows, panel.cols), -1)
                for share in scheme.shares:
                    if not share.is_source:
                        continue
                    local = stored(stage, wholes, share.rank)[matrix.parameter]
                    first = ranges[matrix.parameter][share.rank // tp][0]
                    pieces = list(share.pieces(panel))
                    assert sum(p.numel for p in pieces) == share.elements_in(panel)
                    for p in pieces:
                        size, stride = (p.rows, p.cols), (p.stride, 1)
                        row, col = p.row - panel.row, p.col - panel.col
                        target = found[row : row + p.rows, col : col + p.cols]
                        assert (target == -1).all()
                        target.copy_(local.as_strided(size, stride, p.start - first))
                assert torch.equal(found, expected[panel.row_slice, panel.col_slice])


def in_parts(plan: Plan) -> dict[str, Panels]:
    """The matrices that several ranks compute, by name."""
    pairs = zip(plan.matrices, plan.schemes, strict=True)
    return {m.name: scheme for m, scheme in pairs if isinstance(scheme, Panels)}


def candidates(*costs: int) -> list[Candidate]:
    return [
        Candidate(name=f"m{i:02}", shape=(10, 10), flops=c, cost=c, held={})
        for i, c in enumerate(costs)
    ]


def chosen(
    *costs: int, ranks: int, per_node: int | None = None, **changes: Any
) -> tuple[tuple[int, ...], ...]:
    flops = {"flops": lambda m, n, parts, number: -(-100 // parts)}
    found = candidates(*costs)
    known = [Candidate(**{**vars(c), "flops": 100}) for c in found]
    return choose_ranks(
        known,
        ranks=ranks,
        ranks_per_node=per_node or ranks,
        splitting=splitting(**(flops | changes)),
    ).ranks


def test_what_is_above_the_mean_is_split_and_no_more_than_helps() -> None:
    """One of 100, seven of 20, four ranks: 60 on each are 25, 20, and parts of three of 20."""
    found = chosen(100, *[20] * 7, ranks=4)
    assert len(found[0]) == 4
    assert sum(len(ranks) == 1 for ranks in found) == 4
    loads = [0] * 4
    for cost_of, ranks in zip((100, *[20] * 7), found, strict=True):
        for rank in ranks:
            loads[rank] += cost_of // len(ranks)
    assert max(loads) == 60


def test_nothing_is_split_where_owners_are_even() -> None:
    assert all(len(ranks) == 1 for ranks in chosen(*[50] * 8, ranks=4))


def test_no_more_ranks_than_allowed_share() -> None:
    assert {len(r) for r in chosen(100, ranks=8)} == {4}
    assert {len(r) for r in chosen(100, ranks=8, most_ranks=2)} == {2}
    assert {len(r) for r in chosen(100, ranks=3)} == {3}
    assert {len(r) for r in chosen(100, ranks=8, most_ranks=1)} == {1}


def test_equal_matrices_may_have_different_numbers_of_parts() -> None:
    """Two of 12 and four of 2 on seven ranks: three parts of 5, and four of 4 beside the others."""
    part_of_12 = {1: 12, 2: 7, 3: 5, 4: 4}
    found = choose_ranks(
        candidates(12, 12, 2, 2, 2, 2),
        ranks=7,
        ranks_per_node=7,
        splitting=splitting(flops=lambda m, n, parts, number: part_of_12[parts], min_flops=3),
    )
    assert sorted(len(ranks) for ranks in found.ranks) == [1, 1, 1, 1, 3, 4]
    loads = [0] * 7
    for cost_of, ranks in zip((12, 12, 2, 2, 2, 2), found.ranks, strict=True):
        for rank in ranks:
            loads[rank] += part_of_12[len(ranks)] if cost_of == 12 else cost_of
    assert max(loads) == 6


def test_a_small_matrix_is_not_split() -> None:
    assert {len(r) for r in chosen(100, ranks=8, min_flops=101)} == {1}
    assert {len(r) for r in chosen(100, ranks=8, min_flops=100)} == {4}


def test_messages_that_take_longer_than_they_save_are_not_sent() -> None:
    """Three messages of some 10 x 10 elements of 4 bytes."""
    assert {len(r) for r in chosen(100, ranks=8, flops_per_byte=1)} == {1}
    one = candidates(100)[0]
    costs = [
        part_cost(
            one,
            splitting(flops=lambda m, n, k, j: 100 // k, flops_per_byte=f),
            team_of(one.shape, 2, 2),
        )
        for f in (0, 1, 2)
    ]
    assert costs[0] == 50
    assert costs[2] - costs[1] == costs[1] - costs[0] > 0


def test_ranks_of_a_matrix_are_on_one_node() -> None:
    """Two matrices in four parts on two nodes of four."""
    found = chosen(100, 100, ranks=8, per_node=4)
    assert {tuple(rank // 4 for rank in ranks) for ranks in found} == {(0,) * 4, (1,) * 4}


def test_a_matrix_is_split_on_one_node_or_on_whole_ones() -> None:
    """Of 100 on three nodes of four, up to ten ranks: eight, and all of two nodes."""
    found = chosen(100, ranks=12, per_node=4, most_ranks=10)
    assert [tuple(rank // 4 for rank in ranks) for ranks in found] == [(0,) * 4 + (1,) * 4]
    assert {len(r) for r in chosen(100, ranks=11, per_node=4, most_ranks=16)} == {8}
    assert {len(r) for r in chosen(100, ranks=8, per_node=1, most_ranks=3)} == {3}


def test_the_network_is_used_only_where_it_makes_the_busiest_rank_faster_by_a_tenth() -> None:
    """Eight ranks take half of what four do, and as many tenths of it more as it says."""
    for rate, expected in ((0, 8), (7, 8), (9, 4), (1000, 4)):
        found = choose_ranks(
            [Candidate(name="m", shape=(8, 8), flops=10**10, cost=10**10, held={})],
            ranks=8,
            ranks_per_node=4,
            splitting=splitting(
                most_ranks=8,
                flops=lambda m, n, parts, number: 10**10 // parts,
                # Two messages over the network, each of 1 MiB and 32 bytes.
                flops_per_network_byte=rate * 10**10 // 8 // 10 // (2 * (1 << 20) + 64),
            ),
        )
        assert {len(ranks) for ranks in found.ranks} == {expected}


def test_of_placements_equally_fast_the_busiest_rank_has_fewer_operations() -> None:
    """The second in three parts takes no more time than the first in four, but 32 of operations."""
    operations = {100: {1: 100, 2: 50, 3: 34, 4: 25}, 96: {1: 96, 2: 48, 3: 32, 4: 24}}
    found = choose_ranks(
        [
            Candidate(name="a", shape=(10, 10), flops=100, cost=100, held={}),
            Candidate(name="b", shape=(10, 9), flops=96, cost=75, held={}),
        ],
        ranks=8,
        ranks_per_node=4,
        splitting=splitting(
            flops=lambda m, n, parts, number: operations[100 if n == 10 else 96][parts]
        ),
    )
    assert [len(ranks) for ranks in found.ranks] == [4, 4]


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 1), (8, 2), (6, 3), (3, 3)])
def test_bytes_of_a_part_are_those_of_the_messages(ranks: int, nodes: int) -> None:
    """Against the formula of ``panel_team``: a square of 24 x 24, eight bytes an element."""
    each, square = ranks // nodes, 24 * 24 * 8
    team = team_of((24, 30), ranks, each)
    assert (team.size, team.nodes) == (ranks, nodes)
    near, far = splitting(itemsize=8, scalar_itemsize=8).bytes_moved(24, 30, team, 0)
    messages = len([*team.sum_kinds(), *team.share_kinds()]) // 2
    assert near == 2 * square * (each - 1) // each + 2 * 8 * (ranks - 1)
    latency = 2 * NETWORK_LATENCY_BYTES if nodes > 1 else 0
    assert far == 2 * square * (nodes - 1) // ranks + latency
    assert messages == (nodes > 1) + (each > 1)


LARGE = [
    Whole(name="layers.0.large", shape=(64, 64), tp_dim=0),
    *(Whole(name=f"layers.{i}.small", shape=(16, 16), tp_dim=0) for i in range(1, 9)),
]


@pytest.mark.parametrize(("tp", "dp"), [(1, 4), (2, 2), (2, 3)])
def test_a_plan_has_a_matrix_whole_or_in_parts(tp: int, dp: int) -> None:
    plan = plan_of(stage_of(LARGE, tp=tp, dp=dp))
    assert list(in_parts(plan)) == ["layers.0.large"]
    in_waves = [index for wave in (*plan.main.waves, *plan.split.waves) for index in wave]
    assert sorted(in_waves) == list(range(len(plan.matrices)))
    (matrix,) = in_parts(plan).values()
    assert len(set(matrix.ranks)) == len(matrix.ranks) == 4
    assert sum(load.matrices for load in plan.loads) == len(plan.matrices)
    reached, bound = plan.balance
    assert bound <= reached < stage_of(LARGE, tp=tp, dp=dp).plan().balance[0]


def test_no_rank_has_two_parts_in_one_wave() -> None:
    entries = [Whole(name=f"layers.{i}.large", shape=(64, 64), tp_dim=0) for i in range(3)]
    plan = plan_of(stage_of(entries, tp=1, dp=5))
    assert in_parts(plan)
    for wave in plan.split.waves:
        ranks = [rank for index in wave for rank in plan.schemes[index].ranks]
        assert len(ranks) == len(set(ranks))
    indices = sorted(index for wave in plan.split.waves for index in wave)
    assert [plan.matrices[index].name for index in indices] == list(in_parts(plan))


def test_a_bound_on_buffers_is_kept_or_told() -> None:
    """With less memory fewer waves fly at once; with too little the matrix is not shared."""
    stage = stage_of(LARGE, tp=2, dp=2)
    free = plan_of(stage)
    most = max(load.peak_buffer_bytes for load in free.loads)
    for part in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5):
        try:
            plan = plan_of(stage, buffer_bytes=int(most * part))
        except ValueError as error:
            # With what it says to type, other waves may be under way: it has been tried.
            advised = str(error).rpartition("type --matrix-exchange-buffer-mb ")[2]
            bound = buffer_bytes_of(float(advised))
            loads = plan_of(stage, buffer_bytes=bound).loads
            assert max(load.peak_buffer_bytes for load in loads) <= bound
            break
        assert max(load.peak_buffer_bytes for load in plan.loads) <= int(most * part)
    else:
        raise AssertionError("no bound was too small")


def test_splitting_is_part_of_the_digest() -> None:
    stage = stage_of(LARGE, tp=2, dp=2)
    digests = {
        plan_of(stage).digest,
        plan_of(stage, most_ranks=1).digest,
        plan_of(stage, most_ranks=2).digest,
        plan_of(stage, ranks_per_node=2).digest,
        plan_of(stage, itemsize=2).digest,
    }
    assert len(digests) == 5


def _calls(work: Callable[[], object]) -> int:
    """Python functions entered by some work."""
    count = 0

    def tell(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(tell)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_planning_does_not_grow_with_the_square_of_the_ranks() -> None:
    """Four times the ranks, four times the work, searching and messages included."""

    def entries() -> Iterator[Whole]:
        for i in range(4):
            yield Whole(name=f"layers.{i}.qkv", shape=(256, 64), tp_dim=0)
            yield Whole(name=f"layers.{i}.fc2", shape=(64, 512), tp_dim=1)

    counts = {}
    for dp in (64, 256):
        stage = stage_of(list(entries()), tp=8, dp=dp, bucket=10**6)
        counts[dp] = _calls(lambda stage=stage: plan_of(stage).loads)
    assert counts[256] < 5 * counts[64]
