"""The index of a checkpoint (``.metadata``): the file and bytes of every tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.safe_pickle import load_pickle

INDEX_FILE = ".metadata"

_CLASSES = (
    dcp.BytesStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.Metadata,
    dcp.MetadataIndex,
    dcp.StorageMeta,
    dcp.TensorProperties,
    dcp.TensorStorageMetadata,
    dcp._MEM_FORMAT_ENCODING,
    _StorageInfo,
)
_NAMES: Mapping[str, Any] = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _CLASSES}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Bytes of a data file: file name in the checkpoint's folder, first byte, number of bytes."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor and the bytes that hold it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    place: Place


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor in the index; its chunks are disjoint and cover it."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_index(folder: Path) -> tuple[dict[str, TensorInfo], dict[str, Place]]:
    """Return all tensors, and the places of all non-tensor entries, by key.

    ``FileSystemReader.read_metadata`` is not used: it executes the pickle, and torch's weights-only
    unpickler does not support the protocol of this file.
    """
    path = folder / INDEX_FILE
    if not path.exists():
        raise CheckpointError(f"{folder} is incomplete: its {INDEX_FILE} is missing.")
    with path.open("rb") as stream:
        metadata = load_pickle(stream, source=str(path), more=_NAMES).value
    if not isinstance(metadata, dcp.Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path} is a foreign pickle, not the index of a checkpoint.")
    tensors, blobs = {}, {}
    try:
        places = {index: _place(info) for index, info in metadata.storage_data.items()}
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, dcp.TensorStorageMetadata):
                tensors[key] = _tensor(key, entry, places)
            else:
                blobs[key] = places[dcp.MetadataIndex(key)]
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        what = error if isinstance(error, ValueError) else repr(error)
        raise CheckpointError(f"{path} is damaged: {what}.") from error
    return tensors, blobs


def _tensor(
    key: str, entry: dcp.TensorStorageMetadata, places: Mapping[dcp.MetadataIndex, Place]
) -> TensorInfo:
    """Return a tensor; refuse chunks that do not cover it, as bytes are copied unread."""
    shape, dtype = tuple(entry.size), entry.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key} has the dtype {dtype!r}")
    # A chunk may be listed once for each rank that holds a copy.
    chunks = {}
    for stored in entry.chunks:
        offset = tuple(stored.offsets)
        # megatron-core omits prepended axes from the sizes of chunks that form no regular grid.
        sizes = (*(1 for _ in range(len(offset) - len(stored.sizes))), *stored.sizes)
        for start, size, whole in zip(offset, sizes, shape, strict=True):
            if start < 0 or size < 0 or start + size > whole:
                raise ValueError(f"a chunk of {key} exceeds its shape")
        place = places[dcp.MetadataIndex(key, offset)]
        chunks[offset] = Chunk(offset=offset, shape=sizes, place=place)
    covered = sum(math.prod(chunk.shape) for chunk in chunks.values())
    if covered != math.prod(shape):
        raise ValueError(f"the chunks of {key} hold {covered} of its {math.prod(shape)} elements")
    return TensorInfo(key=key, shape=shape, dtype=dtype, chunks=tuple(chunks.values()))


def _place(info: _StorageInfo) -> Place:
    name = str(info.relative_path)
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            f"{name} is compressed ({info.transform_descriptors}): save without storage-writer "
            "extensions."
        )
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(f"the index names a file outside of the checkpoint: {name}.")
    if info.offset < 0 or info.length < 1:
        raise ValueError(f"an entry of {name} has {info.length} bytes at offset {info.offset}")
    return Place(file=name, start=int(info.offset), length=int(info.length))
