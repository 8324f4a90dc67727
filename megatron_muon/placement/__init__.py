"""Planning: owners, waves, byte and FLOP counts. Pure functions of names, shapes and sizes."""

from megatron_muon.placement.buffer_bound import buffer_bytes_of
from megatron_muon.placement.cost_table import (
    CostTable,
    MeasuredCost,
    load_cost_table,
    write_cost_table,
)
from megatron_muon.placement.factors import FactorPlan, Scheme, SchemeChoice, make_factor_plan
from megatron_muon.placement.panels import even_cuts
from megatron_muon.placement.plan import CostFunction, Plan, RankLoad
from megatron_muon.placement.planning import make_plan
from megatron_muon.placement.segments import (
    ExchangeGroup,
    Rectangle,
    Segment,
    copies,
    rectangles,
    segments,
)
from megatron_muon.placement.shared import SharedMatrix
from megatron_muon.placement.sharing import FLOPS_PER_BYTE, MIN_SHARED_FLOPS, Sharing

__all__ = [
    "FLOPS_PER_BYTE",
    "MIN_SHARED_FLOPS",
    "CostFunction",
    "CostTable",
    "ExchangeGroup",
    "FactorPlan",
    "MeasuredCost",
    "Plan",
    "RankLoad",
    "Rectangle",
    "Scheme",
    "SchemeChoice",
    "Segment",
    "SharedMatrix",
    "Sharing",
    "buffer_bytes_of",
    "copies",
    "even_cuts",
    "load_cost_table",
    "make_factor_plan",
    "make_plan",
    "rectangles",
    "segments",
    "write_cost_table",
]
