"""Conventions of momenta among optimizers, and the factor that converts between them.

With gradients G and the factors β, β₁, μ of the optimizers:

* an average, M ← β M + (1 − β) G, of dmuon, megatron-core's muon (Emerging-Optimizers'
  ``momentum_buffer.lerp_(grad, 1 - momentum)``) and Adam's ``exp_avg``;
* a sum, S ← β S + G, of heavy-ball implementations: S = M / (1 − β);
* Orth-Dion's M after a step: of B = M + G it retains the fraction μ of the captured part. If a
  matrix is captured completely, B is the sum of factor μ, and M = μ S.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_muon.offline.common_state import CommonState
from megatron_muon.offline.errors import CheckpointError

Kind = Literal["average", "sum", "dion"]


@dataclass(frozen=True, kw_only=True)
class Convention:
    """The definition of a stored momentum.

    Attributes:
        kind: ``average``, ``sum`` or ``dion``.
        factor: β or μ, None if unknown.
        problem: The error if an unknown factor is required.
    """

    kind: Kind
    factor: float | None
    problem: str = ""

    @property
    def known(self) -> float:
        """The factor; an error if it is unknown."""
        if self.factor is None:
            raise CheckpointError(f"{self.problem}.")
        return self.factor


def conversion_factor(source: Convention, target: Convention) -> float | None:
    """Return the factor on a momentum; None if the source does not determine it (μ = 0)."""
    if source == target or (source.kind == target.kind != "sum"):
        return 1.0
    if source.kind == "dion" and source.known == 0.0:
        return None
    # An average is converted with the source's factor, so that it averages the same gradients.
    target_factor = source.known if target.kind == "average" else target.known
    return 1.0 / _of_sum(source.kind, source.known) * _of_sum(target.kind, target_factor)


def _of_sum(kind: Kind, factor: float) -> float:
    """Return the ratio of a momentum to the sum of gradients."""
    return {"average": 1.0 - factor, "sum": 1.0, "dion": factor}[kind]


def adam_convention(groups: Iterable[Mapping[str, Any]]) -> Convention:
    """Return the convention of ``exp_avg``, with β₁ of the groups."""
    for group in groups:
        if "betas" in group:
            betas = group["betas"]
            first = betas[0] if isinstance(betas, list | tuple) and betas else betas
            return Convention(kind="average", factor=factor_in_range(first, "Adam's first beta"))
    return Convention(kind="average", factor=None, problem="no parameter group of Adam has betas")


def matrix_convention(
    optimizer: str,
    common: CommonState,
    groups: Iterable[Mapping[str, Any]],
    heavy_ball: float | None,
) -> Convention:
    """Return the convention of ``momentum_buffer``; ``heavy_ball`` is β of a sum, by the user."""
    if heavy_ball is not None:
        return Convention(kind="sum", factor=factor_in_range(heavy_ball, "--heavy-ball"))
    kind: Kind = "dion" if optimizer == "orth_dion" else "average"
    for group in groups:
        if kind == "average" and "momentum" in group:
            return Convention(kind=kind, factor=factor_in_range(group["momentum"], "momentum"))
    name = "orth_dion_momentum" if kind == "dion" else "muon_momentum"
    saved = common.argument(name)
    if saved is None:
        problem = f"the checkpoint does not say {common.missing(name, 'optimizer')}"
        return Convention(kind=kind, factor=None, problem=problem)
    return Convention(kind=kind, factor=factor_in_range(saved, name))


def factor_in_range(value: Any, name: str) -> float:
    """Return a valid momentum factor; refuse any other value."""
    try:
        factor = float(value)
    except (TypeError, ValueError):
        factor = -1.0
    if not 0.0 <= factor < 1.0:
        raise CheckpointError(f"{name} is {value!r}; a momentum factor must be in [0, 1).")
    return factor
