"""Parameter groups and arguments of the common state, rewritten for another optimizer."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_muon.config import OPTIMIZERS
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.source_state import GROUP_KEY, SourceState

_OURS = (GROUP_KEY, "optimizer")

Group = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The optimizer of a converted checkpoint.

    Attributes:
        optimizer: ``adam``, ``dmuon``, ``orth_dion`` or ``muon``.
        source: The state that is converted.
        has_matrices: True if any parameter is a matrix.
        step: Number of steps.
        momentum: β of megatron-core's muon, stored in its groups.
        has_masters: True if masters are stored besides the weights.
    """

    optimizer: str
    source: SourceState
    has_matrices: bool
    step: int
    momentum: float
    has_masters: bool

    @property
    def is_muon(self) -> bool:
        """True for megatron-core's muon."""
        return self.optimizer == "muon"


def optimizer_state(target: Target) -> dict[str, Any] | dict[int, Any]:
    """Return the entry ``optimizer`` of the common state."""
    base = _adam_groups(target)
    scaler = target.source.grad_scaler
    more = {} if scaler is None else {"grad_scaler": scaler}
    if target.is_muon:
        # Without masters megatron-core uses torch's optimizer without a wrapper.
        states = _upstream_states(base, target)
        return {
            number: {"optimizer": state, **more} if target.has_masters else state
            for number, state in enumerate(states)
        }
    sharding = {"param_state_sharding_type": "fully_reshardable"}
    if target.optimizer in OPTIMIZERS:
        groups = base + _matrix_groups(base, target)
        ours = {"param_state": {"right_factor": {}}, **sharding}
        return {"optimizer": {"param_groups": groups}, **more, **ours}
    # Megatron chains one optimizer of dense parameters and one of experts.
    chains = [
        [group for group in base if bool(group.get("is_expert_parallel")) is is_expert]
        for is_expert in (False, True)
    ]
    states = [
        {"optimizer": {"param_groups": chain}, **more, **sharding} for chain in chains if chain
    ]
    return states[0] if len(states) == 1 else dict(enumerate(states))


def _adam_groups(target: Target) -> list[Group]:
    """Return Adam's distinct groups as in a run of Adam alone."""
    found: dict[str, Group] = {}
    for group in target.source.groups:
        if "betas" in group and not group.get(GROUP_KEY):
            plain = {k: v for k, v in group.items() if k not in (*_OURS, "params")}
            plain.setdefault("bias_correction", True)  # torch's Adam always corrects
            found.setdefault(repr(sorted(plain.items())), plain)
    if not found:
        raise CheckpointError(
            "the checkpoint's common state has no parameter group of Adam, from which the target's "
            "groups are derived."
        )
    return [{**group, "step": target.step} for group in found.values()]


def _matrix_groups(base: Sequence[Group], target: Target) -> list[Group]:
    """Return the distinct groups of matrices: the source's, else Adam's with weight decay."""
    if not target.has_matrices:
        return []
    named = {GROUP_KEY: target.optimizer, "optimizer": target.optimizer, "step": target.step}
    groups = [
        {k: v for k, v in group.items() if k != "params"} | named
        for group in _groups_of_matrices(base, target)
    ]
    return list({repr(sorted(group.items())): group for group in groups}.values())


def _groups_of_matrices(base: Sequence[Group], target: Target) -> Sequence[Group]:
    ours = [group for group in target.source.groups if group.get(GROUP_KEY)]
    decayed = [group for group in base if group.get("wd_mult", 1.0) != 0.0]
    return ours or decayed or base


def _upstream_states(base: Sequence[Group], target: Target) -> list[dict[str, Any]]:
    """Return the states of megatron-core's muon and of the Adam chained to it."""
    if any(group.get("is_expert_parallel") for group in base):
        raise CheckpointError(
            "megatron-core's muon chains further optimizers for experts of expert parallelism, "
            "which is not supported: save at --expert-model-parallel-size 1 and convert that."
        )
    left_out = {*_OURS, "params", "step", "betas", "eps", "bias_correction"}
    matrices = [
        {k: v for k, v in group.items() if k not in left_out} | {"momentum": target.momentum}
        for group in _groups_of_matrices(base, target)
    ]
    adam: dict[str, Any] = {"param_groups": [{**group, "optimizer": "adam"} for group in base]}
    if target.source.step_in_state:
        adam["state"] = {"common_step": torch.tensor(float(target.step))}
        for group in adam["param_groups"]:
            del group["step"]
    return [{"param_groups": matrices}, adam]


def arguments(target: Target, settings: Mapping[str, Any]) -> argparse.Namespace | None:
    """Return the saved arguments changed to a run of the target; None if none were saved."""
    saved = target.source.common.value.get("args")
    if saved is None:
        return None
    args = argparse.Namespace(**vars(saved))
    is_ours = target.optimizer in OPTIMIZERS
    args.optimizer = "muon" if target.is_muon else "adam"  # which Megatron sees for ours, too
    args.use_distributed_optimizer = not target.is_muon
    args.dist_ckpt_optim_fully_reshardable = not target.is_muon
    args.matrix_optimizer = target.optimizer if is_ours else None
    if hasattr(args, "use_layer_wise_distributed_optimizer"):
        args.use_layer_wise_distributed_optimizer = target.is_muon and target.has_masters
    if is_ours:
        vars(args).update(settings)
    return args


def content_metadata(target: Target) -> dict[str, Any]:
    """Return the entry ``content_metadata``: how the optimizer state is sharded."""
    found = dict(target.source.common.value.get("content_metadata") or {})
    for name in ("distrib_optim_sharding_type", "distrib_optim_fully_reshardable_mem_efficient"):
        found.pop(name, None)
    found.setdefault("singleton_local_shards", False)
    found["chained_optim_avoid_prefix"] = True
    if not target.is_muon:
        found["distrib_optim_sharding_type"] = "fully_reshardable"
        found["distrib_optim_fully_reshardable_mem_efficient"] = False
    elif target.has_masters:
        # megatron-core looks for state under the prefixes of its chain only then.
        found["distrib_optim_sharding_type"] = "dp_reshardable"
    return found
