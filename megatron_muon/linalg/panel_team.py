"""The workers of one split matrix, on one node or on several, and what each sends to which.

Worker J is number J // N of its node, and its node number J % N of N. So the block rows of the
workers with one number, one of each node, lie one after another: they are a *group*. What goes to
everyone goes over the network once and is then passed on within each node; what is summed is summed
within each node first. With k workers on each node and a square of s bytes a worker sends

    within its node       (k − 1) s / k          the same for any number of nodes
    over the network      (N − 1) s / (k N)      less than a k-th of a square

for a message to everyone, and as much for a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

RequestKind = Literal["scalars", "partials", "sums", "blocks", "rows"]
"""``scalars``   two numbers to everyone
``partials``  of a partial sum the rows of each group, to the worker of the group on this node
``sums``      of a node's sum of the group's rows a block row, to its worker on its node
``blocks``    a block row to the group
``rows``      the group's rows to the node
"""

OVER_NETWORK = ("sums", "blocks")
"""Between nodes; ``scalars`` too, but they are next to nothing."""


@dataclass(frozen=True, kw_only=True)
class Team:
    """The workers of a split matrix.

    Attributes:
        rows: (first, end) of the block rows of all workers; they cover 0 … m, some may be empty.
        nodes: Number of nodes that they are on, as many on each.
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
        """(first, end) of the rows of a worker's group."""
        first = number - number % self.nodes
        return self.rows[first][0], self.rows[first + self.nodes - 1][1]

    def sum_kinds(self) -> Iterator[RequestKind]:
        """Messages by which partial sums are added."""
        if self.on_each > 1 or self.nodes == 1:
            yield "partials"
        if self.nodes > 1:
            yield "sums"

    def share_kinds(self) -> Iterator[RequestKind]:
        """Messages by which block rows come to everyone."""
        if self.nodes > 1:
            yield "blocks"
        if self.on_each > 1 or self.nodes == 1:
            yield "rows"

    def partners(self, kind: RequestKind, number: int) -> range:
        """To whom a worker sends such a message, itself included; they send it one too."""
        if kind == "scalars":
            return range(self.size)
        if kind in OVER_NETWORK:
            first = number - number % self.nodes
            return range(first, first + self.nodes)
        return range(number % self.nodes, self.size, self.nodes)

    def rows_sent(self, kind: RequestKind, source: int, target: int) -> int:
        """Rows that such a message has; none of ``scalars``."""
        whose = source if kind in ("blocks", "rows") else target
        start, end = self.rows[whose] if kind in OVER_NETWORK else self.group(whose)
        return end - start
