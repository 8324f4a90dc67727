"""Memory that every rank needs for the waves of a plan, found by going through the schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_muon.placement.regions import Share
from megatron_muon.placement.schedule import lane_schedule
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


def lane_peaks(
    uses: Sequence[Mapping[int, WaveUse]], phases: PhasesFunction, *, slots: int, alone: bool
) -> dict[int, int]:
    """Most bytes that every rank holds for the waves of a lane.

    Args:
        uses: For each wave what each rank has to do with it.
        phases: Memory of one wave on one rank.
        slots: As for ``lane_schedule``.
        alone: As for ``lane_schedule``.
    """
    order = list(
        lane_schedule(
            [next(iter(wave.values())).messages for wave in uses], slots=slots, alone=alone
        )
    )
    by_rank: dict[int, dict[int, Sequence[Phase]]] = defaultdict(dict)
    for number, wave in enumerate(uses):
        for rank, use in wave.items():
            by_rank[rank][number] = phases(use)
    return {rank: _peak(order, waves) for rank, waves in by_rank.items()}


def _peak(order: Sequence[tuple[int, int]], waves: Mapping[int, Sequence[Phase]]) -> int:
    alive = peak = 0
    for wave, sent in order:
        if wave in waves:
            before = waves[wave][sent - 1].held if sent else 0
            phase = waves[wave][sent]
            peak = max(peak, alive - before + phase.peak)
            alive += phase.held - before
    return peak
