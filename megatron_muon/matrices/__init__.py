"""Describes the logical matrices of a model: names, shapes, splits, shards, ranges, routes.

Data and pure functions, independent of torch, Megatron and process groups.
"""

from megatron_muon.matrices.adapters import adapter_parameters, unwrapped
from megatron_muon.matrices.known_packings import Family, family_by_name, packing_by_name
from megatron_muon.matrices.logical import Block, LogicalMatrix, logical_matrices, natural_key
from megatron_muon.matrices.packing import (
    WHOLE,
    Packing,
    RowPacking,
    RowPart,
    SplitMode,
    intervals,
)
from megatron_muon.matrices.parameter import ShardedParameter, data_parallel_ranges
from megatron_muon.matrices.routing import ParameterFacts, Route, default_route, route
from megatron_muon.matrices.rules import (
    Rule,
    load_rules,
    merged_rule,
    parse_rule,
    unmatched_rules,
)

__all__ = [
    "WHOLE",
    "Block",
    "Family",
    "LogicalMatrix",
    "Packing",
    "ParameterFacts",
    "Route",
    "RowPacking",
    "RowPart",
    "Rule",
    "ShardedParameter",
    "SplitMode",
    "adapter_parameters",
    "data_parallel_ranges",
    "default_route",
    "family_by_name",
    "intervals",
    "load_rules",
    "logical_matrices",
    "merged_rule",
    "natural_key",
    "packing_by_name",
    "parse_rule",
    "route",
    "unmatched_rules",
    "unwrapped",
]
