"""Parameter groups and arguments of the common state, rewritten for another optimizer."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_muon.config import OPTIMIZERS
from megatron_muon.offline.common_state import CommonState
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.source_state import GROUP_KEY

_OURS = (GROUP_KEY, "optimizer")


def adam_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups that Adam trains, each once, as a run of Adam alone has them."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        if "betas" not in group or group.get(GROUP_KEY):
            continue
        plain = {key: value for key, value in group.items() if key not in _OURS and key != "params"}
        plain.setdefault("bias_correction", True)  # torch's Adam does so without being asked
        found.setdefault(repr(sorted(plain.items())), plain)
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class TargetGroups:
    """What becomes of the groups.

    Attributes:
        optimizer: ``adam``, ``dmuon``, ``orth_dion`` or ``muon``.
        has_matrices: Whether any dense parameter, and whether any expert, is a matrix.
        step: Number of steps.
        momentum: β of megatron-core's muon, which its groups carry.
        has_masters: Whether masters are stored beside the weights.
        step_in_state: Whether megatron-core's muon has Adam's step count beside its state.
    """

    optimizer: str
    has_matrices: bool
    step: int
    momentum: float
    has_masters: bool
    step_in_state: bool


def optimizer_state(
    source: Sequence[dict[str, Any]], target: TargetGroups, grad_scaler: dict[str, Any] | None
) -> dict[str, Any] | dict[int, Any]:
    """The entry ``optimizer`` of the common state.

    Args:
        source: Groups of the source.
        target: What they are to become.
        grad_scaler: State of the gradient scaler.

    Raises:
        CheckpointError: The source has no group that Adam trains, so its settings are unknown.
    """
    base = adam_groups(source)
    if not base:
        raise CheckpointError(
            "the checkpoint's common state has no parameter group of Adam, which the target's "
            "groups are made from."
        )
    for group in base:
        group["step"] = target.step
    scaler = {} if grad_scaler is None else {"grad_scaler": grad_scaler}
    if target.optimizer == "muon":
        # Without masters megatron-core has torch's optimizer, and nothing around it.
        states = _upstream_states(base, source, target)
        return {
            number: {"optimizer": state, **scaler} if target.has_masters else state
            for number, state in enumerate(states)
        }
    sharding = {"param_state_sharding_type": "fully_reshardable"}
    if target.optimizer in OPTIMIZERS:
        groups = base + _matrix_groups(base, source, target)
        return {
            "optimizer": {"param_groups": groups},
            **scaler,
            "param_state": {"right_factor": {}},
            **sharding,
        }
    # Megatron chains an optimizer of dense parameters and one of experts.
    chains = [
        [group for group in base if bool(group.get("is_expert_parallel")) is is_expert]
        for is_expert in (False, True)
    ]
    states = [
        {"optimizer": {"param_groups": chain}, **scaler, **sharding} for chain in chains if chain
    ]
    return states[0] if len(states) == 1 else dict(enumerate(states))


def _matrix_groups(
    base: Sequence[dict[str, Any]], source: Sequence[dict[str, Any]], target: TargetGroups
) -> list[dict[str, Any]]:
    """Groups of matrices: those of the source, or else Adam's with weight decay."""
    if not target.has_matrices:
        return []
    named = {GROUP_KEY: target.optimizer, "optimizer": target.optimizer, "step": target.step}
    plain = [
        {key: value for key, value in group.items() if key != "params"}
        for group in source
        if group.get(GROUP_KEY)
    ]
    if not plain:
        plain = [group for group in base if group.get("wd_mult", 1.0) != 0.0] or list(base)
    found = {repr(sorted({**group, **named}.items())): {**group, **named} for group in plain}
    return list(found.values())


def _upstream_states(
    base: Sequence[dict[str, Any]], source: Sequence[dict[str, Any]], target: TargetGroups
) -> list[dict[str, Any]]:
    """The states of megatron-core's muon and of the Adam that it chains to it."""
    if any(group.get("is_expert_parallel") for group in base):
        raise CheckpointError(
            "megatron-core's muon chains further optimizers for experts of expert parallelism, "
            "which is not supported: save at --expert-model-parallel-size 1 and convert that."
        )
    ours = [group for group in source if group.get(GROUP_KEY)]
    plain = ours or [group for group in base if group.get("wd_mult", 1.0) != 0.0]
    left_out = {*_OURS, "params", "step", "betas", "eps", "bias_correction"}
    matrices = [
        {k: v for k, v in group.items() if k not in left_out} | {"momentum": target.momentum}
        for group in plain
    ]
    adam: dict[str, Any] = {"param_groups": [{**group, "optimizer": "adam"} for group in base]}
    if target.step_in_state:
        adam["state"] = {"common_step": torch.tensor(float(target.step))}
        for group in adam["param_groups"]:
            del group["step"]
    return [{"param_groups": matrices}, adam]


def arguments(
    common: CommonState, optimizer: str, settings: Mapping[str, Any], *, has_masters: bool
) -> argparse.Namespace | None:
    """The saved arguments as a run of the target has them; None where none were saved.

    Args:
        common: Common state of the source.
        optimizer: The target.
        settings: Flags of ours that the conversion was told.
        has_masters: As in ``TargetGroups``.
    """
    saved = common.value.get("args")
    if saved is None:
        return None
    args = argparse.Namespace(**vars(saved))
    is_ours = optimizer in OPTIMIZERS
    is_muon = optimizer == "muon"
    args.optimizer = "muon" if is_muon else "adam"  # what ours shows to Megatron, too
    args.use_distributed_optimizer = not is_muon
    args.dist_ckpt_optim_fully_reshardable = not is_muon
    args.matrix_optimizer = optimizer if is_ours else None
    if hasattr(args, "use_layer_wise_distributed_optimizer"):
        args.use_layer_wise_distributed_optimizer = is_muon and has_masters
    if is_ours:
        for name, value in settings.items():
            setattr(args, name, value)
    return args


def content_metadata(common: CommonState, optimizer: str, *, has_masters: bool) -> dict[str, Any]:
    """The entry ``content_metadata``: how the optimizer's state is sharded."""
    found = dict(common.value.get("content_metadata") or {})
    for name in ("distrib_optim_sharding_type", "distrib_optim_fully_reshardable_mem_efficient"):
        found.pop(name, None)
    found.setdefault("singleton_local_shards", False)
    found["chained_optim_avoid_prefix"] = True
    if optimizer != "muon":
        found["distrib_optim_sharding_type"] = "fully_reshardable"
        found["distrib_optim_fully_reshardable_mem_efficient"] = False
    elif has_masters:
        # Only then does megatron-core look for state under the prefixes of its chain.
        found["distrib_optim_sharding_type"] = "dp_reshardable"
    return found
