"""The optimizer state that a checkpoint holds: of which optimizer, and where of each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from megatron_muon.offline.parameters import StoredParameter
from megatron_muon.offline.reading import Checkpoint

Optimizer = Literal["adam", "muon", "dmuon", "orth_dion", "none", "unknown"]

GROUP_KEY = "matrix_optimizer"
"""Key of our groups of matrices, ``integration.combined_optimizer.MATRIX_GROUP_KEY``."""

RESHARD = (
    "load it with --optimizer adam at the layout that it was saved with, and save it with "
    "--dist-ckpt-optim-fully-reshardable (one iteration is enough); then take that"
)


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where one state of one parameter is.

    Attributes:
        info: The tensor that holds it.
        offset: First index of the parameter's box in that tensor.
        shape: Size of the box.
    """

    info: TensorInfo
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """True when the tensor holds nothing else."""
        return self.shape == self.info.shape


@dataclass(frozen=True, kw_only=True)
class SourceState:
    """All optimizer state of a checkpoint.

    Attributes:
        optimizer: Who wrote it.
        groups: Parameter groups of all its optimizers.
        states: State name (``fp32_param`` of masters) to location, by parameter name.
        factors: Right factors by the name of their matrix.
        grad_scaler: State of the gradient scaler, None without one.
        step_in_state: Whether Adam's step count was beside its state, where torch's Adam keeps it,
            and not in its groups, as Transformer Engine's and Apex's.
    """

    optimizer: Optimizer
    groups: tuple[dict[str, Any], ...]
    states: Mapping[str, Mapping[str, Location]]
    factors: Mapping[str, TensorInfo]
    grad_scaler: dict[str, Any] | None
    step_in_state: bool


BUCKETS = (
    "holds Adam's state as dp_reshardable, whose flat buckets do not say which element belongs to "
    "which parameter"
)


def has_buckets(checkpoint: Checkpoint) -> bool:
    """Whether the state is ``dp_reshardable``: flat buckets."""
    return any(".gbuf_idx_" in key for key in checkpoint.tensors)


def optimizer_of(checkpoint: Checkpoint) -> Optimizer:
    """Which optimizer wrote the state; told from its groups, and from its keys without them."""
    states = {known[0] for key in checkpoint.tensors if (known := split_state_key(key))}
    if has_buckets(checkpoint):
        return "adam"
    if _is_sgd(checkpoint.common) or any(map(unknown_state, checkpoint.tensors)):
        return "unknown"
    if RIGHT_FACTOR in states:
        return "orth_dion"
    ours = {group[GROUP_KEY] for group in param_groups(checkpoint.common) if group.get(GROUP_KEY)}
    if MOMENTUM in states:
        return "orth_dion" if ours == {"orth_dion"} else "dmuon" if ours else "muon"
    return "adam" if states else "none"


def param_groups(common: CommonState) -> tuple[dict[str, Any], ...]:
    """The groups of all optimizers of a chain, in order; empty where none are in common state.

    A step count that the state of an optimizer has for all of its groups is put into each.
    """
    found = []
    for state in map(_inner, _optimizers(common)):
        step = _step_in_state(state)
        more = {} if step is None else {"step": int(step)}
        found += [{**more, **group} for group in state.get("param_groups", ())]
    return tuple(found)


def _inner(state: dict[str, Any]) -> dict[str, Any]:
    """The state dict of torch's optimizer: that of megatron-core, for fp32, is this itself."""
    inner = state.get("optimizer")
    return inner if isinstance(inner, dict) else state


def _step_in_state(state: dict[str, Any]) -> Any:
    kept = state.get("state")
    return kept.get("common_step") if isinstance(kept, dict) else None


def _is_sgd(common: CommonState) -> bool:
    """Its ``momentum_buffer`` is a sum of gradients, and of every parameter."""
    return any("dampening" in group for group in param_groups(common))


def _require_known_optimizer(checkpoint: Checkpoint) -> None:
    """Refuse state that would be left behind, or taken for that of another optimizer."""
    unknown = next((key for key in checkpoint.tensors if unknown_state(key)), None)
    known = "Known are Megatron's Adam, its muon, dmuon and Orth-Dion"
    if unknown is not None:
        raise CheckpointError(
            f"{checkpoint.folder} holds {unknown}, state of an optimizer that is not known. "
            f"{known}."
        )
    if _is_sgd(checkpoint.common):
        raise CheckpointError(f"{checkpoint.folder} was saved by SGD. {known}.")


