"""A checkpoint to be written: every tensor as chunks, every chunk with its source."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.index import Chunk, Place, TensorInfo
from megatron_muon.offline.reading import Checkpoint

Shape = tuple[int, ...]


class Value(Protocol):
    """The source of a chunk's elements."""

    def tensor(self, source: Checkpoint | None, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Compute the elements in the chunk's shape."""
        ...


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of a source tensor, with as many elements as the chunk, times a factor."""

    info: TensorInfo
    offset: Shape
    shape: Shape
    factor: float = 1.0

    def tensor(self, source: Checkpoint | None, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Read and multiply, in float32 or wider, rounded once."""
        assert source is not None
        values = source.read_box(self.info.key, self.offset, self.shape)
        if self.factor != 1.0:
            exact = values.to(torch.promote_types(values.dtype, torch.float32))
            values = exact.mul_(self.factor)
        return values.to(dtype).reshape(shape)


def whole(info: TensorInfo) -> Box:
    """Return the box of all elements of a tensor."""
    return Box(info=info, offset=(0,) * len(info.shape), shape=info.shape)


@dataclass(frozen=True, kw_only=True)
class Zeros:
    """Elements without a source."""

    def tensor(self, source: Checkpoint | None, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(shape, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class OutChunk:
    """A box of a tensor to be written, with the source of its elements.

    The stored bytes of a source chunk (``Place``) can be copied, as they do not contain a name.
    """

    offset: Shape
    shape: Shape
    value: Value | Place


@dataclass(frozen=True, kw_only=True)
class OutTensor:
    """A tensor to be written as disjoint chunks; ``rule`` describes the source of its elements."""

    key: str
    shape: Shape
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
class Output:
    """A whole checkpoint to be written.

    Attributes:
        tensors: The tensors.
        blobs: Non-tensor entries by key, without the common state: bytes, or their place in the
            source.
        common: The common state.
        common_in_file: True to write it as ``common.pt`` (megatron-core up to 0.18).
        backend: Content of ``metadata.json``.
        notes: Sentences for the user.
    """

    tensors: tuple[OutTensor, ...]
    blobs: Mapping[str, bytes | Place]
    common: dict[str, object]
    common_in_file: bool
    backend: dict[str, object]
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def copied(info: TensorInfo, key: str, rule: str) -> OutTensor:
    """Return an unchanged source tensor under a key."""
    return in_chunks_of(info, key, info.dtype, rule, lambda chunk: chunk.place)


def in_chunks_of(
    info: TensorInfo,
    key: str,
    dtype: torch.dtype,
    rule: str,
    value: Callable[[Chunk], Value | Place],
) -> OutTensor:
    """Return a tensor with the shape and chunks of a source tensor."""
    chunks = tuple(OutChunk(offset=c.offset, shape=c.shape, value=value(c)) for c in info.chunks)
    return OutTensor(key=key, shape=info.shape, dtype=dtype, chunks=chunks, rule=rule)


def in_one_chunk(key: str, shape: Shape, dtype: torch.dtype, rule: str, value: Value) -> OutTensor:
    """Return a tensor of a single chunk."""
    chunk = OutChunk(offset=(0,) * len(shape), shape=shape, value=value)
    return OutTensor(key=key, shape=shape, dtype=dtype, chunks=(chunk,), rule=rule)


def described(shape: Shape, dtype: torch.dtype) -> str:
    """Return shape and dtype for a listing."""
    sizes = "x".join(str(size) for size in shape) or "scalar"
    return f"{sizes}  {str(dtype).removeprefix('torch.')}"


def require_form(values: torch.Tensor, shape: Shape, dtype: torch.dtype, name: str) -> None:
    """Refuse a computed tensor of another shape or dtype than planned."""
    if tuple(values.shape) != shape or values.dtype != dtype:
        raise CheckpointError(
            f"{name} is {values.dtype} {tuple(values.shape)} and should be {dtype} {shape}."
        )
