"""Which optimizer every parameter of the model goes to, and what it is cut into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_muon.config import MatrixConfig
from megatron_muon.integration.model_parameters import ModelParameter
from megatron_muon.matrices import Route, RowPacking, Rule, SplitMode, merged_rule, route


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
        split = split_mode(parameter, rule, settings)
        routed.append(RoutedParameter(parameter=parameter, route=chosen, rule=rule, split=split))
    return routed, problems


def split_mode(parameter: ModelParameter, rule: Rule, settings: MatrixConfig) -> SplitMode:
    """What the rows of a parameter are cut into; the user's rule comes first."""
    if parameter.packing.rows is RowPacking.WHOLE:
        return "none"
    if rule.split is not None and rule.split != "default":
        return rule.split
    wanted = {
        "qkv": settings.split_qkv,
        "gate_up": settings.split_gate_up,
        "mla": settings.split_mla,
        "ssm": settings.split_ssm,
        "": False,
    }[parameter.family]
    if not wanted:
        return "none"
    by_heads = settings.split_heads and parameter.packing.rows is RowPacking.UNITS
    return "heads" if by_heads else "parts"
