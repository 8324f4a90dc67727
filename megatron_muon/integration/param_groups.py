"""Param groups: Megatron's overrides with the matrices' and the user's on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import (
    combine_param_group_overrides,
    param_group_override_to_tuple,
)

from megatron_muon.config import MatrixConfig
from megatron_muon.integration.combined_optimizer import MATRIX_GROUP_KEY
from megatron_muon.integration.routes import RoutedParameter


def group_overrides(
    config: OptimizerConfig,
    settings: MatrixConfig,
    routed: Sequence[RoutedParameter],
    base: Mapping[ParamKey, Any],
) -> dict[ParamKey, Any]:
    """Megatron's overrides with ours on top, one key per distinct result.

    Merged here and not by Megatron, which refuses two overrides of one field: the user's rule
    comes first.
    """
    members: dict[Any, set[int]] = {}
    values: dict[Any, dict[str, Any]] = {}
    for entry in routed:
        tensor, name = entry.parameter.tensor, entry.parameter.name
        override = dict(
            combine_param_group_overrides(
                [value for key, value in base.items() if key.matches(tensor, name)]
            )
        )
        override |= _our_override(config, settings, entry, override)
        if not override:
            continue
        identity = param_group_override_to_tuple(override)
        members.setdefault(identity, set()).add(id(tensor))
        values[identity] = override
    return {
        ParamKey(with_name_predicate=_among(members[identity], number)): values[identity]
        for number, identity in enumerate(sorted(members, key=repr))
    }


def _our_override(
    config: OptimizerConfig,
    settings: MatrixConfig,
    entry: RoutedParameter,
    standard: Mapping[str, Any],
) -> dict[str, Any]:
    override: dict[str, Any] = {}
    max_lr = standard.get("max_lr", config.lr)
    min_lr = standard.get("min_lr", config.min_lr)
    if entry.is_matrix:
        override[MATRIX_GROUP_KEY] = settings.optimizer
        if settings.lr is not None:
            override["max_lr"] = max_lr = settings.lr
        if settings.min_lr is not None:
            override["min_lr"] = min_lr = settings.min_lr
        if settings.weight_decay is not None:
            override["start_wd"] = override["end_wd"] = settings.weight_decay
    if entry.rule.lr_mult is not None:
        override["max_lr"] = max_lr * entry.rule.lr_mult
        override["min_lr"] = (min_lr or 0.0) * entry.rule.lr_mult
    if entry.rule.wd_mult is not None:
        override["wd_mult"] = entry.rule.wd_mult
    return override


def _among(identities: set[int], number: int) -> ParamWithNamePredicate:
    return ParamWithNamePredicate(
        name=f"megatron_muon_{number}", fn=lambda parameter, name: id(parameter) in identities
    )
