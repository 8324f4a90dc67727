"""Memory of a step: counted while it is alive, and on CPU used again by the next step."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor


class MemoryPool:
    """Allocates and counts buffers.

    On CUDA a released buffer goes back to torch's allocator, which hands it out again, also to
    activations. On CPU that costs page faults in every step, so there a released buffer waits for
    the next request of the same size.

    Attributes:
        alive: Bytes that are allocated and not released.
        peak: The most that ``alive`` has been since ``reset``.

    Args:
        device: Device of the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.alive = 0
        self.peak = 0
        self._keeps = device.type == "cpu"
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def reset(self) -> None:
        """Start a step: count the peak from here."""
        self.peak = self.alive

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A contiguous buffer, not initialized."""
        nbytes = math.prod(shape) * dtype.itemsize
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)
        if not self._keeps:
            return torch.empty(shape, dtype=dtype, device=self.device)
        free = self._free[nbytes]
        block = free.pop() if free else torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return block.view(dtype).view(shape)

    def release(self, buffer: Tensor) -> None:
        """Take a buffer back; the caller drops every reference to it."""
        storage = buffer.untyped_storage()
        self.alive -= storage.nbytes()
        if self._keeps:
            block = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            self._free[storage.nbytes()].append(block)


class Workspace:
    """Named buffers of one computation.

    A buffer's content is undefined when taken; two that are needed together have different names.

    Args:
        pool: Where they are allocated; without one they are plain tensors.
    """

    def __init__(self, pool: MemoryPool | None = None) -> None:
        self._pool = pool
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A contiguous tensor; the same memory as the last one of this name, if that suffices."""
        numel = math.prod(shape)
        key = (name, dtype, device)
        held = self._buffers.get(key)
        if held is None or held.numel() < numel:
            # The smaller one is released first.
            self._release(key)
            held = None
            if self._pool is None:
                held = torch.empty(numel, dtype=dtype, device=device)
            else:
                held = self._pool.take(numel, dtype=dtype)
            self._buffers[key] = held
        return held[:numel].view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def clear(self) -> None:
        """Release everything."""
        for key in list(self._buffers):
            self._release(key)

    def _release(self, key: tuple[str, torch.dtype, torch.device]) -> None:
        buffer = self._buffers.pop(key, None)
        if buffer is not None and self._pool is not None:
            self._pool.release(buffer)
