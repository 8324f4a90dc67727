"""Planning: owners, waves, byte and FLOP counts. Pure functions of names, shapes and sizes."""

from megatron_muon.placement.buffer_bound import buffer_bytes_of
from megatron_muon.placement.cost_table import (
    CostTable,
    MeasuredCost,
    load_cost_table,
    write_cost_table,
)
from megatron_muon.placement.factor_shape import FactorShape
from megatron_muon.placement.method import AtHome, Method
from megatron_muon.placement.part_costs import (
    FLOPS_PER_BYTE,
    FLOPS_PER_NETWORK_BYTE,
    MIN_SPLIT_FLOPS,
    MOST_SPLIT_RANKS,
    Splitting,
)
from megatron_muon.placement.plan import CostFunction, Plan, RankLoad
from megatron_muon.placement.planning import make_plan
from megatron_muon.placement.regions import (
    ExchangeGroup,
    Piece,
    Region,
    Run,
    Share,
    even_cuts,
    shares,
)
from megatron_muon.placement.schemes import Factors, Panels, Scheme, Whole

__all__ = [
    "FLOPS_PER_BYTE",
    "FLOPS_PER_NETWORK_BYTE",
    "MIN_SPLIT_FLOPS",
    "MOST_SPLIT_RANKS",
    "AtHome",
    "CostFunction",
    "CostTable",
    "ExchangeGroup",
    "FactorShape",
    "Factors",
    "MeasuredCost",
    "Method",
    "Panels",
    "Piece",
    "Plan",
    "RankLoad",
    "Region",
    "Run",
    "Scheme",
    "Share",
    "Splitting",
    "Whole",
    "buffer_bytes_of",
    "even_cuts",
    "load_cost_table",
    "make_plan",
    "shares",
    "write_cost_table",
]
