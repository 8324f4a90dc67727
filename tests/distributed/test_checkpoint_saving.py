"""Saving itself: asynchronous, killed, counted, truncated; through ``pretrain()`` where it can be."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tests.distributed.test_pretrain import DMUON, ORTH_DION, pretrain_with_hooks

Ranks = Callable[..., list[Any]]
Flags = tuple[str, ...]


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Every whole tensor of a checkpoint, read by torch alone."""
    reader = FileSystemReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    found = {
        key: torch.full(tuple(entry.size), float("nan"), dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(found, storage_reader=reader, no_dist=True)
    return found


def pretrain_with_slow_writes(rank: int, *args: Any) -> Any:
    """Every write starts when training is a few steps further."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    write = FileSystemWriterAsync.write_preloaded_data_multithread

    @functools.wraps(write)
    def late(*positional: Any, **named: Any) -> None:
        time.sleep(0.7)
        write(*positional, **named)

    FileSystemWriterAsync.write_preloaded_data_multithread = staticmethod(late)
    return pretrain_with_hooks(rank, *args)


@pytest.mark.parametrize("flags", [DMUON, ORTH_DION], ids=["dmuon", "orth_dion"])
def test_an_asynchronous_save_holds_the_state_of_its_iteration(
    ranks: Ranks, tmp_path: Path, flags: Flags
) -> None:
    """The writer works while training goes on: it must not see what training does meanwhile."""
    background = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")
    saved = {}
    for name, run, more in (
        ("plain", pretrain_with_hooks, ()),
        ("asynchronous", pretrain_with_slow_writes, background),
    ):
        folder = tmp_path / name
        every = ("--save-interval", "4", *more)
        arguments = (folder, folder, 1, 1, 6, (*flags, *every))
        ranks(2, run, *arguments, init_process_group=False, timeout=60)
        saved[name] = [tensors_in(folder / f"iter_000000{number}") for number in (4, 6)]
    for plain, asynchronous in zip(saved["plain"], saved["asynchronous"], strict=True):
        assert plain.keys() == asynchronous.keys()
        assert [k for k in plain if not torch.equal(plain[k], asynchronous[k])] == []
