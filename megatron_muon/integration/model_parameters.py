"""Reads from a Megatron model what routing and splitting need to know of each parameter."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_muon.integration.packings import packing_of
from megatron_muon.matrices import (
    WHOLE,
    Family,
    Packing,
    ParameterFacts,
    adapter_parameters,
    unwrapped,
)

TIED_EMBEDDING = "embedding.word_embeddings.weight"
"""Megatron's name of the embedding that the output layer may share."""


@dataclass(frozen=True, kw_only=True)
class ModelParameter:
    """One trainable parameter of a model chunk.

    Attributes:
        tensor: The model parameter; everything is keyed by it, because few attributes survive on
            the fp32 masters.
        facts: What routing looks at.
        tp_dim: 0 or 1 when TP cuts the rows or the columns, None when every TP rank holds all.
        tp: Number of TP (for an expert: expert-TP) ranks that hold it.
        packing: How the rows of a matrix are packed.
        family: Which setting decides on its split.
        is_expert: An expert's parameter: it lives in the expert groups.
        stack: Global numbers of the experts that one 3-D parameter stacks, else None.
    """

    tensor: torch.nn.Parameter
    facts: ParameterFacts
    tp_dim: int | None
    tp: int
    packing: Packing
    family: Family
    is_expert: bool
    stack: tuple[int, ...] | None

    @property
    def name(self) -> str:
        """Name in the model, numbered over all pipeline stages and experts."""
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
    model_chunks: Sequence[torch.nn.Module], *, tp: int, expert_tp: int
) -> tuple[ModelParameter, ...]:
    """All trainable parameters, in model order, each once.

    Args:
        model_chunks: Model chunks, wrapped or not.
        tp: Tensor-parallel size; with 1 nothing is cut.
        expert_tp: Expert-tensor-parallel size, which holds for experts.

    Returns:
        One entry per parameter. Layers and experts are numbered over all pipeline stages and
        expert-parallel ranks, so a parameter has one name at every layout. Names that two chunks
        share all the same start with ``chunk_<i>.``.
    """
    found: list[list[ModelParameter]] = []
    seen: set[int] = set()
    for chunk in model_chunks:
        modules = [(unwrapped(path), module) for path, module in chunk.named_modules()]
        # A wrapper has the path of what it wraps, which comes after it and stays.
        by_path = dict(modules)
        places = [
            _Place(
                path=path,
                leaf=leaf,
                module=module,
                parameter=parameter,
                by_path=by_path,
                sizes=(tp, expert_tp),
            )
            for path, module in modules
            for leaf, parameter in module.named_parameters(recurse=False)
        ]
        adapters = adapter_parameters({place.global_name: place.global_shape for place in places})
        described: list[ModelParameter] = []
        for place in places:
            if place.parameter.requires_grad and id(place.parameter) not in seen:
                seen.add(id(place.parameter))
                described.append(_describe(place, adapters))
        found.append(described)
    return tuple(_with_unique_names(found))


