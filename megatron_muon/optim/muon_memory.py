"""Memory that a wave of Muon takes on one rank, message by message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_muon.linalg import Segments, columns_at_once, newton_schulz_bytes, panel_bytes
from megatron_muon.optim.rule import MOST_CONVERTED
from megatron_muon.placement import Panels
from megatron_muon.placement.memory import Phase, WaveUse
from megatron_muon.placement.schemes import SOURCE, UPDATE

MOST_ELEMENTS_AHEAD = 1 << 23
"""Of β M + (1 − β) G that are made at once where they are sent in a narrower dtype."""

MOST_ELEMENTS = 1 << 27
"""Of matrices that are orthogonalized in one go; the iteration needs two to four times as much."""


def matrices_at_once(m: int, n: int) -> int:
    """Of m x n matrices, how many are orthogonalized in one go."""
    return max(1, MOST_ELEMENTS // (m * n))


def is_in_place(count: int, m: int, n: int, *, held: torch.dtype, compute: torch.dtype) -> bool:
    """Whether the updates of ``count`` matrices lie where the matrices were."""
    small, large = sorted((m, n))
    return count > matrices_at_once(m, n) or (
        held == compute and columns_at_once(count, small, large, compute.itemsize) < large
    )


@dataclass(frozen=True, kw_only=True)
class MuonMemory:
    """Memory of ``muon._Step.wave``.

    Attributes:
        held: Element type of messages and assembled matrices.
        compute: Element type of the iteration.
        looks_ahead: Whether what is sent is a sum (Nesterov).
        momentum: Element type in which M is kept.
        segments: How an (m, n) matrix is iterated.
    """

    held: torch.dtype
    compute: torch.dtype
    looks_ahead: bool
    momentum: torch.dtype
    segments: Callable[[int, int], Segments]

    def phases(self, use: WaveUse) -> list[Phase]:
        """Memory of a wave on one rank."""
        is_narrow = self.held.itemsize < 4
        arriving = use.sent[SOURCE] + use.received[SOURCE]
        back = use.received[UPDATE]
        widened = self.momentum.itemsize < 4
        sums = int(is_narrow or widened) + int(widened) if self.looks_ahead else 0
        ahead = 4 * MOST_ELEMENTS_AHEAD * sums
        converted = min(4 * MOST_CONVERTED, 2 * back) if is_narrow else 0
        panel = next(((s, j) for s, j in use.computed if isinstance(s, Panels)), None)
        middle = self._matrices(use, ahead) if panel is None else self._panel(use, *panel)
        first = Phase(peak=arriving + ahead, held=arriving)
        return [first, *middle, Phase(peak=back + converted, held=0)]

    def _panel(self, use: WaveUse, scheme: Panels, number: int) -> list[Phase]:
        """Between SOURCE and UPDATE, where this rank computes a panel."""
        held = scheme.panels[number].numel * self.held.itemsize
        space = held + self._panel_bytes(scheme, number)
        returning = use.sent[UPDATE] + use.received[UPDATE]
        begin = Phase(peak=max(use.received[SOURCE] + held, space), held=space)
        end = Phase(peak=max(space + use.sent[UPDATE], returning), held=returning)
        return [begin, *[Phase(peak=space, held=space)] * (use.messages - 3), end]

    def _matrices(self, use: WaveUse, ahead: int) -> list[Phase]:
        """Between SOURCE and UPDATE, where this rank computes whole matrices or nothing."""
        there, sent = use.received[SOURCE], use.sent[UPDATE]
        returning = sent + use.received[UPDATE]
        shapes = Counter(scheme.region(0).shape for scheme, _ in use.computed)
        waiting = sum(m * n * count for (m, n), count in shapes.items()) * self.held.itemsize
        peak, waiting = there + waiting, waiting + ahead
        for number, shape in enumerate(sorted(shapes)):
            space = self._batch_bytes(shapes[shape], *shape)
            before = sent if number else 0
            # A result that lies in the batch outlives the workspace.
            in_place = is_in_place(shapes[shape], *shape, held=self.held, compute=self.compute)
            after = 0 if in_place else space
            peak = max(peak, waiting + space + before, waiting + after + sent)
            waiting -= shapes[shape] * shape[0] * shape[1] * self.held.itemsize
        if use.messages == 2:
            return [Phase(peak=max(peak, returning), held=returning)]
        # Another rank's panels: requests are passed with nothing in memory.
        passed = [Phase(peak=there, held=0)] + [Phase(peak=0, held=0)] * (use.messages - 3)
        return [*passed, Phase(peak=returning, held=returning)]

    def _batch_bytes(self, count: int, m: int, n: int) -> int:
        at_once = min(count, matrices_at_once(m, n))
        segments = self.segments(m, n)
        return newton_schulz_bytes(at_once, m, n, segments, held=self.held, compute=self.compute)

    def _panel_bytes(self, scheme: Panels, number: int) -> int:
        (start, end), panel = scheme.rows[number], scheme.panels[number]
        m = min(scheme.shape)
        return panel_bytes(
            m,
            panel.numel // m,
            end - start,
            len(scheme.ranks),
            held=self.held,
            compute=self.compute,
        )
