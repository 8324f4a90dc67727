"""Orth-Dion's hyper-parameters, and what follows from them before the first step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_muon.exchange import Exchange
from megatron_muon.linalg import RIGHT_FACTORS, dion_flops, update_scale
from megatron_muon.optim.dion_home import home_bytes
from megatron_muon.optim.dion_memory import DionMemory
from megatron_muon.optim.dion_owner import MOST_ELEMENTS
from megatron_muon.optim.orth_dion import orth_dion_step
from megatron_muon.optim.rule import MatrixRange, OwnedState, dtype_name
from megatron_muon.placement import AtHome, Method, Plan, Scheme
from megatron_muon.placement.memory import Phase, WaveUse
from megatron_muon.placement.schemes import FactorChoice, factor_scheme


@dataclass(frozen=True, kw_only=True)
class OrthDionRule:
    """Hyper-parameters that are the same for every matrix.

    Attributes:
        rank_fraction: Rank over the smaller side, in (0, 1].
        rank_multiple_of: The rank is rounded up to a multiple of this, but not above the sides.
        momentum: μ, in [0, 1).
        right_factor: One of ``linalg.RIGHT_FACTORS``.
        scale_mode: Name of s(m, n), see ``linalg.scales``.
        extra_scale_factor: Further factor on the update.
        rank_compensation: Multiply the update by √(min(m, n) / r), which gives it the root mean
            square of a full-rank update; its singular values are then above 1.
        state_dtype: Element type of V between steps (M has that of the ranges). bf16 keeps V's
            columns orthonormal to 1e-3 only.
        exchange_dtype: Element type of what is exchanged; factors are computed in fp32 at least.

    Raises:
        ValueError: A value out of its range.
    """

    rank_fraction: float
    rank_multiple_of: int = 1
    momentum: float = 0.95
    right_factor: str = "qr"
    scale_mode: str
    extra_scale_factor: float = 1.0
    rank_compensation: bool = False
    state_dtype: torch.dtype = torch.float32
    exchange_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not 0.0 < self.rank_fraction <= 1.0:
            raise ValueError(f"rank_fraction is {self.rank_fraction}; it must be in (0, 1].")
        if self.rank_multiple_of < 1:
            raise ValueError(f"rank_multiple_of is {self.rank_multiple_of}; it must be at least 1.")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum is {self.momentum}; it must be in [0, 1).")
        if self.right_factor not in RIGHT_FACTORS:
            raise ValueError(
                f"right_factor is {self.right_factor}; supported are {', '.join(RIGHT_FACTORS)}."
            )
        update_scale(self.scale_mode, 1, 1)

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """See ``MatrixRule``."""
        kinds = ("warm", "source", "basis", "response", "update", "captured")
        return dict.fromkeys(kinds, self.exchange_dtype)

    @property
    def factor_dtype(self) -> torch.dtype:
        """Element type in which products and factors are computed."""
        return torch.promote_types(self.exchange_dtype, torch.float32)

    @property
    def momentum_dtype(self) -> torch.dtype:
        """See ``MatrixRule``: M carries the error feedback."""
        return torch.float32

    @property
    def description(self) -> str:
        """See ``MatrixRule``."""
        compensated = ", times sqrt(smaller side / rank)" if self.rank_compensation else ""
        return (
            f"update: {self.scale_mode} scale x {self.extra_scale_factor:.15g}{compensated}, "
            f"rank {self.rank_fraction:.15g} of the smaller side in multiples of "
            f"{self.rank_multiple_of}, right factor {self.right_factor}, computed in fp32, "
            f"exchanged in {dtype_name(self.exchange_dtype)}; "
            f"momentum {self.momentum:.15g}, V kept in {dtype_name(self.state_dtype)}"
        )

    def rank(self, m: int, n: int) -> int:
        """Returns r of a whole m x n matrix, at least 1 and at most min(m, n)."""
        smaller, multiple = min(m, n), self.rank_multiple_of
        # 0.1 * 30 is 3.0000000000000004 in float64: without rounding, rank 4.
        wanted = math.ceil(round(self.rank_fraction * smaller / multiple, 9))
        return min(smaller, multiple * max(1, wanted))

    def scale(self, m: int, n: int) -> float:
        """Returns the factor of U Vᵀ for a whole m x n matrix, before any transposition."""
        scale = self.extra_scale_factor * update_scale(self.scale_mode, m, n)
        if self.rank_compensation:
            scale *= math.sqrt(min(m, n) / self.rank(m, n))
        return scale

    def method(self, exchange: FactorChoice) -> Method:
        """What planning has to know.

        A holder multiplies what it holds; so the work lies where the elements are, and an owner is
        one of the holders: what it holds needs no message.

        Args:
            exchange: What is exchanged: factors, matrices, or whichever is less.
        """

        def flops(m: int, n: int) -> int:
            return dion_flops(m, n, self.rank(m, n))

        def of_factors(m: int, n: int) -> int:
            return flops(m, n) - 8 * m * n * self.rank(m, n)

        return Method(
            cost=flops,
            flops=flops,
            itemsizes=dict.fromkeys(self.dtypes, self.exchange_dtype.itemsize),
            phases=self.phases,
            scheme=factor_scheme(self.rank, of_factors, exchange),
            at_home=AtHome(
                work=lambda m, n: (8 * self.rank(m, n), of_factors(m, n)),
                most_elements=MOST_ELEMENTS,
                most_at_once=4 * MOST_ELEMENTS,
                peak=self._home_peak,
            ),
            slots=2,
            alone=False,
            target_waves=1,
        )

    def phases(self, use: WaveUse) -> list[Phase]:
        """Memory of a wave on one rank, see ``DionMemory``."""
        memory = DionMemory(
            narrow=self.exchange_dtype.itemsize,
            wide=self.factor_dtype.itemsize,
            is_polar=self.right_factor == "polar",
        )
        return memory.phases(use)

    def _home_peak(self, schemes: Sequence[Scheme], elements: int) -> int:
        shapes = [scheme.factors for scheme in schemes if scheme.factors is not None]
        wide, is_polar = self.factor_dtype.itemsize, self.right_factor == "polar"
        return home_bytes(shapes, elements, wide, is_polar=is_polar)

    def first_state(self, plan: Plan, rank: int, device: torch.device) -> OwnedState:
        """V (short side x r) of every matrix that a rank owns.

        Seeded by the matrix's name alone, so it is the same whatever rank owns it.
        """
        return {
            matrix.name: seeded_right_factor(
                matrix.name, min(matrix.shape), self.rank(*matrix.shape), dtype=self.state_dtype
            ).to(device)
            for matrix, owner in zip(plan.matrices, plan.owners, strict=True)
            if owner == rank
        }

    def step(
        self,
        ranges: Sequence[MatrixRange | None],
        exchange: Exchange,
        state: OwnedState,
    ) -> None:
        """See ``MatrixRule``."""
        orth_dion_step(self, ranges, exchange, state)


def seeded_right_factor(name: str, n: int, r: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the V of the first step: standard normal, a function of its arguments alone.

    Neither torch's random state nor rank, device or layout have a part in it, and it disturbs none.
    Drawn in float64, whose path in torch does not depend on the processor's vector width.

    Args:
        name: Name of the logical matrix, the same on every rank and after a restart.
        n: Smaller side of the whole matrix.
        r: Rank.
        dtype: Element type of the result.

    Returns:
        V (n, r) on CPU.
    """
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(n, r, dtype=torch.float64, generator=generator).to(dtype)
