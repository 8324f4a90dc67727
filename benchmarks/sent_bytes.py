"""Counts the bytes that a rank sends in the methods of ProcessGroup, below every collective."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

COUNTED = (
    "_allgather_base",
    "all_gather_single",
    "all_to_all_single",
    "allgather",
    "allreduce",
    "alltoall_base",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "broadcast",
    "barrier",
)
REFUSED = (
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


@contextlib.contextmanager
def count_sent_bytes() -> Iterator[list[float]]:
    """Yield a list that collects the bytes of each collective called inside the block.

    Counted as for a ring or a pairwise exchange, without a rank's own piece.
    """
    sent: list[float] = []
    with contextlib.ExitStack() as patches:
        for name in {*COUNTED, *REFUSED} & set(vars(dist.ProcessGroup)):
            original = getattr(dist.ProcessGroup, name)
            patches.enter_context(
                mock.patch.object(dist.ProcessGroup, name, _counting(name, original, sent))
            )
        yield sent


def _counting(name: str, original: Callable[..., Any], sent: list[float]) -> Callable[..., Any]:
    @wraps(original)
    def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(_sent(name, group, args))
        return original(group, *args, **kwargs)

    return collective


def _sent(name: str, group: Any, args: tuple[Any, ...]) -> float:
    size: int = group.size()
    match name:
        case "barrier":
            return 0.0
        case "allgather" | "_allgather_base" | "all_gather_single":
            return (size - 1) * _bytes(args[1])
        case "allreduce":
            return 2 * (size - 1) / size * _bytes(args[0])
        case "_reduce_scatter_base" | "reduce_scatter_single":
            return (size - 1) / size * _bytes(args[1])
        case "broadcast":
            return (size - 1) / size * _bytes(args[0])
        case "alltoall_base" | "all_to_all_single":
            data, splits = args[1], args[3]
            rows: int = data.shape[0]
            own: int = splits[group.rank()] if splits else rows // size
            return _bytes(data) * (rows - own) / max(rows, 1)
    raise NotImplementedError(f"count_sent_bytes does not support {name}.")


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(_bytes(one) for one in value)