def _optimizers(common: CommonState) -> Iterator[dict[str, Any]]:
    state = common.value.get("optimizer")
    if isinstance(state, dict) and any(isinstance(key, int) for key in state):
        yield from (state[key] for key in sorted(key for key in state if isinstance(key, int)))
    elif isinstance(state, list):
        yield from state
    elif isinstance(state, dict):
        yield state


def source_state(
    checkpoint: Checkpoint,
    parameters: Mapping[str, Sequence[StoredParameter]],
    *,
    may_lack: bool = False,
) -> SourceState:
    """Find every state of every parameter.

    Args:
        checkpoint: The checkpoint.
        parameters: Those of its model part, by key.
        may_lack: Whether weights alone will do.

    Raises:
        CheckpointError: There is no state, or state that belongs to no parameter, or that does not
            say which element belongs to which parameter.
    """
    if has_buckets(checkpoint):
        raise CheckpointError(f"{checkpoint.folder} {BUCKETS}: {RESHARD}.")
    _require_known_optimizer(checkpoint)
    kind = optimizer_of(checkpoint)
    if kind == "none" and not may_lack:
        raise CheckpointError(
            f"{checkpoint.folder} holds no optimizer state to convert (it was saved with "
            "--no-save-optim, or of another optimizer)."
        )
    by_name = {p.name: p for found in parameters.values() for p in found}
    states: dict[str, dict[str, Location]] = {name: {} for name in by_name}
    factors: dict[str, TensorInfo] = {}
    for key, info in checkpoint.tensors.items():
        known = split_state_key(key)
        if known is None:
            continue
        state, name = known
        if state == RIGHT_FACTOR:
            factors[name] = info
        elif name in parameters:
            for parameter in parameters[name]:
                offset, shape = parameter.box()
                _put(states[parameter.name], state, Location(info=info, offset=offset, shape=shape))
        elif name in by_name:
            whole = Location(info=info, offset=(0,) * len(info.shape), shape=info.shape)
            _put(states[name], state, whole)
        else:
            raise CheckpointError(
                f"{key} belongs to no parameter of the model part of {checkpoint.folder}."
            )
    _require_shapes(by_name, states)
    scalers = [
        state["grad_scaler"] for state in _optimizers(checkpoint.common) if "grad_scaler" in state
    ]
    return SourceState(
        optimizer=kind,
        groups=param_groups(checkpoint.common),
        states=states,
        factors=factors,
        grad_scaler=scalers[0] if scalers else None,
        step_in_state=any(
            _step_in_state(_inner(state)) is not None for state in _optimizers(checkpoint.common)
        ),
    )


def _put(states: dict[str, Location], state: str, location: Location) -> None:
    states[MASTER if state == MASTER_OF_ADAM else state] = location


def _require_shapes(
    parameters: Mapping[str, StoredParameter], states: Mapping[str, Mapping[str, Location]]
) -> None:
    for name, found in states.items():
        shape = parameters[name].facts.shape
        there = [state for state in ADAM_STATES if state in found]
        if len(there) == 1:
            (missing,) = set(ADAM_STATES) - set(there)
            raise CheckpointError(
                f"the checkpoint has {there[0]} of {name} without {missing}, as Lion keeps it; the "
                "state of that optimizer is not known."
            )
        for state in (MASTER, MOMENTUM, *ADAM_STATES):
            if state not in found:
                continue
            location = found[state]
            ends = zip(location.offset, location.shape, location.info.shape, strict=False)
            fits = len(location.offset) == len(location.info.shape) and all(
                start + size <= whole for start, size, whole in ends
            )
            if not fits or location.shape[len(location.shape) - len(shape) :] != shape:
                raise CheckpointError(
                    f"{location.info.key} has shape {location.info.shape}, which is not that of "
                    f"the parameter {name}."
                )
            if not location.info.dtype.is_floating_point:
                raise CheckpointError(
                    f"{location.info.key} has element type {location.info.dtype}, which is no "
                    "floating-point type."
                )
