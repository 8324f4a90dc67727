"""What all matrices of a step of Orth-Dion share: right factors, flags that the host reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_muon.exchange import copy_all
from megatron_muon.optim.rule import OwnedState
from megatron_muon.placement import Plan


class RightFactors:
    """V (short side x r) of every matrix that a rank owns.

    Args:
        plan: The plan.
        state: V by the name of the matrix, replaced in place.
        dtype: In which V is computed.
    """

    def __init__(self, plan: Plan, state: OwnedState, dtype: torch.dtype) -> None:
        self._state = {
            index: state[matrix.name]
            for index, matrix in enumerate(plan.matrices)
            if matrix.name in state
        }
        self._dtype = dtype

    def stacked(self, matrices: Sequence[int]) -> torch.Tensor:
        """Those of some matrices of one shape (B, short, r)."""
        return torch.stack([self._state[index] for index in matrices]).to(self._dtype)

    def keep(self, matrices: Sequence[int], values: torch.Tensor) -> None:
        """Replace those of some matrices."""
        copy_all([self._state[index] for index in matrices], list(values))


class Flags:
    """Whether any matrix has dependent columns: what the host reads in a step.

    Attributes:
        late: Flags (B,) that wait until others are read.
    """

    def __init__(self) -> None:
        self.late: list[torch.Tensor] = []
        self._late_is_set = False

    def read(self, flags: Sequence[torch.Tensor]) -> bool:
        """Whether any of them is set, or any that waits; the host waits once."""
        together = [*flags, *self.late]
        found = bool(torch.cat(together).any()) if together else False
        if self.late:
            self._late_is_set, self.late = found, []
        return found

    def read_late(self) -> bool:
        """Whether any that waited is set, as far as is known: one read with them counts as well."""
        if self.late:
            self.read(())
        return self._late_is_set
