"""Memory of the waves: blocks of fixed size, and buffers taken from them one after another."""

from __future__ import annotations

import math

import torch

from megatron_muon.placement.plan import Lane, LaneMemory, aligned


class Arena:
    """Buffers that follow one another in one block of memory.

    Args:
        nbytes: Size of the block; the plan says how much a wave needs.
        device: Device of the block.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._block = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Size of the block."""
        return self._block.nbytes

    @property
    def used(self) -> int:
        """Where the next buffer starts."""
        return self._used

    def take(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous buffer, not initialized."""
        nbytes = math.prod(shape) * dtype.itemsize
        start, self._used = self._used, self._used + aligned(nbytes)
        assert self._used <= self.nbytes, "a wave needs more memory than the plan has counted"
        return self._block[start : start + nbytes].view(dtype).view(shape)

    def rewind(self, position: int = 0) -> None:
        """Release every buffer taken at or after a position."""
        self._used = position


class LaneArenas:
    """The memory of a lane on one rank: a slot for each wave under way, and one for computing.

    Args:
        lane: The lane.
        need: What the plan counts for this rank.
        device: Device of the memory.
    """

    def __init__(self, lane: Lane, need: LaneMemory, device: torch.device) -> None:
        self.slots = [Arena(need.slot, device) for _ in range(lane.used_slots)]
        self.computed = Arena(need.computed, device)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(arena.nbytes for arena in (*self.slots, self.computed))
