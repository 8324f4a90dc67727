"""What is known of one parameter: its shape, how TP cuts it, which rank holds which elements."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RowPacking(Enum):
    """How the rows of a parameter are laid out in storage and which logical parts they form."""

    WHOLE = "whole"
    """The rows are one matrix."""

    QKV = "qkv"
    """Fused attention projection: per query group ``[q … q, (gate … gate,) k, v]``."""

    GATE_UP = "gate_up"
    """Gated MLP: every TP rank stores ``[gate_r; up_r]``."""


@dataclass(frozen=True, kw_only=True)
class ShardedParameter:
    """A 2-D parameter of one pipeline stage, as TP and the distributed optimizer store it.

    Attributes:
        name: Name in the model, without wrapper prefixes.
        global_shape: (m, n) of the parameter gathered over TP.
        tp_dim: 0 when TP cuts the rows, 1 when it cuts the columns, None when every TP rank
            holds the whole parameter.
        tp: Number of TP ranks that hold it (copies when ``tp_dim`` is None).
        ranges: For each DP rank the half-open flat range ``(start, stop)`` of the TP rank's
            row-major shard that this DP rank owns; ``(0, 0)`` when it owns nothing. The same on
            every TP rank, because every TP rank has the same buffer layout.
        packing: How the rows are packed.
        part_rows: For ``RowPacking.QKV``: ``(part name, rows per query group)`` in storage order.
    """

    name: str
    global_shape: tuple[int, int]
    tp_dim: int | None
    tp: int
    ranges: tuple[tuple[int, int], ...]
    packing: RowPacking = RowPacking.WHOLE
    part_rows: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        rows, cols = self.global_shape
        if self.tp_dim is not None and self.global_shape[self.tp_dim] % self.tp:
            raise ValueError(
                f"{self.name}: dimension {self.tp_dim} of {rows}x{cols} is cut over {self.tp} TP "
                "ranks and does not divide evenly; use a tensor-parallel size that divides it"
            )
        halves = 2 * (self.tp if self.tp_dim == 0 else 1)
        if self.packing is RowPacking.GATE_UP and rows % halves:
            raise ValueError(
                f"{self.name}: {rows} rows of gate and up do not make two equal halves on each of "
                f"{halves // 2} TP ranks; use an FFN size that the tensor-parallel size divides"
            )
        covered = 0
        for start, stop in sorted(r for r in self.ranges if r[1] > r[0]):
            if start != covered:
                raise ValueError(
                    f"{self.name}: DP ranges {self.ranges} do not cover the shard exactly once"
                )
            covered = stop
        if covered != self.shard_shape[0] * self.shard_shape[1]:
            raise ValueError(
                f"{self.name}: DP ranges {self.ranges} cover {covered} of "
                f"{self.shard_shape[0] * self.shard_shape[1]} elements"
            )

    @property
    def replicated(self) -> bool:
        """True when every TP rank holds the whole parameter."""
        return self.tp_dim is None

    @property
    def shard_shape(self) -> tuple[int, int]:
        """(rows, cols) of one TP rank's shard."""
        rows, cols = self.global_shape
        if self.tp_dim == 0:
            return rows // self.tp, cols
        if self.tp_dim == 1:
            return rows, cols // self.tp
        return rows, cols


def data_parallel_ranges(
    *, start: int, stop: int, bucket_start: int, bucket_numel: int, dp: int
) -> tuple[tuple[int, int], ...]:
    """Flat ranges of one parameter that each DP rank owns.

    Follows ``DistributedOptimizer._build_model_gbuf_range``: every bucket is cut into ``dp``
    equal shards, without regard to parameter boundaries.

    Args:
        start: First element of the parameter in the gradient buffer.
        stop: One past its last element in the gradient buffer.
        bucket_start: First element of its bucket in the gradient buffer.
        bucket_numel: Elements of the bucket, padding included.
        dp: Number of ranks that the distributed optimizer shards over.

    Returns:
        For each DP rank the half-open range within the parameter, ``(0, 0)`` when empty.
    """
    shard = bucket_numel // dp
    ranges = []
    for rank in range(dp):
        low = max(start, bucket_start + rank * shard)
        high = min(stop, bucket_start + (rank + 1) * shard)
        ranges.append((low - start, high - start) if high > low else (0, 0))
    return tuple(ranges)
