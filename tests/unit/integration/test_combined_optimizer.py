"""The inner optimizer with torch's AdamW: neither Transformer Engine nor Apex is there."""

from __future__ import annotations

import copy
from typing import Any

import torch

from megatron_muon.checkpoint.names import MOMENTUM
from megatron_muon.integration.combined_optimizer import (
    MATRIX_GROUP_KEY,
    CombinedOptimizer,
)


def init_adam(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Megatron's allocation of Adam's state: moments only, no step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if len(optimizer.state[parameter]) == 0:
                optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter.data)
                optimizer.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter.data)


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, generator=generator) for _ in range(3)]


def combined(
    scalars: list[torch.Tensor],
    matrices: list[torch.Tensor],
    dtype: torch.dtype = torch.float32,
) -> CombinedOptimizer:
    groups = [
        {"params": scalars, "lr": 0.1},
        {"params": matrices, "lr": 0.2, MATRIX_GROUP_KEY: "dmuon"},
    ]
    optimizer = CombinedOptimizer(torch.optim.AdamW(groups, weight_decay=0.1), init_adam, dtype)

    def step_matrices() -> None:
        for group in optimizer.param_groups:
            if MATRIX_GROUP_KEY in group:
                for parameter in group["params"]:
                    momentum = optimizer.state[parameter][MOMENTUM]
                    momentum.lerp_(parameter.grad, 0.5)
                    parameter.data.add_(momentum, alpha=-group["lr"])

    optimizer.attach_matrices(step_matrices)
    return optimizer


def give_gradients(parameters: list[torch.Tensor], step: int) -> None:
    for parameter, grad in zip(parameters, tensors(100 + step), strict=True):
        parameter.grad = grad


def test_scalars_are_adamws_and_matrices_are_not_touched_by_it() -> None:
    mine, theirs = tensors(0), tensors(0)
    optimizer = combined(mine[:2], mine[2:])
    optimizer.initialize_state(None)
    adamw = torch.optim.AdamW(theirs[:2], lr=0.1, weight_decay=0.1)
    momentum = torch.zeros(6)
    for step in range(4):
        give_gradients(mine, step)
        give_gradients(theirs, step)
        optimizer.step()
        adamw.step()
        momentum.lerp_(theirs[2].grad, 0.5)
        theirs[2].sub_(momentum, alpha=0.2)
    for found, expected in zip(mine, theirs, strict=True):
        assert torch.equal(found, expected)
    assert set(optimizer.state[mine[2]]) == {MOMENTUM}
    assert [group["step"] for group in optimizer.param_groups] == [4, 4]


def test_resumed_run_is_bit_equal() -> None:
    straight = tensors(0)
    optimizer = combined(straight[:2], straight[2:])
    optimizer.initialize_state(None)
    saved: dict[str, Any] = {}
    kept: list[torch.Tensor] = []
    for step in range(6):
        if step == 3:
            saved, kept = copy.deepcopy(optimizer.state_dict()), [t.clone() for t in straight]
        give_gradients(straight, step)
        optimizer.step()
    resumed = combined(kept[:2], kept[2:])
    resumed.initialize_state(None)
    resumed.load_state_dict(saved)
    for step in range(3, 6):
        give_gradients(kept, step)
        resumed.step()
    for found, expected in zip(kept, straight, strict=True):
        assert torch.equal(found, expected)
    # Adam's counters are one tensor each: a shared one would be counted up once per parameter.
    steps = [resumed.state[parameter]["step"] for parameter in kept[:2]]
    assert [float(step) for step in steps] == [6.0, 6.0]
    assert steps[0] is not steps[1]


def test_a_rank_without_scalars_counts_steps_all_the_same() -> None:
    """Data-parallel rank 0 stores the groups of all ranks: its count must be right."""
    matrices = tensors(0)
    optimizer = combined([], matrices)
    optimizer.initialize_state(None)
    for step in range(2):
        give_gradients(matrices, step)
        optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]


def test_no_parameter_at_all() -> None:
    optimizer = combined([], [])
    optimizer.initialize_state(None)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


def test_momenta_keep_their_element_type_when_state_is_loaded() -> None:
    """Loading by torch casts state to the element type of its parameter (DeepSpeed#7748)."""
    mine = tensors(0)
    optimizer = combined(mine[:2], mine[2:], torch.bfloat16)
    optimizer.initialize_state(None)
    momentum = optimizer.state[mine[2]][MOMENTUM]
    assert momentum.dtype == torch.bfloat16
    momentum.copy_(tensors(1)[0])
    kept = momentum.clone()
    stored = optimizer.state_dict()
    again = combined(mine[:2], mine[2:], torch.bfloat16)
    again.initialize_state(None)
    again.load_state_dict(stored)
    found = again.state[mine[2]][MOMENTUM]
    assert found.dtype == torch.bfloat16 and torch.equal(found, kept)
    assert again.state[mine[0]]["exp_avg"].dtype == torch.float32
