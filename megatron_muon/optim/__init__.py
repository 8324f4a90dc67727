"""Update rules over flat ranges and assembled matrices: the formulas."""

from megatron_muon.optim.dion_rule import OrthDionRule
from megatron_muon.optim.muon import MatrixRange, MuonRule, muon_step
from megatron_muon.optim.orth_dion import first_right_factors, orth_dion_step

__all__ = [
    "MatrixRange",
    "MuonRule",
    "OrthDionRule",
    "first_right_factors",
    "muon_step",
    "orth_dion_step",
]
