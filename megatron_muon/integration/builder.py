"""Builds the optimizer: routes parameters, calls Megatron's own factory with our classes in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import (
    combine_param_group_overrides,
    param_group_override_to_tuple,
)

from megatron_muon.config import MatrixConfig
from megatron_muon.exchange import check_agreement, gather_objects
from megatron_muon.integration.combined_optimizer import MATRIX_GROUP_KEY
from megatron_muon.integration.distributed_optimizer import (
    MatrixChainedOptimizer,
    MatrixDistributedOptimizer,
    MatrixSetup,
)
from megatron_muon.integration.model_parameters import ModelParameter, model_parameters
from megatron_muon.integration.report import RoutedParameter, startup_report
from megatron_muon.integration.stage import make_rule, plan_stage
from megatron_muon.integration.support import ConfigurationError, config_problems
from megatron_muon.matrices import RowPacking, Rule, merged_rule, route, unmatched_rules

original_factory = megatron_optimizer.get_megatron_optimizer
"""Megatron's factory, bound before ``hooks`` replaces it."""


def get_matrix_optimizer(
    config: OptimizerConfig,
    model_chunks: list[Any],
    config_overrides: Mapping[ParamKey, Any] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
    *,
    matrix_config: MatrixConfig | None = None,
) -> MatrixChainedOptimizer:
    """``get_megatron_optimizer`` with matrices; same calling convention, one argument more.

    Args:
        config: Megatron's configuration, ``optimizer="adam"`` and
            ``use_distributed_optimizer=True``.
        model_chunks: Chunks wrapped in ``DistributedDataParallel`` with
            ``use_distributed_optimizer=True``.
        config_overrides: As in Megatron; None for its standard ones.
        use_gloo_process_groups: As in Megatron.
        pg_collection: As in Megatron; None for the groups of ``parallel_state``.
        dump_param_to_param_group_map: As in Megatron.
        matrix_config: Settings of the matrix optimizer; None for the defaults.

    Returns:
        The optimizer, to be used as Megatron's.

    Raises:
        ConfigurationError: On every rank, with every problem found.
    """
    settings = matrix_config or MatrixConfig()
    tp_group, exchange_group = _groups(pg_collection)
    found = model_parameters(model_chunks, tp=tp_group.size())
    routed, problems = _route_all(found, settings)
    problems += config_problems(config, settings, model_chunks, found)
    _raise_on_every_rank(problems, settings.rules, [p.rule_name for p in found])
    _raise_on_every_rank(_unequal_settings(settings, config))
    setup = _plan_together(settings, routed, model_chunks, tp_group, exchange_group)

    base = get_standard_config_overrides(config) if config_overrides is None else config_overrides
    with _our_classes(setup):
        optimizer = original_factory(
            config,
            model_chunks,
            config_overrides=_group_overrides(config, settings, routed, base),
            use_gloo_process_groups=use_gloo_process_groups,
            pg_collection=pg_collection,
            dump_param_to_param_group_map=dump_param_to_param_group_map,
        )
    assert isinstance(optimizer, MatrixChainedOptimizer)
    for group in optimizer.param_groups:
        # Megatron leaves this to its scheduler; a loop of one's own may have none.
        group["lr"] = group["max_lr"]
        decay = group.get("start_wd", config.weight_decay)
        group["weight_decay"] = decay * group.get("wd_mult", 1.0)
    if torch.distributed.get_rank() == 0:
        print(startup_report(settings, routed, optimizer), flush=True)
    return optimizer


def _groups(pg_collection: Any) -> tuple[Any, Any]:
    """The TP group, and the TP x DP x CP group of this pipeline stage."""
    if pg_collection is None:
        return (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        )
    missing = [name for name in ("tp", "tp_dp_cp") if getattr(pg_collection, name, None) is None]
    if missing:
        absent = " and ".join(missing)
        raise ConfigurationError(
            [f"pg_collection lacks {absent} (TP x DP x CP): give it or pass pg_collection=None"]
        )
    return pg_collection.tp, pg_collection.tp_dp_cp


