"""Makes plans: sorts, chooses who computes what, cuts waves within the bound on memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_muon.matrices import LogicalMatrix, ShardedParameter, natural_key
from megatron_muon.placement.buffer_bound import BufferTooSmallError, planned_within
from megatron_muon.placement.memory import LanePhases, PhasesFunction, step_peaks, wave_uses
from megatron_muon.placement.part_costs import Candidate, Splitting, part_cost, team_of
from megatron_muon.placement.plan import CostFunction, Lane, Plan
from megatron_muon.placement.regions import ExchangeGroup, Share, shares
from megatron_muon.placement.schedule import LaneOrder, step_schedule
from megatron_muon.placement.schemes import Panels, Scheme, SchemeFunction, whole_scheme
from megatron_muon.placement.splitting import Choice, choose_ranks

MIN_WAVE_ELEMENTS = 1 << 18
"""An owner's part of a wave below which a further wave costs more latency than it hides."""

TARGET_WAVES = 4
"""Enough for exchange, computation and return to overlap; more only where memory asks for it."""

AUTO_BYTES = 1 << 29
"""Memory of a step that is not worth saving, where the user sets no bound."""


@dataclass(frozen=True, kw_only=True)
class AtHome:
    """How matrices are computed whose owner is one of their holders.

    Attributes:
        work: (m, n) to the time of each element on whoever holds it, and that of the matrix on its
            owner.
        most_elements: A matrix that is no larger and that nobody else holds is in no wave.
        most_at_once: Elements of such matrices that are computed at once, unless memory is short.
        peak: Most bytes that computing them takes, from their schemes and elements at once.
    """

    work: Callable[[int, int], tuple[int, int]]
    most_elements: int
    most_at_once: int
    peak: Callable[[Sequence[Scheme], int], int]


@dataclass(frozen=True, kw_only=True)
class Method:
    """What planning has to know of an optimizer.

    Attributes:
        cost: Estimated time of one (m, n) matrix.
        flops: Floating-point operations of one (m, n) matrix.
        itemsizes: Bytes of an element of a message, by ``Round.kind``.
        scheme: How a matrix with one owner is communicated.
        splitting: How several ranks can compute a matrix; None for one owner each.
        phases: Memory of a wave on a rank.
        slots: Most waves under way at once.
        alone: As in ``Lane``.
        min_wave_elements: An owner's part of a wave is not made smaller unless memory asks for it.
        target_waves: Waves of the busiest owner, unless memory asks for more.
        at_home: Set where holders do a part of the work, and an owner is one of the holders.
    """

    cost: CostFunction
    flops: CostFunction
    itemsizes: Mapping[str, int]
    phases: PhasesFunction
    scheme: SchemeFunction = whole_scheme
    splitting: Splitting | None = None
    slots: int = 3
    alone: bool = True
    min_wave_elements: int = MIN_WAVE_ELEMENTS
    target_waves: int = TARGET_WAVES
    at_home: AtHome | None = None


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
        return _Waves(plan, method).within(bound)

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


