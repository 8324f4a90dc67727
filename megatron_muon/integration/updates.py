"""What a ``MatrixDistributedOptimizer`` steps: one rule on one plan, and the owners' state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_muon.exchange import Exchange, ExchangeCounters, FactorExchange, GroupTransport
from megatron_muon.integration.stage import MatrixRule
from megatron_muon.linalg import Workspace, small_side_first
from megatron_muon.optim import (
    MatrixRange,
    MuonRule,
    OrthDionRule,
    first_right_factors,
    muon_step,
    orth_dion_step,
)
from megatron_muon.placement import FactorPlan, Plan, RankLoad


class MatrixUpdate:
    """One rank's side of the update of all matrices of a domain.

    Attributes:
        rank: This rank in the exchange group.
        right_factors: V of every matrix that this rank owns, by the matrix's name; empty for dmuon.

    Args:
        rule: The update rule.
        plan: The plan that belongs to it.
        group: The exchange group.
        device: Device of parameters and buffers.
    """

    def __init__(
        self,
        rule: MatrixRule,
        plan: Plan,
        group: torch.distributed.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.rank = group.rank()
        self.right_factors: dict[str, torch.Tensor] = {}
        self._rule = rule
        self._workspace = Workspace()
        # Between steps a GPU's memory is the activations'.
        self._keeps_memory = device.type == "cpu"
        transport = GroupTransport(group)
        self._exchange: Exchange | FactorExchange
        if isinstance(plan, FactorPlan):
            assert isinstance(rule, OrthDionRule)
            self._exchange = FactorExchange(
                plan, rank=self.rank, transport=transport, dtype=rule.exchange_dtype, device=device
            )
            self.right_factors = first_right_factors(
                plan, self.rank, dtype=rule.state_dtype, device=device
            )
        else:
            assert isinstance(rule, MuonRule)
            self._exchange = Exchange(
                plan,
                rank=self.rank,
                transport=transport,
                dtype=rule.exchange_dtype,
                device=device,
                keep_buffers=self._keeps_memory,
                squares_dtype=rule.compute_dtype,
                scalars_dtype=rule.scalars_dtype,
                small_side_first=small_side_first(device),
            )

    @property
    def load(self) -> RankLoad:
        """What the plan predicts of a step on this rank."""
        return self._exchange.plan.loads[self.rank]

    @property
    def counters(self) -> ExchangeCounters:
        """What the last step did on this rank."""
        return self._exchange.counters

    def step(self, ranges: Sequence[MatrixRange | None]) -> None:
        """Update every matrix.

        Args:
            ranges: For each parameter of the plan this rank's range, None where it owns nothing.
        """
        if isinstance(self._rule, MuonRule):
            assert isinstance(self._exchange, Exchange)
            muon_step(self._rule, ranges, self._exchange, self._workspace)
            if not self._keeps_memory:
                self._workspace.clear()
        else:
            assert isinstance(self._exchange, FactorExchange)
            orth_dion_step(self._rule, ranges, self._exchange, self.right_factors)
