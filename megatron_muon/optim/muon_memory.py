"""Memory that a wave of Muon takes on one rank, message by message."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_muon.linalg import (
    PanelWork,
    Segments,
    columns_at_once,
    newton_schulz_bytes,
    panel_bytes,
)
from megatron_muon.optim.rule import MOST_CONVERTED
from megatron_muon.placement import Panels, Scheme, Share
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


def widened_at_once(sizes: Sequence[int], most_bytes: int) -> list[list[tuple[int, int, int]]]:
    """Parts of 16-bit momenta that are summed in fp32 together.

    Args:
        sizes: Elements of each range.
        most_bytes: Of fp32 copies, but for one element.

    Returns:
        Groups of (range, start, stop).
    """
    most = max(1, min(MOST_CONVERTED, most_bytes // 4))
    groups: list[list[tuple[int, int, int]]] = []
    room = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if room == 0:
                groups.append([])
                room = most
            stop = min(size, start + room)
            groups[-1].append((index, start, stop))
            room -= stop - start
            start = stop
    return groups


@dataclass(frozen=True, kw_only=True)
class MuonMemory:
    """Memory of ``muon._Step.wave``.

    Attributes:
        held: Element type of messages and assembled matrices.
        compute: Element type of the iteration.
        looks_ahead: Whether what is sent is a sum (Nesterov).
        momentum: Element type in which M is kept.
        segments: How an (m, n) matrix is iterated.
        device: Where.
    """

    held: torch.dtype
    compute: torch.dtype
    looks_ahead: bool
    momentum: torch.dtype
    segments: Callable[[int, int], Segments]
    device: torch.device

    def phases(self, use: WaveUse) -> list[Phase]:
        """Memory of a wave on one rank."""
        arriving = use.sent[SOURCE] + use.received[SOURCE]
        back = use.received[UPDATE]
        panel = next(((s, j) for s, j in use.computed if isinstance(s, Panels)), None)
        middle = self._matrices(use) if panel is None else self._panel(use, *panel)
        first = Phase(peak=arriving + self._ahead(use.sent[SOURCE]), held=arriving)
        converted = self._converted(min(back, self._in_small_runs(use)))
        return [first, *middle, Phase(peak=back + converted, held=0)]

    def before(self, sizes: Sequence[int], most: int) -> int:
        """Bytes of the fp32 copies in which 16-bit momenta are summed; see ``Method.before``."""
        if self.momentum.itemsize >= 4:
            return 0
        groups = widened_at_once(sizes, most)
        return max((4 * sum(b - a for _, a, b in group) for group in groups), default=0)

    def _ahead(self, nbytes: int) -> int:
        """Bytes to fill in so many of B."""
        widened = self.momentum.itemsize < 4
        sums = int(self.held.itemsize < 4 or widened) + int(widened) if self.looks_ahead else 0
        return min(MOST_ELEMENTS_AHEAD, nbytes // self.held.itemsize) * 4 * sums

    def _converted(self, nbytes: int) -> int:
        """Bytes to add so many of the update to the weights."""
        is_narrow = self.held.itemsize < 4
        return min(MOST_CONVERTED, nbytes // self.held.itemsize) * 4 * is_narrow

    def _in_small_runs(self, use: WaveUse) -> int:
        """Bytes that a rank holds in runs that are small enough to be converted, at most."""
        return sum(_in_small_runs(scheme, share) for scheme, share in use.held) * self.held.itemsize

    def _local(self, use: WaveUse, *, converted: bool = False) -> list[int]:
        """Bytes that a rank holds itself of each matrix or panel that it computes.

        Args:
            use: The wave.
            converted: Only those in runs that are small enough to be converted.
        """
        shares = {id(scheme): share for scheme, share in use.held}
        found = []
        for scheme, number in use.computed:
            share = shares.get(id(scheme))
            numel = 0 if share is None else share.elements_in(scheme.region(number))
            if share is not None and converted:
                numel = min(numel, _in_small_runs(scheme, share))
            found.append(numel * self.held.itemsize)
        return found

    def _panel(self, use: WaveUse, scheme: Panels, number: int) -> list[Phase]:
        """Between SOURCE and UPDATE, where this rank computes a panel."""
        held = scheme.panels[number].numel * self.held.itemsize
        (local,), (small,) = self._local(use), self._local(use, converted=True)
        steps = [
            Phase(peak=held + peak, held=held + left)
            for peak, left in self._panel_bytes(scheme, number)
        ]
        filling = held + max(use.received[SOURCE], self._ahead(local))
        steps[0] = steps[0]._replace(peak=max(filling, steps[0].peak))
        *requests, last = steps
        # The messages of other matrices of the wave are passed with everything in memory.
        passed = [last] * (use.messages - 2 - len(requests))
        applying = last.held + use.sent[UPDATE] + self._converted(small)
        returning = use.sent[UPDATE] + use.received[UPDATE]
        end = Phase(peak=max(last.peak, applying, returning), held=returning)
        return [*requests, *passed, end]

    def _matrices(self, use: WaveUse) -> list[Phase]:
        """Between SOURCE and UPDATE, where this rank computes whole matrices or nothing."""
        there, sent = use.received[SOURCE], use.sent[UPDATE]
        returning = sent + use.received[UPDATE]
        shapes = Counter(scheme.region(0).shape for scheme, _ in use.computed)
        local: dict[tuple[int, int], int] = defaultdict(int)
        small: dict[tuple[int, int], int] = defaultdict(int)
        for found, converted in ((local, False), (small, True)):
            for (scheme, _), nbytes in zip(
                use.computed, self._local(use, converted=converted), strict=True
            ):
                found[scheme.region(0).shape] += nbytes
        waiting = sum(m * n * count for (m, n), count in shapes.items()) * self.held.itemsize
        peak = there + waiting
        for number, shape in enumerate(sorted(shapes)):
            space = self._batch_bytes(shapes[shape], *shape)
            before = sent if number else 0
            # A result that lies in the batch outlives the workspace.
            in_place = is_in_place(shapes[shape], *shape, held=self.held, compute=self.compute)
            after = 0 if in_place else space
            computing = before + max(space, self._ahead(local[shape]))
            peak = max(peak, waiting + max(computing, after + sent + self._converted(small[shape])))
            waiting -= shapes[shape] * shape[0] * shape[1] * self.held.itemsize
        if use.messages == 2:
            return [Phase(peak=max(peak, returning), held=returning)]
        # Another rank's panels: requests are passed with nothing in memory.
        passed = [Phase(peak=peak, held=sent)] + [Phase(peak=sent, held=sent)] * (use.messages - 3)
        return [*passed, Phase(peak=returning, held=returning)]

    def _batch_bytes(self, count: int, m: int, n: int) -> int:
        at_once = min(count, matrices_at_once(m, n))
        return newton_schulz_bytes(
            at_once, m, n, self.segments(m, n), self.device, held=self.held, compute=self.compute
        )

    def _panel_bytes(self, scheme: Panels, number: int) -> list[tuple[int, int]]:
        m, work = min(scheme.shape), PanelWork(team=scheme.team, number=number)
        columns = scheme.panels[number].numel // m
        segments = self.segments(*scheme.shape)
        return panel_bytes(
            m, columns, work, segments, self.device, held=self.held, compute=self.compute
        )


def _in_small_runs(scheme: Scheme, share: Share) -> int:
    """Elements of a share in runs that ``add_all`` converts; panels cut a run into any pieces."""
    return sum(
        run.numel for run in share.runs if run.numel <= MOST_CONVERTED or isinstance(scheme, Panels)
    )
