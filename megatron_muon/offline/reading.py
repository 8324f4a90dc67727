"""Reads a distributed checkpoint (PyTorch DCP as written by Megatron) without a process group.

torch plans the reads of each chunk (``create_read_items_for_chunk_list``). The bytes are read here:
``FileSystemReader`` checks neither CRC nor dtype against the index, and does not support chunks
whose sizes lack prepended axes, as megatron-core writes them.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_muon.checkpoint.files import first_damage
from megatron_muon.offline.common_state import RUN_CONFIG_FILE, CommonState, read_run_config
from megatron_muon.offline.errors import CheckpointError, first_line
from megatron_muon.offline.index import INDEX_FILE, Chunk, Place, TensorInfo, read_index
from megatron_muon.offline.safe_pickle import Loaded, load_torch, require_known

BACKEND_FILE = "metadata.json"
COMMON_FILE = "common.pt"
COMMON_KEY = "common_state/shard_0_1"
TRACKER = "latest_checkpointed_iteration.txt"


def find_folder(path: Path, step: int | None = None) -> Path:
    """Return the folder of an iteration (None: the last), given itself or a run's --save folder."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder.")
    if (path / INDEX_FILE).exists() or (path / BACKEND_FILE).exists():
        if step is not None and path.name != f"iter_{step:07d}":
            raise CheckpointError(
                f"{path} is a checkpoint itself, while --step {step} requests another one."
            )
        return path
    there = ", ".join(sorted(entry.name for entry in path.glob("iter_*")))
    if step is None and re.fullmatch(r"iter_\d+|release", path.name):
        raise CheckpointError(
            f"{path} is not a complete checkpoint: it has neither .metadata nor metadata.json."
        )
    last = last_step(path) if step is None else step
    if last is None:
        raise CheckpointError(
            f"{path} is neither a checkpoint nor a run's --save folder: it holds neither "
            f"{INDEX_FILE} nor {TRACKER}{f', but {there}: name one of them' if there else ''}."
        )
    folder = path / (last if isinstance(last, str) else f"iter_{last:07d}")
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no {folder.name} in {path}; there is {there or 'no iteration'}."
        )
    return folder


def last_step(root: Path) -> int | Literal["release"] | None:
    """Return the iteration that a run loads from a folder, None without a tracker."""
    tracker = root / TRACKER
    if not tracker.exists():
        return None
    try:
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise CheckpointError(f"{tracker} cannot be read ({first_line(error)}).") from error
    if text == "release":
        return "release"
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise CheckpointError(f"{tracker} holds {text[:40]!r}, which is not an iteration.")
    return int(text)


