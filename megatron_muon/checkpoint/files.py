"""Checks a checkpoint's files and index before a run loads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_muon.checkpoint.check import Shapes

_EARLIER: Final = (
    "type --ckpt-step with an earlier iteration, or remove it and correct "
    "latest_checkpointed_iteration.txt"
)


@dataclass(frozen=True, kw_only=True)
class Index:
    """Shapes of all optimizer state, and the minimum number of bytes of every data file."""

    shapes: Shapes
    files: Mapping[str, int]


def read_index(checkpoint_dir: str) -> Index | str:
    """Return the index, or the reason why it cannot be read."""
    try:
        index = FileSystemReader(checkpoint_dir).read_metadata()
        files: dict[str, int] = {}
        for place in (index.storage_data or {}).values():
            end = place.offset + place.length
            files[place.relative_path] = max(files.get(place.relative_path, 0), end)
    except Exception as error:  # of pickle or the file system
        missing = not Path(checkpoint_dir, ".metadata").exists()
        reason = "is missing" if missing else f"cannot be read ({error})"
        return f"it is incomplete: its .metadata {reason}, as in an interrupted save; {_EARLIER}"
    shapes = {
        key: tuple(entry.size)
        for key, entry in index.state_dict_metadata.items()
        if "optimizer." in key and isinstance(entry, TensorStorageMetadata)
    }
    return Index(shapes=shapes, files=files)


def damages(checkpoint_dir: str, files: Iterable[tuple[str, int]]) -> list[str]:
    """Return an error for the first file that is shorter than the index says."""
    damage = first_damage(Path(checkpoint_dir), files)
    return [f"it is {damage}; {_EARLIER}"] if damage else []


def first_damage(folder: Path, files: Iterable[tuple[str, int]]) -> str:
    """Describe the first file that is missing or shorter than required; empty without any."""
    for name, size in files:
        path = folder / name
        if not path.exists():
            return f"incomplete: its file {name} is missing"
        found = path.stat().st_size
        if found < size:
            return f"damaged: its file {name} has {found:,} bytes, and its index says {size:,}"
    return ""


def incomplete(folder: Path) -> str:
    """Describe why a folder is not a complete ``torch_dist`` checkpoint; empty if it is."""
    if "://" in str(folder) or Path(folder, "metadata.json").exists():
        return ""
    if not folder.is_dir():
        there = sorted(entry.name for entry in folder.parent.glob("iter_*"))
        return (
            f"there is no such checkpoint; {folder.parent} has {', '.join(there) or 'none'}: "
            "select one with --ckpt-step"
        )
    if any(folder.glob("mp_rank_0*")):
        return (
            "it has --ckpt-format torch: load it with --optimizer adam, and save it with "
            "--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"
        )
    return f"it is incomplete: its metadata.json is missing, as in an interrupted save; {_EARLIER}"
