"""Buffers of an exchange, allocated once and used by every wave of every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_muon.placement.program import Message, WaveProgram
from megatron_muon.placement.waves import MESSAGE_SLOTS


class WaveMemory:
    """Message slots that the waves take in turn, and one place for assembled matrices.

    While wave k is computed, wave k+1 is on its way to the owners and wave k-1 back. The way back
    of a wave uses the slot of its way there, which has been read by then.

    Args:
        programs: The waves as this rank sees them.
        size: Number of ranks of the group; alone, what is sent is what is received.
        dtype: Element type.
        device: Device.
        small_side_first: Of batches of tall matrices the transpose is contiguous.
    """

    def __init__(
        self,
        programs: Sequence[WaveProgram],
        *,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        small_side_first: bool = False,
    ) -> None:
        self._alone = size == 1
        self._small_side_first = small_side_first
        both = [message for p in programs for message in (p.out, p.back)]
        flight = max((self._numel(message) for message in both), default=0)
        matrices = max((_matrix_elements(p) for p in programs), default=0)
        count = min(MESSAGE_SLOTS, len(programs))
        self._slots = [torch.empty(flight, dtype=dtype, device=device) for _ in range(count)]
        self._matrices = torch.empty(matrices, dtype=dtype, device=device)

    @property
    def numel(self) -> int:
        """Elements of all buffers."""
        return self._matrices.numel() + sum(slot.numel() for slot in self._slots)

    def message(self, wave: int, message: Message) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers to send and to receive, for either way of a wave."""
        slot = self._slots[wave % len(self._slots)]
        sent = sum(message.sent_counts)
        if self._alone:
            return slot[:sent], slot[:sent]
        return slot[:sent], slot[sent : sent + sum(message.received_counts)]

    def batches(self, program: WaveProgram) -> list[torch.Tensor]:
        """Batches (B, m, n) of a wave, each contiguous, or turned if so told."""
        found, offset = [], 0
        for batch in program.batches:
            m, n = batch.shape
            count = len(batch.matrices)
            flat = self._matrices[offset : offset + count * m * n]
            turned = m > n and self._small_side_first
            found.append(flat.view(count, n, m).mT if turned else flat.view(count, m, n))
            offset += count * m * n
        return found

    def _numel(self, message: Message) -> int:
        received = 0 if self._alone else sum(message.received_counts)
        return sum(message.sent_counts) + received


def _matrix_elements(program: WaveProgram) -> int:
    return sum(len(b.matrices) * b.shape[0] * b.shape[1] for b in program.batches)