class _Waves:
    """Cuts the matrices of a plan into waves, and finds the memory that they need.

    Args:
        plan: A plan without waves.
        method: The optimizer.
    """

    def __init__(self, plan: Plan, method: Method) -> None:
        self._plan = plan
        self._method = method
        at_home = set(plan.home)
        self._whole = [
            i
            for i, scheme in enumerate(plan.schemes)
            if len(scheme.ranks) == 1 and i not in at_home
        ]
        self._home_peaks: Mapping[int, int] = {}
        self._numels = [plan.matrices[index].numel for index in self._whole]
        self._owners = [plan.owners[index] for index in self._whole]
        self._split = replace(plan.split, waves=_split_waves(plan))
        self._split_phases = self._phases(self._split)

    def within(self, bound: int | None) -> Plan:
        """The plan with the fewest waves, but enough to overlap, that fit a bound on every rank.

        Fewer waves are under way at once only where more of them do not fit.

        Args:
            bound: Bytes; None for ``AUTO_BYTES``, or what is needed to have as many waves under way
                as there can be, whichever is more.

        Raises:
            BufferTooSmallError: Even one matrix per owner and wave needs more.
        """
        if not self._plan.matrices:
            return self._plan
        best: Plan | None = None
        wanted = AUTO_BYTES if bound is None else bound
        self._fit_home(wanted)
        for plan in self._plans():
            peak = max(plan.peak_bytes)
            if peak <= wanted:
                return plan
            if bound is None and plan.main.slots < self._method.slots:
                if plan.main.alone:
                    break
                continue
            if best is None or peak < max(best.peak_bytes):
                best = plan
        assert best is not None
        if bound is None:
            return best
        largest = max(self._plan.matrices, key=lambda m: m.numel)
        raise BufferTooSmallError(largest, max(best.peak_bytes))

    def _fit_home(self, wanted: int) -> None:
        """Find how many of the matrices that are in no wave can be computed at once."""
        at_home = self._method.at_home
        if at_home is None or not self._plan.home:
            return
        by_owner: dict[int, list[Scheme]] = defaultdict(list)
        for index in self._plan.home:
            by_owner[self._plan.owners[index]].append(self._plan.schemes[index])
        least = min(self._plan.matrices[index].numel for index in self._plan.home)
        elements = at_home.most_at_once
        while True:
            peaks = {rank: at_home.peak(theirs, elements) for rank, theirs in by_owner.items()}
            if max(peaks.values()) <= wanted or elements <= least:
                break
            elements //= 2
        self._plan, self._home_peaks = replace(self._plan, home_elements=elements), peaks

    def _plans(self) -> Iterator[Plan]:
        """From the fewest waves to the most, and then with fewer of them under way."""
        cuts = [
            (lane, self._phases(lane))
            for lane in (replace(self._plan.main, waves=waves) for waves in self._cuts())
        ]
        for main, phases in cuts:
            yield self._with(main, phases, self._split)
        for slots in range(self._plan.main.slots - 1, 0, -1):
            # Where waves alternate little is lost by fewer of them.
            for main, phases in cuts[-1:] if self._plan.main.alone else cuts:
                for split in _with_fewer_slots(self._split):
                    yield self._with(replace(main, slots=slots), phases, split)

    def _with(self, main: Lane, phases: LanePhases, split: Lane) -> Plan:
        both = phases, self._split_phases
        turns = step_schedule(
            *(
                LaneOrder(there.messages, lane.slots, lane.alone)
                for lane, there in zip((main, split), both, strict=True)
            )
        )
        peaks = step_peaks(turns, both, ranks=self._plan.group.size)
        # What is at home is done before the first wave starts.
        peaks = [max(peak, self._home_peaks.get(rank, 0)) for rank, peak in enumerate(peaks)]
        return replace(self._plan, main=main, split=split, peak_bytes=tuple(peaks))

    def _cuts(self) -> Iterator[tuple[tuple[int, ...], ...]]:
        cap = initial_cap(
            owners=self._owners,
            numels=self._numels,
            least=self._method.min_wave_elements,
            waves=self._method.target_waves,
        )
        while True:
            cut = cut_by_owner(owners=self._owners, numels=self._numels, cap=cap)
            yield tuple(tuple(self._whole[position] for position in wave) for wave in cut)
            if cap <= min(self._numels, default=cap):
                return
            cap = cap * 3 // 4

    def _phases(self, lane: Lane) -> LanePhases:
        alone = self._plan.group.size == 1
        schemes = self._plan.schemes
        uses = [
            wave_uses([schemes[index] for index in wave], self._plan.itemsizes, alone=alone)
            for wave in lane.waves
        ]
        return LanePhases(uses, self._method.phases)


def _with_fewer_slots(lane: Lane) -> Iterator[Lane]:
    for slots in range(lane.slots, 0, -1):
        yield replace(lane, slots=slots)


def _split_waves(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Waves in which no rank has more than one part, as few as first fit needs."""
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
    return tuple(map(tuple, waves))


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


def initial_cap(
    *,
    owners: Sequence[int],
    numels: Sequence[int],
    least: int = MIN_WAVE_ELEMENTS,
    waves: int = TARGET_WAVES,
) -> int:
    """Elements per owner and wave when memory is no concern."""
    owned: dict[int, int] = defaultdict(int)
    for owner, numel in zip(owners, numels, strict=True):
        owned[owner] += numel
    busiest = max(owned.values(), default=0)
    return max(-(-busiest // waves), least)
