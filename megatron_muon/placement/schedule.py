"""The order in which the waves of a lane are advanced; the same on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence


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
