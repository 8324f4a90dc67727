"""Orth-Dion's rule: rank, scale, refusals, and the first right factor."""

import dataclasses
import math

import pytest
import torch

from megatron_muon.optim.dion_rule import OrthDionRule, seeded_right_factor

FP64, FP32 = torch.float64, torch.float32


def rule(**changes) -> OrthDionRule:
    return OrthDionRule(**({"rank_fraction": 0.25, "scale_mode": "unit_rms_norm"} | changes))


@pytest.mark.parametrize(
    ("fraction", "multiple", "shape", "rank"),
    [
        (0.25, 1, (4096, 1024), 256),
        (0.25, 1, (1024, 4096), 256),
        (0.25, 1, (10, 30), 3),
        (0.1, 1, (30, 30), 3),
        (0.25, 64, (768, 3072), 192),
        (0.25, 128, (768, 3072), 256),
        (0.01, 1, (20, 20), 1),
        (1e-12, 1, (20, 20), 1),
        (0.5, 64, (48, 200), 48),
        (1.0, 7, (20, 30), 20),
        (1.0, 1, (1, 9), 1),
    ],
)
def test_rank_is_a_fraction_of_the_smaller_side_rounded_up(fraction, multiple, shape, rank):
    assert rule(rank_fraction=fraction, rank_multiple_of=multiple).rank(*shape) == rank


def test_scale_sees_the_sides_as_they_are_and_compensates_the_rank_on_demand():
    assert rule().scale(16, 64) == 0.5
    assert rule().scale(64, 16) == 2.0
    assert rule(extra_scale_factor=0.2).scale(64, 16) == pytest.approx(0.4)
    compensated = rule(rank_compensation=True).scale(64, 16)
    assert compensated == pytest.approx(2.0 * math.sqrt(16 / 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank_fraction": 0.0}, "rank_fraction is 0"),
        ({"rank_fraction": 1.5}, "rank_fraction is 1.5"),
        ({"rank_fraction": math.nan}, "rank_fraction is nan"),
        ({"rank_multiple_of": 0}, "rank_multiple_of is 0"),
        ({"momentum": 1.0}, "momentum is 1"),
        ({"momentum": -0.1}, "momentum is -0.1"),
        ({"right_factor": "cholesky"}, "supported are qr, polar, colnorm"),
        ({"scale_mode": "none"}, "--muon-scale-mode none is unknown"),
    ],
)
def test_a_rule_out_of_range_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        rule(**changes)


def test_the_rule_is_frozen_and_defaults_to_the_paper():
    chosen = rule()
    assert (chosen.momentum, chosen.right_factor, chosen.state_dtype) == (0.95, "qr", FP32)
    assert not chosen.rank_compensation
    with pytest.raises(dataclasses.FrozenInstanceError):
        chosen.momentum = 0.9


def test_the_start_of_v_depends_on_the_name_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = seeded_right_factor("layers.0.mlp.linear_fc1.weight", 64, 16)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = seeded_right_factor("layers.0.mlp.linear_fc1.weight", 64, 16)
    other = seeded_right_factor("layers.1.mlp.linear_fc1.weight", 64, 16)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    double = seeded_right_factor("layers.0.mlp.linear_fc1.weight", 64, 16, dtype=FP64)
    assert torch.equal(double.float(), first)
    assert (first.shape, first.dtype, first.device.type) == ((64, 16), FP32, "cpu")
    assert abs(float(double.mean())) < 0.1
    assert abs(float(double.std()) - 1) < 0.1


def test_the_start_of_v_is_frozen():
    # A change would change every run that is started anew.
    found = seeded_right_factor("weight", 3, 2, dtype=FP64).flatten().tolist()
    assert found == pytest.approx(
        [
            0.2505842004032251,
            -1.4627692019293064,
            0.5988298501009937,
            -0.4288355990396204,
            -0.3183764222576209,
            -0.34343974656259435,
        ],
        abs=1e-12,
    )
