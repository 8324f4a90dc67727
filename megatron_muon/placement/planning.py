"""Makes plans: sorts, chooses who computes what, cuts waves within the bound on memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_muon.matrices import LogicalMatrix, ShardedParameter, natural_key
from megatron_muon.placement.buffer_bound import BufferTooSmallError, planned_within
from megatron_muon.placement.method import Method
from megatron_muon.placement.part_costs import Candidate, Splitting, part_cost, team_of
from megatron_muon.placement.plan import Lane, Plan
from megatron_muon.placement.regions import ExchangeGroup, Share, shares
from megatron_muon.placement.schemes import Panels, Scheme
from megatron_muon.placement.splitting import Choice, choose_ranks
from megatron_muon.placement.waves import Waves


def make_plan(
    *,
    group: ExchangeGroup,
    parameters: Sequence[ShardedParameter],
    matrices: Sequence[LogicalMatrix],
    method: Method,
    buffer_bytes: int | None,
    ranks_per_node: int | None = None,
) -> Plan:
    """Choose ranks, schemes and waves.

    Args:
        group: Sizes of the exchange group.
        parameters: All parameters with matrices, any order.
        matrices: Their logical matrices, any order; the plan does not depend on it.
        method: The optimizer.
        buffer_bytes: Bound on what a rank allocates in a step; None for the least that slows
            nothing down, or ``AUTO_BYTES`` if that is more.
        ranks_per_node: Neighbouring ranks that are on one node; all by default.

    Raises:
        BufferTooSmallError: Even one matrix per owner and wave needs more than ``buffer_bytes``;
            the sentence names the flag, the largest matrix and the value to type.
    """
    per_node = min(ranks_per_node or group.size, group.size)
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

    def plan_with(
        splitting: Splitting | None, bound: int | None, most_elements: int | None = None
    ) -> Plan:
        if method.at_home is not None:
            chosen = _choose_at_home(candidates, method.at_home.work, group.size)
        else:
            chosen = choose_ranks(
                candidates,
                ranks=group.size,
                ranks_per_node=per_node,
                splitting=splitting,
                most_elements=most_elements,
            )
        schemes = tuple(
            _scheme(method, splitting, candidate, theirs, ranks, per_node)
            for candidate, theirs, ranks in zip(candidates, held, chosen.ranks, strict=True)
        )
        plan = Plan(
            group=group,
            parameters=parameters,
            matrices=matrices,
            schemes=schemes,
            main=Lane(waves=(), slots=method.slots, alone=method.alone),
            split=Lane(waves=(), slots=method.slots, alone=True),
            home=_at_home(method, schemes),
            home_elements=0,
            costs=tuple(candidate.cost for candidate in candidates),
            flops=tuple(candidate.flops for candidate in candidates),
            possible=chosen.possible,
            itemsizes=method.itemsizes,
            peak_bytes=(0,) * group.size,
            ranks_per_node=per_node,
        )
        return Waves(plan, method).within(bound)

    def split_or_whole(bound: int | None) -> Plan:
        if method.splitting is None or method.splitting.most_ranks == 1:
            return plan_with(None, bound)
        largest = max((matrix.numel for matrix in matrices), default=1)
        most = method.splitting.most_ranks
        smaller = [largest // count for count in (2, 4, 8, most) if count <= most]
        tried: list[BufferTooSmallError] = []
        for splitting, most_elements in (
            (method.splitting, None),
            (None, None),
            *((method.splitting, elements) for elements in smaller),
        ):
            try:
                return plan_with(splitting, bound, most_elements)
            except BufferTooSmallError as error:
                tried.append(error)
        raise min(tried, key=lambda error: error.needed)

    if buffer_bytes is None:
        return split_or_whole(None)
    return planned_within(split_or_whole, buffer_bytes)


def _at_home(method: Method, schemes: Sequence[Scheme]) -> tuple[int, ...]:
    """Matrices that are computed where all of them lies, without a message."""
    if method.at_home is None:
        return ()
    return tuple(
        index
        for index, scheme in enumerate(schemes)
        if scheme.assembles
        and {share.rank for share in scheme.shares} == set(scheme.ranks)
        and scheme.region(0).numel <= method.at_home.most_elements
    )


def _choose_at_home(
    candidates: Sequence[Candidate], work: Callable[[int, int], tuple[int, int]], ranks: int
) -> Choice:
    """An owner among the holders of each matrix, the longest first to the emptiest of them."""
    loads = [0] * ranks
    for candidate in candidates:
        for rank, elements in candidate.held.items():
            loads[rank] += elements * work(*candidate.shape)[0]
    own = [work(*candidate.shape)[1] for candidate in candidates]
    possible = max(*loads, -(-(sum(loads) + sum(own)) // ranks))
    chosen: dict[int, int] = {}
    for index in sorted(range(len(own)), key=lambda i: (-own[i], candidates[i].name)):
        held = candidates[index].held
        chosen[index] = min(held, key=lambda rank: (loads[rank], -held[rank], rank))
        loads[chosen[index]] += own[index]
    return Choice(
        ranks=tuple((chosen[i],) for i in range(len(own))), load=max(loads), possible=possible
    )


def _scheme(
    method: Method,
    splitting: Splitting | None,
    candidate: Candidate,
    held: tuple[Share, ...],
    ranks: tuple[int, ...],
    ranks_per_node: int,
) -> Scheme:
    if len(ranks) == 1 or splitting is None:
        return method.scheme(candidate.shape, held, ranks[0], (candidate.flops, candidate.cost))
    m, n = candidate.shape
    team = team_of(candidate.shape, len(ranks), ranks_per_node)
    # Node by node as chosen; of a team those with one number on their nodes follow one another.
    ranks = tuple(rank for number in range(team.on_each) for rank in ranks[number :: team.on_each])
    return Panels(
        shape=candidate.shape,
        shares=held,
        ranks=ranks,
        team=team,
        work=tuple(
            (
                rank,
                splitting.flops(m, n, team.size, number),
                part_cost(candidate, splitting, team, number),
            )
            for number, rank in enumerate(ranks)
        ),
        requests=splitting.requests(m, n, team),
    )
