"""Logical matrices: what is orthogonalized as one matrix, and where its rectangles are stored."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_muon.matrices.parameter import RowPacking, ShardedParameter


@dataclass(frozen=True, kw_only=True)
class Block:
    """Full-width rows of one TP rank's shard that form a rectangle of a logical matrix.

    Attributes:
        tp_rank: TP rank whose shard holds the rows.
        shard_row: First of the rows in that shard.
        rows: Number of rows.
        row: First row of the rectangle in the logical matrix.
        col: First column of the rectangle in the logical matrix.
        cols: Number of columns, the width of the shard.
    """

    tp_rank: int
    shard_row: int
    rows: int
    row: int
    col: int
    cols: int


@dataclass(frozen=True, kw_only=True)
class LogicalMatrix:
    """One matrix that is orthogonalized as a whole.

    Attributes:
        name: Parameter name, followed by ``[part]`` when the parameter holds several matrices.
        parameter: Name of the parameter that stores it.
        shape: Global (m, n), the same at every layout.
        blocks: Rectangles that cover it exactly once. Of a parameter replicated over TP only the
            copy of TP rank 0 is listed: it is the source, all copies receive its update.
        replicated: True when every TP rank holds a copy.
    """

    name: str
    parameter: str
    shape: tuple[int, int]
    blocks: tuple[Block, ...]
    replicated: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape[0] * self.shape[1]


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key by which ``layers.2`` comes before ``layers.10``: forward order of the layers."""
    pieces = (
        (0, int(piece), "") if piece.isdecimal() else (1, 0, piece)
        for piece in re.split(r"(\d+)", name)
        if piece
    )
    # The name itself decides between ``layers.1`` and ``layers.01``.
    return (*pieces, (-1, 0, name))


def _row_parts(parameter: ShardedParameter, split: bool) -> dict[str, list[tuple[int, int]]]:
    """Global row intervals of each logical part, in the order in which they stack."""
    rows = parameter.global_shape[0]
    if not split or parameter.packing is RowPacking.WHOLE:
        return {"": [(0, rows)]}
    if parameter.packing is RowPacking.GATE_UP:
        return {"gate": [(0, rows // 2)], "up": [(rows // 2, rows)]}
    per_group = sum(count for _, count in parameter.part_rows)
    if per_group == 0 or rows % per_group:
        raise ValueError(
            f"{parameter.name}: {rows} rows are not a multiple of the {per_group} rows of a query "
            f"group {parameter.part_rows}; send it to Adam or turn its split off with "
            f"--matrix-rule '{parameter.name}:split=none'"
        )
    parts: dict[str, list[tuple[int, int]]] = {name: [] for name, _ in parameter.part_rows}
    for group_start in range(0, rows, per_group):
        start = group_start
        for name, count in parameter.part_rows:
            parts[name].append((start, start + count))
            start += count
    return parts


def _stored_runs(parameter: ShardedParameter, tp_rank: int) -> list[tuple[int, int, int]]:
    """Runs ``(shard row, rows, global row)`` by which one TP rank stores the global rows."""
    rows, _ = parameter.global_shape
    if parameter.tp_dim != 0:
        return [(0, rows, 0)]
    local = rows // parameter.tp
    if parameter.packing is RowPacking.GATE_UP:
        half = local // 2
        return [(0, half, tp_rank * half), (half, half, rows // 2 + tp_rank * half)]
    return [(0, local, tp_rank * local)]


def _blocks(
    parameter: ShardedParameter, intervals: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """Intersections ``(tp rank, shard row, rows, row in the part)`` of stored runs and a part."""
    intervals = list(intervals)
    for tp_rank in range(1 if parameter.replicated else parameter.tp):
        for shard_row, rows, global_row in _stored_runs(parameter, tp_rank):
            part_row = 0
            for start, stop in intervals:
                low, high = max(start, global_row), min(stop, global_row + rows)
                if high > low:
                    yield (
                        tp_rank,
                        shard_row + low - global_row,
                        high - low,
                        part_row + low - start,
                    )
                part_row += stop - start


def logical_matrices(parameter: ShardedParameter, *, split: bool) -> tuple[LogicalMatrix, ...]:
    """The matrices that one parameter holds.

    Args:
        parameter: The parameter.
        split: False keeps a packed parameter as one matrix, with its rows in the global order
            (for a gated MLP ``[gate; up]``), so that the result does not depend on TP.

    Returns:
        One matrix per part; decided on the global shape, so the same at every layout, also when
        TP cuts through a query group.

    Raises:
        ValueError: The global rows are not a multiple of the rows of a query group.
    """
    cols = parameter.shard_shape[1]
    matrices = []
    for part, intervals in _row_parts(parameter, split).items():
        blocks = tuple(
            Block(
                tp_rank=tp_rank,
                shard_row=shard_row,
                rows=rows,
                row=row,
                col=tp_rank * cols if parameter.tp_dim == 1 else 0,
                cols=cols,
            )
            for tp_rank, shard_row, rows, row in _blocks(parameter, intervals)
        )
        matrices.append(
            LogicalMatrix(
                name=f"{parameter.name}[{part}]" if part else parameter.name,
                parameter=parameter.name,
                shape=(
                    sum(stop - start for start, stop in intervals),
                    parameter.global_shape[1],
                ),
                blocks=blocks,
                replicated=parameter.replicated,
            )
        )
    return tuple(matrices)
