"""Runs the checks of ``checkpoint`` before Megatron loads, on all ranks together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_muon.checkpoint.check import checkpoint_problems, optimizer_of
from megatron_muon.checkpoint.files import damages, incomplete, read_index
from megatron_muon.checkpoint.names import MOMENTUM, RIGHT_FACTOR, split_state_key
from megatron_muon.exchange import gather_objects, same_on_all_ranks
from megatron_muon.integration.support import CheckpointMismatchError

_OURS = (MOMENTUM, RIGHT_FACTOR)


def with_check(load: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``dist_checkpointing.load``, checked first when it loads our state."""

    @functools.wraps(load)
    def checked(sharded_state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
        if isinstance(sharded_state_dict, dict) and "optimizer" in sharded_state_dict:
            require_loadable(sharded_state_dict["optimizer"], checkpoint_dir)
        return load(sharded_state_dict, checkpoint_dir, *args, **kwargs)

    return checked


def explain_incomplete(load_common: Callable[..., Any]) -> Callable[..., Any]:
    """``dist_checkpointing.load_common_state_dict``, with the name of the damaged file."""

    @functools.wraps(load_common)
    def explained(checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return load_common(checkpoint_dir, *args, **kwargs)
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            index = read_index(str(checkpoint_dir))
            if isinstance(index, str):
                problems = [index]
            else:
                problems = damages(str(checkpoint_dir), sorted(index.files.items()))
            if not problems:
                raise
            raise CheckpointMismatchError(_text(checkpoint_dir, problems)) from error

    return explained


def explain_unfinished(get_format: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``_get_checkpoint_format``; a folder without a finished save gets a sentence."""

    @functools.wraps(get_format)
    def explained(checkpoint_name: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        if getattr(args, "matrix_optimizer", None):
            problem = incomplete(Path(str(checkpoint_name)))
            if problem:
                raise CheckpointMismatchError(_text(str(checkpoint_name), [problem]))
        return get_format(checkpoint_name, args, *rest, **kwargs)

    return explained


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
    index = same_on_all_ranks(lambda: read_index(checkpoint_dir))
    if isinstance(index, str):
        problems = [index]
    else:
        found = index.shapes
        # The vocabulary is padded to a multiple of the tensor-parallel size.
        flexible = {tensor.key for tensor in tensors if tensor.allow_shape_mismatch}
        wanted |= {key: found[key] for key in flexible & found.keys()}
        # A rank looks at its part of the files: there are as many as there were ranks.
        mine = sorted(index.files.items())[dist.get_rank() :: len(kinds)]
        problems = checkpoint_problems(wanted, found, ours) or damages(checkpoint_dir, mine)
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
