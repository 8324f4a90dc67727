"""Memory of a step: live bytes are counted, and on CPU buffers are reused by the next step."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor


class MemoryPool:
    """Allocates and counts buffers.

    On CUDA a released buffer returns to torch's allocator, which can reuse it for activations. On
    CPU that costs page faults in every step, so a released buffer is kept for the next request of
    the same size.

    Attributes:
        alive: Bytes allocated and not released.
        peak: Maximum of ``alive`` since ``reset``.

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
        """Allocate a contiguous, uninitialized buffer."""
        nbytes = math.prod(shape) * dtype.itemsize
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)
        if not self._keeps:
            return torch.empty(shape, dtype=dtype, device=self.device)
        free = self._free[nbytes]
        block = free.pop() if free else torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return block.view(dtype).view(shape)

    def release(self, buffer: Tensor) -> None:
        """Release a buffer, to which the caller keeps no reference."""
        storage = buffer.untyped_storage()
        self.alive -= storage.nbytes()
        if self._keeps:
            block = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            self._free[storage.nbytes()].append(block)


class Workspace:
    """Named buffers of one computation.

    A buffer's content is undefined when taken; simultaneously used ones have different names.

    Args:
        pool: Allocates the buffers; without a pool they are plain tensors.
    """

    def __init__(self, pool: MemoryPool | None = None) -> None:
        self._pool = pool
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a contiguous tensor, in the memory of the last one of this name if sufficient."""
        numel = math.prod(shape)
        key = (name, dtype, device)
        held = self._buffers.get(key)
        if held is None or held.numel() < numel:
            # Release the smaller one first.
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
        """Allocated bytes."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def clear(self) -> None:
        """Release everything."""
        for key in list(self._buffers):
            self._release(key)

    def _release(self, key: tuple[str, torch.dtype, torch.device]) -> None:
        buffer = self._buffers.pop(key, None)
        if buffer is not None and self._pool is not None:
            self._pool.release(buffer)
