"""Derives the parameters of a model from the keys of its checkpoint and the saved arguments.

Megatron stacks layers and experts of a model into one tensor. Here they are separated again, and
every parameter gets its name in the model, to which rules are matched and under which right factors
are stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

from megatron_muon.checkpoint.names import split_state_key
from megatron_muon.matrices import (
    WHOLE,
    Family,
    Packing,
    ParameterFacts,
    RowPacking,
    adapter_parameters,
    family_by_name,
    packing_by_name,
    unwrapped,
)
from megatron_muon.offline.common_state import CommonState
from megatron_muon.offline.index import TensorInfo
from megatron_muon.offline.outputs import Box
from megatron_muon.offline.reading import Checkpoint

_STACKED_LAYERS = re.compile(r"\.layers\.(?!\d)")
_EXPERTS = ".experts.experts."
_LINEAR = re.compile(r"(^|\.)(linear_\w+|\w+_proj)\.weight(\.\w+)?$")
"""Megatron's names of linear layers: linear_qkv, linear_fc1, eh_proj, in_proj, out_proj, …"""

_UNKNOWN = Packing(rows=RowPacking.UNITS)
"""Packing of a parameter that may or may not be packed."""

_NO_STATE = ("optimizer.", "chained_", "rng_state", "rerun_state_machine", "common_state")


@dataclass(frozen=True, kw_only=True)
class StoredParameter:
    """One parameter and its place in the model part of a checkpoint.

    Attributes:
        key: Key of its tensor.
        index: Its index along the axes of layers and experts, empty for a whole tensor.
        facts: Input of routing, with its name in the model.
        family: The setting that determines its split.
        packing: Packing of its rows.
        problem: The reason why its packing is unknown, empty if it is known.
    """

    key: str
    index: tuple[int, ...]
    facts: ParameterFacts
    family: Family = ""
    packing: Packing = WHOLE
    problem: str = ""

    @property
    def name(self) -> str:
        """Name in the model."""
        return self.facts.name

    def box(self, info: TensorInfo) -> Box:
        """Return the box of its elements in a tensor stacked like the model's."""
        offset = (*self.index, *(0 for _ in self.facts.shape))
        return Box(info=info, offset=offset, shape=(*(1 for _ in self.index), *self.facts.shape))


def model_tensors(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """Return the tensors of the model part, by key."""
    return {
        key: info
        for key, info in checkpoint.tensors.items()
        if split_state_key(key) is None and not key.startswith(_NO_STATE)
    }


def stored_parameters(
    tensors: Mapping[str, TensorInfo], common: CommonState
) -> dict[str, tuple[StoredParameter, ...]]:
    """Return the parameters of every model tensor, by the tensor's key."""
    found = {key: tuple(_parameters(info, common)) for key, info in tensors.items()}
    facts = [parameter.facts for stacked in found.values() for parameter in stacked]
    adapters = adapter_parameters({fact.name: fact.shape for fact in facts})
    return {
        key: tuple(
            replace(p, facts=replace(p.facts, is_adapter=True)) if p.name in adapters else p
            for p in stacked
        )
        for key, stacked in found.items()
    }


def _parameters(info: TensorInfo, common: CommonState) -> Iterator[StoredParameter]:
    has_layers = _STACKED_LAYERS.search(info.key) is not None
    has_experts = _EXPERTS in info.key
    axes = has_layers + has_experts
    shape = info.shape[axes:]
    key = unwrapped(info.key)
    is_linear = _LINEAR.search(key) is not None
    family, packing, problem = _packing(key, shape, common) if is_linear else ("", WHOLE, "")
    for index in product(*(range(size) for size in info.shape[:axes])):
        yield StoredParameter(
            key=info.key,
            index=index,
            facts=ParameterFacts(
                name=_name(key, index, has_layers, has_experts, common),
                shape=shape,
                is_linear_weight=is_linear,
                is_embedding_or_output=_is_embedding_or_output(info.key),
                is_router=".router." in info.key,
                is_tied=False,
            ),
            family=family,
            packing=packing,
            problem=problem,
        )


def _name(
    key: str, index: tuple[int, ...], has_layers: bool, has_experts: bool, common: CommonState
) -> str:
    name = key
    if has_layers:
        name = _STACKED_LAYERS.sub(f".layers.{index[0]}.", name, count=1)
    if has_experts:
        expert = index[-1]
        if common.argument("moe_grouped_gemm", False):
            # One linear layer contains a weight of each expert.
            name = name.replace(_EXPERTS, ".experts.") + str(expert)
        else:
            name = name.replace(_EXPERTS, f".experts.local_experts.{expert}.")
    if name.startswith("mtp."):
        name = name.replace(".transformer_layer.", ".mtp_model_layer.")
    return name


def _is_embedding_or_output(key: str) -> bool:
    pieces = key.split(".")
    return "embedding" in pieces or "output_layer" in pieces


def _packing(key: str, shape: tuple[int, ...], common: CommonState) -> tuple[Family, Packing, str]:
    linear = key.rpartition(".weight")[0].rpartition(".")[2]
    if linear == "in_proj":
        return "ssm", _UNKNOWN, "the parts of in_proj are unknown offline"
    if len(shape) != 2:
        return "", WHOLE, ""
    config = _model_config(common)
    try:
        known = packing_by_name(linear, config, shape[0])
    except AttributeError as error:
        missing = common.missing(str(error.name), "model")
        return family_by_name(linear), _UNKNOWN, f"the checkpoint does not say {missing}"
    family, packing = known or ("", WHOLE)
    problem = packing.problem(shape[0], cut=1)
    if linear == "linear_qkv" and not problem:
        groups = config.num_query_groups
        if shape[0] != groups * packing.rows_per_unit:
            problem = (
                f"{shape[0]} rows are not {groups} query groups (num_query_groups) of "
                f"{packing.rows_per_unit} rows"
            )
    return family, packing, problem or ""


def _model_config(common: CommonState) -> Any:
    """Return the fields of ``core_transformer_config_from_args`` that are needed here.

    Fields missing in the saved arguments are taken from ``run_config.yaml``.
    """
    config = SimpleNamespace(**(common.run_config or {}))
    heads = getattr(config, "num_attention_heads", None)
    if heads:  # as in ``TransformerConfig.__post_init__``; null fields are absent
        config.num_query_groups = getattr(config, "num_query_groups", heads)
        if hasattr(config, "hidden_size"):
            config.kv_channels = getattr(config, "kv_channels", config.hidden_size // heads)
    args = common.value.get("args")
    if args is None:
        return config
    vars(config).update({name: value for name, value in vars(args).items() if value is not None})
    heads = getattr(args, "num_attention_heads", None)
    if heads is not None and not getattr(args, "group_query_attention", False):
        config.num_query_groups = heads
    config.gated_linear_unit = any(
        getattr(args, name, False) for name in ("swiglu", "quick_geglu", "gated_linear_unit")
    )
    return config


def require_names(parameters: Mapping[str, Sequence[StoredParameter]], common: CommonState) -> None:
    """Refuse names that would be guesses: those of experts depend on how weights are stored."""
    if any(_EXPERTS in key for key in parameters):
        common.required("moe_grouped_gemm", "model")
