"""What is to be written into a checkpoint: every tensor as chunks, every chunk with its source."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_muon.offline.index import Place, TensorInfo
from megatron_muon.offline.reading import Checkpoint


class Value(Protocol):
    """How the elements of a chunk come about; can be pickled, for worker processes."""

    def tensor(
        self, source: Checkpoint | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """The elements.

        Args:
            source: The checkpoint that is converted, if any.
            shape: Of the chunk.
            dtype: Of the tensor.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of the source as they are: a chunk does not know its tensor's name.

    Attributes:
        place: Where they are.
    """

    place: Place

    def tensor(
        self, source: Checkpoint | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Never asked for: the writer copies them."""
        raise AssertionError("bytes are copied")


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of a tensor of the source, times a number.

    Attributes:
        key: Of the tensor.
        offset: First index of the box along every axis.
        shape: Its size along every axis; as many elements as the chunk.
        factor: The number.
    """

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    factor: float = 1.0

    def tensor(
        self, source: Checkpoint | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Multiplied in float32 at least, rounded once."""
        assert source is not None
        values = source.read_box(self.key, self.offset, self.shape)
        if self.factor != 1.0:
            exact = values.to(torch.promote_types(values.dtype, torch.float32))
            values = exact.mul_(self.factor)
        return values.to(dtype).reshape(shape)


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
    """A box of a tensor that is written.

    Attributes:
        offset: First index along every axis.
        shape: Size along every axis.
        value: Its elements.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    value: Value


@dataclass(frozen=True, kw_only=True)
class OutTensor:
    """A tensor that is written.

    Attributes:
        key: Its key.
        shape: Global shape.
        dtype: Element type.
        chunks: Boxes that cover it once.
        rule: A few words on where its elements come from.
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


@dataclass(frozen=True, kw_only=True)
class OutBlob:
    """An entry that is no tensor.

    Attributes:
        key: Its key.
        content: Its bytes, or where they are in the source.
    """

    key: str
    content: bytes | Place


@dataclass(frozen=True, kw_only=True)
class Output:
    """Everything of a checkpoint.

    Attributes:
        tensors: The tensors.
        blobs: What is no tensor, without the common state.
        common: The common state.
        common_in_file: True to write it as ``common.pt`` (megatron-core up to 0.18).
        backend: ``metadata.json``.
        notes: Sentences that the user is to read.
    """

    tensors: tuple[OutTensor, ...]
    blobs: tuple[OutBlob, ...]
    common: dict[str, object]
    common_in_file: bool
    backend: dict[str, object]
    notes: tuple[str, ...] = field(default=())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def copied(info: TensorInfo, key: str, rule: str) -> OutTensor:
    """A tensor of the source as it is, under a key."""
    return OutTensor(
        key=key,
        shape=info.shape,
        dtype=info.dtype,
        chunks=tuple(
            OutChunk(offset=chunk.offset, shape=chunk.shape, value=Bytes(place=chunk.place))
            for chunk in info.chunks
        ),
        rule=rule,
    )


def scaled(info: TensorInfo, key: str, factor: float, dtype: torch.dtype, rule: str) -> OutTensor:
    """A tensor of the source times a number, in the same chunks."""
    return OutTensor(
        key=key,
        shape=info.shape,
        dtype=dtype,
        chunks=tuple(
            OutChunk(
                offset=chunk.offset,
                shape=chunk.shape,
                value=Box(key=info.key, offset=chunk.offset, shape=chunk.shape, factor=factor),
            )
            for chunk in info.chunks
        ),
        rule=rule,
    )


def zeros(info: TensorInfo, key: str, dtype: torch.dtype, rule: str) -> OutTensor:
    """Zeros in the shape and the chunks of a tensor of the source."""
    return OutTensor(
        key=key,
        shape=info.shape,
        dtype=dtype,
        chunks=tuple(
            OutChunk(offset=chunk.offset, shape=chunk.shape, value=Zeros()) for chunk in info.chunks
        ),
        rule=rule,
    )
