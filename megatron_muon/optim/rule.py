"""What every update rule offers, so that nothing else needs to know which one it is."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_muon.exchange import Exchange
from megatron_muon.linalg import Workspace
from megatron_muon.placement import Plan


@dataclass(kw_only=True)
class MatrixRange:
    """This rank's flat range of one parameter.

    Attributes:
        master: Master weights, 1-D, updated in place.
        momentum: M, same shape, updated in place.
        grad: Gradient after clipping, same shape; read only.
        lr: η.
        weight_decay: λ.
    """

    master: torch.Tensor
    momentum: torch.Tensor
    grad: torch.Tensor
    lr: float
    weight_decay: float


OwnedState = MutableMapping[str, torch.Tensor]
"""State that belongs to a matrix's owner, by the matrix's name."""


class MatrixRule(Protocol):
    """Hyper-parameters and formulas of one optimizer, the same for every matrix."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Element type of every message, by ``Round.kind``."""

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
        workspace: Workspace,
    ) -> None:
        """One step of all matrices of a stage.

        Args:
            ranges: For each parameter of the plan this rank's range, None where it owns no element.
            exchange: The plan's exchange; entered also by a rank that owns nothing.
            state: What ``first_state`` gave; replaced in place.
            workspace: Memory of the computation, kept from step to step.
        """


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def range_of(ranges: Sequence[MatrixRange | None], parameter: int) -> MatrixRange:
    """This rank's range of a parameter of which the plan gives it elements."""
    found = ranges[parameter]
    assert found is not None, "the plan gives this rank elements of a range it does not own"
    return found
