"""The workers of one split matrix, on one or several nodes, and their messages.

Worker J is number J // N of its node, and its node number J % N of N. So the block rows of the
workers with one number, one on each node, are adjacent: they form a *group*. An all-gather crosses
the network once and is then completed within each node; a sum is reduced within each node first.
With k workers on each node and a square of s bytes a worker sends

    within its node       (k − 1) s / k          the same for any number of nodes
    over the network      (N − 1) s / (k N)      less than 1/k of a square

for an all-gather, and as much for a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

RequestKind = Literal["scalars", "partials", "sums", "blocks", "rows"]
"""``scalars``   two numbers to all workers
``partials``  a group's rows of a partial sum, to the group's worker on this node
``sums``      a block row of a node's sum, to its worker on its node
``blocks``    a block row to the group
``rows``      the group's rows to the node
"""

OVER_NETWORK = ("sums", "blocks")
"""Kinds that cross nodes; so do ``scalars``, whose size is negligible."""


@dataclass(frozen=True, kw_only=True)
class Team:
    """The workers of a split matrix.

    Attributes:
        rows: (first, end) of the block rows of all workers; they cover 0 … m, some may be empty.
        nodes: Number of nodes, each with the same number of workers.
    """

    rows: tuple[tuple[int, int], ...]
    nodes: int = 1

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.rows)

    @property
    def on_each(self) -> int:
        """Number of workers on each node."""
        return self.size // self.nodes

    @cached_property
    def longest(self) -> int:
        """Rows of the largest block."""
        return max(end - start for start, end in self.rows)

    def group(self, number: int) -> tuple[int, int]:
        """Return (first, end) of the rows of a worker's group."""
        first = number - number % self.nodes
        return self.rows[first][0], self.rows[first + self.nodes - 1][1]

    def sum_kinds(self) -> Iterator[RequestKind]:
        """Yield the messages that add partial sums."""
        if self.on_each > 1 or self.nodes == 1:
            yield "partials"
        if self.nodes > 1:
            yield "sums"

    def share_kinds(self) -> Iterator[RequestKind]:
        """Yield the messages that gather block rows on all workers."""
        if self.nodes > 1:
            yield "blocks"
        if self.on_each > 1 or self.nodes == 1:
            yield "rows"

    def partners(self, kind: RequestKind, number: int) -> range:
        """Return the workers that exchange such a message with this one, itself included."""
        if kind == "scalars":
            return range(self.size)
        if kind in OVER_NETWORK:
            first = number - number % self.nodes
            return range(first, first + self.nodes)
        return range(number % self.nodes, self.size, self.nodes)

    def rows_sent(self, kind: RequestKind, source: int, target: int) -> int:
        """Return the number of rows in such a message, which is not ``scalars``."""
        worker = source if kind in ("blocks", "rows") else target
        start, end = self.rows[worker] if kind in OVER_NETWORK else self.group(worker)
        return end - start
