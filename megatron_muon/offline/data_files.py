"""Writes the data files and the index of a distributed checkpoint, in several processes.

torch's classes plan and index them: a ``SavePlan`` for each file, a ``SavePlanner`` that computes
each tensor on request, a ``FileSystemWriter`` that names the files and writes ``.metadata``.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.index import Place
from megatron_muon.offline.outputs import OutChunk, Output, require_form
from megatron_muon.offline.reading import COMMON_KEY, Checkpoint
from megatron_muon.offline.safe_pickle import dump_torch
from megatron_muon.offline.signals import SIGNALS, signals_held

PIECE: Final = 1 << 20
"""Bytes copied at a time."""

FILE_BYTES: Final = 2 << 30
"""Approximate size of a data file; each is written by one process."""

Progress = Callable[[int], None]
"""Called with the number of bytes written since the last call."""


def write_files(
    folder: Path, output: Output, source: Checkpoint | None, workers: int, progress: Progress
) -> dict[str, str]:
    """Write everything but ``common.pt`` and ``metadata.json``; return SHA-256 by file name.

    Raises:
        CheckpointError: The source is damaged, or a tensor does not match the plan.
        OSError: A file cannot be written completely.
        BrokenProcessPool: A process was killed.
    """
    planner, writer = Planner(output, source, progress), Writer(folder)
    count = max(workers, -(-sum(planner.sizes.values()) // FILE_BYTES))
    (whole,), metadata = create_default_global_save_plan([SavePlan(planner.items)])
    parts = spread(whole.items, planner.sizes, min(count, len(whole.items)))
    plans = writer.prepare_global_plan([SavePlan(part) for part in parts])
    if workers == 1:
        written = [writer.write_data(plan, planner).wait() for plan in plans]
    else:
        written = _in_processes(writer, plans, planner, workers)
    writer.finish(metadata, written)
    return writer.digests


def spread(
    items: Sequence[WriteItem], sizes: Mapping[dcp.MetadataIndex, int], count: int
) -> list[list[WriteItem]]:
    """Split items into parts of about equal size; torch's own counts a chunk as its tensor."""
    parts: list[list[WriteItem]] = [[] for _ in range(count)]
    filled = [0] * count
    for item in sorted(items, key=lambda item: -sizes[item.index]):
        smallest = min(range(count), key=filled.__getitem__)
        parts[smallest].append(item)
        filled[smallest] += sizes[item.index]
    return parts


class Planner(DefaultSavePlanner):
    """Computes each tensor of an output when the writer requests it.

    Attributes:
        items: Everything to write: chunks of tensors, and non-tensor entries.
        sizes: Bytes of every item, without the overhead of ``torch.save``.
        source: The checkpoint that the output is derived from.
        progress: Called for every item.
    """

    def __init__(self, output: Output, source: Checkpoint | None, progress: Progress) -> None:
        super().__init__()
        self.source, self.progress = source, progress
        self.items: list[WriteItem] = []
        self.sizes: dict[dcp.MetadataIndex, int] = {}
        self._contents: dict[dcp.MetadataIndex, tuple[OutChunk, torch.dtype] | bytes | Place] = {}
        blobs = dict(output.blobs)
        for tensor in output.tensors:
            properties = dcp.TensorProperties(dtype=tensor.dtype)
            for chunk in tensor.chunks:
                index = dcp.MetadataIndex(tensor.key, chunk.offset)
                box = dcp.ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape))
                data = TensorWriteData(box, properties, torch.Size(tensor.shape))
                self.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self.sizes[index] = math.prod(chunk.shape) * tensor.dtype.itemsize
                value = chunk.value
                self._contents[index] = value if isinstance(value, Place) else (chunk, tensor.dtype)
        if not output.common_in_file:
            blobs[COMMON_KEY] = dump_torch([output.common])  # a sharded object is in a list
        for key, content in blobs.items():
            index = dcp.MetadataIndex(key)
            self.items.append(WriteItem(index, WriteItemType.BYTE_IO))
            self.sizes[index] = content.length if isinstance(content, Place) else len(content)
            self._contents[index] = content

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return a tensor, bytes, or the place of bytes in the source."""
        content = self._contents[write_item.index]
        if not isinstance(content, tuple):
            return content
        chunk, dtype = content
        assert not isinstance(chunk.value, Place)
        values = chunk.value.tensor(self.source, chunk.shape, dtype)
        require_form(values, chunk.shape, dtype, str(write_item.index.fqn))
        if values.untyped_storage().nbytes() != values.nbytes:
            values = values.clone()  # torch.save would write the whole storage of a view
        return values.contiguous()


class _Files(FileSystem):
    """torch's file system; the index replaces an existing one atomically."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file."""
        os.replace(path, new_path)


