"""The plan of a low-rank optimizer: per matrix, whether whole matrices or factors travel.

Let X be one matrix, V the factor on its shorter side (short x r), U on its longer (long x r). In an
exchange of factors the owner and the holders take turns, five messages for a whole wave::

    WARM      owner -> holders   V, the holder's rows of it
    SOURCE    holders -> owner   their part of B V
    BASIS     owner -> holders   U, the holder's rows of it
    RESPONSE  holders -> owner   their part of Bᵀ U
    UPDATE    owner -> holders   the new V and the r x r core C, with W = V C

In an exchange of matrices the holders send B itself in SOURCE. In UPDATE each gets its rows of U, V
and C back, or, where that is less, its elements of U Vᵀ and U Wᵀ: a holder of few rows needs nearly
the whole factor of the other side. So a matrix costs no more than 1.5 times what it costs in Muon,
at any number of ranks. Further copies of a parameter that is replicated over TP send nothing and
receive the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Literal

from megatron_muon.matrices import LogicalMatrix, ShardedParameter
from megatron_muon.placement.buffer_bound import planned_within
from megatron_muon.placement.plan import CostFunction, Plan, RankLoad
from megatron_muon.placement.planning import arrange, fitting_waves
from megatron_muon.placement.segments import ExchangeGroup
from megatron_muon.placement.shares import Share, shares

Scheme = Literal["factors", "matrix"]
SchemeChoice = Literal["auto", "factors", "matrix"]

MIN_FACTOR_WAVE_ELEMENTS = 1 << 22
"""``MIN_WAVE_ELEMENTS`` of factors: a wave has up to five messages, of a fraction of its matrices'
elements, and the QRs of a wave are batched (one wave in place of four of 2^20 elements: a tenth of
a step less on 4 gloo ranks)."""


class Round(Enum):
    """A message of a wave, in the order in which they are sent."""

    WARM = "warm"
    SOURCE = "source"
    BASIS = "basis"
    RESPONSE = "response"
    UPDATE = "update"

    @property
    def to_owner(self) -> bool:
        """True when the holders send it."""
        return self in (Round.SOURCE, Round.RESPONSE)


@dataclass(frozen=True, kw_only=True)
class FactorShape:
    """A matrix in the orientation of its factors.

    Attributes:
        long: Longer side, that of U.
        short: Shorter side, that of V.
        rank: r.
        transposed: True when the rows are the shorter side; decided on the global shape.
    """

    long: int
    short: int
    rank: int
    transposed: bool

    def u_len(self, share: Share) -> int:
        """Rows of U that a share meets."""
        return share.cols if self.transposed else share.rows

    def v_len(self, share: Share) -> int:
        """Rows of V that a share meets."""
        return share.rows if self.transposed else share.cols

    def factor_elements(self, share: Share) -> int:
        """Elements of the rows of U and V that a share meets, and of C."""
        return (self.u_len(share) + self.v_len(share) + self.rank) * self.rank

    def returns_elements(self, share: Share) -> bool:
        """Whether a holder that sent B gets elements of the products back, not factors."""
        return 2 * share.numel < self.factor_elements(share)


def factor_shape(shape: tuple[int, int], rank: int) -> FactorShape:
    """Orientation of an (m, n) matrix: V lies on the columns unless there are fewer rows."""
    m, n = shape
    return FactorShape(long=max(m, n), short=min(m, n), rank=rank, transposed=m < n)


def message_elements(where: Round, scheme: Scheme, shape: FactorShape, share: Share) -> int:
    """Elements of one message between the owner of a matrix and the holder of a share."""
    u, v, r = shape.u_len(share) * shape.rank, shape.v_len(share) * shape.rank, shape.rank
    if scheme == "matrix":
        if where is Round.SOURCE:
            return share.numel if share.is_source else 0
        back = 2 * share.numel if shape.returns_elements(share) else shape.factor_elements(share)
        return back if where is Round.UPDATE else 0
    elements = {
        Round.WARM: v if share.is_source else 0,
        Round.SOURCE: u if share.is_source else 0,
        Round.BASIS: u,
        Round.RESPONSE: v if share.is_source else 0,
        Round.UPDATE: v + r * r,
    }
    return elements[where]


def exchanged_elements(
    scheme: Scheme, shape: FactorShape, held: Iterable[Share], owner: int
) -> int:
    """Elements that cross between ranks for one matrix in one step."""
    return sum(
        message_elements(where, scheme, shape, share)
        for share in held
        if share.rank != owner
        for where in Round
    )


@dataclass(frozen=True, kw_only=True)
class FactorPlan(Plan):
    """A plan whose matrices have low-rank factors.

    Attributes:
        ranks: Rank r of each matrix.
        schemes: What travels for each matrix.
    """

    ranks: tuple[int, ...]
    schemes: tuple[Scheme, ...]

    @cached_property
    def shares(self) -> tuple[tuple[Share, ...], ...]:
        """The shares of every matrix."""
        return tuple(
            shares(m, g, s)
            for m, g, s in zip(self.matrices, self.gathers, self.scatters, strict=True)
        )

    @cached_property
    def shapes(self) -> tuple[FactorShape, ...]:
        """Every matrix in the orientation of its factors."""
        return tuple(
            factor_shape(m.shape, r) for m, r in zip(self.matrices, self.ranks, strict=True)
        )

    @cached_property
    def loads(self) -> tuple[RankLoad, ...]:
        """Predicted work, traffic and memory of every rank."""
        size = self.group.size
        flops, owned = [0] * size, [0] * size
        sent, received = [0] * size, [0] * size
        for index, owner in enumerate(self.owners):
            flops[owner] += self.costs[index]
            owned[owner] += 1
            for share in self.shares[index]:
                if share.rank == owner:
                    continue
                for where in Round:
                    elements = message_elements(
                        where, self.schemes[index], self.shapes[index], share
                    )
                    source, target = (share.rank, owner) if where.to_owner else (owner, share.rank)
                    sent[source] += elements
                    received[target] += elements
        peaks = _peaks(self.waves, self.owners, self.schemes, self.shapes, self.shares, size)
        return tuple(
            RankLoad(
                flops=flops[rank],
                cost=flops[rank],
                sent_bytes=sent[rank] * self.itemsize,
                received_bytes=received[rank] * self.itemsize,
                peak_buffer_bytes=peaks[rank] * self.itemsize,
                matrices=owned[rank],
            )
            for rank in range(size)
        )


def _peaks(
    waves: Sequence[Sequence[int]],
    owners: Sequence[int],
    schemes: Sequence[Scheme],
    shapes: Sequence[FactorShape],
    held: Sequence[Sequence[Share]],
    size: int,
) -> list[int]:
    """Most elements that each rank has allocated at once: two waves are under way together."""
    peaks, before = [0] * size, [0] * size
    for wave in waves:
        here = [0] * size
        for index in wave:
            for share in held[index]:
                here[share.rank] += held_elements(schemes[index], shapes[index], share)
                here[owners[index]] += sum(
                    message_elements(where, schemes[index], shapes[index], share) for where in Round
                ) * (share.rank != owners[index] or size > 1)
            here[owners[index]] += owned_elements(schemes[index], shapes[index], held[index])
        peaks = [max(peak, a + b) for peak, a, b in zip(peaks, before, here, strict=True)]
        before = here
    return peaks


def held_elements(scheme: Scheme, shape: FactorShape, share: Share) -> int:
    """Elements that a holder allocates for a matrix: messages, padded rows, and U Cᵀ or V C."""
    elements = sum(message_elements(where, scheme, shape, share) for where in Round)
    if scheme == "factors" and share.is_source:
        elements += share.rows * share.cols
    if scheme == "factors" or not shape.returns_elements(share):
        elements += share.rows * shape.rank
    return elements


def owned_elements(scheme: Scheme, shape: FactorShape, held: Iterable[Share]) -> int:
    """Elements that an owner allocates for a matrix but for messages.

    P, U, W, V, kept V and C; of a matrix that came whole B, and both products if they are sent.
    """
    whole = shape.long * shape.short * (scheme == "matrix")
    if scheme == "matrix" and any(shape.returns_elements(share) for share in held):
        whole *= 3
    return whole + (2 * shape.long + 3 * shape.short) * shape.rank + shape.rank**2


def make_factor_plan(
    *,
    group: ExchangeGroup,
    parameters: Sequence[ShardedParameter],
    matrices: Sequence[LogicalMatrix],
    rank: Callable[[int, int], int],
    cost: CostFunction,
    itemsize: int,
    buffer_bytes: int,
    scheme: SchemeChoice = "auto",
    ranks_per_node: int | None = None,
) -> FactorPlan:
    """Choose owners, what travels, and waves.

    Args:
        group: Sizes of the exchange group.
        parameters: All parameters with matrices, any order.
        matrices: Their logical matrices, any order; the plan does not depend on it.
        rank: r of an (m, n) matrix.
        cost: Estimated time of one (m, n) matrix.
        itemsize: Bytes of one element on the wire.
        buffer_bytes: Bound on a rank's exchange buffers, factors and assembled matrices.
        scheme: ``auto`` takes for each matrix what moves fewer bytes, matrices where equal.
        ranks_per_node: As for ``make_plan``.

    Raises:
        BufferTooSmallError: As ``make_plan``.
    """
    found = arrange(
        group=group,
        parameters=parameters,
        matrices=matrices,
        cost=cost,
        ranks_per_node=ranks_per_node,
    )
    ranks = tuple(rank(*m.shape) for m in found.matrices)
    shapes = tuple(factor_shape(m.shape, r) for m, r in zip(found.matrices, ranks, strict=True))
    held = tuple(
        shares(m, g, s)
        for m, g, s in zip(found.matrices, found.gathers, found.scatters, strict=True)
    )
    schemes = tuple(
        _cheaper(shape, holders, owner) if scheme == "auto" else scheme
        for shape, holders, owner in zip(shapes, held, found.owners, strict=True)
    )

    def peak_bytes(waves: Sequence[Sequence[int]]) -> int:
        return itemsize * max(_peaks(waves, found.owners, schemes, shapes, held, group.size))

    def plan_with(bound: int) -> FactorPlan:
        return FactorPlan(
            group=group,
            parameters=found.parameters,
            matrices=found.matrices,
            owners=found.owners,
            waves=fitting_waves(found, peak_bytes, bound, least=MIN_FACTOR_WAVE_ELEMENTS),
            gathers=found.gathers,
            scatters=found.scatters,
            costs=found.costs,
            itemsize=itemsize,
            ranks_per_node=ranks_per_node or group.size,
            possible=found.possible,
            ranks=ranks,
            schemes=schemes,
        )

    return planned_within(plan_with, buffer_bytes)


def _cheaper(shape: FactorShape, held: Sequence[Share], owner: int) -> Scheme:
    factors = exchanged_elements("factors", shape, held, owner)
    return "factors" if factors < exchanged_elements("matrix", shape, held, owner) else "matrix"
