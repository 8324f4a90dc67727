"""Which optimizer every parameter of the model goes to, and what it is cut into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_muon.config import MatrixConfig
from megatron_muon.integration.model_parameters import ModelParameter
from megatron_muon.matrices import Route, Rule, SplitMode, merged_rule, route


@dataclass(frozen=True, kw_only=True)
class RoutedParameter:
    """A parameter and all that was decided of it.

    Attributes:
        parameter: The parameter.
        route: The optimizer that it goes to, and why.
        rule: The user's wishes for it.
        split: What its packed rows are cut into.
    """

    parameter: ModelParameter
    route: Route
    rule: Rule
    split: SplitMode

    @property
    def is_matrix(self) -> bool:
        """True when the matrix optimizer trains it."""
        return self.route.optimizer == "matrix"


def route_all(
    found: Sequence[ModelParameter], settings: MatrixConfig
) -> tuple[list[RoutedParameter], list[str]]:
    """Every parameter's route, and what is wrong with the user's rules."""
    routed, problems = [], []
    for parameter in found:
        rule = merged_rule(settings.rules, parameter.rule_name)
        try:
            chosen = route(parameter.facts, rule, min_dim=settings.min_dim)
        except ValueError as error:
            problems.append(str(error))
            continue
        split = settings.split_of(parameter.family, parameter.packing, rule)
        routed.append(RoutedParameter(parameter=parameter, route=chosen, rule=rule, split=split))
    return routed, problems
