"""Measures time, bytes, FLOPs and memory of optimizer steps and whole training steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.contenders import (
    LR,
    MOMENTUM,
    SCALE_MODE,
    STEPS,
    WEIGHT_DECAY,
    Contender,
    contenders,
)
from benchmarks.kernels import polynomial_of
from benchmarks.models import ModelSize, backward
from benchmarks.owner_times import OwnerTimes, measure_owners
from benchmarks.sent_bytes import count_sent_bytes
from megatron_muon.benchmark import clock
from megatron_muon.integration.distributed_optimizer import MatrixDistributedOptimizer
from megatron_muon.linalg import update_scale
from tests.ranks import layout

CHECKED = (
    "decoder.layers.0.self_attention.linear_proj.weight",
    "decoder.layers.0.mlp.linear_fc2.weight",
)
"""Weights that no optimizer splits; their first update is compared with float64."""


@dataclass(kw_only=True)
class Measurement:
    """Measurements of one optimizer, of the slowest or busiest rank.

    Attributes:
        label: Name in tables.
        seconds: Times of all measured steps.
        gflop: Matrix products of one step, maximum over ranks.
        sent_mb: MB sent by a rank in one optimizer step, maximum over ranks.
        state_mb: MB of optimizer state, maximum over ranks.
        exchange_mb: MB of exchange buffers, maximum over ranks.
        update_error: Relative error of the first update against float64, None for other rules.
    """

    label: str
    seconds: list[float] = field(default_factory=list)
    gflop: float = 0.0
    sent_mb: float = 0.0
    state_mb: float = 0.0
    exchange_mb: float = 0.0
    update_error: float | None = None

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return statistics.median(self.seconds)


class _Entrant:
    """One optimizer with its model on this rank."""

    def __init__(self, contender: Contender, size: ModelSize, device: torch.device) -> None:
        self.contender = contender
        self.device = device
        self.result = Measurement(label=contender.label)
        self.model, self.optimizer = contender.build(size, device)

    def fill(self, gradients: dict[str, torch.Tensor]) -> None:
        """Set the gradients, the same for all optimizers."""
        for name, parameter in self.model.module.named_parameters():
            parameter.main_grad.copy_(gradients[name])

    def step(self) -> None:
        """Run one optimizer step."""
        succeeded, _, _ = self.optimizer.step()
        assert succeeded

    def slowest(self, value: float) -> float:
        """Return the maximum over all ranks."""
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def time(self, work: Callable[[], object]) -> None:
        """Add the seconds of the slowest rank."""
        dist.barrier()
        start = clock(self.device)
        work()
        self.result.seconds.append(self.slowest(clock(self.device) - start))

    def count(self, gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        """Run the first step and measure everything but time."""
        before, result = _whole(self.model, "data"), self.result
        self.fill(gradients)
        with FlopCounterMode(display=False) as flops, count_sent_bytes() as sent:
            self.step()
        updates = matrix_updates(self.optimizer)
        buffers = sum(update.counters.peak_buffer_bytes for update in updates)
        result.gflop = self.slowest(flops.get_total_flops()) / 1e9
        result.sent_mb = self.slowest(sum(sent)) / 1e6
        result.state_mb = self.slowest(state_bytes(self.optimizer)) / 1e6
        result.exchange_mb = self.slowest(buffers) / 1e6
        if self.contender.is_muon:
            after = _whole(self.model, "data")
            errors = [_direction_error(after[n], before[n], expected[n]) for n in CHECKED]
            # Unlike ``max``, propagates NaN.
            result.update_error = float(torch.tensor(errors).max())


def matrix_updates(optimizer: Any) -> list[Any]:
    """Return the ``MatrixUpdate`` of every domain of an optimizer; empty for other optimizers."""
    return [
        child.exchange
        for child in optimizer.chained_optimizers
        if isinstance(child, MatrixDistributedOptimizer) and child.exchange is not None
    ]


def state_bytes(optimizer: Any) -> int:
    """Return the bytes of this rank's optimizer state: moments, momenta, factors.

    Masters are not counted: in fp32 they are the parameters themselves.
    """
    found: int = sum(
        value.nbytes
        for child in optimizer.chained_optimizers
        for state in getattr(child, "optimizer", child).state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    )
    updates = matrix_updates(optimizer)
    factors: int = sum(f.nbytes for u in updates for f in u.owned_state.values())
    return found + factors


def _join(rank: int, kind: str, tp: int) -> torch.device:
    """Join the process groups and return the device of this rank."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    layout(tp)
    return device


