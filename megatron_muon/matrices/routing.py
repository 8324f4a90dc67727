"""Routes each parameter to an optimizer, with a reason."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_muon.matrices.rules import OptimizerChoice, Rule


@dataclass(frozen=True, kw_only=True)
class ParameterFacts:
    """Input of routing.

    Attributes:
        name: Name in the model, without wrapper prefixes.
        shape: Global shape; for stacked experts the shape of one expert's matrix.
        is_linear_weight: True for the weight of a linear layer.
        is_embedding_or_output: True for word or position embeddings and the output layer.
        is_router: True for a mixture-of-experts router.
        is_tied: True if another pipeline stage has a copy (tied embedding and output).
        is_adapter: True for a parameter of a low-rank adapter, see ``adapters``.
    """

    name: str
    shape: tuple[int, ...]
    is_linear_weight: bool
    is_embedding_or_output: bool
    is_router: bool
    is_tied: bool
    is_adapter: bool = False


@dataclass(frozen=True, kw_only=True)
class Route:
    """The optimizer of one parameter, and the reason for the start-up table."""

    optimizer: OptimizerChoice
    reason: str


def default_route(facts: ParameterFacts, *, min_dim: int) -> Route:
    """Return the route without a rule: weights of linear layers are matrices, all else is Adam's.

    A matrix with a side shorter than ``min_dim`` is assigned to Adam, as it is rather a set of
    vectors (a gate with one output).
    """
    ndim = len(facts.shape)
    if facts.is_adapter:
        return Route(optimizer="adam", reason="low-rank adapter")
    if facts.is_embedding_or_output:
        return Route(optimizer="adam", reason="embedding or output layer")
    if facts.is_tied:
        return Route(optimizer="adam", reason="tied weight")
    if facts.is_router:
        return Route(optimizer="adam", reason="router")
    if ndim == 1:
        return Route(optimizer="adam", reason="norm or bias")
    if ndim != 2:
        return Route(optimizer="adam", reason=f"{ndim}-D")
    if not facts.is_linear_weight:
        return Route(optimizer="adam", reason="not the weight of a linear layer")
    if min(facts.shape) < min_dim:
        return Route(optimizer="adam", reason=f"a side shorter than {min_dim}")
    return Route(optimizer="matrix", reason="linear weight")


def route(facts: ParameterFacts, rule: Rule, *, min_dim: int) -> Route:
    """Return the route of one parameter; the user's merged rule takes precedence.

    Raises:
        ValueError: A rule assigns a parameter that is not 2-D, or is tied across pipeline stages,
            to the matrix optimizer.
    """
    if rule.optimizer is None:
        return default_route(facts, min_dim=min_dim)
    if rule.optimizer == "matrix" and facts.is_tied:
        raise ValueError(
            f"a rule assigns {facts.name} to the matrix optimizer, but it is tied to a copy on "
            "another pipeline stage, and the copies would diverge; leave it to Adam, or untie the "
            "weights"
        )
    if rule.optimizer == "matrix" and len(facts.shape) != 2:
        raise ValueError(
            f"a rule assigns {facts.name} to the matrix optimizer, but it has {len(facts.shape)} "
            "dimensions; only 2-D parameters and stacks of experts are supported, narrow the "
            "rule's pattern"
        )
    return Route(optimizer=rule.optimizer, reason="rule")