def _unequal_settings(settings: MatrixConfig, config: OptimizerConfig) -> list[str]:
    """Settings that are not the same on all ranks: none of them would notice, all would diverge."""
    mine = {f"MatrixConfig.{f.name}": getattr(settings, f.name) for f in fields(settings)}
    for name in ("lr", "min_lr", "weight_decay", "clip_grad"):
        mine[f"OptimizerConfig.{name}"] = getattr(config, name)
    first, *others = gather_objects(mine)
    return [
        f"rank {rank} has {name}={theirs[name]!r}, rank 0 has {first[name]!r}: start all alike"
        for rank, theirs in enumerate(others, start=1)
        for name in first
        if theirs[name] != first[name]
    ]


def _plan_together(
    settings: MatrixConfig,
    routed: Sequence[RoutedParameter],
    model_chunks: Sequence[Any],
    tp_group: Any,
    exchange_group: Any,
) -> MatrixSetup:
    """Rule and plan of this stage, compared with those of the other ranks."""
    device = next(p.device for chunk in model_chunks for p in chunk.parameters())
    matrices = [(r.parameter, r.split) for r in routed if r.route.optimizer == "matrix"]
    problems = []
    try:
        rule = make_rule(settings, device)
        plan = plan_stage(settings, rule, matrices, model_chunks, tp=tp_group.size())
    except ValueError as error:
        problems.append(str(error))
    _raise_on_every_rank(problems)
    dp_rank = next(
        (b.data_parallel_group.rank() for chunk in model_chunks for b in chunk.buffers),
        exchange_group.rank() // tp_group.size(),
    )
    check_agreement(
        digest=plan.digest,
        expected_rank=plan.group.rank(tp_rank=tp_group.rank(), dp_rank=dp_rank),
        group=exchange_group,
        device=device,
    )
    return MatrixSetup(
        rule=rule,
        plan=plan,
        names={r.parameter.tensor: r.parameter.name for r in routed},
        exchange_group=exchange_group,
        device=device,
    )


def _route_all(
    found: Sequence[ModelParameter], settings: MatrixConfig
) -> tuple[list[RoutedParameter], list[str]]:
    """Every parameter's route, and what is wrong with the user's rules."""
    routed, problems = [], []
    for parameter in found:
        rule = merged_rule(settings.rules, parameter.rule_name)
        try:
            chosen = route(parameter.facts, rule)
        except ValueError as error:
            problems.append(str(error))
            continue
        default_split = {
            RowPacking.QKV: settings.split_qkv,
            RowPacking.GATE_UP: settings.split_gate_up,
            RowPacking.WHOLE: False,
        }[parameter.packing]
        split = default_split if rule.split is None else rule.split == "default"
        routed.append(RoutedParameter(parameter=parameter, route=chosen, rule=rule, split=split))
    return routed, problems


def _raise_on_every_rank(
    problems: Sequence[str], rules: Sequence[Rule] = (), names: Sequence[str] = ()
) -> None:
    """Raise the problems of all ranks on all ranks, so that none is left waiting.

    A rule may match on one pipeline stage only; it is wrong when it matches on no rank at all.
    """
    everyone = gather_objects((list(problems), set(unmatched_rules(rules, names))))
    unmatched = set.intersection(*(theirs for _, theirs in everyone))
    merged = list(dict.fromkeys(problem for theirs, _ in everyone for problem in theirs))
    example = next((n for n in names if "linear" in n), "decoder.layers.0.mlp.linear_fc1.weight")
    merged += [
        f"rule '{pattern}' (--matrix-rule or --matrix-rules) matches no trainable parameter; names "
        f"look like '{example}', correct the pattern or remove the rule"
        for pattern in sorted(unmatched)
    ]
    if merged:
        raise ConfigurationError(merged)


def _group_overrides(
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
    is_matrix = entry.route.optimizer == "matrix"
    max_lr = standard.get("max_lr", config.lr)
    min_lr = standard.get("min_lr", config.min_lr)
    if is_matrix:
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


@contextmanager
def _our_classes(setup: MatrixSetup) -> Iterator[None]:
    """Let Megatron's factory build our subclasses, for the time of one call."""
    ours = {
        "DistributedOptimizer": type(
            "MatrixDistributedOptimizer", (MatrixDistributedOptimizer,), {"setup": setup}
        ),
        "ChainedOptimizer": MatrixChainedOptimizer,
    }
    theirs = {name: getattr(megatron_optimizer, name) for name in ours}
    for name, value in ours.items():
        setattr(megatron_optimizer, name, value)
    try:
        yield
    finally:
        for name, value in theirs.items():
            setattr(megatron_optimizer, name, value)
