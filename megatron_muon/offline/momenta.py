"""The conventions in which optimizers keep a momentum, and the factor from one to another.

With gradients G and the factors β, β₁, μ of the optimizers:

* an average, M ← β M + (1 − β) G, of dmuon, megatron-core's muon (Emerging-Optimizers'
  ``momentum_buffer.lerp_(grad, 1 - momentum)``) and Adam's ``exp_avg``;
* a sum, S ← β S + G, of heavy-ball implementations: S = M / (1 − β);
* Orth-Dion's M after a step: of B = M + G it has kept μ of what was captured. Of a matrix that is
  captured whole, B is the sum of factor μ, and M = μ S.
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
    """The form in which a momentum is kept.

    Attributes:
        kind: ``average``, ``sum`` or ``dion``.
        factor: β or μ, None where the checkpoint does not say it.
        unsaid: Beginning of the sentence to say then.
    """

    kind: Kind
    factor: float | None
    unsaid: str = ""

    @property
    def known(self) -> float:
        """The factor, where it is needed."""
        if self.factor is None:
            raise CheckpointError(f"{self.unsaid}.")
        return self.factor


def conversion_factor(source: Convention, target: Convention) -> float | None:
    """Factor on a momentum; None where the source keeps nothing of what was captured (μ = 0)."""
    if source == target or (source.kind == target.kind != "sum"):
        return 1.0
    kept = source.known
    if source.kind == "dion" and kept == 0.0:
        return None
    as_sum = {"average": 1.0 - kept, "sum": 1.0, "dion": kept}[source.kind]
    # Of the sum: an average takes its own source's factor, so that it is the source's average.
    factor = kept if target.kind == "average" else target.known
    return 1.0 / as_sum * {"average": 1.0 - factor, "sum": 1.0, "dion": factor}[target.kind]


def adam_convention(groups: Iterable[Mapping[str, Any]]) -> Convention:
    """That of ``exp_avg``, with β₁ of the groups."""
    for group in groups:
        if "betas" in group:
            betas = group["betas"]
            first = betas[0] if isinstance(betas, list | tuple) and betas else betas
            return Convention(kind="average", factor=factor_in_range(first, "Adam's first beta"))
    return Convention(
        kind="average", factor=None, unsaid="no parameter group of Adam says its betas"
    )


def matrix_convention(
    optimizer: str,
    common: CommonState,
    groups: Iterable[Mapping[str, Any]],
    heavy_ball: float | None,
) -> Convention:
    """That of a source's ``momentum_buffer``.

    Args:
        optimizer: Which optimizer wrote it.
        common: Its common state, which has the factor among its arguments.
        groups: Its parameter groups; megatron-core's muon says the factor there.
        heavy_ball: β when the user says that it is a sum.
    """
    if heavy_ball is not None:
        return Convention(kind="sum", factor=factor_in_range(heavy_ball, "--heavy-ball"))
    kind: Kind = "dion" if optimizer == "orth_dion" else "average"
    for group in groups:
        if kind == "average" and "momentum" in group:
            return Convention(kind=kind, factor=factor_in_range(group["momentum"], "momentum"))
    name = "orth_dion_momentum" if kind == "dion" else "muon_momentum"
    saved = common.argument(name)
    if saved is None:
        unsaid = f"the checkpoint does not say {common.unsaid(name, 'optimizer')}"
        return Convention(kind=kind, factor=None, unsaid=unsaid)
    return Convention(kind=kind, factor=factor_in_range(saved, name))


def factor_in_range(value: Any, name: str) -> float:
    """A momentum's factor."""
    try:
        factor = float(value)
    except (TypeError, ValueError):
        factor = -1.0
    if not 0.0 <= factor < 1.0:
        raise CheckpointError(f"{name} is {value!r}; a momentum's factor is in [0, 1).")
    return factor
