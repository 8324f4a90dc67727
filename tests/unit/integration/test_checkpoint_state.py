"""Where the rows of a parameter are in a checkpoint, as Megatron's own factories say."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROWS, COLS = 12, 4


class Quantized(torch.Tensor):
    """As Transformer Engine's quantized tensors: no storage of its own, so every pointer is 0."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Quantized:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, data.shape, dtype=data.dtype, requires_grad=True
        )
        made._data = data
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a._data if isinstance(a, Quantized) else a for a in args]
        out = func(*plain, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            return Quantized(out)
        return [Quantized(t) for t in out]


def _plain() -> torch.Tensor:
    return torch.nn.Parameter(torch.zeros(ROWS, COLS))


def _quantized() -> torch.Tensor:
    return Quantized(torch.zeros(ROWS, COLS))


def _factory(data: torch.Tensor, pieces: Callable[[torch.Tensor], list[torch.Tensor]]) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        return [
            ShardedTensor.from_rank_offsets(f"{key}_{number}", piece, replica_id=replica_id)
            for number, piece in enumerate(pieces(tensor))
        ]

    return ShardedTensorFactory("fc1.weight", data, build, lambda state: state, (0, 0, 0))


@pytest.mark.parametrize("make", [_plain, _quantized])
def test_gate_and_up_are_two_halves_of_the_rows(megatron: Any, make: Any) -> None:
    """By storage pointers both halves of a quantized weight started at 0."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    from megatron_muon.integration.checkpoint_state import stored_parts

    weight = make()
    whole = ShardedTensor.from_rank_offsets("fc1.weight", weight, (0, 0, 1), replica_id=(0, 0, 0))
    parts = stored_parts({"model": apply_swiglu_sharded_factory(whole, ())})[weight]
    assert [part.start for part in parts] == [0, ROWS * COLS // 2]
    assert [part.tensor.global_offset for part in parts] == [(0, 0), (ROWS // 2, 0)]
    assert {part.tensor.local_shape for part in parts} == {(ROWS // 2, COLS)}


def test_pieces_are_put_in_the_order_of_rows(megatron: Any) -> None:
    from megatron_muon.integration.checkpoint_state import stored_parts

    weight = _plain()
    entry = _factory(weight, lambda t: list(t.split([5, 4, 3]))[::-1])
    parts = stored_parts(entry)[weight]
    assert [(p.start, p.tensor.key) for p in parts] == [
        (0, "fc1.weight_2"),
        (5 * COLS, "fc1.weight_1"),
        (9 * COLS, "fc1.weight_0"),
    ]


@pytest.mark.parametrize(
    "pieces",
    [
        lambda t: [t, t],
        lambda t: [t[:6], t[5:]],
        lambda t: [t[:6], t[7:]],
        lambda t: [t[:6]],
        lambda t: [],
        lambda t: list(t.chunk(2, dim=1)),
        lambda t: [t.t()],
        lambda t: [t.clone()],
        lambda t: [t[:6], t[6:].clone()],
        lambda t: [t.view(3, 4, COLS).transpose(0, 1).reshape(ROWS, COLS)],
    ],
    ids=[
        *("each row twice", "overlapping", "a row left out", "half", "none", "columns"),
        *("transposed", "a copy", "half a copy", "other order"),
    ],
)
@pytest.mark.parametrize("make", [_plain, _quantized])
def test_other_pieces_are_refused_by_name(megatron: Any, make: Any, pieces: Any) -> None:
    from megatron_muon.integration.checkpoint_state import stored_parts

    with pytest.raises(ValueError, match=r"fc1\.weight is not stored as its consecutive rows"):
        stored_parts(_factory(make(), pieces))


def test_frozen_parameters_and_buffers_are_left_alone(megatron: Any) -> None:
    from megatron_muon.integration.checkpoint_state import stored_parts

    frozen = torch.nn.Parameter(torch.zeros(ROWS, COLS), requires_grad=False)
    assert stored_parts([_factory(frozen, lambda t: [t.t()])]) == {}
    assert stored_parts({"step": SimpleNamespace(data=3)}) == {}


@pytest.mark.parametrize("instance", [0, 1])
def test_the_first_optimizer_instance_writes(megatron: Any, instance: int) -> None:
    """Of state that several instances hold; whichever data-parallel rank holds a range of it."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

    from megatron_muon.integration.checkpoint_state import (
        sharded_range,
        sharded_right_factors,
        stored_parts,
    )

    weight = _plain()
    entry = ShardedTensor.from_rank_offsets("fc1.weight", weight, replica_id=(0, 0, 3))
    ranges = sharded_range(
        "exp_avg", torch.zeros(7), 6, stored_parts({"w": entry})[weight], instance=instance
    )
    factors = sharded_right_factors({"fc1.weight": torch.zeros(COLS, 2)}, instance=instance)
    written = [is_main_replica(t.replica_id) for t in (*ranges, *factors.values())]
    assert len(written) > 2
    assert set(written) == {instance == 0}
