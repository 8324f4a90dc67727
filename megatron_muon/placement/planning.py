"""Makes plans: sorts, chooses who computes what, cuts waves within the bound on memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_muon.matrices import LogicalMatrix, ShardedParameter, natural_key
from megatron_muon.placement.buffer_bound import BufferTooSmallError, planned_within
from megatron_muon.placement.plan import CostFunction, Lane, Plan
from megatron_muon.placement.regions import ExchangeGroup, Share, shares
from megatron_muon.placement.schemes import Panels, Scheme, SchemeFunction, whole_scheme
from megatron_muon.placement.splitting import Candidate, Splitting, choose_ranks, part_cost

MIN_WAVE_ELEMENTS = 1 << 18
"""An owner's part of a wave below which a further wave costs more latency than it hides."""

TARGET_WAVES = 4
"""Enough for exchange, computation and return to overlap; more only where memory asks for it."""

SPLIT_SLOTS = 2
"""Waves of split matrices under way at once, where memory allows it."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """What planning has to know of an optimizer.

    Attributes:
        cost: Estimated time of one (m, n) matrix.
        flops: Floating-point operations of one (m, n) matrix.
        itemsizes: Bytes of an element of a message, by ``Round.kind``.
        scheme: How a matrix with one owner is communicated.
        splitting: How several ranks can compute a matrix; None for one owner each. Nothing is
            split where the buffers would not fit otherwise.
        slots: Waves under way at once.
        reuses_messages: As in ``Plan``.
        min_wave_elements: An owner's part of a wave is not made smaller unless memory asks for it.
    """

    cost: CostFunction
    flops: CostFunction
    itemsizes: Mapping[str, int]
    scheme: SchemeFunction = whole_scheme
    splitting: Splitting | None = None
    slots: int = 3
    reuses_messages: bool = True
    min_wave_elements: int | None = None


def make_plan(
    *,
    group: ExchangeGroup,
    parameters: Sequence[ShardedParameter],
    matrices: Sequence[LogicalMatrix],
    method: Method,
    buffer_bytes: int,
    ranks_per_node: int | None = None,
) -> Plan:
    """Choose ranks, schemes and waves.

    Args:
        group: Sizes of the exchange group.
        parameters: All parameters with matrices, any order.
        matrices: Their logical matrices, any order; the plan does not depend on it.
        method: The optimizer.
        buffer_bytes: Bound on a rank's exchange buffers and assembled matrices.
        ranks_per_node: Neighbouring ranks that are on one node; all by default.

    Raises:
        BufferTooSmallError: Even one matrix per owner and wave needs more than ``buffer_bytes``;
            the sentence names the flag, the largest matrix and the value to type.
    """
    parameters = tuple(sorted(parameters, key=lambda p: natural_key(p.name)))
    matrices = tuple(sorted(matrices, key=lambda m: natural_key(m.name)))
    by_name = {parameter.name: parameter for parameter in parameters}
    held = [shares(matrix, by_name[matrix.parameter], group) for matrix in matrices]
    candidates = [
        Candidate(
            name=matrix.name,
            shape=matrix.shape,
            cost=method.cost(*matrix.shape),
            flops=method.flops(*matrix.shape),
            held={share.rank: share.numel for share in theirs},
        )
        for matrix, theirs in zip(matrices, held, strict=True)
    ]

    def plan_with(splitting: Splitting | None, bound: int) -> Plan:
        chosen = choose_ranks(
            candidates,
            ranks=group.size,
            ranks_per_node=ranks_per_node or group.size,
            splitting=splitting,
            buffer_bytes=bound,
        )
        plan = Plan(
            group=group,
            parameters=parameters,
            matrices=matrices,
            schemes=tuple(
                _scheme(method, splitting, candidate, theirs, ranks)
                for candidate, theirs, ranks in zip(candidates, held, chosen.ranks, strict=True)
            ),
            main=Lane(waves=(), slots=method.slots),
            split=Lane(waves=(), slots=SPLIT_SLOTS),
            costs=tuple(candidate.cost for candidate in candidates),
            flops=tuple(candidate.flops for candidate in candidates),
            possible=chosen.possible,
            itemsizes=method.itemsizes,
            reuses_messages=method.reuses_messages,
            ranks_per_node=ranks_per_node or group.size,
        )
        return _with_main_waves(_with_split_waves(plan, bound), bound, method.min_wave_elements)

    def split_or_whole(bound: int) -> Plan:
        if method.splitting is None or method.splitting.most_ranks == 1:
            return plan_with(None, bound)
        try:
            return plan_with(method.splitting, bound)
        except BufferTooSmallError as split:
            try:
                return plan_with(None, bound)
            except BufferTooSmallError as whole:
                raise min(split, whole, key=lambda error: error.needed) from None

    return planned_within(split_or_whole, buffer_bytes)


def _scheme(
    method: Method,
    splitting: Splitting | None,
    candidate: Candidate,
    held: tuple[Share, ...],
    ranks: tuple[int, ...],
) -> Scheme:
    if len(ranks) == 1 or splitting is None:
        return method.scheme(candidate.shape, held, ranks[0], (candidate.flops, candidate.cost))
    (m, n), numbers = candidate.shape, range(len(ranks))
    return Panels(
        shape=candidate.shape,
        shares=held,
        ranks=ranks,
        flops=tuple(splitting.flops(m, n, len(ranks), number) for number in numbers),
        costs=tuple(part_cost(candidate, splitting, len(ranks), number) for number in numbers),
        requests=splitting.requests(m, n),
    )


def _with_split_waves(plan: Plan, buffer_bytes: int) -> Plan:
    """The plan with waves in which no rank has more than one part, as few as first fit needs.

    As many of them are under way as leave half of the memory for the matrices of one owner each,
    if there are any.
    """
    waves: list[list[int]] = []
    busy: list[set[int]] = []
    for index, scheme in enumerate(plan.schemes):
        if len(scheme.ranks) == 1:
            continue
        ranks = set(scheme.ranks)
        number = next((n for n, taken in enumerate(busy) if not taken & ranks), len(waves))
        if number == len(waves):
            waves.append([])
            busy.append(set())
        waves[number].append(index)
        busy[number] |= ranks
    if not waves:
        return plan
    is_all = sum(map(len, waves)) == len(plan.schemes)
    room = buffer_bytes if is_all else buffer_bytes // 2
    plan = replace(plan, split=Lane(waves=tuple(map(tuple, waves)), slots=SPLIT_SLOTS))
    while plan.split.slots > 1 and max(plan.peak_bytes) > room:
        plan = replace(plan, split=replace(plan.split, slots=plan.split.slots - 1))
    return plan


def _with_main_waves(plan: Plan, buffer_bytes: int, least: int | None) -> Plan:
    """The plan with the fewest waves (but enough to overlap) whose peak fits on every rank.

    Raises:
        BufferTooSmallError: As ``make_plan``.
    """
    if not plan.matrices:
        return plan
    whole = [index for index, scheme in enumerate(plan.schemes) if len(scheme.ranks) == 1]
    numels = [plan.matrices[index].numel for index in whole]
    owners = [plan.owners[index] for index in whole]
    cap = initial_cap(owners=owners, numels=numels, least=least)
    smallest: int | None = None
    while True:
        cut = cut_by_owner(owners=owners, numels=numels, cap=cap)
        waves = tuple(tuple(whole[position] for position in wave) for wave in cut)
        plan = replace(plan, main=replace(plan.main, waves=waves))
        peak = max(plan.peak_bytes)
        if peak <= buffer_bytes:
            return plan
        smallest = peak if smallest is None else min(smallest, peak)
        if cap <= min(numels, default=cap):
            raise BufferTooSmallError(max(plan.matrices, key=lambda m: m.numel), smallest)
        cap = cap * 3 // 4


def cut_by_owner(
    *, owners: Sequence[int], numels: Sequence[int], cap: int
) -> tuple[tuple[int, ...], ...]:
    """Deal every owner's matrices, in order, to waves of at most ``cap`` elements per owner.

    A matrix larger than ``cap`` has an owner's part of a wave to itself.

    Args:
        owners: Owner of each matrix, in the order in which the next forward needs them.
        numels: Elements of each matrix.
        cap: Elements per owner and wave.

    Returns:
        For each wave the indices of its matrices, ascending.
    """
    wave_of: dict[int, int] = defaultdict(int)
    filled: dict[int, int] = defaultdict(int)
    waves: list[list[int]] = []
    for index, (owner, numel) in enumerate(zip(owners, numels, strict=True)):
        if filled[owner] and filled[owner] + numel > cap:
            wave_of[owner] += 1
            filled[owner] = 0
        filled[owner] += numel
        while len(waves) <= wave_of[owner]:
            waves.append([])
        waves[wave_of[owner]].append(index)
    return tuple(map(tuple, waves))


def initial_cap(*, owners: Sequence[int], numels: Sequence[int], least: int | None = None) -> int:
    """Elements per owner and wave when memory is no concern; at least MIN_WAVE_ELEMENTS if None."""
    owned: dict[int, int] = defaultdict(int)
    for owner, numel in zip(owners, numels, strict=True):
        owned[owner] += numel
    busiest = max(owned.values(), default=0)
    return max(-(-busiest // TARGET_WAVES), MIN_WAVE_ELEMENTS if least is None else least)
