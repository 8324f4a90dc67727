"""Describes one parameter: its shape, its TP sharding, and the elements on each rank."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_muon.matrices.packing import WHOLE, Packing, RowPacking


@dataclass(frozen=True, kw_only=True)
class ShardedParameter:
    """A parameter of one pipeline stage, as TP and the distributed optimizer store it.

    It contains one matrix, or a stack of equally shaped matrices (grouped experts), each sharded
    over TP in the same way.

    Attributes:
        name: Name in the model, without wrapper prefixes.
        global_shape: (m, n) of one matrix gathered over TP.
        tp_dim: 0 if TP shards the rows, 1 if it shards the columns, None if every TP rank has the
            whole parameter.
        tp: Number of TP ranks with a shard (or copy if ``tp_dim`` is None).
        ranges: For each DP rank its half-open flat range ``(start, stop)`` of the TP rank's
            row-major shard; ``(0, 0)`` if empty. The same on every TP rank, as all have the same
            buffer layout.
        packing: Packing of a matrix's rows.
        stack: Numbers of the stacked matrices (global expert numbers), None for a single matrix.
    """

    name: str
    global_shape: tuple[int, int]
    tp_dim: int | None
    tp: int
    ranges: tuple[tuple[int, int], ...]
    packing: Packing = WHOLE
    stack: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        rows, cols = self.global_shape
        if self.tp_dim is not None and self.global_shape[self.tp_dim] % self.tp:
            raise ValueError(
                f"{self.name}: dimension {self.tp_dim} of {rows}x{cols} is sharded over {self.tp} "
                "TP ranks and does not divide evenly; use a tensor-parallel size that divides it"
            )
        problem = self.packing.problem(rows, cut=self.tp if self.tp_dim == 0 else 1)
        if problem and self.packing.rows is RowPacking.BLOCKS:
            # The rows of a TP rank are unknown without valid blocks.
            raise ValueError(
                f"{self.name}: {problem}; change the sizes, or assign it to Adam with "
                f"--matrix-rule '{self.name}:optimizer=adam'"
            )
        covered = 0
        for start, stop in sorted(r for r in self.ranges if r[1] > r[0]):
            if start != covered:
                raise ValueError(
                    f"{self.name}: DP ranges {self.ranges} do not cover the shard exactly once"
                )
            covered = stop
        if covered != self.shard_numel:
            raise ValueError(
                f"{self.name}: DP ranges {self.ranges} cover {covered} of {self.shard_numel} "
                "elements"
            )

    @property
    def replicated(self) -> bool:
        """True if every TP rank has the whole parameter."""
        return self.tp_dim is None

    @property
    def shard_shape(self) -> tuple[int, int]:
        """(rows, cols) of one TP rank's shard of one matrix."""
        rows, cols = self.global_shape
        if self.tp_dim == 0:
            return rows // self.tp, cols
        if self.tp_dim == 1:
            return rows, cols // self.tp
        return rows, cols

    @property
    def shard_numel(self) -> int:
        """Elements of one TP rank's shard, including all matrices of a stack."""
        rows, cols = self.shard_shape
        return rows * cols * (1 if self.stack is None else len(self.stack))


def data_parallel_ranges(
    *, start: int, stop: int, bucket_start: int, bucket_numel: int, dp: int
) -> tuple[tuple[int, int], ...]:
    """Return the flat range of one parameter on each DP rank.

    As in ``DistributedOptimizer._build_model_gbuf_range``, every bucket is split into ``dp`` equal
    shards, regardless of parameter boundaries.

    Args:
        start: First element of the parameter in the gradient buffer.
        stop: One past its last element in the gradient buffer.
        bucket_start: First element of its bucket in the gradient buffer.
        bucket_numel: Elements of the bucket, including padding.
        dp: Number of ranks over which the distributed optimizer shards.

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
