"""The plan: the same for any order of its inputs, every element travels once, loads are counted."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from megatron_muon.matrices import ShardedParameter, SplitMode, logical_matrices
from megatron_muon.placement import ExchangeGroup, Plan, make_plan, schemes
from tests.distributed.prescribed import Whole
from tests.unit.placement.stages import (
    UNBOUNDED,
    Stage,
    cost,
    numbered,
    random_stage,
    runs_of,
    stage_of,
    stored,
    whole_matrices,
    whole_method,
)

LAYOUTS = [(1, 1), (2, 1), (1, 3), (2, 2), (4, 1), (2, 5), (8, 1)]
EVERY_LAYOUT = pytest.mark.parametrize(("tp", "dp"), LAYOUTS)


@pytest.mark.parametrize(("tp", "dp"), [(1, 4), (2, 2), (4, 3)])
def test_plan_does_not_depend_on_the_order_of_its_inputs(tp: int, dp: int) -> None:
    """Equal shapes everywhere, so that nothing but the names can break ties."""
    entries = [Whole(name=f"layers.{i}.w", shape=(8, 8), tp_dim=i % 2) for i in range(13)]
    for stage in (stage_of(entries, tp=tp, dp=dp), random_stage(tp, tp=tp, dp=dp, parameters=13)):
        plans = []
        for seed in range(6):
            rng = random.Random(seed)
            parameters, matrices = list(stage.parameters), list(stage.matrices)
            if seed:
                rng.shuffle(parameters)
                rng.shuffle(matrices)
            plans.append(
                make_plan(
                    group=stage.group,
                    parameters=parameters,
                    matrices=matrices,
                    method=whole_method(),
                    buffer_bytes=40_000,
                )
            )
        assert all(plan == plans[0] for plan in plans)
        assert len({plan.digest for plan in plans}) == 1


def test_names_of_equal_natural_order_do_not_depend_on_the_order_either() -> None:
    """``01`` and ``1`` are the same number, not the same name."""
    stage = stage_of(
        [Whole(name=name, shape=(8, 8), tp_dim=0) for name in ("w.1.a", "w.01.a")], tp=1, dp=2
    )
    backwards = dataclasses.replace(stage, parameters=stage.parameters[::-1])
    assert stage.plan().digest == backwards.plan().digest


def _plan(
    entries: tuple[tuple[str, int, int | None], ...] = (("a", 16, 0), ("b", 16, 0), ("c", 24, 0)),
    *,
    tp: int = 2,
    dp: int = 2,
    bucket: int = 10**6,
    split: SplitMode = "parts",
    itemsize: int = 4,
    factor: int = 1,
) -> Plan:
    wholes = [Whole(name=name, shape=(rows, 8), tp_dim=dim) for name, rows, dim in entries]
    wholes.append(dataclasses.replace(_GATED, name="d"))
    stage = stage_of(wholes, tp=tp, dp=dp, bucket=bucket, split=split)
    return make_plan(
        group=stage.group,
        parameters=stage.parameters,
        matrices=stage.matrices,
        method=whole_method(itemsize, cost=lambda m, n: factor * cost(m, n)),
        buffer_bytes=UNBOUNDED,
    )


_GATED = next(
    e for seed in range(9) for e in random_stage(seed, tp=1, dp=1).entries if "gated" in e.name
)


@pytest.mark.parametrize(
    "other",
    [
        lambda: _plan((("a", 16, 0), ("b", 16, 0), ("cc", 24, 0))),
        lambda: _plan((("a", 16, 0), ("b", 16, 0), ("c", 32, 0))),
        lambda: _plan((("a", 16, 0), ("b", 16, 0), ("c", 24, None))),
        lambda: _plan((("a", 16, 0), ("b", 16, 0), ("c", 24, 1))),
        lambda: _plan((("a", 16, 0), ("b", 16, 0))),
        lambda: _plan(tp=4, dp=1),
        lambda: _plan(tp=1, dp=4),
        lambda: _plan(dp=4),
        lambda: _plan(bucket=1),
        lambda: _plan(split="none"),
        lambda: _plan(itemsize=8),
        lambda: _plan(factor=2),
    ],
    ids=[
        *("name", "shape", "replicated", "cut", "a matrix less", "tp", "tp and dp", "dp"),
        *("bucket", "split", "itemsize", "cost"),
    ],
)
def test_other_inputs_give_another_digest(other: Callable[[], Plan]) -> None:
    assert _plan().digest == _plan().digest
    assert other().digest != _plan().digest


def test_other_waves_give_another_digest() -> None:
    stage = random_stage(1, tp=1, dp=2, parameters=12)
    free, bounded = stage.plan(), stage.plan(buffer_bytes=6_000)
    assert free.main.waves != bounded.main.waves
    assert free.digest != bounded.digest


def _changed(data: Any, but: str) -> list[Any]:
    """The same data with another value in one field, for each field."""
    names = [f.name for f in dataclasses.fields(data) if f.name != but]
    return [dataclasses.replace(data, **{name: "another"}) for name in names]


@pytest.mark.parametrize("kind", [schemes.Whole, schemes.Factors, schemes.Panels])
def test_every_field_of_a_plan_and_of_its_schemes_is_in_the_digest(kind: Any) -> None:
    """Also one that follows from others in the plans that are made today."""
    scheme = kind(**dict.fromkeys((f.name for f in dataclasses.fields(kind)), ()))
    plan = dataclasses.replace(_plan(), schemes=(scheme,))
    others = _changed(plan, "schemes")
    others += [dataclasses.replace(plan, schemes=(s,)) for s in _changed(scheme, "shares")]
    assert len({other.digest for other in (plan, *others)}) == 1 + len(others)


def _runs(stage: Stage, plan: Plan, index: int, *, copies: bool) -> list[tuple[int, list[int]]]:
    """(rank, numbers of the elements) of every run of a matrix, from what the ranks store."""
    wholes = numbered(stage.entries)
    name = plan.matrices[index].parameter
    (parameter,) = (p for p in stage.parameters if p.name == name)
    found = []
    for rank, run in runs_of(plan, index, copies=copies):
        start, stop = parameter.ranges[rank // stage.group.tp]
        assert start <= run.start < run.start + run.numel <= stop
        own = stored(stage, wholes, rank)[name]
        found.append((rank, own[run.start - start :][: run.numel].tolist()))
    return found


@EVERY_LAYOUT
@pytest.mark.parametrize("split", ["parts", "none"])
def test_every_element_is_gathered_once_and_scattered_to_every_holder(
    tp: int, dp: int, split: SplitMode
) -> None:
    stage = random_stage(100 * tp + dp, tp=tp, dp=dp, split=split)
    plan = stage.plan()
    wholes = numbered(stage.entries)
    expected = whole_matrices(stage, wholes)
    assert sorted(expected) == sorted(m.name for m in plan.matrices)
    received: list[list[int]] = [[] for _ in range(stage.group.size)]
    for index, matrix in enumerate(plan.matrices):
        elements = sorted(expected[matrix.name].flatten().tolist())
        for copies in (False, True):
            order = [(rank, run.start) for rank, run in runs_of(plan, index, copies=copies)]
            assert order == sorted(order)
        gathered = [e for _, run in _runs(stage, plan, index, copies=False) for e in run]
        assert sorted(gathered) == elements
        for rank, run in _runs(stage, plan, index, copies=True):
            received[rank] += run
    for rank, elements in enumerate(received):
        own = stored(stage, wholes, rank).values()
        assert sorted(elements) == sorted(e for part in own for e in part.tolist())


@EVERY_LAYOUT
def test_loads_count_what_crosses_between_ranks(tp: int, dp: int) -> None:
    stage = random_stage(7 * tp + dp, tp=tp, dp=dp)
    plan = stage.plan(itemsize=2)
    sent, received = Counter[int](), Counter[int]()
    for index, owner in enumerate(plan.owners):
        for copies in (False, True):
            outwards = not copies
            for rank, run in _runs(stage, plan, index, copies=copies):
                if rank != owner:
                    sent[rank if outwards else owner] += 2 * len(run)
                    received[owner if outwards else rank] += 2 * len(run)
    for rank, load in enumerate(plan.loads):
        owned = [i for i, owner in enumerate(plan.owners) if owner == rank]
        assert load.sent_bytes == sent[rank]
        assert load.received_bytes == received[rank]
        assert load.matrices == len(owned)
        assert load.flops == sum(cost(*plan.matrices[i].shape) for i in owned)
    assert sum(load.matrices for load in plan.loads) == len(plan.matrices)
    assert stage.group.size > 1 or plan.loads[0].sent_bytes == 0


def test_matrices_are_in_forward_order() -> None:
    entries = [Whole(name=f"layers.{i}.w", shape=(8, 8), tp_dim=0) for i in range(12)]
    plan = stage_of(entries, tp=1, dp=2).plan()
    assert [m.name for m in plan.matrices] == [e.name for e in entries]
    assert [p.name for p in plan.parameters] == [e.name for e in entries]


def test_equal_matrices_are_dealt_evenly() -> None:
    entries = [Whole(name=f"layers.{i}.w", shape=(16, 8), tp_dim=0) for i in range(12)]
    plan = stage_of(entries, tp=2, dp=3).plan()
    assert [load.matrices for load in plan.loads] == [2] * 6
    assert plan.balance == (1.0, 1.0)


def test_balance_is_reached_and_possible_over_the_mean() -> None:
    """Costs 8·8·8 twice and 32·8·8 once on two ranks: mean 3 of 6 units, the largest is 4."""
    entries = [
        Whole(name=name, shape=(rows, 8), tp_dim=0)
        for name, rows in (("a", 8), ("b", 8), ("c", 32))
    ]
    plan = stage_of(entries, tp=2, dp=1).plan()
    assert plan.balance == pytest.approx((4 / 3, 4 / 3))
    assert stage_of(entries, tp=1, dp=1).plan().balance == (1.0, 1.0)
    assert stage_of(entries, tp=2, dp=3).plan().balance == pytest.approx((4.0, 4.0))


def test_more_ranks_than_matrices() -> None:
    stage = stage_of([Whole(name="w", shape=(8, 8), tp_dim=1)], tp=2, dp=5)
    plan = stage.plan()
    assert sorted(load.matrices for load in plan.loads) == [0] * 9 + [1]
    assert plan.main.waves == ((0,),)
    (owner,) = plan.owners
    runs = runs_of(plan, 0, copies=False)
    held = sum(run.numel for rank, run in runs if rank == owner)
    assert held == max(
        sum(run.numel for holder, run in runs if holder == rank) for rank in range(10)
    )


@EVERY_LAYOUT
def test_no_matrix_at_all(tp: int, dp: int) -> None:
    plan = stage_of([], tp=tp, dp=dp).plan(buffer_bytes=0)
    assert (plan.matrices, plan.owners, plan.main.waves) == ((), (), ())
    assert plan.balance == (1.0, 1.0)
    assert len(plan.loads) == tp * dp
    assert not any(any(dataclasses.astuple(load)) for load in plan.loads)
    assert len(plan.digest) == 64


def test_a_parameter_without_matrices_stays_at_home() -> None:
    """A parameter may be listed though none of its matrices are."""
    stage = stage_of([Whole(name=n, shape=(8, 8), tp_dim=0) for n in "ab"], tp=1, dp=2)
    matrices = [m for m in stage.matrices if m.name == "b"]
    plan = make_plan(
        group=stage.group,
        parameters=stage.parameters,
        matrices=matrices,
        method=whole_method(),
        buffer_bytes=UNBOUNDED,
    )
    assert [m.name for m in plan.matrices] == ["b"]
    assert [p.name for p in plan.parameters] == ["a", "b"]


def test_ranks_of_one_tensor_parallel_group_are_neighbours() -> None:
    group = ExchangeGroup(tp=4, dp=3)
    ranks = [group.rank(tp_rank=t, dp_rank=d) for d in range(3) for t in range(4)]
    assert ranks == list(range(group.size))


def test_update_of_a_replicated_matrix_goes_to_the_same_range_of_every_copy() -> None:
    parameter = ShardedParameter(
        name="w", global_shape=(2, 3), tp_dim=None, tp=2, ranges=((0, 2), (0, 0), (2, 6))
    )
    plan = make_plan(
        group=ExchangeGroup(tp=2, dp=3),
        parameters=[parameter],
        matrices=logical_matrices(parameter, split="parts"),
        method=whole_method(),
        buffer_bytes=UNBOUNDED,
    )
    sources, copies = (runs_of(plan, 0, copies=copies) for copies in (False, True))
    assert [(rank, r.start, r.numel) for rank, r in sources] == [(0, 0, 2), (4, 2, 4)]
    assert sorted((rank, r.start, r.numel) for rank, r in copies) == [
        (0, 0, 2),
        (1, 0, 2),
        (4, 2, 4),
        (5, 2, 4),
    ]
