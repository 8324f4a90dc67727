"""Logical matrices: sharded by Megatron's conventions, written here, and assembled by blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from megatron_muon.matrices import (
    WHOLE,
    LogicalMatrix,
    Packing,
    RowPacking,
    RowPart,
    ShardedParameter,
    SplitMode,
    logical_matrices,
    natural_key,
)

TP_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A whole parameter; ``shape`` is that of one matrix of a stack."""

    name: str
    shape: tuple[int, int]
    tp_dim: int | None = 0
    packing: Packing = WHOLE
    stack: tuple[int, ...] | None = None


def _units(name: str, *parts: tuple[str, int, int], units: int, tp_dim: int | None = 0) -> Case:
    """Parts (name, rows, heads) of each of so many units."""
    packing = Packing(
        rows=RowPacking.UNITS,
        parts=tuple(RowPart(name=part, rows=rows, heads=heads) for part, rows, heads in parts),
    )
    return Case(name=name, shape=(units * packing.rows_per_unit, 5), tp_dim=tp_dim, packing=packing)


def _qkv(name: str, *, groups: int, heads: int, head_dim: int, gated: bool = False) -> Case:
    """``heads`` query heads in each of ``groups`` query groups."""
    query = heads * head_dim
    gate = (("gate", query, heads),) if gated else ()
    return _units(
        name, ("q", query, heads), *gate, ("k", head_dim, 1), ("v", head_dim, 1), units=groups
    )


def _blocks(
    name: str, *parts: tuple[str, int], stack: tuple[int, ...] | None = None, tp_dim: int | None = 0
) -> Case:
    packing = Packing(
        rows=RowPacking.BLOCKS, parts=tuple(RowPart(name=part, rows=rows) for part, rows in parts)
    )
    return Case(
        name=name,
        shape=(packing.rows_per_unit, 5),
        packing=packing,
        stack=stack,
        tp_dim=tp_dim,
    )


CASES = (
    Case(name="row cut", shape=(24, 7)),
    Case(name="column cut", shape=(7, 24), tp_dim=1),
    Case(name="replicated", shape=(7, 5), tp_dim=None),
    _blocks("gated fc1", ("gate", 24), ("up", 24)),
    _blocks("mamba in_proj", ("z", 24), ("x", 24), ("B", 16), ("C", 16), ("dt", 8)),
    _qkv("GQA, groups divide", groups=8, heads=2, head_dim=3),
    _qkv("GQA, TP cuts through groups and heads", groups=2, heads=4, head_dim=4),
    _qkv("MQA", groups=1, heads=6, head_dim=5),
    _qkv("plain attention", groups=8, heads=1, head_dim=2),
    _qkv("gated attention, groups divide", groups=8, heads=3, head_dim=2, gated=True),
    _qkv("gated attention, TP cuts through groups", groups=4, heads=2, head_dim=2, gated=True),
    _units("MLA kv_up", ("k", 3, 1), ("v", 2, 1), units=8),
    _units("MLA kv_down, replicated", ("latent", 7, 1), ("rope", 2, 1), units=1, tp_dim=None),
    _units("MLA kv_down, cut", ("latent", 13, 1), ("rope", 3, 1), units=1),
    Case(name="grouped fc2, columns", shape=(5, 16), tp_dim=1, stack=(4, 5, 6)),
    Case(name="grouped fc1, rows", shape=(16, 5), stack=(0, 1)),
    _blocks("grouped gated fc1", ("gate", 8), ("up", 8), stack=(2, 3, 4)),
    _blocks("grouped gated fc1, one copy", ("gate", 3), ("up", 3), stack=(0, 1), tp_dim=None),
)
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
EVERY_TP = pytest.mark.parametrize("tp", TP_SIZES)


def _whole(case: Case) -> np.ndarray:
    """The whole parameter (stack, rows, columns); every element is different."""
    stacked = 1 if case.stack is None else len(case.stack)
    return np.arange(stacked * case.shape[0] * case.shape[1]).reshape(stacked, *case.shape)


def _shards(case: Case, tp: int) -> list[np.ndarray]:
    """The 2-D view of what Megatron stores on each TP rank."""
    whole = _whole(case)
    if case.tp_dim is None:
        return [whole.reshape(-1, case.shape[1])] * tp
    if case.packing.rows is RowPacking.BLOCKS:
        ends = np.cumsum([part.rows for part in case.packing.parts])[:-1]
        cut = [np.split(block, tp, axis=1) for block in np.split(whole, ends, axis=1)]
        shards = [np.concatenate(pieces, axis=1) for pieces in zip(*cut, strict=True)]
    else:
        shards = np.split(whole, tp, axis=1 + case.tp_dim)
    return [shard.reshape(-1, shard.shape[2]) for shard in shards]


def _expected(case: Case, split: SplitMode = "parts") -> dict[str, np.ndarray]:
    """Whole parts by name."""
    found = {}
    for index, whole in enumerate(_whole(case)):
        number = [] if case.stack is None else [str(case.stack[index])]
        for part, rows in _parts(case, whole, split).items():
            label = ".".join([*number, part] if part else number)
            found[f"{case.name}[{label}]" if label else case.name] = rows
    return found


def _parts(case: Case, whole: np.ndarray, split: SplitMode) -> dict[str, np.ndarray]:
    parts = case.packing.parts
    if split == "none" or case.packing.rows is RowPacking.WHOLE:
        return {"": whole}
    ends = np.cumsum([part.rows for part in parts])[:-1]
    if case.packing.rows is RowPacking.BLOCKS:
        pieces = np.split(whole, ends)
        return {part.name: piece for part, piece in zip(parts, pieces, strict=True)}
    grouped = whole.reshape(-1, case.packing.rows_per_unit, case.shape[1])
    found = {}
    for unit, group in enumerate(grouped):
        for part, piece in zip(parts, np.split(group, ends), strict=True):
            if split == "parts":
                found.setdefault(part.name, []).append(piece)
            else:
                for head, rows in enumerate(np.split(piece, part.heads)):
                    found[f"{part.name}{unit * part.heads + head}"] = [rows]
    return {name: np.concatenate(pieces) for name, pieces in found.items()}


