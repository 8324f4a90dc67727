"""Which parameters the target of a conversion trains as matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_muon.matrices import Route, merged_rule, route, unmatched_rules
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.parameters import StoredParameter
from megatron_muon.offline.settings import ConvertSettings


def target_routes(
    parameters: Sequence[StoredParameter], settings: ConvertSettings
) -> dict[str, bool]:
    """Whether a parameter is a matrix, by name; decided by the rules of training.

    Args:
        parameters: All that have state.
        settings: The target and the user's rules.

    Raises:
        CheckpointError: A rule that matches nothing or cannot be, or nothing is a matrix.
    """
    names = [parameter.name for parameter in parameters]
    unmatched = unmatched_rules(settings.matrix.rules, names)
    if unmatched:
        example = next((name for name in names if "linear" in name), names[0])
        raise CheckpointError(
            f"rule '{unmatched[0]}' (--matrix-rule or --matrix-rules) matches no trainable "
            f"parameter; names look like '{example}'."
        )
    if settings.to == "adam":
        return dict.fromkeys(names, False)
    if settings.to == "muon":
        upstreams = {parameter.name: _is_upstreams(parameter) for parameter in parameters}
        if not any(upstreams.values()):
            raise CheckpointError(
                "no parameter has two dimensions and goes to megatron-core's muon."
            )
        return upstreams
    routes = {parameter.name: _route(parameter, settings) for parameter in parameters}
    found = {name: chosen.optimizer == "matrix" for name, chosen in routes.items()}
    if not any(found.values()):
        reasons = Counter(chosen.reason for chosen in routes.values()).most_common()
        raise CheckpointError(
            f"no parameter is a matrix by the rules, so there is nothing for {settings.to} to "
            f"train: {', '.join(f'{count} {reason}' for reason, count in reasons)} "
            f"(--matrix-min-dim is {settings.matrix.min_dim})."
        )
    return found


def _route(parameter: StoredParameter, settings: ConvertSettings) -> Route:
    rule = merged_rule(settings.matrix.rules, parameter.name)
    try:
        return route(parameter.facts, rule, min_dim=settings.matrix.min_dim)
    except ValueError as error:
        raise CheckpointError(f"{error}.") from error


def _is_upstreams(parameter: StoredParameter) -> bool:
    """megatron-core's ``_is_nonlinear_or_embedding``: routers and position embeddings are its."""
    pieces = parameter.name.split(".")
    is_flagged = "word_embeddings" in pieces or "output_layer" in pieces
    return len(parameter.facts.shape) == 2 and not is_flagged
