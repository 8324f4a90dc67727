"""Runs ``checkpoint_check`` before Megatron loads a checkpoint, on all ranks together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
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
    """``dist_checkpointing.load_common_state_dict``, telling which save is not whole."""

    @functools.wraps(load_common)
    def telling(checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return load_common(checkpoint_dir, *args, **kwargs)
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            index = _read_index(str(checkpoint_dir))
            if isinstance(index, str):
                problems = [index]
            else:
                problems = _damages(str(checkpoint_dir), sorted(index.files.items()))
            if not problems:
                raise
            raise CheckpointMismatchError(_text(checkpoint_dir, problems)) from error

    return telling


def telling_what_is_unfinished(get_format: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``_get_checkpoint_format``, with a sentence on a folder that holds no save."""

    @functools.wraps(get_format)
    def telling(checkpoint_name: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        if getattr(args, "matrix_optimizer", None):
            problem = _unfinished(Path(str(checkpoint_name)))
            if problem:
                raise CheckpointMismatchError(_text(str(checkpoint_name), [problem]))
        return get_format(checkpoint_name, args, *rest, **kwargs)

    return telling


def _unfinished(folder: Path) -> str:
    """Why a folder is no finished ``torch_dist`` checkpoint; empty when it is one."""
    if "://" in str(folder) or Path(folder, "metadata.json").exists():
        return ""
    if not folder.is_dir():
        there = sorted(entry.name for entry in folder.parent.glob("iter_*"))
        return (
            f"there is no such checkpoint; of {', '.join(there) or 'no iteration'} in "
            f"{folder.parent} name one with --ckpt-step"
        )
    if any(folder.glob("mp_rank_0*")):
        return (
            "it is of --ckpt-format torch: load it with --optimizer adam, and save it with "
            "--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"
        )
    return f"it is incomplete: its metadata.json is missing, as when a save was cut off; {_EARLIER}"


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
    index = same_on_all_ranks(lambda: _read_index(checkpoint_dir))
    if isinstance(index, str):
        problems = [index]
    else:
        found = index.shapes
        # The vocabulary is padded to a multiple of the tensor-parallel size.
        flexible = {tensor.key for tensor in tensors if tensor.allow_shape_mismatch}
        wanted |= {key: found[key] for key in flexible & found.keys()}
        # A rank looks at its part of the files: there are as many as there were ranks.
        mine = sorted(index.files.items())[dist.get_rank() :: len(kinds)]
        problems = checkpoint_problems(wanted, found, ours) or _damages(checkpoint_dir, mine)
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


@dataclass(frozen=True, kw_only=True)
class _Index:
    """What a checkpoint's ``.metadata`` says.

    Attributes:
        shapes: Keys and global shapes of all optimizer state.
        files: Bytes that every data file has at least.
    """

    shapes: Shapes
    files: Mapping[str, int]


_EARLIER = (
    "type --ckpt-step with an earlier iteration, or remove it and correct "
    "latest_checkpointed_iteration.txt"
)


def _read_index(checkpoint_dir: str) -> _Index | str:
    """The index, or why it cannot be read."""
    try:
        index = FileSystemReader(checkpoint_dir).read_metadata()
        files: dict[str, int] = {}
        for place in (index.storage_data or {}).values():
            end = place.offset + place.length
            files[place.relative_path] = max(files.get(place.relative_path, 0), end)
    except Exception as error:  # any of pickle's and the file system's
        missing = not Path(checkpoint_dir, ".metadata").exists()
        reason = "is missing" if missing else f"cannot be read ({error})"
        return f"it is incomplete: its .metadata {reason}, as when a save was cut off; {_EARLIER}"
    shapes = {
        key: tuple(entry.size)
        for key, entry in index.state_dict_metadata.items()
        if "optimizer." in key and isinstance(entry, TensorStorageMetadata)
    }
    return _Index(shapes=shapes, files=files)


def _damages(checkpoint_dir: str, files: Iterable[tuple[str, int]]) -> list[str]:
    """A sentence for the first file that is not as long as the index says."""
    for name, size in files:
        path = Path(checkpoint_dir, name)
        found = path.stat().st_size if path.exists() else None
        if found is None:
            return [f"it is incomplete: its file {name} is missing; {_EARLIER}"]
        if found < size:
            said = f"its file {name} has {found:,} bytes, and its index says {size:,}"
            return [f"it is damaged: {said}; {_EARLIER}"]
    return []
