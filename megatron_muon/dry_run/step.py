"""Counts allocations, launches and messages of one step of any rank of a plan."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_muon.dry_run.counting import OperationCounter, count_host_reads
from megatron_muon.exchange import Exchange
from megatron_muon.linalg import small_side_first
from megatron_muon.optim import MatrixRange, MatrixRule
from megatron_muon.placement import Plan


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Counts of one rank in one step.

    Attributes:
        rank: Rank in the exchange group.
        transient_bytes: Peak of live bytes that the step allocates.
        flops: Floating-point operations of matrix products.
        kernels: Kernel launches by operation.
        slow: Tensors of list operations processed one by one, by operation.
        host_reads: Number of times that the host waits for a value.
        messages: All-to-all calls.
        sent: Partner to the bytes sent to it.
        received_bytes: Bytes received.
    """

    rank: int
    transient_bytes: int
    flops: int
    kernels: dict[str, int]
    slow: dict[str, int]
    host_reads: int
    messages: int
    sent: dict[int, int]
    received_bytes: int

    @property
    def launches(self) -> int:
        """All kernel launches."""
        return sum(self.kernels.values())

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to other ranks."""
        return sum(self.sent.values())


@dataclass(kw_only=True)
class _Transport:
    """Sends nothing and records the messages."""

    rank: int
    messages: int = 0
    sent: dict[int, int] = field(default_factory=dict)
    received_bytes: int = 0

    def all_to_all(
        self,
        *,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_counts: Sequence[int],
        sent_counts: Sequence[int],
    ) -> _Transport:
        """Count a message; see ``exchange.Transport``."""
        self.messages += 1
        for partner, count in enumerate(sent_counts):
            if count and partner != self.rank:
                self.sent[partner] = self.sent.get(partner, 0) + count * sent.element_size()
        own = received_counts[self.rank]
        self.received_bytes += (received.numel() - own) * received.element_size()
        return self

    def wait(self) -> None:
        """Return immediately."""


def count_step(plan: Plan, rule: MatrixRule, rank: int, device: torch.device) -> StepCounts:
    """Run and count one step of a rank; call it inside a ``FakeTensorMode``.

    Raises:
        RuntimeError: The step reads the value of a tensor where it must not.
    """
    transport = _Transport(rank=rank)
    exchange = Exchange(
        plan,
        rank=rank,
        transport=transport,
        dtypes=rule.dtypes,
        device=device,
        small_side_first=small_side_first(device),
    )
    ranges = _ranges(plan, rank, device, rule.momentum_dtype)
    state = rule.first_state(plan, rank, device)
    held = [t for r in ranges if r is not None for t in (r.master, r.momentum, r.grad)]
    counter = OperationCounter([*held, *state.values()])

    def step() -> None:
        with counter:
            rule.step(ranges, exchange, state)

    gc.collect()
    reads = count_host_reads(step)
    return StepCounts(
        rank=rank,
        transient_bytes=counter.peak,
        flops=counter.flops,
        kernels=dict(counter.kernels),
        slow=dict(counter.slow),
        host_reads=reads,
        messages=transport.messages,
        sent=transport.sent,
        received_bytes=transport.received_bytes,
    )


def _ranges(
    plan: Plan, rank: int, device: torch.device, momentum_dtype: torch.dtype
) -> list[MatrixRange | None]:
    dp_rank = rank // plan.group.tp
    found: list[MatrixRange | None] = []
    for parameter in plan.parameters:
        start, stop = parameter.ranges[dp_rank]
        master, grad = (torch.empty(stop - start, device=device) for _ in range(2))
        momentum = torch.empty(stop - start, device=device, dtype=momentum_dtype)
        found.append(
            MatrixRange(master=master, momentum=momentum, grad=grad, lr=1e-3, weight_decay=0.1)
            if stop > start
            else None
        )
    return found
