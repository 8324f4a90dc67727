"""Time, bytes, FLOPs and memory of an optimizer's step, and of a whole training step."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_muon.benchmark.timing import clock
from megatron_muon.exchange.measuring import SentBytes, slowest, wait_for_all, whole
from megatron_muon.integration.contenders import (
    LR,
    MOMENTUM,
    SCALE_MODE,
    STEPS,
    WEIGHT_DECAY,
    Contender,
    ModelSize,
    build_model,
    contenders,
    loss_and_gradients,
    make_groups,
    matrix_updates,
    state_bytes,
    whole_rows,
)
from megatron_muon.linalg import coefficient_schedule, update_scale

CHECKED = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")
"""Weights of layer 0 that no optimizer splits; their first update is compared with float64."""


@dataclass(kw_only=True)
class Measurement:
    """What one optimizer did, on the slowest or busiest rank.

    Attributes:
        label: Name in tables.
        seconds: Of every measured step.
        gflop: Matrix products of one step, of the busiest rank.
        sent_mb: Bytes that one rank sends in one optimizer step, the most, in MB.
        state_mb: Optimizer state of the rank with the most, in MB.
        exchange_mb: Buffers of the exchange on the rank with the most, in MB.
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


def tokens_of(batch: int, size: ModelSize, device: torch.device, seed: int) -> torch.Tensor:
    """A batch of random tokens (b, s + 1)."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(size.vocab, (batch, size.sequence + 1), generator=generator)
    return drawn.to(device)


class _Entrant:
    """One optimizer with its model on this rank."""

    def __init__(self, contender: Contender, size: ModelSize, device: torch.device) -> None:
        self.contender = contender
        self.device = device
        self.model, self.optimizer = contender.build(build_model(size, device))

    def fill(self, gradients: dict[str, torch.Tensor]) -> None:
        """The same gradients as for every other."""
        for name, parameter in self.model.module.named_parameters():
            parameter.main_grad.copy_(gradients[name])

    def step(self) -> None:
        """One optimizer step."""
        succeeded, _, _ = self.optimizer.step()
        assert succeeded

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds of the slowest rank."""
        wait_for_all()
        start = clock(self.device)
        work()
        return slowest(clock(self.device) - start, self.device)

    def checked_weights(self) -> dict[str, torch.Tensor]:
        """Whole weights of layer 0."""
        named = dict(self.model.module.named_parameters())
        found = {}
        for name in CHECKED:
            parameter = named[f"decoder.layers.0.{name}"]
            found[name] = whole(parameter.data, *whole_rows(parameter))
        return found


def measure_optimizer_steps(
    device: torch.device, tp: int, size: ModelSize, rounds: int
) -> dict[str, Measurement]:
    """Every optimizer in turn, round by round, with the same gradients."""
    make_groups(tp)
    source = build_model(size, device)
    reference = contenders()[0].build(source)[0]
    loss_and_gradients(reference, tokens_of(4, size, device, 0))
    gradients = {n: p.main_grad.clone() for n, p in reference.module.named_parameters()}
    expected = _expected_updates(reference)
    del source, reference
    entrants = [_Entrant(contender, size, device) for contender in contenders()]
    results = {e.contender.key: Measurement(label=e.contender.label) for e in entrants}
    for entrant in entrants:
        _count(entrant, gradients, expected, results[entrant.contender.key])
    for _ in range(rounds):
        for entrant in entrants:
            entrant.fill(gradients)
            results[entrant.contender.key].seconds.append(entrant.timed(entrant.step))
    return results


def _count(
    entrant: _Entrant,
    gradients: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    result: Measurement,
) -> None:
    """The first step of an optimizer: everything but time."""
    device, before = entrant.device, entrant.checked_weights()
    entrant.fill(gradients)
    with FlopCounterMode(display=False) as flops, SentBytes().counting() as sent:
        entrant.step()
    result.gflop = slowest(flops.get_total_flops(), device) / 1e9
    result.sent_mb = slowest(sent.total, device) / 1e6
    result.state_mb = slowest(state_bytes(entrant.optimizer), device) / 1e6
    buffers = sum(u.counters.peak_buffer_bytes for u in matrix_updates(entrant.optimizer))
    result.exchange_mb = slowest(buffers, device) / 1e6
    if entrant.contender.is_muon:
        after = entrant.checked_weights()
        result.update_error = max(
            _direction_error(after[n].double(), before[n].double(), expected[n]) for n in CHECKED
        )


def _expected_updates(model: Any) -> dict[str, torch.Tensor]:
    """p(σ) of the whole gradients, on their singular values, in float64: the first direction."""
    named = dict(model.module.named_parameters())
    found = {}
    for name in CHECKED:
        parameter = named[f"decoder.layers.0.{name}"]
        gradient = whole(parameter.main_grad, *whole_rows(parameter)).double()
        found[name] = polynomial_of(gradient * (1.0 - MOMENTUM), "quintic", STEPS)
    return found


def polynomial_of(matrix: torch.Tensor, coefficients: str, steps: int) -> torch.Tensor:
    """U p(σ / ‖·‖) Vᵀ of a matrix or batch, in float64."""
    factors: tuple[torch.Tensor, ...] = torch.linalg.svd(matrix.double(), full_matrices=False)
    u, sigma, vt = factors
    sigma = sigma / sigma.norm(dim=-1, keepdim=True)
    for a, b, c in coefficient_schedule(coefficients, steps):
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    result: torch.Tensor = (u * sigma.unsqueeze(-2)) @ vt
    return result


def _direction_error(after: torch.Tensor, before: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of an update, learning rate, scale and weight decay taken out."""
    direction = (before - after - LR * WEIGHT_DECAY * before) / LR
    scaled = expected * update_scale(SCALE_MODE, *expected.shape)
    return float((direction - scaled).norm() / scaled.norm())


def measure_training_steps(
    device: torch.device,
    tp: int,
    size: ModelSize,
    rounds: int,
    micro_batches: int,
    keys: tuple[str, ...],
) -> dict[str, Measurement]:
    """Whole steps: forward and backward of all micro-batches, reduction, optimizer."""
    make_groups(tp)
    entrants = [_Entrant(c, size, device) for c in contenders() if c.key in keys]
    results = {e.contender.key: Measurement(label=e.contender.label) for e in entrants}

    def work(entrant: _Entrant, number: int) -> None:
        for index in range(micro_batches):
            loss_and_gradients(entrant.model, tokens_of(1, size, device, 100 * number + index))
        entrant.step()

    for number in range(rounds + 1):
        for entrant in entrants:
            seconds = entrant.timed(lambda: work(entrant, number))  # noqa: B023 - called at once
            if number:
                results[entrant.contender.key].seconds.append(seconds)
    return results
