"""What measurements need of a process group: ranks, the slowest of them, bytes that left one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist


def join_world(*, rank: int, size: int, store: str, backend: str) -> None:
    """Join the default process group of one machine; a file is the meeting point."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)


def slowest(value: float, device: torch.device) -> float:
    """The largest value of all ranks."""
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def wait_for_all() -> None:
    """Return when every rank has come here."""
    dist.barrier()


def whole(shard: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """A matrix from its tensor-parallel shards along ``dim``."""
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return torch.cat(shards, dim=dim)


class SentBytes:
    """Counts what this rank sends, in the process groups' own methods, under every collective.

    As a ring or a pairwise exchange sends it; of a rank's own piece nothing is counted.
    """

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

    def __init__(self) -> None:
        self.total = 0.0
        self.calls: dict[str, int] = {}

    @contextlib.contextmanager
    def counting(self) -> Iterator[SentBytes]:
        """Count inside the with-block."""
        methods = vars(dist.ProcessGroup)
        names = [name for name in (*self.COUNTED, *self.REFUSED) if name in methods]
        # As they lie in the class: what getattr gives would no longer bind to an instance.
        originals = {name: methods[name] for name in names}
        for name in names:
            wrapped = self._wrapped(name, getattr(dist.ProcessGroup, name))
            setattr(dist.ProcessGroup, name, wrapped)
        try:
            yield self
        finally:
            for name, original in originals.items():
                setattr(dist.ProcessGroup, name, original)

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            self.total += self._sent(name, group, args)
            return original(group, *args, **kwargs)

        return collective

    def _sent(self, name: str, group: Any, args: tuple[Any, ...]) -> float:
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
                sent, splits = args[1], args[3]
                rows: int = sent.shape[0]
                own: int = splits[group.rank()] if splits else rows // size
                return _bytes(sent) * (rows - own) / max(rows, 1)
        raise NotImplementedError(f"SentBytes does not know what {name} sends.")


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(one) for one in value)
