"""What planning has to know of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_muon.placement.memory import PhasesFunction
from megatron_muon.placement.part_costs import Splitting
from megatron_muon.placement.plan import CostFunction
from megatron_muon.placement.schemes import Scheme, SchemeFunction, whole_scheme

MIN_WAVE_ELEMENTS = 1 << 18
"""An owner's part of a wave below which a further wave costs more latency than it hides."""

TARGET_WAVES = 4
"""Enough for exchange, computation and return to overlap; more only where memory asks for it."""


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


def _no_bytes(sizes: Sequence[int], most: int) -> int:
    return 0


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
        before: Bytes that a rank allocates before the first wave, from the elements of its ranges
            and the bytes that it may take.
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
    before: Callable[[Sequence[int], int], int] = _no_bytes