def _with_unique_names(chunks: Sequence[Sequence[ModelParameter]]) -> Iterator[ModelParameter]:
    used = Counter(entry.name for chunk in chunks for entry in chunk)
    for number, chunk in enumerate(chunks):
        for entry in chunk:
            if used[entry.name] > 1:
                facts = replace(entry.facts, name=f"chunk_{number}.{entry.name}")
                entry = replace(entry, facts=facts)
            yield entry


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a parameter is in its model.

    Attributes:
        path: Path of its module without wrapper prefixes.
        leaf: Its name in the module.
        module: The module.
        parameter: The parameter itself.
        by_path: Every module of the chunk.
        sizes: Tensor-parallel and expert-tensor-parallel size.
    """

    path: str
    leaf: str
    module: torch.nn.Module
    parameter: torch.nn.Parameter
    by_path: Mapping[str, torch.nn.Module]
    sizes: tuple[int, int]

    @property
    def parent(self) -> torch.nn.Module | None:
        return self.by_path.get(self.path.rpartition(".")[0]) if self.path else None

    @property
    def is_expert(self) -> bool:
        return not getattr(self.parameter, "allreduce", True)

    @property
    def tp(self) -> int:
        return self.sizes[self.is_expert]

    @property
    def tp_dim(self) -> int | None:
        # On replicated Transformer Engine weights partition_dim is 0 all the same.
        cut = self.tp > 1 and bool(getattr(self.parameter, "tensor_model_parallel", False))
        return int(self.parameter.partition_dim) if cut else None  # type: ignore[attr-defined]

    @property
    def is_linear_weight(self) -> bool:
        return self.leaf.startswith("weight") and any(
            base.__name__.endswith("Linear") for base in type(self.module).__mro__
        )

    @property
    def stacks_experts(self) -> bool:
        return self.parameter.dim() == 3 and self.is_linear_weight and self.experts is not None

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape gathered over TP; of a stack that of one expert, as its ``partition_dim`` is."""
        shape = list(self.parameter.shape[1:] if self.stacks_experts else self.parameter.shape)
        if self.tp_dim is not None:
            shape[self.tp_dim] *= self.tp
        return tuple(shape)

    @property
    def experts(self) -> tuple[int, ...] | None:
        """Global numbers of the experts of the mixture that it belongs to, if any."""
        pieces = self.path.split(".")
        for end in range(len(pieces), -1, -1):
            layer = self.by_path.get(".".join(pieces[:end]))
            numbers = getattr(layer, "local_expert_indices", None)
            if numbers is not None:
                return tuple(int(number) for number in numbers)
        return None

    @property
    def global_name(self) -> str:
        """Name with layers and experts numbered as in one process."""
        pieces = self.path.split(".") if self.path else []
        renamed = list(pieces)
        leaf = self.leaf
        for index, piece in enumerate(pieces):
            if not piece.isdecimal():
                continue
            layer = getattr(self.by_path[".".join(pieces[: index + 1])], "layer_number", None)
            if pieces[index - 1] == "layers" and isinstance(layer, int):
                renamed[index] = str(layer - 1)
            if pieces[index - 1] == "local_experts" and self.experts is not None:
                renamed[index] = str(self.experts[int(piece)])
        numbered = re.fullmatch(r"(weight|bias)(\d+)", leaf)
        if numbered and self.experts is not None:
            leaf = f"{numbered[1]}{self.experts[int(numbered[2])]}"
        return ".".join([*renamed, leaf])


def _describe(place: _Place, adapters: Collection[str]) -> ModelParameter:
    module, parameter, tp_dim = place.module, place.parameter, place.tp_dim
    family: Family = ""
    packing = WHOLE
    if place.is_linear_weight and (parameter.dim() == 2 or place.stacks_experts):
        family, packing = packing_of(
            place.path, parameter, place.parent, cut=place.tp if tp_dim == 0 else 1
        )
    return ModelParameter(
        tensor=parameter,
        facts=ParameterFacts(
            name=place.global_name,
            shape=place.global_shape,
            is_linear_weight=place.is_linear_weight,
            is_embedding_or_output=_is_embedding_or_output(place, parameter),
            is_router="Router" in type(module).__name__,
            is_tied=bool(
                getattr(parameter, "shared", False) or getattr(parameter, "shared_embedding", False)
            ),
            is_adapter=place.global_name in adapters,
        ),
        tp_dim=tp_dim,
        tp=place.tp,
        packing=packing,
        family=family,
        is_expert=place.is_expert,
        stack=place.experts if place.stacks_experts else None,
    )


def _is_embedding_or_output(place: _Place, parameter: torch.nn.Parameter) -> bool:
    # Learned position embeddings carry no flag, so the class and the name are asked as well.
    return (
        bool(getattr(parameter, "is_embedding_or_output_parameter", False))
        or any("Embedding" in base.__name__ for base in type(place.module).__mro__)
        or "output_layer" in place.path.split(".")
    )
