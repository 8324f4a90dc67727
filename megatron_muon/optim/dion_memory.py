"""Memory that a wave of Orth-Dion takes on one rank, message by message.

In the order of ``orth_dion.OrthDionStep.wave``, all that it allocates: what is counted here is at
least what a step takes, whatever the bound that the user gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_muon.optim.dion_owner import MOST_SENT, blocks
from megatron_muon.optim.held_batch import applied_bytes, batches, multiplied_bytes
from megatron_muon.optim.rule import MOST_CONVERTED
from megatron_muon.placement import FactorShape, Scheme, Share
from megatron_muon.placement.memory import Phase, WaveUse
from megatron_muon.placement.schemes import BASIS, CAPTURED, RESPONSE, SOURCE, UPDATE, WARM, Round


@dataclass(frozen=True, kw_only=True)
class DionMemory:
    """How much a step of Orth-Dion takes of each thing.

    Attributes:
        narrow: Bytes of an element of a message.
        wide: Bytes of an element of a factor.
        is_polar: Whether V is a polar factor, which takes more to compute.
    """

    narrow: int
    wide: int
    is_polar: bool

    def phases(self, use: WaveUse) -> list[Phase]:
        """Memory of a wave."""
        owned, held = self._owned(use), use.held
        is_alone = not any(use.received.values())
        sent = use.sent
        there: Mapping[Round, int] = sent if is_alone else use.received
        flying = {w: there[w] if is_alone else sent[w] + there[w] for w in (*sent, *there)}

        def under_way(where: Round) -> int:
            return flying.get(where, 0)

        multiplied = self._most(held, by_factors=True)
        applied = self._most(held, by_factors=False)
        phases = []
        by_factors = use.messages > 3
        if by_factors:
            warm = under_way(WARM)
            phases.append(Phase(peak=max(sent[WARM] + owned.stacked, warm), held=warm))
        make = there[WARM] + sent[SOURCE] + multiplied if by_factors else 0
        source = under_way(SOURCE)
        phases.append(Phase(peak=max(make, source), held=source))
        peak = there[SOURCE] + owned.finding
        elements = there[SOURCE] if owned.u_kept else 0
        if by_factors:
            pack = elements + owned.u + sent[BASIS] + owned.basis_sent
            after = elements + owned.u_kept + under_way(BASIS)
            phases.append(Phase(peak=max(peak, pack, after), held=after))
            base = elements + owned.u_kept + there[BASIS]
            after = base + under_way(RESPONSE)
            make = base + sent[RESPONSE] + multiplied
            phases.append(Phase(peak=max(make, after), held=after))
            peak = 0
        base = owned.u_kept + there[BASIS]
        peak = max(peak, elements + there[RESPONSE] + base + owned.refreshing)
        packed = sent[UPDATE] if owned.sends_factors else 0
        peak = max(peak, base + packed + owned.refreshed)
        base += owned.vw_kept
        after = base + under_way(UPDATE)
        peak = max(peak, base + sent[UPDATE] + owned.given_back)
        phases.append(Phase(peak=max(peak, after), held=after))
        base += there[UPDATE]
        peak = base + max(applied, self._converted(there[UPDATE]))
        base = owned.u_kept + owned.vw_kept
        after = base + under_way(CAPTURED)
        peak = max(peak, base + sent[CAPTURED] + owned.given_back, after)
        phases.append(Phase(peak=peak, held=after))
        phases.append(Phase(peak=base + there[CAPTURED] + self._converted(there[CAPTURED]), held=0))
        return phases

    def _converted(self, nbytes: int) -> int:
        """Elements of messages that are added to weights, in the dtype of these."""
        if self.narrow == self.wide:
            return 0
        return min(MOST_CONVERTED * self.wide, nbytes * self.wide // self.narrow)

    def _most(self, held: list[tuple[Scheme, Share]], *, by_factors: bool) -> int:
        """The batch with most memory of those that are multiplied, or of all that are applied."""
        chosen = [
            (scheme, share)
            for scheme, share in held
            if not (scheme.assembles if by_factors else scheme.carries_elements(UPDATE, share))
        ]
        count = multiplied_bytes if by_factors else applied_bytes
        return max((count(chosen, found, self.wide) for found in batches(chosen)), default=0)

    def _owned(self, use: WaveUse) -> _Owned:
        groups: Counter[tuple[FactorShape, bool]] = Counter()
        for scheme, _ in use.computed:
            assert scheme.factors is not None, "the plan is one of another optimizer"
            groups[scheme.factors, scheme.assembles] += 1
        found = _Owned()
        for (shape, is_assembled), count in groups.items():
            u, v, core = (
                count * size * shape.rank * self.wide
                for size in (shape.long, shape.short, shape.rank)
            )
            block, stacked = self._block(shape, count) if is_assembled else (0, v)
            added = 0 if is_assembled else self._converted(u * self.narrow // self.wide)
            making = block + (stacked if is_assembled else 0)
            found.stacked = max(found.stacked, 0 if is_assembled else v)
            # Products, then QR: its input, Q, R, and what of R is left below dropped columns.
            finding = max(u + max(making, added), 2 * (u + core))
            found.finding = max(found.finding, finding - u - core)
            found.u += u
            more = 2 * v + 4 * core if self.is_polar else 0
            refreshing = max(v + max(block, added), 3 * v + 2 * core + more)
            kept = 2 * v + core + (core if self.is_polar else 0)
            found.refreshing = max(found.refreshing, refreshing - kept)
            found.previous += kept
            found.cores += core
            in_order = [self._in_order(size) for size in (u, v, core)]
            if not is_assembled:
                found.basis_sent = max(found.basis_sent, in_order.pop(0))
            found.one_more = max(found.one_more, v + max(v, sum(in_order)))
            if is_assembled:
                found.u_kept += u
                found.vw_kept += 2 * v
                rounded = block * self.narrow // self.wide if self.narrow != self.wide else 0
                found.given_back = max(
                    found.given_back, block + rounded, rounded + self._converted(rounded)
                )
        found.sends_factors = any(
            len(scheme.messages[UPDATE]) > len(scheme.messages.get(CAPTURED, ()))
            for scheme, _ in use.computed
        )
        # Whichever group comes last.
        found.finding += found.u + found.cores
        found.refreshing += found.previous
        found.refreshed = found.previous + found.one_more
        return found

    def _in_order(self, size: int) -> int:
        """Factors as they are sent, see ``OwnedMatrices._as_sent``."""
        elements = size // self.wide
        return elements * self.narrow if elements <= MOST_SENT else 0

    def _block(self, shape: FactorShape, count: int) -> tuple[int, int]:
        """Bytes of the part of B, or of a product, that is in memory at once, and of its V."""
        part, (first, end) = next(blocks(shape, count))
        count = int(part.stop) - int(part.start)
        return (
            count * (end - first) * shape.region.cols * self.wide,
            count * shape.short * shape.rank * self.wide,
        )


@dataclass(kw_only=True)
class _Owned:
    """Bytes of the factors of the matrices that a rank owns in a wave.

    Attributes:
        stacked: V of a group whose holders are sent it.
        u: U of all.
        cores: R of the QR of all.
        u_kept: U of those that are assembled.
        vw_kept: V and W of those that are assembled.
        finding: The most while U is found.
        refreshing: The most while V is found.
        previous: V, the one before and C, of all.
        one_more: V to keep, and W or factors as they are sent, of one group.
        basis_sent: U of one group as it is sent.
        refreshed: The most when V has been found.
        sends_factors: Whether any holder is sent factors, before elements are.
        given_back: A block of a product, as it is computed and as it is sent.
    """

    stacked: int = 0
    u: int = 0
    cores: int = 0
    u_kept: int = 0
    vw_kept: int = 0
    finding: int = 0
    refreshing: int = 0
    previous: int = 0
    one_more: int = 0
    basis_sent: int = 0
    refreshed: int = 0
    sends_factors: bool = False
    given_back: int = 0
