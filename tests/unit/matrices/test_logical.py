"""Logical matrices: cut by Megatron's conventions, written here, and put together by the blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from megatron_muon.matrices import (
    LogicalMatrix,
    RowPacking,
    ShardedParameter,
    logical_matrices,
    natural_key,
)

TP_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A parameter as one process holds it; ``group`` is (part, rows) of one query group."""

    name: str
    shape: tuple[int, int]
    tp_dim: int | None = 0
    packing: RowPacking = RowPacking.WHOLE
    group: tuple[tuple[str, int], ...] = ()


def _qkv(name: str, *, groups: int, heads: int, head_dim: int, gated: bool = False) -> Case:
    """``heads`` query heads in each of ``groups`` query groups."""
    query = heads * head_dim
    gate = (("gate", query),) if gated else ()
    parts = (("q", query), *gate, ("k", head_dim), ("v", head_dim))
    return Case(
        name=name,
        shape=(groups * sum(rows for _, rows in parts), 5),
        packing=RowPacking.QKV,
        group=parts,
    )


CASES = (
    Case(name="row cut", shape=(24, 7)),
    Case(name="column cut", shape=(7, 24), tp_dim=1),
    Case(name="replicated", shape=(7, 5), tp_dim=None),
    Case(name="gated fc1", shape=(48, 5), packing=RowPacking.GATE_UP),
    _qkv("GQA, groups divide", groups=8, heads=2, head_dim=3),
    _qkv("GQA, TP cuts through groups and heads", groups=2, heads=4, head_dim=4),
    _qkv("MQA", groups=1, heads=6, head_dim=5),
    _qkv("plain attention", groups=8, heads=1, head_dim=2),
    _qkv("gated attention, groups divide", groups=8, heads=3, head_dim=2, gated=True),
    _qkv("gated attention, TP cuts through groups", groups=4, heads=2, head_dim=2, gated=True),
)
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
EVERY_TP = pytest.mark.parametrize("tp", TP_SIZES)


def _whole(case: Case) -> np.ndarray:
    """The whole parameter; every element is different."""
    return np.arange(case.shape[0] * case.shape[1]).reshape(case.shape)


def _shards(case: Case, tp: int) -> list[np.ndarray]:
    """What Megatron stores on each TP rank."""
    whole = _whole(case)
    if case.tp_dim is None:
        return [whole] * tp
    if case.packing is RowPacking.GATE_UP:
        gate, up = np.split(whole, 2)
        halves = zip(np.split(gate, tp), np.split(up, tp), strict=True)
        return [np.concatenate(half) for half in halves]
    return np.split(whole, tp, axis=case.tp_dim)


def _expected(case: Case) -> dict[str, np.ndarray]:
    """Whole parts by name."""
    whole = _whole(case)
    if case.packing is RowPacking.GATE_UP:
        half = len(whole) // 2
        return {f"{case.name}[gate]": whole[:half], f"{case.name}[up]": whole[half:]}
    if case.packing is RowPacking.QKV:
        per_group = sum(rows for _, rows in case.group)
        grouped = whole.reshape(-1, per_group, case.shape[1])
        parts, start = {}, 0
        for part, rows in case.group:
            parts[f"{case.name}[{part}]"] = grouped[:, start : start + rows].reshape(
                -1, case.shape[1]
            )
            start += rows
        return parts
    return {case.name: whole}


def _parameter(case: Case, tp: int) -> ShardedParameter:
    tp_dim = None if tp == 1 else case.tp_dim
    numel = case.shape[0] * case.shape[1] // (1 if tp_dim is None else tp)
    return ShardedParameter(
        name=case.name,
        global_shape=case.shape,
        tp_dim=tp_dim,
        tp=tp,
        ranges=((0, numel),),
        packing=case.packing,
        part_rows=case.group,
    )


def _assembled(matrix: LogicalMatrix, shards: list[np.ndarray]) -> np.ndarray:
    """The matrix that the blocks give; every element is written exactly once."""
    result = np.full(matrix.shape, -1)
    writes = np.zeros(matrix.shape, int)
    for block in matrix.blocks:
        rows = shards[block.tp_rank][block.shard_row : block.shard_row + block.rows]
        assert rows.shape == (block.rows, block.cols)
        place = np.s_[block.row : block.row + block.rows, block.col : block.col + block.cols]
        result[place] = rows
        writes[place] += 1
    assert (writes == 1).all()
    return result


@EVERY_TP
@EVERY_CASE
def test_blocks_of_the_shards_give_the_rows_of_the_whole(case: Case, tp: int) -> None:
    matrices = logical_matrices(_parameter(case, tp), split=True)
    expected = _expected(case)
    assert [m.name for m in matrices] == list(expected)
    for matrix in matrices:
        assert matrix.parameter == case.name
        assert matrix.shape == expected[matrix.name].shape
        assert matrix.numel == expected[matrix.name].size
        assert (_assembled(matrix, _shards(case, tp)) == expected[matrix.name]).all()


