"""The order in which the waves of a step are advanced; the same on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class LaneOrder(NamedTuple):
    """What the order of a lane's waves follows from.

    Attributes:
        messages: Messages of each wave.
        slots: As for ``lane_schedule``.
        alone: As for ``lane_schedule``.
    """

    messages: Sequence[int]
    slots: int
    alone: bool


class Turn(NamedTuple):
    """A wave goes on.

    Attributes:
        lane: 0 for the main lane, 1 for that of split matrices.
        wave: Number of the wave in its lane.
        sent: Messages that it has sent.
    """

    lane: int
    wave: int
    sent: int


def step_schedule(main: LaneOrder, split: LaneOrder) -> Iterator[Turn]:
    """Which wave of a step goes on next.

    The waves of split matrices are spread evenly between those of the others: ranks that have a
    part of one have fewer matrices of their own, so that all end at the same time.
    """
    # The last message of the split lane is left for the end: it brings home what the last wave of
    # the other need not wait for.
    of_main, rest = sum(main.messages), max(0, sum(split.messages) - 1)
    others = _turns(1, split)
    started = done = 0
    for turn in _turns(0, main):
        yield turn
        started += turn.sent < main.messages[turn.wave]
        while done < rest * started // of_main:
            following = next(others)
            yield following
            done += following.sent < split.messages[following.wave]
    yield from others


def _turns(number: int, lane: LaneOrder) -> Iterator[Turn]:
    for wave, sent in lane_schedule(lane.messages, slots=lane.slots, alone=lane.alone):
        yield Turn(number, wave, sent)


def lane_schedule(messages: Sequence[int], *, slots: int, alone: bool) -> Iterator[tuple[int, int]]:
    """Which wave goes on next.

    In turn the next wave is started and those under way are advanced by one message, the newest
    first: so wave k+1 is on its way to the owners while wave k is computed, and wave k-1 on its way
    back.

    Args:
        messages: Messages of each wave.
        slots: Most waves under way at once.
        alone: Whether a wave is computed only when the one before it is on its way back; else the
            computations of waves alternate.

    Yields:
        (wave, messages that it has sent): it waits for the last of them, works, and sends the next
        one or ends.
    """
    waiting = deque(range(len(messages)))
    flying: list[int] = []
    sent = [0] * len(messages)
    while waiting or flying:
        older = list(flying)
        if waiting and len(flying) < slots:
            wave = waiting.popleft()
            flying.insert(0, wave)
            yield wave, 0
            sent[wave] = 1
        for wave in older:
            if (
                alone
                and sent[wave] == 1
                and any(other < wave and sent[other] < messages[other] for other in flying)
            ):
                continue
            yield wave, sent[wave]
            if sent[wave] == messages[wave]:
                flying.remove(wave)
            else:
                sent[wave] += 1
