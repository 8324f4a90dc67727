"""Collectives that the package uses; the only module that starts one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Return when the received buffer may be read and the sent one reused."""


class Transport(Protocol):
    """How messages travel within one exchange group."""

    def all_to_all(
        self,
        *,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_counts: Sequence[int],
        sent_counts: Sequence[int],
    ) -> Pending:
        """Start an all-to-all-v of 1-D buffers; both must stay untouched until waited for."""


class GroupTransport:
    """All-to-all-v over a ``torch.distributed`` group, NCCL or gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_to_all(
        self,
        *,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_counts: Sequence[int],
        sent_counts: Sequence[int],
    ) -> Pending:
        """Start the exchange; every rank of the group must call it, with zero counts too."""
        pending = dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=list(received_counts),
            input_split_sizes=list(sent_counts),
            group=self._group,
            async_op=True,
        )
        assert pending is not None
        return pending


class PlanMismatchError(RuntimeError):
    """The ranks of an exchange group do not agree on the plan."""


def check_agreement(
    *,
    digest: str,
    expected_rank: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Compare the plan's digest over the group, once at start.

    Args:
        digest: ``Plan.digest`` of this rank.
        expected_rank: Rank in the group that this rank's TP and DP coordinates give.
        group: The exchange group.
        device: Device for the message.

    Raises:
        PlanMismatchError: On every rank, when any rank has another plan or another place.
    """
    words = [int(digest[i : i + 15], 16) for i in range(0, 60, 15)]
    mine = torch.tensor([*words, expected_rank], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    rows = [row.tolist() for row in everyone]
    displaced = [rank for rank, row in enumerate(rows) if row[-1] != rank]
    if displaced:
        raise PlanMismatchError(
            f"ranks {displaced} of the exchange group have TP and DP coordinates that do not match "
            "their place in Megatron's tensor-and-data-parallel group; this rank order is not "
            "supported, use Megatron's default order tp-cp-ep-dp-pp"
        )
    different = [rank for rank, row in enumerate(rows) if row[:-1] != rows[0][:-1]]
    if different:
        raise PlanMismatchError(
            f"ranks {different} of the exchange group made another plan than rank 0: names, "
            "shapes, bucket sizes, --matrix-rule or the content of --dmuon-cost-table differ "
            "between ranks; start every rank with the same arguments, files and model"
        )


def same_on_all_ranks[T](find: Callable[[], T]) -> T:
    """What rank 0 finds, on every rank; used at start and at load only."""
    found: list[T | None] = [find() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return found[0]  # type: ignore[return-value]


def gather_objects[T](value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, in rank order; used at start only."""
    everyone: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone  # type: ignore[return-value]
