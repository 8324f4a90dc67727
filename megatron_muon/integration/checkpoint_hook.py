"""Runs ``checkpoint_check`` before Megatron loads a checkpoint, on all ranks together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_muon.checkpoint.names import MOMENTUM, RIGHT_FACTOR, split_state_key
from megatron_muon.exchange import gather_objects, same_on_all_ranks
from megatron_muon.integration.checkpoint_check import (
    Shapes,
    checkpoint_problems,
    optimizer_of,
)

_OURS = (MOMENTUM, RIGHT_FACTOR)


class CheckpointMismatchError(ValueError):
    """The checkpoint does not hold what this run's optimizer asks for; on every rank alike."""


def with_check(load: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``dist_checkpointing.load``, asking first when our state is to be loaded."""

    @functools.wraps(load)
    def checked(sharded_state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
        if isinstance(sharded_state_dict, dict) and "optimizer" in sharded_state_dict:
            require_loadable(sharded_state_dict["optimizer"], checkpoint_dir)
        return load(sharded_state_dict, checkpoint_dir, *args, **kwargs)

    return checked


def telling_what_is_incomplete(load_common: Callable[..., Any]) -> Callable[..., Any]:
    """``dist_checkpointing.load_common_state_dict``, with a sentence on a save that was cut off."""

    @functools.wraps(load_common)
    def telling(checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return load_common(checkpoint_dir, *args, **kwargs)
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            found = _optimizer_shapes(str(checkpoint_dir))
            if not isinstance(found, str):
                raise
            raise CheckpointMismatchError(_text(checkpoint_dir, [found])) from error

    return telling


def require_loadable(optimizer_state: Any, checkpoint_dir: str) -> None:
    """Raise on every rank if any rank asks for what the checkpoint does not hold.

    Args:
        optimizer_state: Megatron's sharded state of all optimizers of this rank.
        checkpoint_dir: The checkpoint.

    Raises:
        CheckpointMismatchError: With all problems of all ranks.
    """
    tensors = list(_tensors(optimizer_state))
    wanted = {tensor.key: tuple(tensor.global_shape) for tensor in tensors}
    is_ours = any((split_state_key(key) or ("",))[0] in _OURS for key in wanted)
    kinds = gather_objects(optimizer_of(wanted) if is_ours else "")
    ours = next((kind for kind in ("orth_dion", "dmuon") if kind in kinds), "")
    if not ours:
        return
    found = same_on_all_ranks(lambda: _optimizer_shapes(checkpoint_dir))
    if isinstance(found, str):
        problems = [found]
    else:
        # The vocabulary is padded to a multiple of the tensor-parallel size.
        flexible = {tensor.key for tensor in tensors if tensor.allow_shape_mismatch}
        wanted |= {key: found[key] for key in flexible & found.keys()}
        problems = checkpoint_problems(wanted, found, ours)
    everyone = dict.fromkeys(p for theirs in gather_objects(problems) for p in theirs)
    if everyone:
        raise CheckpointMismatchError(_text(checkpoint_dir, everyone))


def _text(checkpoint_dir: str, problems: Iterable[str]) -> str:
    lines = "\n".join(f"  - {problem}" for problem in problems)
    return f"megatron_muon: cannot load {checkpoint_dir}\n{lines}"


def _tensors(state: Any) -> Iterator[ShardedTensor]:
    if isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)


def _optimizer_shapes(checkpoint_dir: str) -> Shapes | str:
    """Keys and shapes of all optimizer state, or why they cannot be read."""
    try:
        stored = FileSystemReader(checkpoint_dir).read_metadata().state_dict_metadata
    except Exception as error:  # any of pickle's and the file system's
        missing = not Path(checkpoint_dir, ".metadata").exists()
        reason = "is missing" if missing else f"cannot be read ({error})"
        return (
            f"it is incomplete: its .metadata {reason}, as when a save was cut off; type "
            "--ckpt-step with an earlier iteration, or remove it and correct "
            "latest_checkpointed_iteration.txt"
        )
    return {
        key: tuple(entry.size)
        for key, entry in stored.items()
        if "optimizer." in key and isinstance(entry, TensorStorageMetadata)
    }
