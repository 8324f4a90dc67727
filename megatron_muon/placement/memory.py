"""Memory that every rank needs for the waves of a plan, found by going through the schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_muon.placement.regions import Share
from megatron_muon.placement.schedule import Turn
from megatron_muon.placement.schemes import Round, Scheme


class Phase(NamedTuple):
    """A wave from one message to the next, on one rank.

    Attributes:
        peak: Most bytes that the wave holds at once.
        held: Bytes that it still holds when the next message is sent, 0 at its end.
    """

    peak: int
    held: int


@dataclass(kw_only=True)
class WaveUse:
    """What one rank has to do with one wave.

    Attributes:
        messages: Number of messages of the wave, the same on every rank.
        sent: Bytes that it sends in each round, to itself included.
        received: Bytes that it receives in each round; nothing where there is one rank, for what
            is sent is what is received.
        held: Matrices that it holds a share of.
        computed: Matrices that it computes, with its place among those that do.
    """

    messages: int
    sent: dict[Round, int] = field(default_factory=lambda: defaultdict(int))
    received: dict[Round, int] = field(default_factory=lambda: defaultdict(int))
    held: list[tuple[Scheme, Share]] = field(default_factory=list)
    computed: list[tuple[Scheme, int]] = field(default_factory=list)


PhasesFunction = Callable[[WaveUse], Sequence[Phase]]
"""Memory of one wave on one rank: one phase more than it has messages."""


def wave_uses(
    schemes: Sequence[Scheme], itemsizes: Mapping[str, int], *, alone: bool
) -> dict[int, WaveUse]:
    """What every rank has to do with a wave; ranks that have nothing to do are left out.

    Args:
        schemes: Those of the matrices of the wave.
        itemsizes: As in ``Plan``.
        alone: Whether there is only one rank.
    """
    rounds = {where for scheme in schemes for where in scheme.messages}
    found: dict[int, WaveUse] = defaultdict(lambda: WaveUse(messages=len(rounds)))
    for scheme in schemes:
        for where, messages in scheme.messages.items():
            itemsize = itemsizes[where.kind]
            for source, target, elements in messages:
                found[source].sent[where] += elements * itemsize
                if not alone:
                    found[target].received[where] += elements * itemsize
        for share in scheme.shares:
            found[share.rank].held.append((scheme, share))
        for number, rank in enumerate(scheme.ranks):
            found[rank].computed.append((scheme, number))
    return dict(found)


class LanePhases:
    """Memory of the waves of a lane.

    Attributes:
        messages: Messages of each wave.
        of_rank: For each rank, by the number of a wave, its phases.

    Args:
        uses: For each wave what each rank has to do with it.
        phases: Memory of one wave on one rank.
    """

    def __init__(self, uses: Sequence[Mapping[int, WaveUse]], phases: PhasesFunction) -> None:
        self.messages = tuple(next(iter(wave.values())).messages for wave in uses)
        self.of_rank: dict[int, dict[int, Sequence[Phase]]] = defaultdict(dict)
        for number, wave in enumerate(uses):
            for rank, use in wave.items():
                self.of_rank[rank][number] = phases(use)


def step_peaks(turns: Iterable[Turn], lanes: Sequence[LanePhases], *, ranks: int) -> list[int]:
    """Most bytes that every rank holds at once.

    Args:
        turns: What ``step_schedule`` gives.
        lanes: Memory of both lanes.
        ranks: Number of ranks.
    """
    of_wave: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for time, turn in enumerate(turns):
        of_wave[turn.lane, turn.wave].append((time, turn.sent))
    return [_peak(of_wave, [lane.of_rank.get(rank, {}) for lane in lanes]) for rank in range(ranks)]


def _peak(
    of_wave: Mapping[tuple[int, int], Sequence[tuple[int, int]]],
    lanes: Sequence[Mapping[int, Sequence[Phase]]],
) -> int:
    own = sorted(
        (time, sent, phases)
        for lane, waves in enumerate(lanes)
        for wave, phases in waves.items()
        for time, sent in of_wave[lane, wave]
    )
    alive = peak = 0
    for _, sent, phases in own:
        before = phases[sent - 1].held if sent else 0
        peak = max(peak, alive - before + phases[sent].peak)
        alive += phases[sent].held - before
    return peak
