"""The index of a DCP checkpoint (``.metadata``): which tensor lies in which bytes of which file."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.safe_pickle import load_pickle

INDEX_FILE = ".metadata"

_CLASSES = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
)
_NAMES: Mapping[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind for kind in _CLASSES
}


Offset = tuple[int, ...]
"""An index or a size along every axis."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Bytes of a data file.

    Attributes:
        file: Name of the file in the checkpoint's folder.
        start: First byte.
        length: Number of bytes.
    """

    file: str
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor and the bytes that hold it.

    Attributes:
        offset: First index along every axis.
        shape: Size along every axis.
        place: Where it is stored.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    place: Place

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index along every axis."""
        return tuple(a + b for a, b in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What the index says of a tensor.

    Attributes:
        key: Its key.
        shape: Global shape.
        dtype: Element type.
        chunks: Boxes that cover it.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Index:
    """Everything in a checkpoint.

    Attributes:
        tensors: By key.
        blobs: Places of what is no tensor, by key.
    """

    tensors: dict[str, TensorInfo]
    blobs: dict[str, Place]

    def file_sizes(self) -> dict[str, int]:
        """Bytes that every data file has at least."""
        sizes: dict[str, int] = {}
        for place in self._places():
            sizes[place.file] = max(sizes.get(place.file, 0), place.start + place.length)
        return sizes

    def _places(self) -> Iterable[Place]:
        yield from self.blobs.values()
        for info in self.tensors.values():
            for chunk in info.chunks:
                yield chunk.place


def read_index(folder: Path) -> Index:
    """Read ``.metadata``.

    Raises:
        CheckpointError: It is missing, damaged, or no index.
    """
    path = folder / INDEX_FILE
    if not path.exists():
        raise CheckpointError(f"{folder} is incomplete: its {INDEX_FILE} is missing.")
    with path.open("rb") as stream:
        metadata = load_pickle(stream, source=str(path), more=_NAMES).value
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path} is a foreign pickle, and no index of a checkpoint.")
    try:
        return _from_metadata(metadata)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        what = error if isinstance(error, ValueError) else repr(error)
        raise CheckpointError(f"{path} is damaged: {what}.") from error


def _from_metadata(metadata: Metadata) -> Index:
    places = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): _place(info)
        for index, info in metadata.storage_data.items()
    }
    tensors: dict[str, TensorInfo] = {}
    blobs: dict[str, Place] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks = {
                tuple(chunk.offsets): _chunk(chunk, places[key, tuple(chunk.offsets)])
                for chunk in entry.chunks
            }
            tensors[key] = _whole(
                TensorInfo(
                    key=key,
                    shape=tuple(entry.size),
                    dtype=entry.properties.dtype,
                    chunks=tuple(chunks.values()),
                )
            )
        else:
            blobs[key] = places[key, None]
    return Index(tensors=tensors, blobs=blobs)


def _whole(info: TensorInfo) -> TensorInfo:
    """Refuse a tensor whose chunks do not make it up: bytes are copied without being looked at."""
    if not isinstance(info.dtype, torch.dtype):
        raise ValueError(f"{info.key} has the element type {info.dtype!r}")
    for chunk in info.chunks:
        ends = zip(chunk.offset, chunk.end, info.shape, strict=True)
        if any(low < 0 or low > high or high > size for low, high, size in ends):
            raise ValueError(f"a chunk of {info.key} is not inside of it")
    covered = sum(math.prod(chunk.shape) for chunk in info.chunks)
    if covered != math.prod(info.shape):
        raise ValueError(
            f"the chunks of {info.key} hold {covered} of its {math.prod(info.shape)} elements"
        )
    return info


def _chunk(chunk: ChunkStorageMetadata, place: Place) -> Chunk:
    # megatron-core leaves prepended axes out of the sizes of chunks that lie on no regular grid.
    missing = len(chunk.offsets) - len(chunk.sizes)
    return Chunk(
        offset=tuple(chunk.offsets), shape=(*(1 for _ in range(missing)), *chunk.sizes), place=place
    )


def _place(info: _StorageInfo) -> Place:
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            f"{info.relative_path} is compressed ({info.transform_descriptors}): save without "
            "storage-writer extensions."
        )
    name = str(info.relative_path)
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(f"the index names a file outside of the checkpoint: {name}.")
    if info.offset < 0 or info.length < 1:
        raise ValueError(f"an entry of {name} has {info.length} bytes from {info.offset} on")
    return Place(file=name, start=int(info.offset), length=int(info.length))


def write_index(
    path: Path,
    entries: Iterable[tuple[str, tuple[int, ...], torch.dtype, Sequence[tuple[Offset, Offset]]]],
    places: Mapping[tuple[str, Offset | None], Place],
) -> None:
    """Write ``.metadata``.

    Args:
        path: The file.
        entries: Key, shape, element type and the (offset, shape) of all chunks of every tensor.
        places: Where everything was written, by key and offset (None of what is no tensor).
    """
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        key: TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(size))
                for offset, size in chunks
            ],
        )
        for key, shape, dtype, chunks in entries
    }
    storage = {}
    for (key, offset), place in places.items():
        if offset is None:
            state[key] = BytesStorageMetadata()
        index = MetadataIndex(key, None if offset is None else torch.Size(offset))
        storage[index] = _StorageInfo(place.file, place.start, place.length)
    metadata = Metadata(
        state_dict_metadata=state,
        planner_data=None,
        storage_data=storage,
        storage_meta=StorageMeta(),
    )
    with path.open("wb") as stream:
        pickle.dump(metadata, stream)
        stream.flush()
        os.fsync(stream.fileno())
