"""Planning: owners, waves, byte and FLOP counts. Pure functions of names, shapes and sizes."""

from megatron_muon.placement.factors import FactorPlan, Scheme, SchemeChoice, make_factor_plan
from megatron_muon.placement.plan import CostFunction, Plan, RankLoad, make_plan
from megatron_muon.placement.segments import (
    ExchangeGroup,
    Rectangle,
    Segment,
    copies,
    rectangles,
    segments,
)

__all__ = [
    "CostFunction",
    "ExchangeGroup",
    "FactorPlan",
    "Plan",
    "RankLoad",
    "Rectangle",
    "Scheme",
    "SchemeChoice",
    "Segment",
    "copies",
    "make_factor_plan",
    "make_plan",
    "rectangles",
    "segments",
]
