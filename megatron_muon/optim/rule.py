"""What every update rule offers, so that nothing else needs to know which one it is."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_muon.exchange import Exchange
from megatron_muon.placement import Plan


@dataclass(kw_only=True)
class MatrixRange:
    """This rank's flat range of one parameter.

    Attributes:
        master: Master weights, 1-D, updated in place.
        momentum: M, same shape, updated in place; of the rule's ``momentum_dtype``.
        grad: Gradient after clipping, same shape; read only.
        lr: η.
        weight_decay: λ.
    """

    master: torch.Tensor
    momentum: torch.Tensor
    grad: torch.Tensor
    lr: float
    weight_decay: float


MOST_CONVERTED = 1 << 23
"""Most elements of updates that are converted at once to the dtype of the weights."""

OwnedState = MutableMapping[str, torch.Tensor]
"""State that belongs to a matrix's owner, by the matrix's name."""


class MatrixRule(Protocol):
    """Hyper-parameters and formulas of one optimizer, the same for every matrix."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Element type of every message, by ``Round.kind``."""

    @property
    def momentum_dtype(self) -> torch.dtype:
        """Element type in which M is kept."""

    @property
    def description(self) -> str:
        """One line on the update, for the table at start."""

    def scale(self, m: int, n: int) -> float:
        """Factor of the orthonormal update of a whole m x n matrix."""

    def rank(self, m: int, n: int) -> int | None:
        """Rank of the update of a whole m x n matrix; None for full rank."""

    def first_state(self, plan: Plan, rank: int, device: torch.device) -> OwnedState:
        """The owner's state of every matrix that a rank owns, before the first step."""

    def step(
        self,
        ranges: Sequence[MatrixRange | None],
        exchange: Exchange,
        state: OwnedState,
    ) -> None:
        """One step of all matrices of a stage.

        Args:
            ranges: For each parameter of the plan this rank's range, None where it owns no element.
            exchange: The plan's exchange; entered also by a rank that owns nothing.
            state: What ``first_state`` gave; replaced in place.
        """


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def decay_weights(ranges: Sequence[MatrixRange]) -> None:
    """W ← (1 − η λ) W."""
    factors = [1.0 - r.lr * r.weight_decay for r in ranges]
    if all(r.master.element_size() >= 4 for r in ranges):
        torch._foreach_mul_([r.master for r in ranges], factors)
        return
    for r, factor in zip(ranges, factors, strict=True):
        # On lists torch rounds the factor to 16 bits first.
        r.master.mul_(factor)


def add_all(targets: Sequence[torch.Tensor], terms: Sequence[torch.Tensor], factor: float) -> None:
    """T ← T + factor · t for each pair, many at once where the device can.

    It cannot where dtypes differ; there small terms are converted first, some at a time.
    """
    group: list[tuple[torch.Tensor, torch.Tensor]] = []
    converted = 0
    for target, term in zip(targets, terms, strict=True):
        count = term.numel() if target.dtype != term.dtype else 0
        if count > MOST_CONVERTED:
            target.add_(term, alpha=factor)
            continue
        if converted + count > MOST_CONVERTED:
            _add_group(group, factor)
            group, converted = [], 0
        group.append((target, term))
        converted += count
    _add_group(group, factor)


def _add_group(group: Sequence[tuple[torch.Tensor, torch.Tensor]], factor: float) -> None:
    if group:
        targets, terms = (list(part) for part in zip(*group, strict=True))
        if any(t.dtype != x.dtype for t, x in group):
            converted = [
                torch.empty_like(t, memory_format=torch.contiguous_format) for t in targets
            ]
            torch._foreach_copy_(converted, terms)
            terms = converted
        torch._foreach_add_(targets, terms, alpha=factor)


def range_of(ranges: Sequence[MatrixRange | None], parameter: int) -> MatrixRange:
    """This rank's range of a parameter of which the plan gives it elements."""
    found = ranges[parameter]
    assert found is not None, "the plan gives this rank elements of a range it does not own"
    return found
