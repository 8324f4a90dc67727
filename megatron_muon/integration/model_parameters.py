"""Reads from a Megatron model what routing and splitting need to know of each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_muon.matrices import ParameterFacts, RowPacking

TIED_EMBEDDING = "embedding.word_embeddings.weight"
"""Megatron's name of the embedding that the output layer may share."""


@dataclass(frozen=True, kw_only=True)
class ModelParameter:
    """One trainable parameter of a model chunk.

    Attributes:
        tensor: The model parameter; everything is keyed by it, because few attributes survive on
            the fp32 masters.
        facts: What routing looks at.
        tp_dim: 0 or 1 when TP cuts it, None when every TP rank holds all of it.
        packing: How its rows are packed.
        part_rows: Parts of a query group, see ``ShardedParameter.part_rows``.
        is_expert: An expert's parameter: it lives in the expert groups.
    """

    tensor: torch.nn.Parameter
    facts: ParameterFacts
    tp_dim: int | None
    packing: RowPacking
    part_rows: tuple[tuple[str, int], ...]
    is_expert: bool

    @property
    def name(self) -> str:
        """Name in the model, without wrapper prefixes."""
        return self.facts.name

    @property
    def rule_name(self) -> str:
        """Name that the user's rules are matched with.

        The last pipeline stage calls its copy of a tied embedding ``output_layer.weight``; one
        weight must follow one rule, so both copies go by the embedding's name.
        """
        if self.facts.is_tied and self.name.endswith("output_layer.weight"):
            return TIED_EMBEDDING
        return self.name


def model_parameters(
    model_chunks: Sequence[torch.nn.Module], *, tp: int
) -> tuple[ModelParameter, ...]:
    """All trainable parameters, in model order, each once.

    Args:
        model_chunks: Model chunks, wrapped or not.
        tp: Tensor-parallel size; with 1 nothing is cut.

    Returns:
        One entry per parameter. With several chunks the names start with ``chunk_<i>.``.
    """
    found: list[ModelParameter] = []
    seen: set[int] = set()
    for number, chunk in enumerate(model_chunks):
        prefix = f"chunk_{number}." if len(model_chunks) > 1 else ""
        for path, module, parent in _modules(chunk):
            for local_name, parameter in module.named_parameters(recurse=False):
                if not parameter.requires_grad or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                found.append(
                    _describe(
                        f"{prefix}{path}.{local_name}" if path else f"{prefix}{local_name}",
                        parameter,
                        module,
                        parent,
                        tp,
                    )
                )
    return tuple(found)


def _modules(
    chunk: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Module | None]]:
    """(path without wrapper prefixes, module, its parent) of every module."""
    by_path = dict(chunk.named_modules())
    for path, module in by_path.items():
        parent = by_path.get(path.rpartition(".")[0]) if path else None
        yield _strip_wrappers(path), module, parent


def _strip_wrappers(path: str) -> str:
    """Drop the ``module.`` prefixes that DDP and Float16Module put in front."""
    while path == "module" or path.startswith("module."):
        path = path[len("module.") :]
    return path


def _describe(
    name: str,
    parameter: torch.nn.Parameter,
    module: torch.nn.Module,
    parent: torch.nn.Module | None,
    tp: int,
) -> ModelParameter:
    leaf = name.rpartition(".")[2]
    is_linear = any(base.__name__.endswith("Linear") for base in type(module).__mro__)
    cut = tp > 1 and bool(getattr(parameter, "tensor_model_parallel", False))
    packing, part_rows = _packing(name, parent)
    return ModelParameter(
        tensor=parameter,
        facts=ParameterFacts(
            name=name,
            ndim=parameter.dim(),
            is_linear_weight=is_linear and leaf.startswith("weight"),
            is_embedding_or_output=_is_embedding_or_output(name, parameter, module),
            is_router="Router" in type(module).__name__,
            is_tied=bool(
                getattr(parameter, "shared", False) or getattr(parameter, "shared_embedding", False)
            ),
        ),
        # On replicated Transformer Engine weights partition_dim is 0 all the same.
        tp_dim=int(parameter.partition_dim) if cut else None,  # type: ignore[attr-defined]
        packing=packing,
        part_rows=part_rows,
        is_expert=not getattr(parameter, "allreduce", True),
    )


def _is_embedding_or_output(
    name: str, parameter: torch.nn.Parameter, module: torch.nn.Module
) -> bool:
    # Learned position embeddings carry no flag, so the class and the name are asked as well.
    return (
        bool(getattr(parameter, "is_embedding_or_output_parameter", False))
        or any("Embedding" in base.__name__ for base in type(module).__mro__)
        or "output_layer" in name.split(".")
    )


def _packing(
    name: str, parent: torch.nn.Module | None
) -> tuple[RowPacking, tuple[tuple[str, int], ...]]:
    config: Any = getattr(parent, "config", None)
    if config is None:
        return RowPacking.WHOLE, ()
    if name.endswith("linear_qkv.weight"):
        heads_per_group = config.num_attention_heads // config.num_query_groups
        query = ("q", heads_per_group * config.kv_channels)
        gate = (("gate", query[1]),) if getattr(config, "attention_output_gate", False) else ()
        return RowPacking.QKV, (query, *gate, ("k", config.kv_channels), ("v", config.kv_channels))
    if name.endswith("linear_fc1.weight") and getattr(config, "gated_linear_unit", False):
        return RowPacking.GATE_UP, ()
    return RowPacking.WHOLE, ()
