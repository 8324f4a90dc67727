"""Update rules over flat ranges and assembled matrices: the formulas."""

from megatron_muon.optim.dion_rule import OrthDionRule
from megatron_muon.optim.muon_rule import MuonRule
from megatron_muon.optim.rule import MatrixRange, MatrixRule, OwnedState

__all__ = ["MatrixRange", "MatrixRule", "MuonRule", "OrthDionRule", "OwnedState"]
