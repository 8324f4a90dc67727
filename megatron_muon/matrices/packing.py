"""Packing of several logical matrices into the rows of one parameter."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

SplitMode = Literal["none", "parts", "heads"]
"""Split of a packed parameter: none, its parts, or every attention head of its parts."""


class RowPacking(Enum):
    """Layout of a parameter's rows in storage."""

    WHOLE = "whole"
    """The rows are one matrix."""

    UNITS = "units"
    """The parts of one unit (query group, attention head) are adjacent, followed by those of the
    next unit; TP may cut through a unit."""

    BLOCKS = "blocks"
    """Each part is sharded over TP separately: every TP rank stores its shard of the first part,
    then its shard of the second."""


@dataclass(frozen=True, kw_only=True)
class RowPart:
    """Rows of a packed parameter that form one logical matrix.

    Attributes:
        name: Name of the part.
        rows: Rows of one unit (``UNITS``), or rows over all TP ranks (``BLOCKS``).
        heads: Number of attention heads of equal size in these rows; 1 never splits them.
    """

    name: str
    rows: int
    heads: int = 1


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The rows of one matrix of a parameter; parts are in storage order, empty for ``WHOLE``."""

    rows: RowPacking = RowPacking.WHOLE
    parts: tuple[RowPart, ...] = ()

    @property
    def rows_per_unit(self) -> int:
        """Rows of all parts together."""
        return sum(part.rows for part in self.parts)

    def problem(self, rows: int, *, cut: int) -> str | None:
        """Return why ``rows`` over ``cut`` TP ranks cannot have this packing, None if they can."""
        if self.rows is RowPacking.WHOLE:
            return None
        parts = ", ".join(f"{part.name} {part.rows}" for part in self.parts)
        if self.rows is RowPacking.UNITS:
            if not self.rows_per_unit or rows % self.rows_per_unit:
                return (
                    f"{rows} rows are not a multiple of the {self.rows_per_unit} rows of a query "
                    f"group or head ({parts})"
                )
            return None
        if rows != self.rows_per_unit:
            return f"{rows} rows are not the {self.rows_per_unit} rows of its parts ({parts})"
        uneven = [part.name for part in self.parts if part.rows % cut]
        if uneven:
            return f"{cut} TP ranks do not divide the rows of {', '.join(uneven)} ({parts})"
        return None


WHOLE = Packing()
"""Rows that are one matrix."""


def intervals(packing: Packing, rows: int, split: SplitMode) -> dict[str, list[tuple[int, int]]]:
    """Return the half-open row intervals of each logical part by name, in stacking order.

    ``rows`` are those over all TP ranks, for which ``packing.problem`` is None. Without a split
    there is one unnamed part.
    """
    if split == "none" or packing.rows is RowPacking.WHOLE:
        return {"": [(0, rows)]}
    found: dict[str, list[tuple[int, int]]] = {}
    for unit, unit_start in enumerate(range(0, rows, packing.rows_per_unit)):
        start = unit_start
        for part in packing.parts:
            stop = start + part.rows
            if split == "heads" and packing.rows is RowPacking.UNITS:
                for head in range(part.heads):
                    low = start + head * part.rows // part.heads
                    high = start + (head + 1) * part.rows // part.heads
                    found[f"{part.name}{unit * part.heads + head}"] = [(low, high)]
            else:
                found.setdefault(part.name, []).append((start, stop))
            start = stop
    return found


def stored_runs(
    packing: Packing, rows: int, *, tp: int, tp_rank: int
) -> list[tuple[int, int, int]]:
    """Return the runs ``(row in the shard, rows, global row)`` that a TP rank stores."""
    if packing.rows is not RowPacking.BLOCKS:
        local = rows // tp
        return [(0, local, tp_rank * local)]
    runs, shard_row, first = [], 0, 0
    for part in packing.parts:
        local = part.rows // tp
        runs.append((shard_row, local, first + tp_rank * local))
        shard_row += local
        first += part.rows
    return runs
