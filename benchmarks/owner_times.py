"""Measures the compute time of each owner, for comparison with the plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.kernels import STEPS
from megatron_muon.benchmark import median_ms
from megatron_muon.linalg import Workspace, coefficient_schedule, orthogonalize_
from megatron_muon.placement import Plan


@dataclass(frozen=True, kw_only=True)
class OwnerTimes:
    """Owners of one layout.

    Attributes:
        milliseconds: Measured for the matrices of each rank, one rank at a time.
        costs: Planned cost of each, in FLOPs.
    """

    milliseconds: tuple[float, ...]
    costs: tuple[int, ...]

    @property
    def measured(self) -> float:
        """Measured slowest owner over the mean."""
        return max(self.milliseconds) * len(self.milliseconds) / sum(self.milliseconds)

    @property
    def planned(self) -> float:
        """Planned slowest owner over the mean."""
        return max(self.costs) * len(self.costs) / sum(self.costs)


def measure_owners(plan: Plan, rank: int, device: torch.device, rounds: int) -> OwnerTimes:
    """Time the matrices of each rank, one rank at a time, as ranks share the cores."""
    mine = 0.0
    for turn in range(plan.group.size):
        dist.barrier()
        if turn == rank:
            mine = _milliseconds(plan, rank, device, rounds)
    times: list[float] = [0.0] * plan.group.size
    dist.all_gather_object(times, mine)
    return OwnerTimes(
        milliseconds=tuple(times),
        costs=tuple(load.cost for load in plan.loads),
    )


def _milliseconds(plan: Plan, rank: int, device: torch.device, rounds: int) -> float:
    schedule, space = coefficient_schedule("quintic", STEPS), Workspace()
    shapes = Counter(
        (min(matrix.shape), max(matrix.shape))
        for matrix, scheme in zip(plan.matrices, plan.schemes, strict=True)
        if scheme.ranks == (rank,)
    )
    batches = [torch.randn(count, *shape, device=device) for shape, count in shapes.items()]

    def run() -> None:
        for batch in batches:
            orthogonalize_(batch, schedule, compute_dtype=torch.float32, workspace=space)

    return median_ms(run, device, rounds)
