"""Flat ranges as boxes, against every range of small tensors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megatron_muon.checkpoint.boxes import boxes
from megatron_muon.checkpoint.names import STATES, split_state_key, state_key

SHAPES = [(1,), (7,), (1, 5), (5, 1), (3, 4), (2, 3, 4), (3, 1, 2), (1, 1, 6), (2, 2, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_boxes_of_a_range_are_its_elements_in_order(shape: tuple[int, ...]) -> None:
    total = math.prod(shape)
    tensor = torch.arange(total).view(shape)
    for start, stop in itertools.combinations(range(total + 1), 2):
        found = list(boxes(shape, start, stop))
        elements = []
        for box in found:
            slices = [slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True)]
            cut = tensor[tuple(slices)]
            assert cut.shape == box.shape and cut.numel() == box.numel
            assert cut.flatten()[0] == box.start
            elements += cut.flatten().tolist()
        assert elements == list(range(start, stop))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_range_needs_few_boxes(shape: tuple[int, ...]) -> None:
    """Three of a matrix: the end of a row, whole rows, the beginning of a row."""
    total = math.prod(shape)
    most = max(
        len(list(boxes(shape, start, stop)))
        for start, stop in itertools.combinations(range(total + 1), 2)
    )
    assert most <= 2 * len(shape) - 1
    assert len(list(boxes(shape, 0, total))) == 1


def test_an_empty_range_has_no_box() -> None:
    assert list(boxes((3, 4), 5, 5)) == []
    assert list(boxes((3, 4), 7, 2)) == []


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("chained", ["", "chained_0.", "chained_12."])
def test_a_key_is_split_into_state_and_name(state: str, chained: str) -> None:
    name = "decoder.layers.mlp.linear_fc1.weight"
    assert split_state_key(chained + state_key(state, name)) == (state, name)


@pytest.mark.parametrize(
    "key",
    [
        "decoder.layers.mlp.linear_fc1.weight",
        "optimizer.state.step.decoder.final_layernorm.weight",
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.exp_avg",
        "optimizer.state.exp_avg.",
        "chained_.optimizer.state.exp_avg.x",
    ],
)
def test_other_keys_are_no_state_keys(key: str) -> None:
    assert split_state_key(key) is None
