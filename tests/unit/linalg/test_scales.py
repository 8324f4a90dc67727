"""Scale modes: the factor, and the measured RMS of a scaled, exactly orthogonal factor."""

import math

import pytest
import torch

from megatron_muon.linalg import SCALE_MODES, update_rms, update_scale

SHAPES = [(1, 1), (1, 16), (16, 1), (12, 12), (8, 32), (32, 8), (7, 5)]

# The factors at 8×32 and 32×8, worked out by hand.
BY_HAND = {
    "spectral": (math.sqrt(32), math.sqrt(32)),
    "unit_rms_norm": (0.5, 2.0),
    "shape_scaling": (1.0, 2.0),
    "match_rms_adamw": (0.2 * math.sqrt(32), 0.2 * math.sqrt(32)),
}

# The RMS of the update at 8×32 and 32×8, worked out by hand.
RMS_BY_HAND = {
    "spectral": (1.0, 1.0),
    "unit_rms_norm": (0.5 / math.sqrt(32), 2 / math.sqrt(32)),
    "shape_scaling": (1 / math.sqrt(32), 1 / math.sqrt(8)),
    "match_rms_adamw": (0.2, 0.2),
}


def orthogonal(m: int, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(m * 100 + n)
    x = torch.randn((m, n), dtype=torch.float64, generator=generator)
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    return u @ vt


def test_every_mode_has_values_by_hand():
    assert set(SCALE_MODES) == set(BY_HAND) == set(RMS_BY_HAND)


@pytest.mark.parametrize("mode", SCALE_MODES)
def test_the_factor_is_that_of_the_formula(mode):
    assert (update_scale(mode, 8, 32), update_scale(mode, 32, 8)) == pytest.approx(BY_HAND[mode])


@pytest.mark.parametrize("mode", SCALE_MODES)
def test_the_rms_is_that_of_the_table(mode):
    assert (update_rms(mode, 8, 32), update_rms(mode, 32, 8)) == pytest.approx(RMS_BY_HAND[mode])


@pytest.mark.parametrize("mode", SCALE_MODES)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_the_rms_is_the_measured_one(mode, m, n):
    update = update_scale(mode, m, n) * orthogonal(m, n)
    assert update.square().mean().sqrt().item() == pytest.approx(update_rms(mode, m, n), rel=1e-12)


@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_the_factor_is_that_of_emerging_optimizers(mode, m, n):
    upstream = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers.muon")
    assert update_scale(mode, m, n) == pytest.approx(
        upstream.get_muon_scale_factor(m, n, mode=mode), rel=1e-14
    )


@pytest.mark.parametrize("function", [update_scale, update_rms])
def test_an_unknown_mode_is_refused_with_the_known_ones(function):
    with pytest.raises(ValueError, match="--muon-scale-mode spectrum is unknown") as error:
        function("spectrum", 4, 4)
    assert all(mode in str(error.value) for mode in SCALE_MODES)


@pytest.mark.parametrize(("m", "n"), [(0, 4), (4, 0)])
def test_an_empty_matrix_is_refused(m, n):
    with pytest.raises(ValueError, match=f"{m}x{n} matrix has no scale"):
        update_scale("spectral", m, n)
