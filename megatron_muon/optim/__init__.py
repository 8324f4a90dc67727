"""Update rules over flat ranges and assembled matrices: the formulas."""

from megatron_muon.optim.muon import MatrixRange, MuonRule, muon_step

__all__ = ["MatrixRange", "MuonRule", "muon_step"]
