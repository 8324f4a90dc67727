"""Coefficient sets: published numbers, their effect on singular values, and refusals."""

import dataclasses
import math

import pytest
import torch

from megatron_muon.linalg import COEFFICIENT_SETS, coefficient_schedule, parse_coefficients

PUBLISHED = [name for name in COEFFICIENT_SETS if name != "custom"]

# Name, steps, lowest and highest singular value after them, from [0.02, 1] (0.001 rounded outward).
INTERVALS = [
    ("simple", 1, 0.068, 1.203),
    ("simple", 5, 0.681, 1.135),
    ("quintic", 5, 0.977, 1.033),
    ("quintic", 10, 0.977, 1.027),
    ("polar_express", 5, 0.869, 1.125),
    ("polar_express", 8, 0.999, 1.001),
    ("polar_express", 12, 0.999, 1.001),
    ("cans", 5, 0.883, 1.121),
    ("cans", 8, 1.006, 1.056),
    ("aol", 4, -1.085, 1.085),
    ("deepseekv4", 5, 0.681, 1.135),
    ("deepseekv4", 10, 0.999, 1.001),
    ("deepseekv4", 12, 0.999, 1.001),
]


# Name, steps, largest slope on [0, 1].
SLOPES = [
    ("simple", 1, 3.4),
    ("simple", 5, 485),
    ("quintic", 5, 493),
    ("polar_express", 8, 6.4e3),
    ("cans", 5, 4.9e4),
    ("aol", 4, 130),
    ("deepseekv4", 10, 7.9e4),
]


def polynomial(sigma: torch.Tensor, schedule) -> torch.Tensor:
    for a, b, c in schedule:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


def largest_slope(schedule) -> float:
    sigma = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    slope = torch.ones_like(sigma)
    for a, b, c in schedule:
        slope *= a + 3 * b * sigma**2 + 5 * c * sigma**4
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return float(slope.abs().max())


@pytest.mark.parametrize("name", PUBLISHED)
def test_numbers_are_those_of_emerging_optimizers(name):
    upstream = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    assert list(COEFFICIENT_SETS[name].steps) == upstream._COEFFICIENT_SETS[name]


def test_every_set_of_emerging_optimizers_is_here():
    upstream = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    assert set(upstream._COEFFICIENT_SETS) | {"custom"} == set(COEFFICIENT_SETS)


def test_sets_are_frozen_keyed_by_their_name_and_have_a_source():
    for name, row in COEFFICIENT_SETS.items():
        assert row.name == name
        assert row.source
        with pytest.raises(dataclasses.FrozenInstanceError):
            row.name = "other"
    with pytest.raises(TypeError):
        COEFFICIENT_SETS["mine"] = COEFFICIENT_SETS["simple"]


@pytest.mark.parametrize(("name", "steps", "low", "high"), INTERVALS)
def test_singular_values_land_in_the_documented_interval(name, steps, low, high):
    sigma = torch.linspace(0.02, 1, 20_001, dtype=torch.float64)
    after = polynomial(sigma, coefficient_schedule(name, steps))
    assert low <= after.min() <= low + 0.003
    assert high - 0.003 <= after.max() <= high


@pytest.mark.parametrize(("name", "steps", "documented"), SLOPES)
def test_the_largest_slope_is_the_documented_one(name, steps, documented):
    found = largest_slope(coefficient_schedule(name, steps))
    assert found == pytest.approx(documented, rel=0.02)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "aol"])
def test_no_singular_value_changes_sign(name):
    sigma = torch.logspace(-6, 0, 20_001, dtype=torch.float64)
    for steps in range(1, 2 * len(COEFFICIENT_SETS[name].steps) + 1):
        try:
            schedule = coefficient_schedule(name, steps)
        except ValueError:
            continue
        assert polynomial(sigma, schedule).min() > 0


def test_aol_is_right_below_its_root_and_reverses_above_as_documented():
    schedule = coefficient_schedule("aol", 4)
    below = polynomial(torch.linspace(0.02, 0.88, 20_001, dtype=torch.float64), schedule)
    above = polynomial(torch.linspace(0.8838, 1, 20_001, dtype=torch.float64), schedule)
    assert below.min() > 0
    assert below.max() < 1.085
    assert above.max() < 0


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_a_set_that_diverges_in_16_bits_is_refused_there_and_only_there(narrow):
    message = rf"cans diverges .* in {narrow}\. Type --dmuon-compute-dtype fp32"
    with pytest.raises(ValueError, match=message):
        coefficient_schedule("cans", 5, compute_dtype=narrow)
    assert coefficient_schedule("cans", 5, compute_dtype=torch.float32)
    for name in set(PUBLISHED) - {"cans"}:
        assert coefficient_schedule(name, 4, compute_dtype=narrow)


