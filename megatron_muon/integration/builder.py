"""Builds the optimizer: routes parameters, calls Megatron's own factory with our classes in it."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey

from megatron_muon.config import MatrixConfig
from megatron_muon.exchange import check_agreement, gather_objects
from megatron_muon.integration.chained_optimizer import MatrixChainedOptimizer
from megatron_muon.integration.distributed_optimizer import (
    MatrixDistributedOptimizer,
    MatrixSetup,
)
from megatron_muon.integration.domains import Domain, domains, tensor_parallel_sizes
from megatron_muon.integration.hooks import SCHEDULE_HOOK, put_in
from megatron_muon.integration.model_parameters import model_parameters
from megatron_muon.integration.param_groups import group_overrides
from megatron_muon.integration.quantized import clear_first_values, quantized_weight_problems
from megatron_muon.integration.report import startup_report, summarize
from megatron_muon.integration.routes import RoutedParameter, route_all
from megatron_muon.integration.stage import make_rule, plan_stage
from megatron_muon.integration.support import (
    ConfigurationError,
    config_problems,
    model_problems,
    settings_of,
)
from megatron_muon.integration.versions import require_megatron
from megatron_muon.matrices import Rule, unmatched_rules

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
        matrix_config: Settings of the matrix optimizer; None for the defaults, with what the
            ``muon_…`` fields of ``config`` say.

    Returns:
        The optimizer, to be used as Megatron's.

    Raises:
        MegatronVersionError: Megatron is of another version.
        ConfigurationError: On every rank, with every problem found.
    """
    put_in((SCHEDULE_HOOK,), require_megatron(training=False))
    settings = settings_of(config, matrix_config)
    tp, expert_tp = tensor_parallel_sizes(pg_collection)
    found = model_parameters(model_chunks, tp=tp, expert_tp=expert_tp)
    routed, problems = route_all(found, settings)
    problems += config_problems(config, settings, model_chunks)
    problems += model_problems(model_chunks)
    problems += quantized_weight_problems(config, model_chunks, tp=tp)
    if not any(gather_objects(bool(found))):
        problems.append("no parameter of the model is trainable: there is nothing to optimize")
    _raise_on_every_rank(problems, settings.rules, [p.rule_name for p in found])
    _raise_on_every_rank(_unequal_settings(settings, config))
    with_experts = any(gather_objects(any(p.is_expert for p in found)))
    setups = _plan_together(
        settings,
        routed,
        model_chunks,
        domains(pg_collection, with_experts=with_experts),
        pg_collection,
        trains_in_bf16=config.bf16,
    )

    base = get_standard_config_overrides(config) if config_overrides is None else config_overrides
    with _our_classes(setups):
        optimizer = original_factory(
            config,
            model_chunks,
            config_overrides=group_overrides(config, settings, routed, base),
            use_gloo_process_groups=use_gloo_process_groups,
            pg_collection=pg_collection,
            dump_param_to_param_group_map=dump_param_to_param_group_map,
        )
    assert isinstance(optimizer, MatrixChainedOptimizer)
    clear_first_values(model_chunks)
    for group in optimizer.param_groups:
        # Megatron leaves this to its scheduler; a loop of one's own may have none.
        group["lr"] = group["max_lr"]
        decay = group.get("start_wd", config.weight_decay)
        group["weight_decay"] = decay * group.get("wd_mult", 1.0)
    _report(settings, routed, setups, model_chunks)
    return optimizer


def _unequal_settings(settings: MatrixConfig, config: OptimizerConfig) -> list[str]:
    """Settings that are not the same on all ranks: none of them would notice, all would diverge."""
    mine = {f"MatrixConfig.{f.name}": getattr(settings, f.name) for f in fields(settings)}
    for field in fields(config):
        if field.name not in ("timers", "config_logger_dir"):
            mine[f"OptimizerConfig.{field.name}"] = getattr(config, field.name)
    digests = gather_objects(hashlib.blake2b(pickle.dumps(mine), digest_size=16).digest())
    # Of equal bytes equal values: the values themselves, a kilobyte a rank, are rarely needed.
    if len(set(digests)) == 1:
        return []
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
    found: Sequence[Domain],
    pg_collection: Any,
    *,
    trains_in_bf16: bool,
) -> tuple[MatrixSetup, ...]:
    """Rule and plan of every domain of this stage, compared with those of the other ranks."""
    device = next(p.device for chunk in model_chunks for p in chunk.parameters())
    problems: list[str] = []
    plans = []
    try:
        rule, method = make_rule(settings, device, trains_in_bf16=trains_in_bf16)
        plans = [plan_stage(settings, method, routed, model_chunks, domain) for domain in found]
    except ValueError as error:
        problems.append(str(error))
    _raise_on_every_rank(problems)
    setups = []
    for domain, plan in zip(found, plans, strict=True):
        group = domain.make_exchange_group(pg_collection)
        check_agreement(
            digest=plan.digest,
            expected_rank=plan.group.rank(
                tp_rank=domain.tp_group.rank(), dp_rank=domain.dp_group.rank()
            ),
            group=group,
            device=device,
        )
        setups.append(
            MatrixSetup(
                domain=domain,
                rule=rule,
                plan=plan,
                names={r.parameter.tensor: r.parameter.name for r in routed},
                exchange_group=group,
                device=device,
            )
        )
    return tuple(setups)


def _report(
    settings: MatrixConfig,
    routed: Sequence[RoutedParameter],
    setups: Sequence[MatrixSetup],
    model_chunks: Sequence[Any],
) -> None:
    """Print what was decided, once for the whole model."""
    mine = [
        summarize(
            settings,
            setup.plan,
            setup.rule,
            [r for r in routed if setup.domain.has(r.parameter)],
            domain=setup.domain.name,
            buffers=[b for chunk in model_chunks for b in setup.domain.buffers(chunk)],
        )
        for setup in setups
        if setup.domain.is_first
    ]
    everyone = [summary for theirs in gather_objects(mine) for summary in theirs]
    if torch.distributed.get_rank() == 0:
        print(startup_report(settings, everyone), flush=True)


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


@contextmanager
def _our_classes(setups: Sequence[MatrixSetup]) -> Iterator[None]:
    """Let Megatron's factory build our subclasses, for the time of one call."""
    ours = {
        "DistributedOptimizer": type(
            "MatrixDistributedOptimizer",
            (MatrixDistributedOptimizer,),
            {"setups": {setup.domain.is_expert: setup for setup in setups}},
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