class Writer(FileSystemWriter):
    """torch's writer, with one item in memory at a time and every file hashed while written.

    torch's own holds the last chunk of every tensor of a file, and cannot copy bytes of a
    checkpoint.

    Attributes:
        digests: SHA-256 of every file written, by name.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = _Files()
        self.digests: dict[str, str] = {}

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Write one data file."""
        name, results = f"{plan.storage_data.prefix}0.distcp", []
        with Path(self.path, name).open("wb", buffering=0) as stream:
            file = _HashingFile(stream)
            for item in plan.items:
                start = file.position
                _write(file, planner.resolve_data(item), planner.source)
                place = _StorageInfo(name, start, file.position - start)
                results.append(WriteResult(item.index, place.length, place))
                planner.progress(planner.sizes[item.index])
            os.fsync(stream.fileno())
        self.digests[name] = file.digest
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def storage_meta(self) -> dcp.StorageMeta:
        """Return no folder, since it is renamed when complete."""
        return dcp.StorageMeta()


class _HashingFile:
    """A file that is hashed while written.

    Attributes:
        position: Bytes written.
        failure: Exception of a failed write; torch's zip writer raises a different one.
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
            # Linux writes at most 2 GiB at a time, and less when a disk is nearly full.
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


def _write(
    file: _HashingFile, data: torch.Tensor | bytes | Place, source: Checkpoint | None
) -> None:
    if isinstance(data, Place):
        assert source is not None, "bytes are copied from a source"
        _copy_bytes(file, data, source.folder)
    elif isinstance(data, bytes):
        file.write(data)
    else:
        try:
            torch.save(data, file)  # type: ignore[arg-type]
        except RuntimeError as error:
            if file.failure is None:
                raise
            raise file.failure from error


def _copy_bytes(file: _HashingFile, place: Place, folder: Path) -> None:
    # One buffer for all pieces: allocating each would cost more than the copy.
    buffer = memoryview(bytearray(min(PIECE, place.length)))
    with (folder / place.file).open("rb", buffering=0) as stream:
        stream.seek(place.start)
        left = place.length
        while left:
            count = stream.readinto(buffer[: min(left, PIECE)])
            if not count:
                raise CheckpointError(f"{place.file} of {folder} is truncated.")
            file.write(buffer[:count])
            left -= count


# ---- several processes ------------------------------------------------------------------------

_written: Any = None
"""In a worker process: bytes written by all of them."""

_is_over: Any = None
"""In a worker process: nonzero to stop; without a lock, which a killed process might hold."""

_job: Any = None
"""In a worker process: writer, plans and planner, inherited and not pickled."""


def _start_worker(written: Any, is_over: Any, job: Any, parent: int) -> None:
    global _written, _is_over, _job
    _written, _is_over, _job = written, is_over, job
    _job[-1].progress = _add_written
    torch.set_num_threads(1)
    # The parent receives the first two as well, and stops this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Exit when the parent was killed, instead of waiting for it forever."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _add_written(count: int) -> None:
    if _is_over.value:
        raise CheckpointError("the run is over.")
    with _written.get_lock():
        _written.value += count


def _work(number: int) -> tuple[list[WriteResult], dict[str, str]]:
    writer, plans, planner = _job
    return writer.write_data(plans[number], planner).wait(), writer.digests


def _in_processes(
    writer: Writer, plans: list[SavePlan], planner: Planner, workers: int
) -> list[list[WriteResult]]:
    context = multiprocessing.get_context("fork")
    written, is_over = context.Value("q", 0), context.Value("b", 0, lock=False)
    reported, results = 0, []
    with ProcessPoolExecutor(
        min(workers, len(plans)),
        mp_context=context,
        initializer=_start_worker,
        initargs=(written, is_over, (writer, plans, planner), os.getpid()),
    ) as pool:
        try:
            with signals_held():  # in the processes, until they have their own handlers
                waiting = {pool.submit(_work, number) for number in range(len(plans))}
            while waiting:
                finished, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                for file in finished:
                    found, digests = file.result()
                    results.append(found)
                    writer.digests |= digests
                reported, before = written.get_obj().value, reported
                planner.progress(reported - before)
        finally:
            is_over.value = len(results) < len(plans)
            pool.shutdown(wait=True, cancel_futures=True)
    return results
