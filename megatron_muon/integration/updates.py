"""What a ``MatrixDistributedOptimizer`` steps: one rule on one plan, and the owners' state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_muon.exchange import Exchange, ExchangeCounters, GroupTransport
from megatron_muon.linalg import small_side_first
from megatron_muon.optim import MatrixRange, MatrixRule
from megatron_muon.placement import Plan, RankLoad


class MatrixUpdate:
    """One rank's side of the update of all matrices of a domain.

    Attributes:
        rank: This rank in the exchange group.
        owned_state: State that belongs to the matrices that this rank owns, by their names: V of
            Orth-Dion.

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
        self.owned_state = rule.first_state(plan, self.rank, device)
        self._rule = rule
        self._exchange = Exchange(
            plan,
            rank=self.rank,
            transport=GroupTransport(group),
            dtypes=rule.dtypes,
            device=device,
            small_side_first=small_side_first(device),
        )

    @property
    def plan(self) -> Plan:
        """Who computes what."""
        return self._exchange.plan

    @property
    def load(self) -> RankLoad:
        """What the plan predicts of a step on this rank."""
        return self.plan.loads[self.rank]

    @property
    def counters(self) -> ExchangeCounters:
        """What the last step did on this rank."""
        return self._exchange.counters

    def step(self, ranges: Sequence[MatrixRange | None]) -> None:
        """Update every matrix.

        Args:
            ranges: For each parameter of the plan this rank's range, None where it owns nothing.
        """
        self._rule.step(ranges, self._exchange, self.owned_state)