def _parameter(case: Case, tp: int) -> ShardedParameter:
    tp_dim = None if tp == 1 else case.tp_dim
    stacked = 1 if case.stack is None else len(case.stack)
    numel = stacked * case.shape[0] * case.shape[1] // (1 if tp_dim is None else tp)
    return ShardedParameter(
        name=case.name,
        global_shape=case.shape,
        tp_dim=tp_dim,
        tp=tp,
        ranges=((0, numel),),
        packing=case.packing,
        stack=case.stack,
    )


def _assembled(matrix: LogicalMatrix, shards: list[np.ndarray]) -> np.ndarray:
    """Assemble the matrix of the blocks; every element is written exactly once."""
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


SPLITS = pytest.mark.parametrize("split", ["parts", "heads", "none"])


@SPLITS
@EVERY_TP
@EVERY_CASE
def test_blocks_of_the_shards_give_the_rows_of_the_whole(
    case: Case, tp: int, split: SplitMode
) -> None:
    """Unsplit too: a gated MLP, whose storage depends on TP, is ``[gate; up]`` at every TP."""
    matrices = logical_matrices(_parameter(case, tp), split=split)
    expected = _expected(case, split)
    assert [m.name for m in matrices] == list(expected)
    for matrix in matrices:
        assert matrix.parameter == case.name
        assert matrix.shape == expected[matrix.name].shape
        assert matrix.numel == expected[matrix.name].size
        assert (_assembled(matrix, _shards(case, tp)) == expected[matrix.name]).all()


@EVERY_TP
@EVERY_CASE
@SPLITS
def test_every_stored_row_is_in_exactly_one_block(case: Case, tp: int, split: SplitMode) -> None:
    """The copy of TP rank 0 is the source of a replicated parameter; others are not read."""
    parameter = _parameter(case, tp)
    stacked = 1 if case.stack is None else len(case.stack)
    used = np.zeros((tp, stacked * parameter.shard_shape[0]), int)
    for matrix in logical_matrices(parameter, split=split):
        for block in matrix.blocks:
            used[block.tp_rank, block.shard_row : block.shard_row + block.rows] += 1
    sources = 1 if parameter.replicated else tp
    assert (used[:sources] == 1).all()
    assert (used[sources:] == 0).all()


@EVERY_CASE
@SPLITS
def test_names_and_shapes_do_not_depend_on_tp(case: Case, split: SplitMode) -> None:
    found = {
        tuple((m.name, m.shape) for m in logical_matrices(_parameter(case, tp), split=split))
        for tp in TP_SIZES
    }
    assert len(found) == 1


@pytest.mark.parametrize("tp", [2, 4, 8])
@EVERY_CASE
def test_only_parameters_without_tp_sharding_are_replicated(case: Case, tp: int) -> None:
    for matrix in logical_matrices(_parameter(case, tp), split="parts"):
        assert matrix.replicated is (case.tp_dim is None)


def test_one_expert_is_one_matrix_under_its_global_number() -> None:
    """MaxText#4798: the expert axis is not a dimension of a matrix."""
    (case,) = (case for case in CASES if case.name == "grouped gated fc1")
    names = [m.name for m in logical_matrices(_parameter(case, 2), split="parts")]
    assert names == [f"{case.name}[{e}.{part}]" for e in (2, 3, 4) for part in ("gate", "up")]


@pytest.mark.parametrize(
    "parts", [(RowPart(name="q", rows=4), RowPart(name="k", rows=2), RowPart(name="v", rows=2)), ()]
)
def test_rows_that_are_no_whole_query_groups_are_refused(parts: tuple[RowPart, ...]) -> None:
    parameter = ShardedParameter(
        name="layers.0.linear_qkv.weight",
        global_shape=(20, 2),
        tp_dim=None,
        tp=1,
        ranges=((0, 40),),
        packing=Packing(rows=RowPacking.UNITS, parts=parts),
    )
    with pytest.raises(ValueError, match=r"linear_qkv\.weight: 20 rows") as error:
        logical_matrices(parameter, split="parts")
    assert "--matrix-rule 'layers.0.linear_qkv.weight:split=none'" in str(error.value)
    assert logical_matrices(parameter, split="none")[0].shape == (20, 2)


@pytest.mark.parametrize(("rows", "tp"), [((3, 3), 2), ((6, 6), 4), ((2, 3), 2)])
def test_parts_that_tp_does_not_divide_are_refused(rows: tuple[int, int], tp: int) -> None:
    """Such a shard has no ``[gate_r; up_r]``; rows must not vanish, split or not."""
    case = _blocks("fc1", ("gate", rows[0]), ("up", rows[1]))
    with pytest.raises(ValueError, match=r"fc1: .*(gate|divide)"):
        _parameter(case, tp)


def test_parts_that_are_not_all_rows_are_refused() -> None:
    case = _blocks("fc1", ("gate", 3), ("up", 3))
    wrong = Case(name="fc1", shape=(8, 5), packing=case.packing)
    with pytest.raises(ValueError, match=r"fc1: 8 rows are not the 6 rows of its parts"):
        _parameter(wrong, 1)


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


def test_natural_key_is_unique_per_name() -> None:
    assert natural_key("layers.1.w") != natural_key("layers.01.w")