def _tokens(batch: int, size: ModelSize, device: torch.device, seed: int) -> torch.Tensor:
    """Return a batch of random tokens (b, s + 1), the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(size.vocab, (batch, size.sequence + 1), generator=generator)
    return drawn.to(device)


def gradients_of(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return this rank's gradients by name; with the same tokens all DP ranks have the same ones.

    They are not reduced, which would rescale only a rank's shard of the buffers.
    """
    backward(model, tokens)
    return {n: p.main_grad.clone() for n, p in model.module.named_parameters()}


def measure_optimizer_steps(
    rank: int, kind: str, tp: int, size: ModelSize, rounds: int
) -> tuple[dict[str, Measurement], OwnerTimes]:
    """Measure all optimizers, alternating, with the same gradients; then dmuon's owners."""
    device = _join(rank, kind, tp)
    entrants = [_Entrant(contender, size, device) for contender in contenders()]
    source = entrants[0].model
    gradients = gradients_of(source, _tokens(4, size, device, 0))
    # The first direction is U p(σ) Vᵀ of the whole gradients.
    expected = {
        name: polynomial_of(gradient * (1.0 - MOMENTUM), "quintic", STEPS)
        for name, gradient in _whole(source, "main_grad").items()
    }
    for entrant in entrants:
        entrant.count(gradients, expected)
    for _ in range(rounds):
        for entrant in entrants:
            entrant.fill(gradients)
            entrant.time(entrant.step)
    found = {entrant.contender.key: entrant.result for entrant in entrants}
    [dmuon] = [e for e in entrants if e.contender.key == "dmuon"]
    [update] = matrix_updates(dmuon.optimizer)
    return found, measure_owners(update.plan, update.rank, device, rounds)


def _whole(model: Any, value: str) -> dict[str, torch.Tensor]:
    """Gather the checked weights' ``data`` or ``main_grad`` over TP, in float64."""
    group = parallel_state.get_tensor_model_parallel_group()
    named, found = dict(model.module.named_parameters()), {}
    for name in CHECKED:
        shard = getattr(named[name], value).contiguous()
        shards = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(shards, shard, group=group)
        found[name] = torch.cat(shards, dim=named[name].partition_dim).double()
    return found


def _direction_error(after: torch.Tensor, before: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error of an update without learning rate, scale and weight decay."""
    direction = (before - after - LR * WEIGHT_DECAY * before) / LR
    scaled = expected * update_scale(SCALE_MODE, *expected.shape)
    return float((direction - scaled).norm() / scaled.norm())


def measure_training_steps(
    rank: int, kind: str, tp: int, size: ModelSize, rounds: int, micro_batches: int
) -> dict[str, Measurement]:
    """Measure whole steps: forward and backward of all micro-batches, reduction, optimizer."""
    device = _join(rank, kind, tp)
    keys = ("adamw", "dmuon", "orth_dion_4")
    entrants = [_Entrant(c, size, device) for c in contenders() if c.key in keys]

    def work(entrant: _Entrant, number: int) -> None:
        seeds = range(100 * number, 100 * number + micro_batches)
        backward(entrant.model, *(_tokens(1, size, device, seed) for seed in seeds))
        entrant.model.finish_grad_sync()
        entrant.step()

    for number in range(rounds + 1):
        for entrant in entrants:
            entrant.time(partial(work, entrant, number))
    for entrant in entrants:
        # The first step allocates.
        del entrant.result.seconds[0]
    return {entrant.contender.key: entrant.result for entrant in entrants}
