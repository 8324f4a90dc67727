"""Tensor maths of the matrix optimizers: no torch.distributed, no Megatron, no global state."""

from megatron_muon.linalg.coefficients import (
    COEFFICIENT_SETS,
    CoefficientSet,
    Schedule,
    coefficient_schedule,
    parse_coefficients,
)
from megatron_muon.linalg.kernels import warm_up
from megatron_muon.linalg.newton_schulz import (
    columns_at_once,
    newton_schulz,
    newton_schulz_bytes,
    orthogonalize_,
)
from megatron_muon.linalg.orthonormal import (
    RIGHT_FACTORS,
    Basis,
    Refresh,
    RightFactor,
    dion_flops,
    orthonormal_basis,
    right_factor,
)
from megatron_muon.linalg.panel_newton_schulz import (
    PanelRequest,
    PanelWork,
    PanelWorker,
    orthogonalize_panel_,
    panel_bytes,
    panel_flops,
    panel_requests,
)
from megatron_muon.linalg.panel_team import OVER_NETWORK, RequestKind, Team
from megatron_muon.linalg.precision import (
    COMPUTE_POLICIES,
    EXCHANGE_POLICIES,
    STATE_DTYPES,
    full_precision_matmul,
    resolve_compute_dtype,
    resolve_exchange_dtype,
)
from megatron_muon.linalg.products import gram, small_side_first
from megatron_muon.linalg.scales import SCALE_MODES, update_rms, update_scale
from megatron_muon.linalg.segments import (
    Segments,
    carried_segments,
    cheapest_segments,
    newton_schulz_flops,
    standard_segments,
)
from megatron_muon.linalg.workspace import MemoryPool, Workspace

__all__ = [
    "COEFFICIENT_SETS",
    "COMPUTE_POLICIES",
    "EXCHANGE_POLICIES",
    "OVER_NETWORK",
    "RIGHT_FACTORS",
    "SCALE_MODES",
    "STATE_DTYPES",
    "Basis",
    "CoefficientSet",
    "MemoryPool",
    "PanelRequest",
    "PanelWork",
    "PanelWorker",
    "Refresh",
    "RequestKind",
    "RightFactor",
    "Schedule",
    "Segments",
    "Team",
    "Workspace",
    "carried_segments",
    "cheapest_segments",
    "coefficient_schedule",
    "columns_at_once",
    "dion_flops",
    "full_precision_matmul",
    "gram",
    "newton_schulz",
    "newton_schulz_bytes",
    "newton_schulz_flops",
    "orthogonalize_",
    "orthogonalize_panel_",
    "orthonormal_basis",
    "panel_bytes",
    "panel_flops",
    "panel_requests",
    "parse_coefficients",
    "resolve_compute_dtype",
    "resolve_exchange_dtype",
    "right_factor",
    "small_side_first",
    "standard_segments",
    "update_rms",
    "update_scale",
    "warm_up",
]
