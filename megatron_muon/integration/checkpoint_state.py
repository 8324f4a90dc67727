"""Optimizer state as sharded tensors in model space: every rank writes and reads its own ranges.

megatron-core's ``fully_reshardable`` gathers the state of all data-parallel ranks, because a flat
range is no rectangle. It is a few of them (``checkpoint.boxes``), so here nothing is gathered and
nothing is copied: the tensors of a save and of a load are views of the state itself. Key, shape and
place of every state are those of its parameter in the model part of the checkpoint, hence the state
loads at every layout at which the weights load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_muon.checkpoint.boxes import boxes
from megatron_muon.checkpoint.names import RIGHT_FACTOR, state_key

SHARDING_TYPES = ("dp_reshardable", "fully_reshardable")
"""Megatron's names of sharding types under which our state is stored; in the same form by both."""


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """Consecutive elements of a local parameter that are one sharded tensor of the checkpoint.

    A gated ``linear_fc1`` has two of them: gate and up.

    Attributes:
        start: First of them in the row-major parameter.
        tensor: Key, global shape, place and replica of that sharded tensor, without data.
    """

    start: int
    tensor: ShardedTensor

    def alone(self, name: str) -> StoredPart:
        """The same part of a tensor of one layer (or expert) only, under the parameter's name."""
        axes = self.tensor.prepend_axis_num
        return replace(
            self,
            tensor=replace(
                self.tensor,
                key=name,
                global_shape=self.tensor.global_shape[axes:],
                global_offset=self.tensor.global_offset[axes:],
                axis_fragmentations=None,
                prepend_axis_num=0,
            ),
        )


StoredParts = Mapping[torch.Tensor, tuple[StoredPart, ...]]
"""Where every parameter of a rank is stored; tensors are compared by identity."""


def stored_parts(model_sharded_state_dict: Any) -> StoredParts:
    """Where the elements of every parameter are in the model part of a checkpoint.

    Args:
        model_sharded_state_dict: What the model's ``sharded_state_dict`` gave, with parameters as
            data (Megatron's ``keep_vars``); of several chunks, all in one dict.

    Raises:
        ValueError: A parameter is stored in pieces that are not its consecutive rows, each once.
    """
    return {
        entry.data: tuple(_parts(entry))
        for entry in _sharded(model_sharded_state_dict)
        if isinstance(entry.data, torch.Tensor) and entry.data.requires_grad
    }


def _sharded(value: Any) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    if isinstance(value, ShardedTensor | ShardedTensorFactory):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _sharded(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _sharded(inner)


def _parts(entry: ShardedTensor | ShardedTensorFactory) -> list[StoredPart]:
    """The pieces of a parameter in the order of its rows.

    Found with a plain tensor in the parameter's place, of which nothing is touched: a quantized
    weight has no storage that would tell where a view of it starts.
    """
    if isinstance(entry, ShardedTensor):
        return [StoredPart(start=0, tensor=entry.without_data())]
    whole = torch.empty(entry.data.shape, dtype=torch.uint8)
    storage = whole.untyped_storage().data_ptr()
    found = []
    for part in _sharded(replace(entry, data=whole).build()):
        held = part.data
        is_rows = held.is_contiguous() and held.untyped_storage().data_ptr() == storage
        if isinstance(part, ShardedTensor) and is_rows:
            found.append(StoredPart(start=held.storage_offset(), tensor=part.without_data()))
    found.sort(key=lambda part: part.start)
    ends = [part.start + _numel(part.tensor) for part in found]
    if [part.start for part in found] != [0, *ends[:-1]] or ends[-1:] != [whole.numel()]:
        raise ValueError(
            f"{entry.key} is not stored as its consecutive rows, each once; its optimizer state "
            "cannot be stored: type --no-save-optim and --no-load-optim"
        )
    return found


def sharded_range(
    state: str,
    values: torch.Tensor,
    start: int,
    parts: tuple[StoredPart, ...],
    *,
    instance: int,
) -> list[ShardedTensor]:
    """A rank's range of one state of a parameter as boxes of the checkpoint's tensors.

    Args:
        state: Name of the state.
        values: The range, 1-D; the result holds views of it.
        start: First element of the range in the row-major parameter.
        parts: Where the parameter is stored.
        instance: Number of this rank's distributed-optimizer instance; the first one writes.
    """
    found = []
    for part in parts:
        stored = part.tensor
        first = max(start, part.start)
        last = min(start + values.numel(), part.start + _numel(stored))
        for box in boxes(stored.local_shape, first - part.start, last - part.start):
            here = part.start + box.start - start
            # Prepended axes are written out: Megatron drops them from tensors without a grid.
            before = stored.global_offset[: stored.prepend_axis_num]
            offset = stored.global_offset[stored.prepend_axis_num :]
            shape = (*(1 for _ in before), *box.shape)
            found.append(
                replace(
                    stored,
                    key=state_key(state, stored.key),
                    data=values[here : here + box.numel].view(shape),
                    dtype=values.dtype,
                    local_shape=shape,
                    global_offset=(
                        *before,
                        *(a + b for a, b in zip(offset, box.offset, strict=True)),
                    ),
                    axis_fragmentations=None,
                    prepend_axis_num=0,
                    # Ranges are spread over the data-parallel ranks, weights are copied to them.
                    replica_id=(*stored.replica_id[:2], instance),
                )
            )
    return found


def sharded_right_factors(
    factors: Mapping[str, torch.Tensor], *, instance: int
) -> dict[str, ShardedTensor]:
    """Orth-Dion's V of the matrices that a rank owns, each whole under its matrix's name."""
    return {
        name: ShardedTensor.from_rank_offsets(
            state_key(RIGHT_FACTOR, name), factor, replica_id=(instance, 0, 0)
        )
        for name, factor in factors.items()
    }


def copy_loaded(target: torch.Tensor, loaded: torch.Tensor) -> None:
    """Take over what was loaded, unless it was loaded into place."""
    if loaded.data_ptr() != target.data_ptr() or loaded.dtype != target.dtype:
        target.copy_(loaded.view(target.shape))


def _numel(tensor: ShardedTensor) -> int:
    return int(torch.Size(tensor.local_shape).numel())
