"""Process groups of a world with a single existing rank."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore


def join(*, world_size: int, rank: int, ranks_per_node: int) -> None:
    """Create the default process group, and replace operations that scale with the world size.

    Groups without this rank are not created; gathered objects are copies of this rank's own.
    """
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    new_group = dist.new_group

    def make_group(ranks: Any = None, *_: Any, **__: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return new_group(ranks)

    def gather_own(gathered: list[Any], value: Any, group: Any = None) -> None:
        gathered[:] = [value] * len(gathered)

    dist.new_group = make_group
    for module in (dist, c10d):
        module.all_gather_object = gather_own  # type: ignore[attr-defined]
        module.broadcast_object_list = lambda *_, **__: None  # type: ignore[attr-defined]
