"""A small checkpoint to write, in three chunks of which the last may fail."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_muon.offline.outputs import OutChunk, Output, OutTensor, Zeros
from megatron_muon.offline.safe_pickle import dump_torch

WHOLE = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Given:
    """A part of WHOLE, or a failure that a test requests."""

    rows: tuple[int, int]
    failure: str = ""

    def tensor(self, source: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.failure == "raises":
            raise OSError(5, "Input/output error")
        if self.failure == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.failure == "dtype":
            return WHOLE[slice(*self.rows)].double()
        if self.failure == "sleeps":
            time.sleep(60)
        if self.failure == "naps":
            time.sleep(2)
        return WHOLE[slice(*self.rows)]


def output(failure: str = "", in_file: bool = False) -> Output:
    rows = ((0, 2), (2, 3), (3, 5))
    chunks = tuple(
        OutChunk(
            offset=(first, 0),
            shape=(last - first, 7),
            value=Given((first, last), failure if first == 3 else ""),
        )
        for first, last in rows
    )
    return Output(
        tensors=(
            OutTensor(key="a", shape=(5, 7), dtype=torch.float32, chunks=chunks, rule="given"),
            OutTensor(
                key="z",
                shape=(3,),
                dtype=torch.bfloat16,
                chunks=(OutChunk(offset=(0,), shape=(3,), value=Zeros()),),
                rule="zero",
            ),
        ),
        blobs={"b/shard_0_1": dump_torch([1])},
        common={"iteration": 3, "content_metadata": {}},
        common_in_file=in_file,
        backend={"sharded_backend": "torch_dist", "sharded_backend_version": 1},
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []
