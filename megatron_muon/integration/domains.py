"""Domains: parameters that are sharded over the same ranks, each with an exchange of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core import parallel_state

from megatron_muon.exchange import exchange_group, neighbours_on_a_node
from megatron_muon.integration.model_parameters import ModelParameter
from megatron_muon.integration.support import ConfigurationError

DomainName = Literal["dense", "expert"]


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Dense parameters, or experts: Megatron gives each a DistributedOptimizer of its own.

    Attributes:
        name: ``dense`` or ``expert``.
        tp_group: The ranks that a matrix is cut over.
        dp_group: The ranks that the distributed optimizer shards over; with several optimizer
            instances those of one instance. Context-parallel ranks belong to it.
        is_first: Whether this rank is the first of its stage that holds parameters of the domain,
            over all optimizer instances.
    """

    name: DomainName
    tp_group: torch.distributed.ProcessGroup
    dp_group: torch.distributed.ProcessGroup
    is_first: bool

    @property
    def is_expert(self) -> bool:
        """True for the experts."""
        return self.name == "expert"

    def has(self, parameter: ModelParameter) -> bool:
        """Whether a parameter belongs to it."""
        return parameter.is_expert == self.is_expert

    def buffers(self, model_chunk: Any) -> Sequence[Any]:
        """Gradient buffers of its parameters."""
        found: Sequence[Any] = (
            model_chunk.expert_parallel_buffers if self.is_expert else model_chunk.buffers
        )
        return found

    def ranks_per_node(self, per_node: int | None) -> int:
        """Neighbouring ranks of the exchange group that are on one node.

        Args:
            per_node: Ranks of the world on every node; None where that is not known.
        """
        if per_node is None:
            return self.tp_group.size() * self.dp_group.size()
        return neighbours_on_a_node(
            tp_group=self.tp_group, dp_group=self.dp_group, ranks_per_node=per_node
        )

    def make_exchange_group(self, pg_collection: Any) -> torch.distributed.ProcessGroup:
        """The exchange group; all ranks must call it, in the same order of domains.

        Args:
            pg_collection: As in Megatron; None for the groups of ``parallel_state``.
        """
        existing = None
        if not self.is_expert:
            existing = (
                getattr(pg_collection, "tp_dp_cp", None)
                if pg_collection is not None
                else parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
            )
        return exchange_group(tp_group=self.tp_group, dp_group=self.dp_group, existing=existing)


def domains(pg_collection: Any, *, with_experts: bool) -> tuple[Domain, ...]:
    """The domains of a model.

    Args:
        pg_collection: As in Megatron; None for the groups of ``parallel_state``.
        with_experts: Whether any rank of the world has expert parameters.

    Raises:
        ConfigurationError: A group is missing in ``pg_collection``.
    """
    make = _from_parallel_state if pg_collection is None else _from_collection
    names: tuple[DomainName, ...] = ("dense", "expert") if with_experts else ("dense",)
    found = []
    for name in names:
        tp_group, dp_group, all_dp_group = make(name, pg_collection)
        found.append(
            Domain(
                name=name,
                tp_group=tp_group,
                dp_group=dp_group,
                is_first=tp_group.rank() == 0 and all_dp_group.rank() == 0,
            )
        )
    return tuple(found)


Groups = tuple[
    torch.distributed.ProcessGroup, torch.distributed.ProcessGroup, torch.distributed.ProcessGroup
]
"""TP, DP of one optimizer instance, DP over all instances."""


def _from_parallel_state(name: DomainName, _: Any) -> Groups:
    if name == "expert":
        return (
            parallel_state.get_expert_tensor_parallel_group(),
            parallel_state.get_expert_data_parallel_group(
                with_gtp_remat=False, partial_expert_data_parallel=True
            ),
            parallel_state.get_expert_data_parallel_group(with_gtp_remat=False),
        )
    return (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(
            with_context_parallel=True, with_gtp_remat=False, partial_data_parallel=True
        ),
        parallel_state.get_data_parallel_group(with_context_parallel=True, with_gtp_remat=False),
    )


def _from_collection(name: DomainName, pg_collection: Any) -> Groups:
    if name == "expert":
        return (
            _member(pg_collection, "expt_tp"),
            _member(pg_collection, "intra_expt_dp", "expt_dp"),
            _member(pg_collection, "expt_dp"),
        )
    return (
        _member(pg_collection, "tp"),
        _member(pg_collection, "intra_dp_cp", "dp_cp", "dp"),
        _member(pg_collection, "dp_cp", "dp"),
    )


def tensor_parallel_sizes(pg_collection: Any) -> tuple[int, int]:
    """(TP size, expert-TP size); the latter is the former where there are no expert groups."""
    if pg_collection is None:
        tp = parallel_state.get_tensor_model_parallel_world_size()
        expert = parallel_state.get_expert_tensor_parallel_group(check_initialized=False)
        return tp, tp if expert is None else expert.size()
    tp = _member(pg_collection, "tp").size()
    expert = getattr(pg_collection, "expt_tp", None)
    return tp, tp if expert is None else expert.size()


def _member(pg_collection: Any, *names: str) -> torch.distributed.ProcessGroup:
    """The first of these groups that the collection has."""
    for name in names:
        group: torch.distributed.ProcessGroup | None = getattr(pg_collection, name, None)
        if group is not None:
            return group
    raise ConfigurationError(
        [f"pg_collection lacks {' or '.join(names)}: give it or pass pg_collection=None"]
    )
