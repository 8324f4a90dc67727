"""Makes plans: sorts, chooses who computes what, cuts waves within the bound on memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_muon.matrices import LogicalMatrix, ShardedParameter, natural_key
from megatron_muon.placement.buffer_bound import BufferTooSmallError, planned_within
from megatron_muon.placement.plan import CostFunction, Plan, wave_footprints, wave_peak
from megatron_muon.placement.segments import ExchangeGroup, Segment, copies, segments
from megatron_muon.placement.shared import (
    SHARED_SLOTS,
    SharedMatrix,
    shared_peaks,
    shared_waves,
)
from megatron_muon.placement.sharing import Candidate, Sharing, choose_ranks, part_cost
from megatron_muon.placement.waves import cut_by_owner, initial_cap


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Parameters, matrices and owners in the order of the plan, before waves are cut.

    Attributes:
        parameters: Sorted by name.
        matrices: Sorted by name.
        gathers: For each matrix the runs that go to its owner.
        scatters: For each matrix the runs that receive its update.
        costs: Estimated time of each matrix.
        flops: Operations of each matrix.
        owners: Rank that computes each matrix, the first of several.
        ranks: All ranks that compute each matrix.
        possible: As ``Plan.possible``.
    """

    parameters: tuple[ShardedParameter, ...]
    matrices: tuple[LogicalMatrix, ...]
    gathers: tuple[tuple[Segment, ...], ...]
    scatters: tuple[tuple[Segment, ...], ...]
    costs: tuple[int, ...]
    flops: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    possible: int

    @property
    def owners(self) -> tuple[int, ...]:
        """Rank that computes each matrix, the first of several."""
        return tuple(ranks[0] for ranks in self.ranks)

    @property
    def whole(self) -> list[int]:
        """Indices of the matrices that one rank computes."""
        return [index for index, ranks in enumerate(self.ranks) if len(ranks) == 1]


def arrange(
    *,
    group: ExchangeGroup,
    parameters: Sequence[ShardedParameter],
    matrices: Sequence[LogicalMatrix],
    cost: CostFunction,
    flops: CostFunction | None = None,
    ranks_per_node: int | None = None,
    sharing: Sharing | None = None,
    buffer_bytes: int = 0,
) -> Arrangement:
    """Sort everything and choose owners; the result does not depend on the order given."""
    parameters = tuple(sorted(parameters, key=lambda p: natural_key(p.name)))
    matrices = tuple(sorted(matrices, key=lambda m: natural_key(m.name)))
    by_name = {parameter.name: parameter for parameter in parameters}
    gathers = tuple(segments(m, by_name[m.parameter], group) for m in matrices)
    scatters = tuple(copies(g, m, group) for g, m in zip(gathers, matrices, strict=True))
    candidates = [
        Candidate(
            name=matrix.name,
            shape=matrix.shape,
            cost=cost(*matrix.shape),
            flops=(flops or cost)(*matrix.shape),
            held=_elements_by_rank(runs),
        )
        for matrix, runs in zip(matrices, scatters, strict=True)
    ]
    chosen = choose_ranks(
        candidates,
        ranks=group.size,
        ranks_per_node=ranks_per_node or group.size,
        sharing=sharing,
        buffer_bytes=buffer_bytes,
    )
    return Arrangement(
        parameters=parameters,
        matrices=matrices,
        gathers=gathers,
        scatters=scatters,
        costs=tuple(candidate.cost for candidate in candidates),
        flops=tuple(candidate.flops for candidate in candidates),
        ranks=chosen.ranks,
        possible=chosen.possible,
    )


def _elements_by_rank(runs: Sequence[Segment]) -> dict[int, int]:
    elements: dict[int, int] = defaultdict(int)
    for segment in runs:
        elements[segment.rank] += segment.numel
    return elements


def make_plan(
    *,
    group: ExchangeGroup,
    parameters: Sequence[ShardedParameter],
    matrices: Sequence[LogicalMatrix],
    cost: CostFunction,
    itemsize: int,
    buffer_bytes: int,
    flops: CostFunction | None = None,
    ranks_per_node: int | None = None,
    sharing: Sharing | None = None,
) -> Plan:
    """Choose owners and waves.

    Args:
        group: Sizes of the exchange group.
        parameters: All parameters with matrices, any order.
        matrices: Their logical matrices, any order; the plan does not depend on it.
        cost: Estimated time of one (m, n) matrix.
        itemsize: Bytes of one element on the wire.
        buffer_bytes: Bound on a rank's exchange buffers and assembled matrices.
        flops: Floating-point operations of one (m, n) matrix; ``cost`` by default.
        ranks_per_node: Neighbouring ranks that are on one node; all by default.
        sharing: How several ranks can share a matrix; None for one owner each. Nothing is shared
            where the buffers would not fit otherwise.

    Raises:
        BufferTooSmallError: Even one matrix per owner and wave needs more than ``buffer_bytes``;
            the sentence names the flag, the largest matrix and the value to type.
    """

    def plan_with(wanted: Sharing | None, bound: int) -> Plan:
        found = arrange(
            group=group,
            parameters=parameters,
            matrices=matrices,
            cost=cost,
            flops=flops,
            ranks_per_node=ranks_per_node,
            sharing=wanted,
            buffer_bytes=bound,
        )
        return _plan_of(found, group, itemsize, bound, ranks_per_node, wanted)

    def shared_or_whole(bound: int) -> Plan:
        if sharing is None or sharing.most_ranks == 1:
            return plan_with(None, bound)
        try:
            return plan_with(sharing, bound)
        except BufferTooSmallError as shared:
            try:
                return plan_with(None, bound)
            except BufferTooSmallError as whole:
                raise min(shared, whole, key=lambda error: error.needed) from None

    return planned_within(shared_or_whole, buffer_bytes)


