"""Measured times of orthogonalizations, by shape and batch; written by the benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

FORMAT = "megatron_muon cost table 1"
LARGEST = 1 << 50
"""Of any number of a table; operations of such a shape are still a float."""


@dataclass(frozen=True, kw_only=True, order=True)
class MeasuredCost:
    """One measurement.

    Attributes:
        short: Smaller side; a matrix and its transpose take the same time.
        long: Larger side.
        batch: Matrices at once.
        nanoseconds: Time of one of them.
    """

    short: int
    long: int
    batch: int
    nanoseconds: int


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """What was measured on one device with one kind of iteration.

    Attributes:
        device: Name of the device.
        dtype: Element type of the iteration, as ``bfloat16``.
        steps: Newton-Schulz steps.
        measured: The measurements.
    """

    device: str
    dtype: str
    steps: int
    measured: tuple[MeasuredCost, ...]

    def cost(self, m: int, n: int, *, batch: int, flops: Callable[[int, int], int]) -> int:
        """Nanoseconds of one of ``batch`` matrices, at least 1.

        A shape that was not measured takes as long as its operations take at the rate of the
        measured shape that is nearest in operations.

        Args:
            m: Rows.
            n: Columns.
            batch: Matrices that are computed at once; the nearest measured batch is taken.
            flops: Operations of one matrix.
        """
        wanted = (min(m, n), max(m, n))
        shapes = sorted({(entry.short, entry.long) for entry in self.measured})
        nearest = min(shapes, key=lambda shape: (_distance(flops(*shape), flops(m, n)), shape))
        if wanted in shapes:
            nearest = wanted
        entry = min(
            (e for e in self.measured if (e.short, e.long) == nearest),
            key=lambda e: (_distance(e.batch, batch), e.batch),
        )
        if nearest == wanted:
            return max(1, entry.nanoseconds)
        return max(1, entry.nanoseconds * flops(m, n) // max(1, flops(*nearest)))

    def lacks(self, shapes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Shapes that were not measured, each once, smaller side first."""
        measured = {(entry.short, entry.long) for entry in self.measured}
        return sorted({(min(shape), max(shape)) for shape in shapes} - measured)


def _distance(one: int, other: int) -> float:
    return max(one, other) / max(1, min(one, other))


def write_cost_table(table: CostTable, path: str | Path) -> None:
    """Write a table as JSON."""
    content = {"format": FORMAT, **asdict(table)}
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_cost_table(path: str | Path) -> CostTable:
    """Read what ``write_cost_table`` wrote.

    Raises:
        ValueError: The file cannot be read, or is no such table; names the flag and the file.
    """
    again = f"write it with python -m megatron_muon.benchmark --cost-table {path}"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"--dmuon-cost-table {path} cannot be read ({reason}): {again}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--dmuon-cost-table {path} is no JSON ({error}): {again}") from error
    try:
        return _table(content)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"--dmuon-cost-table {path} is no table of costs ({error}): {again}"
        ) from error


def _table(content: Any) -> CostTable:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"its format is not '{FORMAT}'")
    missing = [key for key in ("device", "dtype", "steps", "measured") if key not in content]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    measured = tuple(sorted(_entry(values) for values in content["measured"]))
    if not measured:
        raise ValueError("it has no measurement")
    return CostTable(
        device=str(content["device"]),
        dtype=str(content["dtype"]),
        steps=_counted("steps", content["steps"]),
        measured=measured,
    )


def _entry(values: Mapping[str, Any]) -> MeasuredCost:
    known = {field.name for field in fields(MeasuredCost)}
    if not isinstance(values, dict) or set(values) != known:
        found = sorted(values) if isinstance(values, dict) else repr(values)
        raise ValueError(f"an entry has {found} and should have {sorted(known)}")
    for name, value in values.items():
        _counted(name, value)
    if values["short"] > values["long"]:
        raise ValueError(f"short {values['short']} is above long {values['long']}")
    return MeasuredCost(**values)


def _counted(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
        raise ValueError(f"{name} is {value!r} and should be an integer from 1 to {LARGEST}")
    return value
