"""Logical matrices, each orthogonalized as a whole, and where their rectangles are stored."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_muon.matrices.packing import SplitMode, intervals, stored_runs
from megatron_muon.matrices.parameter import ShardedParameter


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
        name: Parameter name, followed by ``[part]``, ``[expert]`` or ``[expert.part]`` if the
            parameter contains several matrices.
        parameter: Name of the parameter that stores it.
        shape: Global (m, n), the same at every layout.
        blocks: Disjoint rectangles that cover it. Of a parameter replicated over TP only the copy
            of TP rank 0 is listed: it is the source, and all copies receive its update.
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
    """Return a sort key in forward order: ``layers.2`` before ``layers.10``."""
    pieces = (
        (0, int(piece), "") if piece.isdecimal() else (1, 0, piece)
        for piece in re.split(r"(\d+)", name)
        if piece
    )
    # The name itself orders ``layers.1`` and ``layers.01``.
    return (*pieces, (-1, 0, name))


def _blocks(
    parameter: ShardedParameter, rows_of_part: Sequence[tuple[int, int]], stacked: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield intersections ``(tp rank, shard row, rows, row in part)`` of stored runs and a part."""
    rows, _ = parameter.global_shape
    cut = parameter.tp if parameter.tp_dim == 0 else 1
    first = stacked * parameter.shard_shape[0]
    for tp_rank in range(1 if parameter.replicated else parameter.tp):
        runs = stored_runs(
            parameter.packing, rows, tp=cut, tp_rank=tp_rank if parameter.tp_dim == 0 else 0
        )
        for shard_row, count, global_row in runs:
            part_row = 0
            for start, stop in rows_of_part:
                low, high = max(start, global_row), min(stop, global_row + count)
                if high > low:
                    yield (
                        tp_rank,
                        first + shard_row + low - global_row,
                        high - low,
                        part_row + low - start,
                    )
                part_row += stop - start


def logical_matrices(parameter: ShardedParameter, *, split: SplitMode) -> tuple[LogicalMatrix, ...]:
    """Return the matrices of one parameter.

    Args:
        parameter: The parameter.
        split: ``none`` keeps packed rows as one matrix, in global order (for a gated MLP
            ``[gate; up]``), so that the result does not depend on TP. Stacked matrices are always
            separate.

    Returns:
        One matrix per part; determined by the global shape, so the same at every layout, also if
        TP cuts through a query group.

    Raises:
        ValueError: The rows are to be split, but do not consist of whole query groups or heads.
    """
    rows, cols = parameter.global_shape
    problem = parameter.packing.problem(rows, cut=1)
    if problem and split != "none":
        raise ValueError(
            f"{parameter.name}: {problem}; assign it to Adam or turn its split off with "
            f"--matrix-rule '{parameter.name}:split=none'"
        )
    shard_cols = parameter.shard_shape[1]
    matrices = []
    for stacked, number in enumerate((None,) if parameter.stack is None else parameter.stack):
        for part, rows_of_part in intervals(parameter.packing, rows, split).items():
            label = ".".join(str(piece) for piece in (number, part) if piece not in (None, ""))
            blocks = tuple(
                Block(
                    tp_rank=tp_rank,
                    shard_row=shard_row,
                    rows=count,
                    row=row,
                    col=tp_rank * shard_cols if parameter.tp_dim == 1 else 0,
                    cols=shard_cols,
                )
                for tp_rank, shard_row, count, row in _blocks(parameter, rows_of_part, stacked)
            )
            matrices.append(
                LogicalMatrix(
                    name=f"{parameter.name}[{label}]" if label else parameter.name,
                    parameter=parameter.name,
                    shape=(sum(stop - start for start, stop in rows_of_part), cols),
                    blocks=blocks,
                    replicated=parameter.replicated,
                )
            )
    return tuple(matrices)
