"""Muon: hyper-parameters, and what planning has to know; ``muon`` has the formula and the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_muon.exchange import Exchange
from megatron_muon.linalg import (
    Segments,
    cheapest_segments,
    newton_schulz_flops,
    panel_flops,
    panel_requests,
    update_scale,
    warm_up,
)
from megatron_muon.optim.muon import muon_step
from megatron_muon.optim.muon_memory import MuonMemory
from megatron_muon.optim.rule import MatrixRange, OwnedState, dtype_name
from megatron_muon.placement import (
    FLOPS_PER_BYTE,
    FLOPS_PER_NETWORK_BYTE,
    CostFunction,
    Method,
    Plan,
    Splitting,
    even_cuts,
)


@dataclass(frozen=True, kw_only=True)
class MuonRule:
    """Hyper-parameters that are the same for every matrix.

    Attributes:
        momentum: β.
        nesterov: Orthogonalize β M + (1 − β) G instead of M.
        schedule: Coefficients (a, b, c) of each Newton-Schulz step.
        coefficient_type: Name of the schedule.
        scale_mode: Name of s(m, n), see ``linalg.scales``.
        extra_scale_factor: Further factor on the update.
        compute_dtype: Element type of the iteration.
        exchange_dtype: Element type of what is exchanged, and of the assembled matrices.
        momentum_dtype: Element type in which M is kept.
    """

    momentum: float
    nesterov: bool
    schedule: tuple[tuple[float, float, float], ...]
    coefficient_type: str = "custom"
    scale_mode: str
    extra_scale_factor: float
    compute_dtype: torch.dtype
    exchange_dtype: torch.dtype = torch.float32
    momentum_dtype: torch.dtype = torch.float32

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """See ``MatrixRule``."""
        wide = torch.promote_types(self.exchange_dtype, torch.float32)
        return {
            "source": self.exchange_dtype,
            "update": self.exchange_dtype,
            "scalars": torch.promote_types(wide, self.compute_dtype),
            "squares": self.compute_dtype,
        }

    @property
    def description(self) -> str:
        """See ``MatrixRule``."""
        return (
            f"update: {self.scale_mode} scale x {self.extra_scale_factor:.15g}, "
            f"{len(self.schedule)} Newton-Schulz steps ({self.coefficient_type}), computed in "
            f"{dtype_name(self.compute_dtype)}, exchanged in {dtype_name(self.exchange_dtype)}; "
            f"momentum {self.momentum:.15g}{' (Nesterov)' if self.nesterov else ''}"
        )

    def scale(self, m: int, n: int) -> float:
        """``extra · s(m, n)``, the factor of the orthogonalized matrix."""
        return self.extra_scale_factor * update_scale(self.scale_mode, m, n)

    def rank(self, m: int, n: int) -> None:
        """Full rank."""
        return

    def first_state(self, plan: Plan, rank: int, device: torch.device) -> OwnedState:
        """None: momenta are in flat ranges; kernels are tuned for what the rank computes."""
        computed = (
            scheme.region(scheme.ranks.index(rank)).shape
            for scheme in plan.schemes
            if rank in scheme.ranks
        )
        warm_up(computed, device, self.compute_dtype)
        return {}

    def flops(self, m: int, n: int, device: torch.device) -> int:
        """Operations of the orthogonalization of one m x n matrix."""
        return newton_schulz_flops(m, n, self.segments(m, n, device), device)

    def segments(self, m: int, n: int, device: torch.device) -> Segments:
        """How an m x n matrix is iterated."""
        return cheapest_segments(m, n, self.schedule, self.compute_dtype, device)

    def method(
        self,
        device: torch.device,
        *,
        cost: CostFunction | None = None,
        splitting: Splitting | None = None,
    ) -> Method:
        """What planning has to know.

        Args:
            device: Where matrices are computed.
            cost: Estimated time of a matrix; its operations by default.
            splitting: What ``splitting`` gives; None for one owner a matrix.
        """

        def flops(m: int, n: int) -> int:
            return self.flops(m, n, device)

        memory = MuonMemory(
            held=self.exchange_dtype,
            compute=self.compute_dtype,
            looks_ahead=self.nesterov,
            momentum=self.momentum_dtype,
            segments=lambda m, n: self.segments(m, n, device),
            device=device,
        )
        return Method(
            cost=cost or flops,
            flops=flops,
            itemsizes={kind: dtype.itemsize for kind, dtype in self.dtypes.items()},
            phases=memory.phases,
            before=memory.before,
            splitting=splitting,
        )

    def splitting(
        self,
        most_ranks: int,
        device: torch.device,
        *,
        min_flops: int,
    ) -> Splitting:
        """How several ranks compute a matrix.

        Args:
            most_ranks: Most ranks that compute one.
            device: Where they compute.
            min_flops: Operations of a matrix below which it is not split.
        """

        def flops(m: int, n: int, ranks: int, number: int) -> int:
            short, long = sorted((m, n))
            start, end = even_cuts(short, ranks)[number]
            first, last = even_cuts(long, ranks)[number]
            segments = self.segments(m, n, device)
            return panel_flops(short, last - first, end - start, segments, device)

        return Splitting(
            most_ranks=most_ranks,
            flops=flops,
            requests=lambda m, n, team: panel_requests(self.segments(m, n, device), team),
            itemsize=self.dtypes["squares"].itemsize,
            scalar_itemsize=self.dtypes["scalars"].itemsize,
            min_flops=min_flops,
            flops_per_byte=FLOPS_PER_BYTE[device.type],
            flops_per_network_byte=FLOPS_PER_NETWORK_BYTE[device.type],
        )

    def step(
        self,
        ranges: Sequence[MatrixRange | None],
        exchange: Exchange,
        state: OwnedState,
    ) -> None:
        """See ``MatrixRule``."""
        muon_step(self, ranges, exchange)
