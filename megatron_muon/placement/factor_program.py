"""One rank's part of one wave of a factor plan: what it holds, what it owns, what it sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_muon.placement.factors import (
    FactorPlan,
    FactorShape,
    Round,
    Scheme,
    message_elements,
)
from megatron_muon.placement.program import Message
from megatron_muon.placement.shares import Share

Slot = tuple[int, int]
"""(first element, number of elements) in a message buffer."""


@dataclass(frozen=True, kw_only=True)
class HeldMatrix:
    """A matrix that this rank holds a share of.

    Attributes:
        index: Index into ``FactorPlan.matrices``.
        parameter: Index into ``FactorPlan.parameters``.
        range_start: First element of this rank's range in its shard; pieces count from the shard.
        owner: Rank that computes it.
        shape: Its factors.
        scheme: What travels.
        share: What this rank holds.
    """

    index: int
    parameter: int
    range_start: int
    owner: int
    shape: FactorShape
    scheme: Scheme
    share: Share


@dataclass(frozen=True, kw_only=True)
class OwnedMatrix:
    """A matrix that this rank computes.

    Attributes:
        index: Index into ``FactorPlan.matrices``.
        shape: Its factors.
        scheme: What travels.
        shares: What all ranks hold of it.
    """

    index: int
    shape: FactorShape
    scheme: Scheme
    shares: tuple[Share, ...]


@dataclass(frozen=True, kw_only=True)
class RoundProgram:
    """One message as one rank sees it.

    Attributes:
        message: Elements for and from every rank.
        sent: (matrix, partner) to the slot in the sent buffer.
        received: (matrix, partner) to the slot in the received buffer.
    """

    message: Message
    sent: Mapping[tuple[int, int], Slot]
    received: Mapping[tuple[int, int], Slot]


@dataclass(frozen=True, kw_only=True)
class FactorWave:
    """What one rank does in one wave.

    Attributes:
        held: Matrices that it holds a share of.
        owned: Matrices that it computes.
        rounds: The messages that the wave needs on any rank; the same keys on every rank.
    """

    held: tuple[HeldMatrix, ...]
    owned: tuple[OwnedMatrix, ...]
    rounds: Mapping[Round, RoundProgram]


def compile_factor_wave(plan: FactorPlan, wave: Iterable[int], rank: int) -> FactorWave:
    """Derive one rank's program from the plan.

    Both ends of a message derive the same order: by partner, then matrix.
    """
    wave = tuple(wave)
    number = {parameter.name: i for i, parameter in enumerate(plan.parameters)}
    dp_rank = rank // plan.group.tp
    held = []
    for index in wave:
        parameter = number[plan.matrices[index].parameter]
        held += [
            HeldMatrix(
                index=index,
                parameter=parameter,
                range_start=plan.parameters[parameter].ranges[dp_rank][0],
                owner=plan.owners[index],
                shape=plan.shapes[index],
                scheme=plan.schemes[index],
                share=share,
            )
            for share in plan.shares[index]
            if share.rank == rank
        ]
    owned = tuple(
        OwnedMatrix(
            index=index,
            shape=plan.shapes[index],
            scheme=plan.schemes[index],
            shares=plan.shares[index],
        )
        for index in wave
        if plan.owners[index] == rank
    )
    by_factors = any(plan.schemes[index] == "factors" for index in wave)
    rounds = {
        where: _round(plan, wave, rank, where)
        for where in Round
        if by_factors or where in (Round.SOURCE, Round.UPDATE)
    }
    return FactorWave(held=tuple(held), owned=owned, rounds=rounds)


def _round(plan: FactorPlan, wave: tuple[int, ...], rank: int, where: Round) -> RoundProgram:
    outgoing: list[tuple[int, int, int]] = []
    incoming: list[tuple[int, int, int]] = []
    for index in wave:
        owner = plan.owners[index]
        for share in plan.shares[index]:
            if rank not in (owner, share.rank):
                continue
            elements = message_elements(where, plan.schemes[index], plan.shapes[index], share)
            if not elements:
                continue
            source, target = (share.rank, owner) if where.to_owner else (owner, share.rank)
            if source == rank:
                outgoing.append((target, index, elements))
            if target == rank:
                incoming.append((source, index, elements))
    sent, sent_counts = _slots(outgoing, plan.group.size)
    received, received_counts = _slots(incoming, plan.group.size)
    return RoundProgram(
        message=Message(sent_counts=sent_counts, received_counts=received_counts),
        sent=sent,
        received=received,
    )


def _slots(
    entries: list[tuple[int, int, int]], size: int
) -> tuple[dict[tuple[int, int], Slot], tuple[int, ...]]:
    """Places of (partner, matrix, elements) in a buffer, and the elements of each partner."""
    counts = [0] * size
    slots: dict[tuple[int, int], Slot] = {}
    offset = 0
    for partner, index, elements in sorted(entries):
        slots[index, partner] = (offset, elements)
        counts[partner] += elements
        offset += elements
    return slots, tuple(counts)
