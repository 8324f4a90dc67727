"""Memory that is kept from one call to the next."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """Named buffers that grow to what was asked of them and stay until ``clear``.

    A buffer's content is undefined when taken; two that are needed together have different names.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A contiguous tensor; the same memory as the last one of this name."""
        numel = math.prod(shape)
        key = (name, dtype, device)
        held = self._buffers.get(key)
        if held is None or held.numel() < numel:
            # The smaller one is let go first.
            self._buffers.pop(key, None)
            held = self._buffers[key] = torch.empty(numel, dtype=dtype, device=device)
        return held[:numel].view(shape)

    def clear(self) -> None:
        """Let go of everything."""
        self._buffers.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())
