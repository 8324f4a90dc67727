"""A checkpoint that is to be written: every tensor as chunks, every chunk with its source."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_muon.offline.index import Chunk, Place, TensorInfo
from megatron_muon.offline.reading import Checkpoint


class Value(Protocol):
    """The source of a chunk's elements."""

    def tensor(
        self, source: Checkpoint | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """The elements in the chunk's shape, made when they are asked for."""
        ...


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of the source as they are: a stored chunk does not hold its tensor's name."""

    place: Place

    def tensor(
        self, source: Checkpoint | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Never called: the writer copies the bytes."""
        raise AssertionError("bytes are copied")


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of a tensor of the source, times a factor.

    Attributes:
        info: The tensor.
        offset: First index along every axis.
        shape: Size along every axis; as many elements as the chunk.
        factor: The factor.
    """

    info: TensorInfo
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    factor: float = 1.0

    def tensor(
        self, source: Checkpoint | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Multiplied in float32 at least, rounded once."""
        assert source is not None
        values = source.read_box(self.info.key, self.offset, self.shape)
        if self.factor != 1.0:
            exact = values.to(torch.promote_types(values.dtype, torch.float32))
            values = exact.mul_(self.factor)
        return values.to(dtype).reshape(shape)


def whole(info: TensorInfo) -> Box:
    """All of a tensor."""
    return Box(info=info, offset=(0,) * len(info.shape), shape=info.shape)


@dataclass(frozen=True, kw_only=True)
class Zeros:
    """Elements without a source."""

    def tensor(
        self, source: Checkpoint | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """All zero."""
        return torch.zeros(shape, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class OutChunk:
    """A box of a tensor that is written, with the source of its elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    value: Value


@dataclass(frozen=True, kw_only=True)
class OutTensor:
    """A tensor that is written.

    Attributes:
        key: Its key.
        shape: Global shape.
        dtype: Of the elements.
        chunks: Boxes that cover it once.
        rule: Where its elements come from, in words.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[OutChunk, ...]
    rule: str

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.key}  {described(self.shape, self.dtype)}  {self.rule}"


@dataclass(frozen=True, kw_only=True)
class OutBlob:
    """An entry that is no tensor: its bytes, or their place in the source."""

    key: str
    content: bytes | Place


@dataclass(frozen=True, kw_only=True)
class Output:
    """Everything of a checkpoint.

    Attributes:
        tensors: The tensors.
        blobs: Entries that are no tensors, without the common state.
        common: The common state.
        common_in_file: True to write it as ``common.pt`` (megatron-core up to 0.18).
        backend: ``metadata.json``.
        notes: Sentences for the user.
    """

    tensors: tuple[OutTensor, ...]
    blobs: tuple[OutBlob, ...]
    common: dict[str, object]
    common_in_file: bool
    backend: dict[str, object]
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def copied(info: TensorInfo, key: str, rule: str) -> OutTensor:
    """A tensor of the source as it is, under a key."""
    return in_chunks_of(info, key, info.dtype, rule, lambda chunk: Bytes(place=chunk.place))


def in_chunks_of(
    info: TensorInfo, key: str, dtype: torch.dtype, rule: str, value: Callable[[Chunk], Value]
) -> OutTensor:
    """A tensor in the shape and the chunks of a tensor of the source."""
    chunks = tuple(OutChunk(offset=c.offset, shape=c.shape, value=value(c)) for c in info.chunks)
    return OutTensor(key=key, shape=info.shape, dtype=dtype, chunks=chunks, rule=rule)


def in_one_chunk(
    key: str, shape: tuple[int, ...], dtype: torch.dtype, rule: str, value: Value
) -> OutTensor:
    """A tensor that is one chunk."""
    chunk = OutChunk(offset=(0,) * len(shape), shape=shape, value=value)
    return OutTensor(key=key, shape=shape, dtype=dtype, chunks=(chunk,), rule=rule)


def described(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Shape and dtype on one line of a listing."""
    sizes = "x".join(str(size) for size in shape) or "scalar"
    return f"{sizes}  {str(dtype).removeprefix('torch.')}"