def _plan_of(
    found: Arrangement,
    group: ExchangeGroup,
    itemsize: int,
    buffer_bytes: int,
    ranks_per_node: int | None,
    sharing: Sharing | None,
) -> Plan:
    plan = Plan(
        group=group,
        parameters=found.parameters,
        matrices=found.matrices,
        owners=found.owners,
        waves=(),
        gathers=found.gathers,
        scatters=found.scatters,
        costs=found.costs,
        itemsize=itemsize,
        ranks_per_node=ranks_per_node or group.size,
        flops=found.flops,
        possible=found.possible,
    )
    peaks = [0] * group.size
    if sharing is not None and len(found.whole) < len(found.matrices):
        plan = _with_shared(plan, found, sharing)
        plan, peaks = _with_slots(plan, buffer_bytes)

    def peak_bytes(waves: Sequence[Sequence[int]]) -> int:
        footprints = wave_footprints(
            waves, found.matrices, found.owners, found.gathers, found.scatters, group.size
        )
        return max(itemsize * wave_peak(footprints, r) + peaks[r] for r in range(group.size))

    return replace(plan, waves=fitting_waves(found, peak_bytes, buffer_bytes))


def _with_shared(plan: Plan, found: Arrangement, sharing: Sharing) -> Plan:
    """The plan with its shared matrices and their waves."""
    shared = []
    for index, ranks in enumerate(found.ranks):
        if len(ranks) == 1:
            continue
        m, n = shape = found.matrices[index].shape
        candidate = Candidate(
            name=found.matrices[index].name,
            shape=shape,
            flops=found.flops[index],
            cost=found.costs[index],
            held={},
        )
        count = len(ranks)
        shared.append(
            SharedMatrix(
                index=index,
                shape=shape,
                ranks=ranks,
                requests=sharing.requests(m, n),
                flops=tuple(sharing.flops(m, n, count, number) for number in range(count)),
                costs=tuple(part_cost(candidate, sharing, count, j) for j in range(count)),
            )
        )
    return replace(
        plan,
        shared=tuple(shared),
        shared_waves=shared_waves(shared),
        shared_itemsizes=(sharing.itemsize, sharing.scalar_itemsize),
    )


def _with_slots(plan: Plan, buffer_bytes: int) -> tuple[Plan, list[int]]:
    """The plan with as many shared waves under way as leave half of the memory; every rank's peak.

    The other half is for the matrices of one owner each, if there are any.
    """
    room = buffer_bytes if len(plan.shared) == len(plan.matrices) else buffer_bytes // 2
    for slots in range(SHARED_SLOTS, 0, -1):
        peaks = shared_peaks(
            plan.shared,
            plan.traffic_of_shared,
            plan.shared_waves,
            plan.itemsizes,
            plan.group.size,
            slots,
        )
        if max(peaks) <= room:
            break
    return replace(plan, shared_slots=slots), peaks


def fitting_waves(
    found: Arrangement,
    peak_bytes: Callable[[Sequence[Sequence[int]]], int],
    buffer_bytes: int,
    *,
    least: int | None = None,
) -> tuple[tuple[int, ...], ...]:
    """The fewest waves (but enough to overlap) whose peak fits the bound on every rank.

    Args:
        found: Matrices and owners; waves are cut of those that one rank computes.
        peak_bytes: Bytes alive at once on the rank with the most, for given waves.
        buffer_bytes: The bound.
        least: As in ``initial_cap``.

    Raises:
        BufferTooSmallError: Even one matrix per owner and wave needs more.
    """
    if not found.matrices:
        return ()
    whole = found.whole
    numels = [found.matrices[index].numel for index in whole]
    owners = [found.ranks[index][0] for index in whole]
    cap = initial_cap(owners=owners, numels=numels, least=least)
    smallest: int | None = None
    while True:
        cut = cut_by_owner(owners=owners, numels=numels, cap=cap)
        waves = tuple(tuple(whole[position] for position in wave) for wave in cut)
        peak = peak_bytes(waves)
        if peak <= buffer_bytes:
            return waves
        smallest = peak if smallest is None else min(smallest, peak)
        if cap <= min(numels, default=cap):
            raise BufferTooSmallError(max(found.matrices, key=lambda m: m.numel), smallest)
        cap = cap * 3 // 4
