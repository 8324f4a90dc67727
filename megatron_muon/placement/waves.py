"""Cuts the matrices of a plan into waves, within the bound on memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megatron_muon.placement.buffer_bound import BufferTooSmallError
from megatron_muon.placement.memory import LanePhases, step_peaks, wave_uses
from megatron_muon.placement.method import MIN_WAVE_ELEMENTS, TARGET_WAVES, Method
from megatron_muon.placement.plan import Lane, Plan
from megatron_muon.placement.schedule import LaneOrder, step_schedule
from megatron_muon.placement.schemes import Scheme

AUTO_BYTES = 1 << 29
"""Memory of a step that is not worth saving, where the user sets no bound."""


class Waves:
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
        self._ranges = [
            [stop - start for start, stop in held if stop > start]
            for held in zip(*(parameter.ranges for parameter in plan.parameters), strict=True)
        ]
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
        # So is what comes before it, which has as much memory as the waves of the fullest rank.
        most, tp = max(peaks), self._plan.group.tp
        before = [self._method.before(sizes, most) for sizes in self._ranges]
        peaks = [max(peak, before[rank // tp]) for rank, peak in enumerate(peaks)]
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
