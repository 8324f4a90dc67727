"""Megatron's DistributedOptimizer with matrices: its storage, our update."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from megatron_muon.checkpoint.check import optimizer_mismatch
from megatron_muon.checkpoint.names import MASTER, MOMENTUM, RIGHT_FACTOR
from megatron_muon.integration.checkpoint_state import (
    StoredParts,
    copy_loaded,
    sharded_range,
    sharded_right_factors,
)
from megatron_muon.integration.combined_optimizer import MATRIX_GROUP_KEY, CombinedOptimizer
from megatron_muon.integration.domains import Domain
from megatron_muon.integration.updates import MatrixUpdate
from megatron_muon.optim import MatrixRange, MatrixRule
from megatron_muon.placement import Plan


@dataclass(frozen=True, kw_only=True)
class MatrixSetup:
    """What the builder hands to every ``MatrixDistributedOptimizer``.

    Attributes:
        domain: Dense parameters or experts.
        rule: The update rule.
        plan: The plan of the domain in this pipeline stage.
        names: Name of every trainable parameter.
        exchange_group: Process group of the domain's TP x DP in this pipeline stage.
        device: Device of parameters and buffers.
    """

    domain: Domain
    rule: MatrixRule
    plan: Plan
    names: dict[torch.nn.Parameter, str]
    exchange_group: torch.distributed.ProcessGroup
    device: torch.device


class MatrixDistributedOptimizer(DistributedOptimizer):
    """``DistributedOptimizer`` whose matrix groups are updated through owners.

    Buffers, master shards, bucketed reduce and gather, clipping and mixed precision are the base
    class's. Overridden: the inner optimizer, the state of matrices (momentum only), and the
    checkpoint form of that state.

    Args:
        optimizer: Adam over all groups as Megatron's factory built it, None without parameters.
        config: Megatron's optimizer configuration.
        grad_scaler: Megatron's gradient scaler.
        init_state_fn: Megatron's function that allocates Adam's state.
        setups: Set as a class attribute by the builder, because Megatron's factory calls the
            class: the setup of the dense parameters (False) and of the experts (True).
        **kwargs: Passed on to the base class.
    """

    setups: ClassVar[dict[bool, MatrixSetup]]

    def __init__(
        self, optimizer: Any, config: Any, grad_scaler: Any, init_state_fn: Any, **kwargs: Any
    ) -> None:
        self.plan: Plan | None = None
        self.exchange: MatrixUpdate | None = None
        if optimizer is None:
            super().__init__(optimizer, config, grad_scaler, init_state_fn, **kwargs)
            return
        # Megatron never mixes dense parameters and experts in one optimizer.
        self.setup = self.setups[bool(optimizer.param_groups[0]["is_expert_parallel"])]
        for group in optimizer.param_groups:
            if MATRIX_GROUP_KEY in group:
                # One of the keys by which Megatron tells groups apart in a checkpoint.
                group["optimizer"] = group[MATRIX_GROUP_KEY]
        inner = CombinedOptimizer(optimizer, init_state_fn, self.setup.rule.momentum_dtype)
        super().__init__(inner, config, grad_scaler, init_state_fn, **kwargs)
        self._main_shards = self._find_main_shards()
        self.optimizer.initialize_state(config)
        self.rule, self.plan = self.setup.rule, self.setup.plan
        self.exchange = MatrixUpdate(
            self.rule, self.plan, self.setup.exchange_group, self.setup.device
        )
        self._tensors = {name: tensor for tensor, name in self.setup.names.items()}
        self.optimizer.attach_matrices(self._step_matrices)

    # ---- matrices -----------------------------------------------------------------------------

    def _find_main_shards(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """This rank's master shard of each model parameter that it owns a range of.

        ``model_param_group_index_map`` is not used: it counts fp32 and 16-bit parameters in model
        order, while a group's list has all fp32 shards first.
        """
        pairs = (
            (self.model_fp32_groups, self.shard_fp32_groups),
            (self.model_float16_groups, self.shard_fp32_from_float16_groups),
        )
        return {
            model: main
            for model_groups, main_groups in pairs
            for models, mains in zip(model_groups, main_groups, strict=True)
            for model, main in zip(models, mains, strict=True)
        }

    def _step_matrices(self) -> None:
        assert self.plan is not None and self.exchange is not None
        group_of = {
            id(parameter): group
            for group in self.optimizer.param_groups
            if MATRIX_GROUP_KEY in group
            for parameter in group["params"]
        }
        ranges: list[MatrixRange | None] = []
        for parameter in self.plan.parameters:
            master = self._main_shards.get(self._tensors[parameter.name])
            if master is None:
                ranges.append(None)
                continue
            assert master.grad is not None, "Megatron has not copied the gradients"
            group = group_of[id(master)]
            ranges.append(
                MatrixRange(
                    master=master.data,
                    momentum=self.optimizer.state[master][MOMENTUM],
                    grad=master.grad,
                    lr=float(group["lr"]),
                    weight_decay=float(group["weight_decay"]),
                )
            )
        self.exchange.step(ranges)

    # ---- skipped steps ------------------------------------------------------------------------

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[torch.Tensor]:
        """The base class's gradients, and a probe of those that the norm leaves out.

        A gradient that is a copy of another TP rank's is not counted in the norm. The probe is 0,
        or nan when such a gradient is not finite, so that the one norm that all ranks share tells
        all of them to skip the step; no further collective is needed.
        """
        counted: list[torch.Tensor] = super().get_grads_for_grad_norm(grad_norm_group)
        if grad_norm_group is not None:
            return counted
        known = {id(grad) for grad in counted}
        left_out = [
            parameter.grad
            for parameter in self.get_parameters()
            if parameter.grad is not None and id(parameter.grad) not in known
        ]
        if left_out:
            counted.append(sum((grad * 0.0).sum() for grad in left_out).float().reshape(1))
        return counted

    # ---- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Groups and gradient scaler, without parameter state, as the base class's.

        The base class needs a ``step`` tensor in the state of every parameter when neither TE nor
        Apex is there; ``CombinedOptimizer`` keeps it in the groups.
        """
        if self.is_stub_optimizer:
            return {"optimizer": {"param_groups": []}}
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.state_dict()["param_groups"]
        ]
        for group in groups:
            group.setdefault("step", 0)
        state: dict[str, Any] = {"optimizer": {"param_groups": groups}}
        if self.grad_scaler:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and gradient scaler, and parameter state where ``param_state`` is given.

        The rates that a schedule works with are those of this run until Megatron's scheduler is
        loaded, whose flags decide (``schedule``). State is matched by parameter name, so a group
        carries nothing but numbers.
        """
        if self.is_stub_optimizer:
            return
        state = {key: value for key, value in state_dict.items() if not key.startswith("param_")}
        _require_same_optimizer(self.optimizer.param_groups, state["optimizer"])
        self.optimizer.initialize_state(self.config)
        saved = state["optimizer"]["param_groups"]
        groups = [_resumed_group(group, saved) for group in self.optimizer.param_groups]
        super().load_state_dict({**state, "optimizer": {"param_groups": groups}})
        if "param_state" in state_dict:
            self.load_parameter_state_from_model_space(state_dict["param_state"])

    def stored_states(self, parts: StoredParts) -> dict[str, set[tuple[str, ...]]]:
        """Names of the states that are kept of every tensor of the model.

        Args:
            parts: Where the parameters of the model are stored.

        Raises:
            ValueError: A parameter of this optimizer is not among them.
        """
        if self.is_stub_optimizer:
            return {}
        self.optimizer.initialize_state(self.config)
        found: dict[str, set[tuple[str, ...]]] = {}
        for parameter in self._main_shards:
            if parameter not in parts:
                raise ValueError(
                    f"{self.setup.names[parameter]} is not in the model's sharded state; give the "
                    "sharded_state_dict() of every model chunk that the optimizer was built for"
                )
            for part in parts[parameter]:
                found.setdefault(part.tensor.key, set()).add(tuple(self._states(parameter)))
        return found

    def param_state_in_model_space(
        self, parts: StoredParts, mixed: Collection[str], *, is_loading: bool
    ) -> dict[str, Any]:
        """This rank's ranges of all state, see ``checkpoint_state``; views, nothing is gathered.

        Args:
            parts: Where the parameters of the model are stored.
            mixed: Keys of tensors whose layers have different states, because a rule sends some
                of them to another optimizer; these layers are stored one by one.
            is_loading: True to give memory of its own to what the model part is loaded over: the
                weights of a checkpoint may be rounded, and fp32 masters are views of fp32 weights.
        """
        if self.is_stub_optimizer:
            return {}
        instance = self.distributed_optimizer_instance_id
        found: dict[str, Any] = {}
        for parameter in self._main_shards:
            name = self.setup.names[parameter]
            stored = tuple(
                part.alone(name) if part.tensor.key in mixed else part for part in parts[parameter]
            )
            start = self._get_model_param_range_map(parameter)["param"].start
            states = self._states(parameter)
            if is_loading and _share_memory(states[MASTER], parameter):
                states[MASTER] = torch.empty_like(states[MASTER])
            found[name] = {
                state: sharded_range(state, values, start, stored, instance=instance)
                for state, values in states.items()
            }
        if self.exchange is not None:
            factors = self.exchange.owned_state
            found[RIGHT_FACTOR] = sharded_right_factors(factors, instance=instance)
        return found

    def load_parameter_state_from_model_space(self, param_state: Mapping[str, Any]) -> None:
        """Inverse of ``param_state_in_model_space``."""
        for parameter in self._main_shards:
            loaded = param_state[self.setup.names[parameter]]
            for state, values in self._states(parameter).items():
                first = 0
                for box in loaded[state]:
                    copy_loaded(values[first : first + box.numel()], box)
                    first += box.numel()
                assert first == values.numel(), "boxes cover a range once, in order"
        if self.exchange is not None:
            for name, factor in self.exchange.owned_state.items():
                copy_loaded(factor, param_state[RIGHT_FACTOR][name])

    def _states(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """This rank's range of everything that is kept of a parameter, by the names of a save."""
        main = self._main_shards[parameter]
        return {
            MASTER: main.data,
            **{
                key: value
                for key, value in self.optimizer.state[main].items()
                if isinstance(value, torch.Tensor) and key != "step"
            },
        }


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _require_same_optimizer(current: Sequence[dict[str, Any]], saved: Mapping[str, Any]) -> None:
    """Refuse the state of another optimizer: a momentum of the same name means another thing.

    Raises:
        ValueError: The saved matrices were trained by another optimizer than ours are.
    """
    ours = {group[MATRIX_GROUP_KEY] for group in current if group.get(MATRIX_GROUP_KEY)}
    theirs = {g[MATRIX_GROUP_KEY] for g in saved["param_groups"] if g.get(MATRIX_GROUP_KEY)}
    if ours and theirs != ours:
        found = ", ".join(sorted(theirs)) or "an optimizer without matrices (Adam)"
        wanted, to_type = ", ".join(sorted(ours)), min(theirs, default="adam")
        raise ValueError(optimizer_mismatch(found, wanted, to_type=to_type))


def _resumed_group(current: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """The saved group most like a current one, with the current one's identity.

    Megatron pairs groups by a tuple that holds learning rates and weight decay, and fails on any
    change of them with a bare ``KeyError``.
    """

    def likeness(group: dict[str, Any]) -> tuple[bool, int]:
        equal = [group.get(key) == current.get(key) for key in param_group_identifier_keys]
        return group.get("optimizer") == current.get("optimizer"), sum(equal)

    resumed: dict[str, Any] = dict(sorted(saved, key=likeness)[-1])
    for key in param_group_identifier_keys:
        resumed.pop(key, None)
        if key in current:
            resumed[key] = current[key]
    return resumed
