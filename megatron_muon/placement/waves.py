"""Waves: matrices that travel and are computed together, bounded in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_WAVE_ELEMENTS = 1 << 18
"""An owner's share of a wave below which a further wave costs more latency than it hides."""

TARGET_WAVES = 4
"""Enough for exchange, computation and return to overlap; more only where memory asks for it."""


MESSAGE_SLOTS = 3
"""Waves whose messages are in memory: going to the owners, being computed, going back."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Elements that one rank holds for one wave.

    Attributes:
        outbound: Packed for the owners and received as owner.
        matrices: Assembled as owner.
        inbound: Packed as owner for the holders and received as holder.
    """

    outbound: int
    matrices: int
    inbound: int


EMPTY = Footprint(outbound=0, matrices=0, inbound=0)


def peak_elements(waves: Sequence[Footprint]) -> int:
    """Number of elements that one rank holds for its exchange.

    They are held in fixed places, see ``exchange.wave_memory``: one for assembled matrices, and
    ``MESSAGE_SLOTS`` for either way of a wave.
    """
    flight = max((max(wave.outbound, wave.inbound) for wave in waves), default=0)
    matrices = max((wave.matrices for wave in waves), default=0)
    return matrices + min(MESSAGE_SLOTS, len(waves)) * flight


def cut_by_owner(
    *, owners: Sequence[int], numels: Sequence[int], cap: int
) -> tuple[tuple[int, ...], ...]:
    """Deal every owner's matrices, in order, to waves of at most ``cap`` elements per owner.

    A matrix larger than ``cap`` has a wave's share of its owner to itself.

    Args:
        owners: Owner of each matrix, in the order in which the next forward needs them.
        numels: Elements of each matrix.
        cap: Elements per owner and wave.

    Returns:
        For each wave the indices of its matrices, ascending.
    """
    wave_of: dict[int, int] = {}
    filled: dict[int, int] = {}
    waves: list[list[int]] = []
    for index, (owner, numel) in enumerate(zip(owners, numels, strict=True)):
        wave = wave_of.get(owner, 0)
        if filled.get(owner, 0) and filled[owner] + numel > cap:
            wave += 1
            filled[owner] = 0
        wave_of[owner] = wave
        filled[owner] = filled.get(owner, 0) + numel
        while len(waves) <= wave:
            waves.append([])
        waves[wave].append(index)
    return tuple(tuple(wave) for wave in waves)


def initial_cap(*, owners: Sequence[int], numels: Sequence[int], least: int | None = None) -> int:
    """Elements per owner and wave when memory is no concern; at least MIN_WAVE_ELEMENTS if None."""
    owned: dict[int, int] = {}
    for owner, numel in zip(owners, numels, strict=True):
        owned[owner] = owned.get(owner, 0) + numel
    busiest = max(owned.values(), default=0)
    return max(-(-busiest // TARGET_WAVES), MIN_WAVE_ELEMENTS if least is None else least)
