"""The optimizer state of a checkpoint: the optimizer, and the box of each parameter's states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from megatron_muon.checkpoint.names import (
    ADAM_STATES,
    MASTER,
    MASTER_OF_ADAM,
    MOMENTUM,
    RIGHT_FACTOR,
    split_state_key,
    unknown_state,
)
from megatron_muon.offline.common_state import CommonState
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.index import TensorInfo
from megatron_muon.offline.momenta import Convention, matrix_convention
from megatron_muon.offline.outputs import Box, whole
from megatron_muon.offline.parameters import (
    StoredParameter,
    model_tensors,
    require_names,
    stored_parameters,
)
from megatron_muon.offline.reading import Checkpoint

Optimizer = Literal["adam", "muon", "dmuon", "orth_dion", "none", "unknown"]

GROUP_KEY = "matrix_optimizer"
"""Key that marks our groups of matrices (``integration.combined_optimizer.MATRIX_GROUP_KEY``)."""

BUCKETS = (
    "holds Adam's state as dp_reshardable, whose flat buckets do not map elements to parameters"
)
RESHARD = (
    "load it with --optimizer adam at the layout of its run, and save it with "
    "--dist-ckpt-optim-fully-reshardable (one iteration is enough); then use that checkpoint. With "
    "fp32 weights megatron-core 0.19.2 cannot load it ('a view of a leaf Variable'): train such a "
    "model with the flag from the start"
)
_SUPPORTED = "Supported are Megatron's Adam and muon, dmuon and Orth-Dion"


class SourceState:
    """The model and optimizer state of a checkpoint.

    Attributes:
        common: The common state.
        model: Tensors of the model part, by key.
        parameters: Parameters of every tensor, by key.
        optimizer: The optimizer that wrote the state.
        groups: Parameter groups of all its optimizers.
        states: Boxes by parameter name and state (``fp32_param`` of masters).
        factors: Right factors by matrix name.
        grad_scaler: State of the gradient scaler, or None.
        step_in_state: True if Adam's step count is in its state, as in torch's Adam, and not in
            its groups, as in Transformer Engine's and Apex's.

    Args:
        checkpoint: The checkpoint.
        may_lack: True to accept weights without optimizer state.
    """

    def __init__(self, checkpoint: Checkpoint, *, may_lack: bool = False) -> None:
        self.common = checkpoint.common
        self.model = model_tensors(checkpoint)
        self.parameters = stored_parameters(self.model, self.common)
        require_names(self.parameters, self.common)
        self.optimizer = optimizer_of(checkpoint)
        _require_known(checkpoint, self.optimizer, may_lack=may_lack)
        by_name = {p.name: p for found in self.parameters.values() for p in found}
        self.states: dict[str, dict[str, Box]] = {name: {} for name in by_name}
        self.factors: dict[str, TensorInfo] = {}
        for key, info in checkpoint.tensors.items():
            state, name = split_state_key(key) or ("", "")
            state = MASTER if state == MASTER_OF_ADAM else state
            if state == RIGHT_FACTOR:
                self.factors[name] = info
            elif name in self.parameters:
                for parameter in self.parameters[name]:
                    self.states[parameter.name][state] = parameter.box(info)
            elif name in by_name:
                self.states[name][state] = whole(info)
            elif state:
                raise CheckpointError(
                    f"{key} does not belong to any model parameter of {checkpoint.folder}."
                )
        for name, found in self.states.items():
            _require_fit(by_name[name], found)
        self.groups = param_groups(self.common)
        optimizers = list(_optimizers(self.common))
        scalers = [state["grad_scaler"] for state in optimizers if "grad_scaler" in state]
        self.grad_scaler: dict[str, Any] | None = scalers[0] if scalers else None
        steps = map(_step_in_state, map(_inner, optimizers))
        self.step_in_state = any(step is not None for step in steps)

    @property
    def steps(self) -> int:
        """Number of steps that the optimizer has made."""
        steps = [int(group["step"]) for group in self.groups if "step" in group]
        if not steps and any(ADAM_STATES[0] in states for states in self.states.values()):
            raise CheckpointError(
                "the checkpoint's common state has no step count of Adam (step of a group, or "
                "common_step), which its bias correction requires."
            )
        return max(steps, default=0)

    def momentum_convention(self, heavy_ball: float | None = None) -> Convention:
        """Return the convention of ``momentum_buffer``; ``heavy_ball`` is β of a sum."""
        return matrix_convention(self.optimizer, self.common, self.groups, heavy_ball)


def has_buckets(checkpoint: Checkpoint) -> bool:
    """Return True for ``dp_reshardable`` state: flat buckets."""
    return any(".gbuf_idx_" in key for key in checkpoint.tensors)


def optimizer_of(checkpoint: Checkpoint) -> Optimizer:
    """Detect the optimizer that wrote the state from its groups and keys."""
    states = {known[0] for key in checkpoint.tensors if (known := split_state_key(key))}
    if has_buckets(checkpoint):
        return "adam"
    groups = param_groups(checkpoint.common)
    # SGD also has a ``momentum_buffer``: a sum of gradients, of every parameter.
    is_sgd = any("dampening" in group for group in groups)
    if is_sgd or any(map(unknown_state, checkpoint.tensors)):
        return "unknown"
    if RIGHT_FACTOR in states:
        return "orth_dion"
    ours = {group[GROUP_KEY] for group in groups if group.get(GROUP_KEY)}
    if MOMENTUM in states:
        return "orth_dion" if ours == {"orth_dion"} else "dmuon" if ours else "muon"
    return "adam" if states else "none"


def param_groups(common: CommonState) -> tuple[dict[str, Any], ...]:
    """Return the groups of all chained optimizers, in order; empty without optimizer state.

    A step count in the state of an optimizer is added to each of its groups.
    """
    found = []
    for state in map(_inner, _optimizers(common)):
        step = _step_in_state(state)
        more = {} if step is None else {"step": int(step)}
        found += [{**more, **group} for group in state.get("param_groups", ())]
    return tuple(found)


def _inner(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict of torch's optimizer, which megatron-core does not wrap in fp32."""
    inner = state.get("optimizer")
    return inner if isinstance(inner, dict) else state