@EVERY_TP
@EVERY_CASE
def test_unsplit_is_one_matrix_in_global_row_order(case: Case, tp: int) -> None:
    """Also a gated MLP, whose storage order depends on TP: ``[gate; up]`` at every TP."""
    (matrix,) = logical_matrices(_parameter(case, tp), split=False)
    assert matrix.name == case.name
    assert (_assembled(matrix, _shards(case, tp)) == _whole(case)).all()


@EVERY_TP
@EVERY_CASE
@pytest.mark.parametrize("split", [True, False])
def test_every_stored_row_is_in_exactly_one_block(case: Case, tp: int, split: bool) -> None:
    """Of a replicated parameter the copy of TP rank 0 is the source, the others are not read."""
    parameter = _parameter(case, tp)
    used = np.zeros((tp, parameter.shard_shape[0]), int)
    for matrix in logical_matrices(parameter, split=split):
        for block in matrix.blocks:
            used[block.tp_rank, block.shard_row : block.shard_row + block.rows] += 1
    sources = 1 if parameter.replicated else tp
    assert (used[:sources] == 1).all()
    assert (used[sources:] == 0).all()


@EVERY_CASE
@pytest.mark.parametrize("split", [True, False])
def test_names_and_shapes_do_not_depend_on_tp(case: Case, split: bool) -> None:
    found = {
        tuple((m.name, m.shape) for m in logical_matrices(_parameter(case, tp), split=split))
        for tp in TP_SIZES
    }
    assert len(found) == 1


@pytest.mark.parametrize("tp", [2, 4, 8])
@EVERY_CASE
def test_only_what_tp_does_not_cut_is_replicated(case: Case, tp: int) -> None:
    for matrix in logical_matrices(_parameter(case, tp), split=True):
        assert matrix.replicated is (case.tp_dim is None)


def test_part_rows_of_an_unpacked_parameter_are_not_used() -> None:
    parameter = ShardedParameter(
        name="w",
        global_shape=(6, 2),
        tp_dim=None,
        tp=1,
        ranges=((0, 12),),
        part_rows=(("q", 4), ("k", 2)),
    )
    (matrix,) = logical_matrices(parameter, split=True)
    assert (matrix.name, matrix.shape) == ("w", (6, 2))


@pytest.mark.parametrize("part_rows", [(("q", 4), ("k", 2), ("v", 2)), ()])
def test_rows_that_are_no_whole_query_groups_are_refused(
    part_rows: tuple[tuple[str, int], ...],
) -> None:
    parameter = ShardedParameter(
        name="layers.0.linear_qkv.weight",
        global_shape=(20, 2),
        tp_dim=None,
        tp=1,
        ranges=((0, 40),),
        packing=RowPacking.QKV,
        part_rows=part_rows,
    )
    with pytest.raises(ValueError, match=r"linear_qkv\.weight: 20 rows") as error:
        logical_matrices(parameter, split=True)
    assert "--matrix-rule 'layers.0.linear_qkv.weight:split=none'" in str(error.value)
    assert logical_matrices(parameter, split=False)[0].shape == (20, 2)


@pytest.mark.parametrize(("rows", "tp"), [(6, 2), (12, 4), (5, 1)])
@pytest.mark.parametrize("split", [True, False])
def test_gate_and_up_that_are_not_equal_halves_on_every_rank_are_refused(
    rows: int, tp: int, split: bool
) -> None:
    """Such a shard has no ``[gate_r; up_r]``; rows must not vanish."""
    with pytest.raises(ValueError, match=r"fc1.*gate"):
        logical_matrices(
            _parameter(Case(name="fc1", shape=(rows, 2), packing=RowPacking.GATE_UP), tp),
            split=split,
        )


@pytest.mark.parametrize(("shape", "tp_dim"), [((10, 8), 0), ((8, 10), 1)])
def test_a_dimension_that_tp_does_not_divide_is_refused(
    shape: tuple[int, int], tp_dim: int
) -> None:
    with pytest.raises(ValueError, match=f"fc2: dimension {tp_dim} of .* 4 TP ranks"):
        _parameter(Case(name="fc2", shape=shape, tp_dim=tp_dim), 4)


def test_natural_key_is_forward_order() -> None:
    names = ["layers.10.fc1", "layers.2.fc2", "layers.2.fc1", "final", "layers.2.fc1[gate]"]
    assert sorted(names, key=natural_key) == [
        "final",
        "layers.2.fc1",
        "layers.2.fc1[gate]",
        "layers.2.fc2",
        "layers.10.fc1",
    ]


def test_natural_key_tells_different_names_apart() -> None:
    assert natural_key("layers.1.w") != natural_key("layers.01.w")
