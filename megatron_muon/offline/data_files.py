"""Data files of a distributed checkpoint: hashed as they are written, by several processes."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.index import Place
from megatron_muon.offline.outputs import Bytes, OutBlob, OutChunk, Output
from megatron_muon.offline.reading import COMMON_KEY, Checkpoint
from megatron_muon.offline.safe_pickle import dump_torch
from megatron_muon.offline.signals import SIGNALS, signals_held

PIECE = 1 << 20
"""Bytes that are copied at once."""

FILE_BYTES = 2 << 30
"""Size of a data file, about; every file is written by one process."""

Progress = Callable[[int], None]
"""Called with the number of bytes written so far."""


@dataclass(frozen=True, kw_only=True)
class _Item:
    """One entry of a data file; a tensor's chunk, or (without chunk) a blob."""

    key: str
    dtype: torch.dtype | None
    content: OutChunk | OutBlob
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """What a process has put into one data file.

    Attributes:
        file: Its name.
        digest: SHA-256 of the file.
        places: Of every entry, by key and offset (None of a blob).
    """

    file: str
    digest: str
    places: dict[tuple[str, tuple[int, ...] | None], Place]


def write_files(
    staging: Path, output: Output, source: Checkpoint | None, workers: int, progress: Progress
) -> list[WrittenFile]:
    """Write everything but the index and the common state of a ``common.pt``.

    Args:
        staging: Folder of the files.
        output: What goes into them.
        source: The checkpoint that it is made from.
        workers: Number of processes; 1 for this one alone.
        progress: Told now and then how many bytes are written.

    Raises:
        CheckpointError: The source is damaged, or a tensor is not what the output says.
        OSError: A file cannot be written to its end.
        BrokenProcessPool: A process was killed.
    """
    items = [
        _Item(
            key=tensor.key,
            dtype=tensor.dtype,
            content=chunk,
            nbytes=math.prod(chunk.shape) * tensor.dtype.itemsize,
        )
        for tensor in output.tensors
        for chunk in tensor.chunks
    ]
    blobs = list(output.blobs)
    if not output.common_in_file:
        # A sharded object stands in a list.
        blobs.append(OutBlob(key=COMMON_KEY, content=dump_torch([output.common])))
    for blob in blobs:
        size = len(blob.content) if isinstance(blob.content, bytes) else blob.content.length
        items.append(_Item(key=blob.key, dtype=None, content=blob, nbytes=size))
    total = sum(item.nbytes for item in items)
    count = min(len(items), max(workers, -(-total // FILE_BYTES)))
    files = {f"__{number}_0.distcp": part for number, part in enumerate(_spread(items, count))}
    if workers == 1:
        counter = _Counter(progress)
        return [_write_file(staging / n, part, source, counter.add) for n, part in files.items()]
    return _in_processes(staging, files, source, workers, progress)


def _spread(items: Sequence[_Item], count: int) -> list[list[_Item]]:
    """The items in so many parts of about equal size; each stays in order."""
    parts: list[list[_Item]] = [[] for _ in range(count)]
    sizes = [0] * count
    for item in sorted(items, key=lambda item: -item.nbytes):
        smallest = min(range(count), key=sizes.__getitem__)
        parts[smallest].append(item)
        sizes[smallest] += item.nbytes
    return parts


class _Counter:
    def __init__(self, progress: Progress) -> None:
        self._progress, self._done = progress, 0

    def add(self, count: int) -> None:
        self._done += count
        self._progress(self._done)


_written: Any = None
"""In a worker process: the bytes that all of them have written."""

_is_over: Any = None
"""In a worker process: not 0 when it is to end; without a lock, which a killed one might hold."""


def _start_worker(written: Any, is_over: Any, parent: int) -> None:
    global _written, _is_over
    _written, _is_over = written, is_over
    torch.set_num_threads(1)
    # The parent hears of the first two, and has this process end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when its parent was killed, for whom it would wait for ever."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _add_written(count: int) -> None:
    if _is_over.value:
        raise CheckpointError("the run is over.")
    with _written.get_lock():
        _written.value += count


def _work(path: Path, items: list[_Item], source: Checkpoint | None) -> WrittenFile:
    return _write_file(path, items, source, _add_written)


def _in_processes(
    staging: Path,
    files: dict[str, list[_Item]],
    source: Checkpoint | None,
    workers: int,
    progress: Progress,
) -> list[WrittenFile]:
    context = multiprocessing.get_context("fork")
    written, is_over = context.Value("q", 0), context.Value("b", 0, lock=False)
    waiting: set[Future[WrittenFile]] = set()
    done: list[WrittenFile] = []
    with ProcessPoolExecutor(
        min(workers, len(files)),
        mp_context=context,
        initializer=_start_worker,
        initargs=(written, is_over, os.getpid()),
    ) as pool:
        try:
            with signals_held():  # in the processes, until they have handlers of their own
                for name, part in files.items():
                    waiting.add(pool.submit(_work, staging / name, part, source))
            while waiting:
                finished, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                done += [future.result() for future in finished]
                progress(written.get_obj().value)
        finally:
            if len(done) < len(files):
                is_over.value = 1
            pool.shutdown(wait=True, cancel_futures=True)
    return sorted(done, key=lambda entry: entry.file)


class _HashingFile:
    """A file that is hashed as it is written.

    Attributes:
        position: Bytes written.
        failure: What ended a write: torch's zip writer tells of it in words of its own.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()
        self.position = 0
        self.failure: BaseException | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        left = view
        try:
            # Linux writes 2 GiB at most at a time, and less where a disk is nearly full.
            while left:
                left = left[self._stream.write(left) :]
        except BaseException as failure:
            self.failure = failure
            raise
        self._hash.update(view)
        self.position += len(view)
        return len(view)

    def flush(self) -> None:
        self._stream.flush()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def _write_file(
    path: Path, items: Sequence[_Item], source: Checkpoint | None, add: Progress
) -> WrittenFile:
    places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    with path.open("wb", buffering=0) as stream:
        file = _HashingFile(stream)
        for item in items:
            start = file.position
            _write_item(file, item, source)
            content = item.content
            offset = content.offset if isinstance(content, OutChunk) else None
            length = file.position - start
            places[item.key, offset] = Place(file=path.name, start=start, length=length)
            add(item.nbytes)
        os.fsync(stream.fileno())
    return WrittenFile(file=path.name, digest=file.digest, places=places)


def _write_item(file: _HashingFile, item: _Item, source: Checkpoint | None) -> None:
    content = item.content
    if isinstance(content, OutBlob):
        if isinstance(content.content, bytes):
            file.write(content.content)
        else:
            _copy_bytes(file, content.content, source)
        return
    if isinstance(content.value, Bytes):
        _copy_bytes(file, content.value.place, source)
        return
    assert item.dtype is not None
    values = content.value.tensor(source, content.shape, item.dtype)
    if tuple(values.shape) != content.shape or values.dtype != item.dtype:
        raise CheckpointError(
            f"{item.key} came out as {values.dtype} {tuple(values.shape)}, and is to be "
            f"{item.dtype} {content.shape}."
        )
    if values.untyped_storage().nbytes() != values.numel() * values.dtype.itemsize:
        values = values.clone()  # torch.save would write the whole storage of a view
    try:
        torch.save(values.contiguous(), file)  # type: ignore[arg-type]
    except RuntimeError as error:
        if file.failure is None:
            raise
        raise file.failure from error


def _copy_bytes(file: _HashingFile, place: Place, source: Checkpoint | None) -> None:
    assert source is not None, "bytes are those of a source"
    # One buffer for all pieces: fresh memory for each would cost more than the copy.
    buffer = memoryview(bytearray(min(PIECE, place.length)))
    with (source.folder / place.file).open("rb", buffering=0) as stream:
        stream.seek(place.start)
        left = place.length
        while left:
            count = stream.readinto(buffer[: min(left, PIECE)])
            if not count:
                raise CheckpointError(f"{place.file} of {source.folder} ends too early.")
            file.write(buffer[:count])
            left -= count