def _optimizers(common: CommonState) -> Iterator[dict[str, Any]]:
    state = common.value.get("optimizer")
    if isinstance(state, dict) and any(isinstance(key, int) for key in state):
        yield from (state[key] for key in sorted(key for key in state if isinstance(key, int)))
    elif isinstance(state, list):
        yield from state
    elif isinstance(state, dict):
        yield state


def _step_in_state(state: dict[str, Any]) -> Any:
    kept = state.get("state")
    return kept.get("common_step") if isinstance(kept, dict) else None


def _require_known(checkpoint: Checkpoint, kind: Optimizer, *, may_lack: bool) -> None:
    """Refuse state that is unreadable, of an unknown optimizer, or missing."""
    folder = checkpoint.folder
    if has_buckets(checkpoint):
        raise CheckpointError(f"{folder} {BUCKETS}: {RESHARD}.")
    unknown = next(filter(unknown_state, checkpoint.tensors), None)
    if unknown is not None:
        raise CheckpointError(
            f"{folder} holds {unknown}, state of an unknown optimizer. {_SUPPORTED}."
        )
    if kind == "unknown":
        raise CheckpointError(f"{folder} was saved by SGD. {_SUPPORTED}.")
    if kind == "none" and not may_lack:
        raise CheckpointError(
            f"{folder} holds no optimizer state to convert (it was saved with --no-save-optim, or "
            "by an unsupported optimizer)."
        )


def _require_fit(parameter: StoredParameter, states: Mapping[str, Box]) -> None:
    """Refuse one of Adam's two moments alone, and state of another shape or of integers."""
    name, shape = parameter.name, parameter.facts.shape
    there = [state for state in ADAM_STATES if state in states]
    if len(there) == 1:
        (missing,) = set(ADAM_STATES) - set(there)
        raise CheckpointError(
            f"the checkpoint has {there[0]} of {name} without {missing}, like Lion's state, which "
            "is not supported."
        )
    for box in states.values():
        info = box.info
        fits = len(box.offset) == len(info.shape) and all(
            start + size <= whole
            for start, size, whole in zip(box.offset, box.shape, info.shape, strict=True)
        )
        if not fits or box.shape[len(box.shape) - len(shape) :] != shape:
            raise CheckpointError(
                f"{info.key} has shape {info.shape}, which does not fit the parameter {name}."
            )
        if not info.dtype.is_floating_point:
            raise CheckpointError(
                f"{info.key} has dtype {info.dtype}, which is not a floating-point dtype."
            )
