"""Saving itself: asynchronous, killed in the middle, and how many collectives it takes."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_muon.config import MatrixConfig
from megatron_muon.matrices import Rule
from tests.distributed.checkpointing import save
from tests.distributed.test_pretrain import DMUON, ORTH_DION, pretrain_with_hooks
from tests.distributed.training import Run, build, gather
from tests.ranks import RankFailed
from tests.tiny_gpt import train_step

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
    """The writer runs during training and must not see its changes."""
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


def pretrain_until_killed(rank: int, after: float, *args: Any) -> Any:
    """A run that is killed some seconds after it begins to write for the first time."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    write = FileSystemWriterAsync.write_preloaded_data

    @functools.wraps(write)
    def slow(*positional: Any, **named: Any) -> Any:
        time.sleep(0.05)
        return write(*positional, **named)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(slow)
    prepare = FileSystemWriterAsync.prepare_write_data
    timers: list[threading.Timer] = []

    @functools.wraps(prepare)
    def starting(*positional: Any, **named: Any) -> None:
        if not timers:
            # The group: forked writers die with the rank, as on a machine that goes down.
            timers.append(threading.Timer(after, os.killpg, (0, signal.SIGKILL)))
            timers[0].start()
        prepare(*positional, **named)

    FileSystemWriterAsync.prepare_write_data = starting
    return pretrain_with_hooks(rank, *args)


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_killed_while_saving_ends_as_one_that_was_not(
    ranks: Ranks, tmp_path: Path, kills: int
) -> None:
    """Killed at random moments, it continues from the previous save each time."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    every = (*DMUON, "--save-interval", "1")
    moments = random.Random(0)
    unfinished = 0
    for _ in range(kills):
        arguments = (moments.uniform(0.0, 0.5), killed, killed, 1, 1, 1000, every)
        with pytest.raises(RankFailed) as failed:
            ranks(2, pretrain_until_killed, *arguments, init_process_group=False, timeout=60)
        # A rank may live long enough to see the other one go.
        assert any("signal 9" in report for report in failed.value.reports.values())
        _mend_tracker(killed)
        unfinished += _one_is_unfinished(ranks, killed, every)
    assert unfinished
    last = int((killed / "latest_checkpointed_iteration.txt").read_text())
    flags = (straight, straight, 1, 1, last + 1, every)
    ranks(2, pretrain_with_hooks, *flags, init_process_group=False, timeout=240)
    ranks(2, pretrain_with_hooks, killed, killed, *flags[2:], init_process_group=False)
    name = f"iter_{last + 1:07d}"
    expected, found = tensors_in(straight / name), tensors_in(killed / name)
    assert expected.keys() == found.keys()
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []


def _mend_tracker(folder: Path) -> None:
    """The repair after a kill between Megatron's truncation and its write."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    if tracker.exists() and not tracker.read_text():
        newest = max(f.parent.name for f in folder.glob("iter_*/metadata.json"))
        tracker.write_text(str(int(newest.removeprefix("iter_"))))


def test_a_run_continues_after_its_empty_tracker_was_repaired(ranks: Ranks, tmp_path: Path) -> None:
    """Megatron truncates the tracker before it writes it; an empty one ends the next run."""
    every = (*DMUON, "--save-interval", "1")

    def run(iterations: int) -> list[list[float]]:
        arguments = (tmp_path, tmp_path, 1, 1, iterations, every)
        results = ranks(2, pretrain_with_hooks, *arguments, init_process_group=False)
        return [losses for losses, _ in results]

    run(2)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("")
    with pytest.raises(RankFailed, match="SystemExit"):
        run(3)
    _mend_tracker(tmp_path)
    assert tracker.read_text() == "2"
    # One step more, of two micro-batches on each rank.
    assert [len(losses) for losses in run(3)] == [2, 2]
    assert tracker.read_text() == "3"


def _one_is_unfinished(ranks: Ranks, folder: Path, flags: Flags) -> bool:
    """Return True for an interrupted save; a run that loads it reports so."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    known = int(tracker.read_text()) if tracker.exists() else 0
    newest = max(folder.glob("iter_*"), default=None)
    if newest is None or (newest / ".metadata").exists():
        return False
    iteration = int(newest.name.removeprefix("iter_"))
    assert iteration > known
    if known:
        arguments = (folder, folder, 1, 1, 1000, (*flags, "--ckpt-step", str(iteration)))
        with pytest.raises(RankFailed) as failed:
            ranks(2, pretrain_with_hooks, *arguments, init_process_group=False, timeout=60)
        for report in failed.value.reports.values():
            assert "CheckpointMismatchError: megatron_muon: cannot load" in report
            assert "it is incomplete: its" in report
    return True


class CountCollectives(TorchDispatchMode):
    """Counts operations of process groups, from any caller."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def _collectives_of_a_save(rank: int, folder: Path, layers: int, rules: tuple[Rule, ...]) -> Any:
    config = MatrixConfig(min_dim=1, rules=rules)
    run = Run(dp=2, overlap=True, config=config, options=(("layers", layers),))
    chunks, optimizer, schedule = build(run)
    for step in range(2):
        train_step(chunks, optimizer, step, global_batch=16, micro_batch=4)
    gather(chunks)
    parameters = sum(1 for chunk in chunks for _ in chunk.parameters())
    with CountCollectives() as counted:
        save(chunks, optimizer, schedule, folder)
    return parameters, len(optimizer.param_groups), counted.counts


def test_collectives_of_a_save_do_not_grow_with_the_model(ranks: Ranks, tmp_path: Path) -> None:
    rules = tuple(
        Rule(pattern=f"*.{layer}.weight", lr_mult=factor)
        for layer, factor in (("linear_fc1", 0.5), ("linear_fc2", 0.25), ("linear_proj", 2.0))
    )
    small = ranks(2, _collectives_of_a_save, tmp_path / "small", 2, ())
    large = ranks(2, _collectives_of_a_save, tmp_path / "large", 6, rules)
    for (few, few_groups, counts), (many, many_groups, same) in zip(small, large, strict=True):
        assert many > 2 * few and many_groups > few_groups
        assert sum(counts.values()) > 0
        assert same == counts
