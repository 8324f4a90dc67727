"""Memory that a wave of Orth-Dion takes on one rank, message by message."""

from __future__ import annotations

from collections import Counter

from megatron_muon.optim.dion_owner import blocks
from megatron_muon.placement import FactorShape, Scheme, Share
from megatron_muon.placement.memory import Phase, WaveUse
from megatron_muon.placement.schemes import BASIS, CAPTURED, RESPONSE, SOURCE, UPDATE, WARM


def dion_phases(use: WaveUse, itemsize: int, wide: int) -> list[Phase]:
    """Memory of ``orth_dion._Step.wave``.

    Args:
        use: What the rank has to do.
        itemsize: Bytes of an element of a message.
        wide: Bytes of an element of a factor.
    """
    sent, received = use.sent, use.received
    both = {where: sent[where] + received[where] for where in (*sent, *received)}
    owned = _Owned(use, wide)
    # A factor from a message is widened, and a product of it made, for one matrix at a time.
    widened = 0 if wide == itemsize else wide // itemsize
    product = max((_product_bytes(scheme, share, wide) for scheme, share in use.held), default=0)
    elements = received[SOURCE] if owned.u_kept else 0
    phases = []
    by_factors = use.messages > 3
    if by_factors:
        warm, source = both.get(WARM, 0), both.get(SOURCE, 0)
        phases.append(Phase(peak=warm + owned.one_v, held=warm))
        make = received[WARM] + min(received[WARM] * widened, product) + product + sent[SOURCE]
        phases.append(Phase(peak=max(make, source), held=source))
    else:
        phases.append(Phase(peak=both.get(SOURCE, 0), held=both.get(SOURCE, 0)))
    peak = received[SOURCE] + owned.finding_bases
    if by_factors:
        pack = elements + owned.u + sent[BASIS]
        held = elements + owned.u_kept + both.get(BASIS, 0)
        phases.append(Phase(peak=max(peak, pack, held), held=held))
        base = elements + owned.u_kept + received[BASIS]
        make = base + min(received[BASIS] * widened, product) + product + sent[RESPONSE]
        held = base + both.get(RESPONSE, 0)
        phases.append(Phase(peak=max(make, held), held=held))
        peak = 0
    base = elements + owned.u_kept + received[BASIS] + received[RESPONSE]
    peak = max(peak, base + owned.refreshing)
    base = owned.u_kept + owned.vw_kept + received[BASIS]
    held = base + both.get(UPDATE, 0)
    peak = max(peak, base + owned.u + owned.one_v + sent[UPDATE], base + sent[UPDATE] + owned.block)
    phases.append(Phase(peak=max(peak, held), held=held))
    apply = base + received[UPDATE] + max(min(received[UPDATE] * widened, product) + product, 0)
    held = owned.u_kept + owned.vw_kept + both.get(CAPTURED, 0)
    make = owned.u_kept + owned.vw_kept + sent[CAPTURED] + owned.block
    phases.append(Phase(peak=max(apply, make, held), held=held))
    phases.append(Phase(peak=held - sent[CAPTURED], held=0))
    return phases


class _Owned:
    """Bytes of factors of the matrices that a rank owns in a wave.

    Attributes:
        u: U of all.
        u_kept: U of those that are assembled.
        vw_kept: V and W of those that are assembled.
        one_v: V of the group with the most.
        block: Of B, or of a product, that is in memory at once.
        finding_bases: The most while U is found.
        refreshing: The most while V is found.
    """

    def __init__(self, use: WaveUse, wide: int) -> None:
        groups: Counter[tuple[FactorShape, bool]] = Counter()
        for scheme, _ in use.computed:
            assert scheme.factors is not None
            groups[scheme.factors, scheme.assembles] += 1
        u = {k: n * k[0].long * k[0].rank * wide for k, n in groups.items()}
        v = {k: n * k[0].short * k[0].rank * wide for k, n in groups.items()}
        core = sum(n * k[0].rank ** 2 * wide for k, n in groups.items())
        self.u, self.one_v = sum(u.values()), max(v.values(), default=0)
        self.u_kept = sum(size for (_, assembled), size in u.items() if assembled)
        self.vw_kept = 2 * sum(size for (_, assembled), size in v.items() if assembled)
        self.block = max((_block_bytes(*k, n, wide) for k, n in groups.items()), default=0)
        # What goes into QR beside what comes out of it, of one group.
        one_u = max(u.values(), default=0)
        self.finding_bases = self.u + max(one_u, self.block + self.one_v)
        self.refreshing = sum(v.values()) + core + max(2 * self.one_v, self.block)


def _block_bytes(shape: FactorShape, is_assembled: bool, count: int, wide: int) -> int:
    if not is_assembled:
        return 0
    part, (first, end) = next(blocks(shape, count))
    count = int(part.stop) - int(part.start)
    return count * (end - first) * shape.region.cols * wide


def _product_bytes(scheme: Scheme, share: Share, wide: int) -> int:
    """A holder's product before it is copied to its message, or a factor times the core."""
    if scheme.assembles or scheme.factors is None:
        return 0
    return max(share.rows, share.cols) * scheme.factors.rank * wide
