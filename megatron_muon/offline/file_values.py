"""Chunks of an imported checkpoint whose elements are in a file of ``torch.save``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.plain_names import PlainTensor
from megatron_muon.offline.reading import Checkpoint
from megatron_muon.offline.torch_files import Steps, at, read_torch_file


@dataclass(frozen=True, kw_only=True)
class FromFile:
    """A whole parameter (or its state) from the plain tensors of a file; can be pickled.

    Attributes:
        path: The file.
        parts: Every plain tensor of the parameter, with the keys that lead to its values.
        factor: Number that all are multiplied by.
    """

    path: Path
    parts: tuple[tuple[PlainTensor, Steps], ...]
    factor: float = 1.0

    def tensor(
        self, source: Checkpoint | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """The elements; rows that no plain tensor has (padding) are zero."""
        parameter = self.parts[0][0].parameter
        whole = torch.zeros(parameter.facts.shape, dtype=dtype)
        for plain, steps in self.parts:
            values = at(read_torch_file(self.path), steps)
            if self.factor != 1.0:
                exact = torch.promote_types(values.dtype, torch.float32)
                values = values.to(exact) * self.factor
            _require_range(values, dtype, f"{plain.name} of {self.path}")
            if whole.dim():
                plain.put(whole, values.to(dtype))
            else:
                whole.copy_(values)
        return whole.reshape(shape)


def _require_range(values: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    """Refuse finite values that are inf in a narrower element type."""
    both = dtype.is_floating_point and values.dtype.is_floating_point
    if not both or not values.numel():
        return
    largest = torch.finfo(dtype).max
    if torch.finfo(values.dtype).max > largest:
        finite = values.abs().nan_to_num(nan=0.0, posinf=0.0)
        if float(finite.max()) > largest:
            raise CheckpointError(f"{what} has {float(finite.max()):g}, which is inf as {dtype}.")


@dataclass(frozen=True, kw_only=True)
class FactorFromFile:
    """A right factor of a file.

    Attributes:
        path: The file.
        steps: Keys that lead to it.
    """

    path: Path
    steps: Steps

    def tensor(
        self, source: Checkpoint | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """The factor."""
        values: torch.Tensor = at(read_torch_file(self.path), self.steps)
        return values.to(dtype).reshape(shape).contiguous()
