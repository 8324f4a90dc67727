"""Tensor maths of the matrix optimizers: no torch.distributed, no Megatron, no global state."""

from megatron_muon.linalg.coefficients import (
    COEFFICIENT_SETS,
    CoefficientSet,
    Schedule,
    coefficient_schedule,
    parse_coefficients,
)
from megatron_muon.linalg.newton_schulz import newton_schulz, newton_schulz_flops
from megatron_muon.linalg.orthonormal import (
    RIGHT_FACTORS,
    RightFactor,
    dion_flops,
    orthonormal_basis,
    right_factor,
)
from megatron_muon.linalg.precision import (
    COMPUTE_POLICIES,
    STATE_DTYPES,
    full_precision_matmul,
    resolve_compute_dtype,
)
from megatron_muon.linalg.scales import SCALE_MODES, update_rms, update_scale

__all__ = [
    "COEFFICIENT_SETS",
    "COMPUTE_POLICIES",
    "RIGHT_FACTORS",
    "SCALE_MODES",
    "STATE_DTYPES",
    "CoefficientSet",
    "RightFactor",
    "Schedule",
    "coefficient_schedule",
    "dion_flops",
    "full_precision_matmul",
    "newton_schulz",
    "newton_schulz_flops",
    "orthonormal_basis",
    "parse_coefficients",
    "resolve_compute_dtype",
    "right_factor",
    "update_rms",
    "update_scale",
]