class Checkpoint:
    """A checkpoint of one iteration; opening it reads only the index.

    Attributes:
        folder: The folder of ``.metadata``.
        tensors: All tensors by key.
        blobs: Places of all non-tensor entries, by key.
        backend: Content of ``metadata.json``.

    Args:
        path: The folder of an iteration, or a run's --save folder.
        step: Iteration; None for the last one.
        run_config: A ``run_config.yaml``; None for the one in the folder, if any.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        step: int | None = None,
        run_config: Path | None = None,
    ) -> None:
        self._run_config = run_config
        self.folder = find_folder(Path(path), step)
        self.backend = _read_backend(self.folder)
        tensors, blobs = read_index(self.folder)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self.blobs: Mapping[str, Place] = MappingProxyType(blobs)
        chunks = (chunk for info in tensors.values() for chunk in info.chunks)
        ends: dict[str, int] = {}
        for place in (*blobs.values(), *(chunk.place for chunk in chunks)):
            ends[place.file] = max(ends.get(place.file, 0), place.start + place.length)
        damage = first_damage(self.folder, sorted(ends.items()))
        if damage:
            raise CheckpointError(f"{self.folder} is {damage}.")

    # ---- tensors ------------------------------------------------------------------------------

    def read(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read a whole tensor, in its own or another dtype."""
        shape = self._info(key).shape
        return self.read_box(key, [0] * len(shape), shape, dtype)

    def read_box(
        self,
        key: str,
        offsets: Sequence[int],
        sizes: Sequence[int],
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Read a box of a tensor, assembled from the overlapping chunks one at a time."""
        info = self._info(key)
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        if any(o < 0 or e > n for o, e, n in zip(offsets, ends, info.shape, strict=True)):
            raise CheckpointError(f"{key} of shape {info.shape} has no box {offsets} to {ends}.")
        wanted = dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        stored = dcp.TensorStorageMetadata(
            dcp.TensorProperties(dtype=info.dtype),
            torch.Size(info.shape),
            [
                dcp.ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.shape))
                for c in info.chunks
            ],
        )
        result: torch.Tensor | None = None
        covered = 0
        for part in create_read_items_for_chunk_list(key, stored, [wanted]):
            chunk = info.chunks[part.storage_index.index or 0]
            values = self._read_chunk(key, chunk)
            if chunk.shape == tuple(sizes) == tuple(part.lengths):
                return values if dtype is None else values.to(dtype)
            if result is None:
                result = torch.empty(tuple(sizes), dtype=dtype or info.dtype)
            there = narrow_tensor_by_index(result, part.dest_offsets, part.lengths)
            there.copy_(narrow_tensor_by_index(values, part.storage_offsets, part.lengths))
            covered += math.prod(part.lengths)
        if covered != math.prod(sizes):
            raise CheckpointError(
                f"the chunks of {key} cover {covered} of the {math.prod(sizes)} requested elements."
            )
        return torch.empty(tuple(sizes), dtype=dtype or info.dtype) if result is None else result

    def _read_chunk(self, key: str, chunk: Chunk) -> torch.Tensor:
        info, source = self._info(key), f"{key} in {chunk.place.file}"
        values = self._load(chunk.place, key).value
        if not isinstance(values, torch.Tensor):
            raise CheckpointError(f"{source} is a {type(values).__name__}, not a tensor.")
        if values.dtype != info.dtype or values.numel() != math.prod(chunk.shape):
            raise CheckpointError(
                f"{source} is {values.dtype} {tuple(values.shape)}, and the index says "
                f"{info.dtype} {chunk.shape}."
            )
        return values.detach().reshape(chunk.shape)

    def _info(self, key: str) -> TensorInfo:
        if key not in self.tensors:
            raise CheckpointError(f"{self.folder} holds no tensor {key}.")
        return self.tensors[key]

    def _load(self, place: Place, key: str) -> Loaded:
        with io.BufferedReader(_Window(self.folder, place)) as window:
            return load_torch(window, source=f"{key} in {place.file}")

    # ---- the rest -----------------------------------------------------------------------------

    def read_blob(self, key: str) -> Loaded:
        """Read a non-tensor entry: random state, extra state, a sharded object."""
        return self._load(self.blobs[key], key)

    def blobs_to_copy(self) -> dict[str, Place]:
        """Return the non-tensor entries except the common state; refuse unknown packages."""
        found = {key: place for key, place in self.blobs.items() if key != COMMON_KEY}
        for key in found:
            require_known(self.read_blob(key), key)
        return found

    @cached_property
    def common(self) -> CommonState:
        """The common state, from a file or an entry."""
        path = self.folder / COMMON_FILE
        if path.exists():
            with path.open("rb") as stream:
                loaded = load_torch(stream, source=COMMON_FILE)
        elif COMMON_KEY in self.blobs:
            loaded = self.read_blob(COMMON_KEY)
        else:
            raise CheckpointError(
                f"{self.folder} has no common state: neither {COMMON_FILE} nor {COMMON_KEY}."
            )
        value = loaded.value
        if isinstance(value, list) and len(value) == 1:
            value = value[0]  # a sharded object is in a list
        if not isinstance(value, dict):
            raise CheckpointError(f"the common state of {self.folder} is a {type(value).__name__}.")
        own = self.folder / RUN_CONFIG_FILE
        config = self._run_config
        if config is None and value.get("args") is None and own.exists():
            config = own
        return CommonState(
            in_file=path.exists(),
            loaded=Loaded(value=value, inert=loaded.inert),
            run_config=None if config is None else read_run_config(config),
        )


def _read_backend(folder: Path) -> dict[str, Any]:
    path = folder / BACKEND_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: its metadata.json is missing."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error
    backend = found.get("sharded_backend") if isinstance(found, dict) else None
    if backend != "torch_dist":
        raise CheckpointError(
            f"{path} says sharded_backend {backend!r}; only torch_dist can be read "
            "(--ckpt-format torch_dist)."
        )
    return dict(found)


class _Window(io.RawIOBase):
    """A part of a file as a file; torch's ``_create_file_view`` seeks incorrectly from the end."""

    def __init__(self, folder: Path, place: Place) -> None:
        self._stream = (folder / place.file).open("rb", buffering=0)
        self._start, self._length, self._at = place.start, place.length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._length - self._at))
        self._stream.seek(self._start + self._at)
        count = self._stream.readinto(memoryview(buffer)[:wanted]) or 0
        self._at += count
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()