def test_fewer_steps_take_the_first_triples():
    full = COEFFICIENT_SETS["polar_express"].steps
    assert coefficient_schedule("polar_express", 3) == full[:3]
    assert coefficient_schedule("quintic", 1) == COEFFICIENT_SETS["quintic"].steps[:1]


@pytest.mark.parametrize("name", ["polar_express", "cans", "deepseekv4"])
def test_more_steps_repeat_the_last_triple(name):
    full = COEFFICIENT_SETS[name].steps
    assert coefficient_schedule(name, len(full) + 3) == full + (full[-1],) * 3


@pytest.mark.parametrize("name", ["simple", "quintic"])
def test_more_steps_run_whole_passes(name):
    full = COEFFICIENT_SETS[name].steps
    assert coefficient_schedule(name, 3 * len(full)) == full * 3


@pytest.mark.parametrize(("steps", "instead"), [(6, 5), (9, 5), (11, 10)])
def test_an_unfinished_pass_is_refused(steps, instead):
    with pytest.raises(ValueError, match=f"--muon-num-ns-steps {steps} .*quintic") as error:
        coefficient_schedule("quintic", steps)
    assert f"type --muon-num-ns-steps {instead}." in str(error.value)


@pytest.mark.parametrize("steps", [5, 8])
def test_a_second_pass_of_aol_is_refused(steps):
    with pytest.raises(ValueError, match="reverses the sign") as error:
        coefficient_schedule("aol", steps)
    assert "type --muon-num-ns-steps 4." in str(error.value)


@pytest.mark.parametrize("name", [*PUBLISHED, "custom"])
@pytest.mark.parametrize("steps", [0, -1])
def test_less_than_one_step_is_refused(name, steps):
    with pytest.raises(ValueError, match=f"--muon-num-ns-steps {steps} .*at least 1"):
        coefficient_schedule(name, steps, [(2.0, -1.5, 0.5)] if name == "custom" else None)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="--muon-coefficient-type cubic is unknown") as error:
        coefficient_schedule("cubic", 5)
    assert all(name in str(error.value) for name in COEFFICIENT_SETS)


def test_custom_triples_are_used_in_order():
    custom = [(3.0, -2.5, 0.5), (1.5, -0.5, 0.0)]
    assert coefficient_schedule("custom", 1, custom) == ((3.0, -2.5, 0.5),)
    assert coefficient_schedule("custom", 4, custom) == tuple(custom * 2)
    with pytest.raises(ValueError, match="--muon-num-ns-steps 5"):
        coefficient_schedule("custom", 5, custom)


@pytest.mark.parametrize("custom", [None, ()])
def test_custom_without_triples_is_refused(custom):
    with pytest.raises(ValueError, match="custom requires --dmuon-coefficients"):
        coefficient_schedule("custom", 5, custom)


@pytest.mark.parametrize("triple", [(1.0, 2.0), (1.0, 2.0, 3.0, 4.0), (1.0, math.nan, 2.0)])
def test_malformed_custom_triples_are_refused(triple):
    with pytest.raises(ValueError, match="--dmuon-coefficients: entry 2 is"):
        coefficient_schedule("custom", 2, [(2.0, -1.5, 0.5), triple])


def test_custom_triples_for_another_set_are_refused():
    with pytest.raises(ValueError, match=r"--dmuon-coefficients is set but .* quintic"):
        coefficient_schedule("quintic", 5, [(2.0, -1.5, 0.5)])


def test_parse_reads_triples_in_order():
    assert parse_coefficients("3.4445,-4.775,2.0315;2,-1.5,5e-1") == (
        (3.4445, -4.775, 2.0315),
        (2.0, -1.5, 0.5),
    )
    assert parse_coefficients(" 1 , 2,3 ") == ((1.0, 2.0, 3.0),)


@pytest.mark.parametrize(
    "text", ["", "1,2", "1,2,3,4", "1,2,3;", "1;2;3", "1,2,x", "1,2,inf", "1,,3"]
)
def test_parse_refuses_anything_but_triples(text):
    with pytest.raises(ValueError, match=r"--dmuon-coefficients.*Type for example"):
        parse_coefficients(text)
