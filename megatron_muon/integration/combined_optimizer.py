"""The inner optimizer that Megatron's DistributedOptimizer steps: Adam and the matrix rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_muon.checkpoint.names import MOMENTUM

MATRIX_GROUP_KEY = "matrix_optimizer"
"""Key of a param group whose parameters are matrices; its value is the optimizer's name."""


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps the scalar groups with the Adam that Megatron built, then the matrix groups.

    Both share this object's ``param_groups`` and ``state``, so Megatron's scheduler, checkpointing
    and logging see one optimizer. Matrices have a momentum and no second moment. ``step`` is kept
    as an int in every group on every rank, also where a rank holds no scalar parameter: the copy
    of data-parallel rank 0 is the one that a checkpoint stores.

    Args:
        scalar: Adam over all groups, as Megatron built it; it is left with the scalar groups.
        initialize_scalar: Megatron's function that allocates Adam's state.
        momentum_dtype: Element type of the momenta.
    """

    def __init__(
        self,
        scalar: torch.optim.Optimizer,
        initialize_scalar: Callable[..., None],
        momentum_dtype: torch.dtype,
    ) -> None:
        self.scalar = scalar
        self._momentum_dtype = momentum_dtype
        self._initialize_scalar = initialize_scalar
        self._step_matrices: Callable[[], None] | None = None
        super().__init__(scalar.param_groups, dict(scalar.defaults))

    def attach_matrices(self, step: Callable[[], None]) -> None:
        """Set what steps the matrix groups; known once the master shards exist."""
        self._step_matrices = step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of all groups.

        Args:
            closure: Not supported; Megatron never passes one.
        """
        assert closure is None, "closures are not supported"
        step = max((int(group.get("step", 0)) for group in self.param_groups), default=0) + 1
        self._share_with_scalar()
        if any(group["params"] for group in self.scalar.param_groups):
            self.scalar.step()
        if self._step_matrices is not None:
            self._step_matrices()
        for group in self.param_groups:
            group["step"] = step

    def initialize_state(self, config: Any) -> None:
        """Allocate all state that does not exist yet, zeros, on every parameter of this rank."""
        self._share_with_scalar()
        self._initialize_scalar(self.scalar, config)
        for group in self.param_groups:
            if MATRIX_GROUP_KEY in group:
                for parameter in group["params"]:
                    if MOMENTUM not in self.state[parameter]:
                        self.state[parameter][MOMENTUM] = torch.zeros_like(
                            parameter.data, dtype=self._momentum_dtype
                        )
        self._set_scalar_steps()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state as ``torch.optim.Optimizer`` does, then put right what it changes.

        That is ``step``, and momenta, which it casts to the element type of the parameter.
        """
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if MOMENTUM in state:
                state[MOMENTUM] = state[MOMENTUM].to(self._momentum_dtype)
        self._share_with_scalar()
        self._set_scalar_steps()

    def _share_with_scalar(self) -> None:
        self.scalar.state = self.state
        self.scalar.param_groups = [g for g in self.param_groups if MATRIX_GROUP_KEY not in g]

    def _set_scalar_steps(self) -> None:
        """Put the count where Adam looks: torch's in each state, Apex's and TE's in the group."""
        uses_tensors = isinstance(self.scalar, torch.optim.Adam)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter)
                if not state:
                    continue
                if uses_tensors and MATRIX_GROUP_KEY not in group:
                    state["step"] = torch.tensor(float(group.get("step", 0)))
                else:
                    state.pop("step", None)
