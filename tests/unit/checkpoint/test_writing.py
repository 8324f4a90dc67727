"""Writing and reading of a checkpoint: torch reads the same, damage is told, nothing half-written.

Conversions have tests of their own on what real runs saved; here are files and bytes only.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_muon.checkpoint import writing
from megatron_muon.checkpoint.errors import CheckpointError
from megatron_muon.checkpoint.manifest import manifest_problems
from megatron_muon.checkpoint.outputs import (
    Bytes,
    OutBlob,
    OutChunk,
    Output,
    OutTensor,
    Zeros,
    copied,
)
from megatron_muon.checkpoint.reading import Checkpoint
from megatron_muon.checkpoint.safe_pickle import dump_torch
from megatron_muon.checkpoint.writing import write_checkpoint, write_tracker

ROOT = Path(__file__).parents[3]
WHOLE = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Given:
    """A part of WHOLE, or what a test wants instead of it."""

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
        blobs=(OutBlob(key="b/shard_0_1", content=dump_torch([1])),),
        common={"iteration": 3, "content_metadata": {}},
        common_in_file=in_file,
        backend={"sharded_backend": "torch_dist", "sharded_backend_version": 1},
    )


@pytest.fixture
def written(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "iter_0000003"
    write_checkpoint(folder, output())
    write_tracker(folder.parent, 3)
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("in_file", [False, True])
def test_torch_reads_what_was_written(tmp_path: Path, workers: int, in_file: bool) -> None:
    folder = tmp_path / "iter_0000003"
    write_checkpoint(folder, output(in_file=in_file), workers=workers)
    found = {"a": torch.zeros(5, 7), "z": torch.ones(3, dtype=torch.bfloat16)}
    load(found, storage_reader=FileSystemReader(str(folder)), no_dist=True)
    assert torch.equal(found["a"], WHOLE)
    assert not found["z"].any()
    checkpoint = Checkpoint(folder)
    assert checkpoint.common.in_file is in_file
    assert checkpoint.common.value["iteration"] == 3
    assert checkpoint.read_blob("b/shard_0_1").value == [1]
    assert names_in(tmp_path) == ["iter_0000003"]
    assert list(manifest_problems(folder)) == []


def test_every_box_is_put_together_from_its_chunks(written: Path) -> None:
    checkpoint = Checkpoint(written)
    for first in range(5):
        for last in range(first, 6):
            box = checkpoint.read_box("a", (first, 2), (last - first, 3))
            assert torch.equal(box, WHOLE[first:last, 2:5])
    assert torch.equal(checkpoint.read("a", torch.bfloat16), WHOLE.bfloat16())
    with pytest.raises(CheckpointError, match="has no box"):
        checkpoint.read_box("a", (3, 0), (3, 7))


def test_a_copy_of_bytes_is_the_same(written: Path, tmp_path: Path) -> None:
    source = Checkpoint(written)
    plan = output()
    info = source.tensors["a"]
    plan = Output(**{**vars(plan), "tensors": (copied(info, "renamed", "copied"),)})
    assert all(isinstance(chunk.value, Bytes) for chunk in plan.tensors[0].chunks)
    write_checkpoint(tmp_path / "copy", plan, source=source)
    assert torch.equal(Checkpoint(tmp_path / "copy").read("renamed"), WHOLE)


def test_a_folder_of_a_run_leads_to_its_last_iteration(written: Path) -> None:
    assert Checkpoint(written.parent).folder == written
    assert Checkpoint(written.parent, 3).folder == written
    with pytest.raises(CheckpointError, match=r"no iter_0000004; of iter_0000003 in .* --step"):
        Checkpoint(written.parent, 4)


def change_index(folder: Path, change: Callable[[Metadata], None]) -> None:
    """Megatron's own index is changed here, as no run of today would write it."""
    import pickle

    metadata = FileSystemReader(str(folder)).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_chunk_sizes_without_prepended_axes_are_understood(tmp_path: Path) -> None:
    """megatron-core writes them so where chunks lie on no regular grid."""
    plan = output()

    class Reshaped(Given):
        def tensor(self, *args: Any) -> torch.Tensor:
            return WHOLE[None]

    chunk = OutChunk(offset=(0, 0, 0), shape=(1, 5, 7), value=Reshaped((0, 5)))
    tensor = OutTensor(key="a", shape=(1, 5, 7), dtype=torch.float32, chunks=(chunk,), rule="given")
    write_checkpoint(tmp_path / "c", Output(**{**vars(plan), "tensors": (tensor,)}))

    def shorten(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["a"]
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks[0].sizes = torch.Size([5, 7])

    change_index(tmp_path / "c", shorten)
    assert torch.equal(Checkpoint(tmp_path / "c").read("a"), WHOLE[None])


# ---- damage -----------------------------------------------------------------------------------


def _other_dtype(folder: Path) -> None:
    def change(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["a"]
        assert isinstance(entry, TensorStorageMetadata)
        entry.properties.dtype = torch.float16

    change_index(folder, change)


def _shorten(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-10])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated file": (_shorten, r"damaged: its file __0_0.distcp has [\d,]+ bytes, and its index"),
    "missing shard": (lambda f: (f / "__0_0.distcp").unlink(), "its file __0_0.distcp is missing"),
    "missing index": (lambda f: (f / ".metadata").unlink(), "its .metadata is missing"),
    "no JSON": (lambda f: (f / "metadata.json").write_text("{"), "cannot be read as JSON"),
    "other backend": (
        lambda f: (f / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "says sharded_backend 'zarr'; only torch_dist",
    ),
    "no end": (lambda f: (f / "metadata.json").unlink(), "its metadata.json is missing"),
    "foreign index": (lambda f: (f / ".metadata").write_bytes(b"junk"), "cannot be read as a pick"),
    "other dtype": (_other_dtype, r"is torch.float32 \(2, 7\), and the index says torch.float16"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damage_is_told_in_a_sentence(written: Path, damage: str) -> None:
    change, sentence = DAMAGES[damage]
    change(written)
    with pytest.raises(CheckpointError, match=sentence) as told:
        Checkpoint(written).read("a")
    assert "\n" not in str(told.value) and len(str(told.value)) < 400


def test_a_changed_file_is_told_by_its_hash(written: Path) -> None:
    path = written / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert list(manifest_problems(written)) == [
        "__0_0.distcp is not the file that was written (SHA-256 differs)"
    ]


def test_a_file_outside_of_the_checkpoint_is_not_opened(written: Path) -> None:
    def lead_out(metadata: Metadata) -> None:
        for place in (metadata.storage_data or {}).values():
            place.relative_path = "../../secret"

    change_index(written, lead_out)
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        Checkpoint(written)


# ---- all or nothing ---------------------------------------------------------------------------


def test_nothing_is_overwritten_without_being_told(written: Path) -> None:
    before = (written / "__0_0.distcp").stat().st_mtime_ns
    with pytest.raises(CheckpointError, match=r"exists; type --overwrite"):
        write_checkpoint(written, output())
    assert (written / "__0_0.distcp").stat().st_mtime_ns == before
    write_checkpoint(written, output(), overwrite=True)
    assert (written / "__0_0.distcp").stat().st_mtime_ns != before
    assert names_in(written.parent) == ["iter_0000003", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize(
    ("failure", "workers", "sentence"),
    [
        ("raises", 1, "Input/output error"),
        ("raises", 2, "Input/output error"),
        ("dies", 2, "was killed, perhaps for want of memory"),
        ("dtype", 1, "came out as torch.float64"),
    ],
)
def test_a_failure_leaves_nothing(
    tmp_path: Path, failure: str, workers: int, sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        write_checkpoint(tmp_path / "run" / "iter_0000003", output(failure), workers=workers)
    assert names_in(tmp_path) == []


def test_a_failure_leaves_what_was_to_be_replaced(written: Path) -> None:
    with pytest.raises(CheckpointError):
        write_checkpoint(written, output("raises"), overwrite=True)
    assert torch.equal(Checkpoint(written).read("a"), WHOLE)
    assert names_in(written.parent) == ["iter_0000003", "latest_checkpointed_iteration.txt"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file sizes stands in for the disk: writing fails in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"File too large.*nothing was left.*free some"):
            write_checkpoint(tmp_path / "run" / "iter_0000003", output())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names_in(tmp_path) == []


_TERMINATED = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}]
import signal
from megatron_muon.checkpoint.__main__ import _end
from megatron_muon.checkpoint.writing import write_checkpoint
from tests.unit.checkpoint.test_writing import output
signal.signal(signal.SIGTERM, _end)
write_checkpoint(Path({folder!r}), output("sleeps"))
"""


@pytest.mark.slow
def test_a_terminated_run_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "iter_0000003"
    code = _TERMINATED.format(root=str(ROOT), folder=str(folder))
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as process:
        end = time.monotonic() + 60
        while not list(folder.parent.glob(".iter*/__0_0.distcp")) and time.monotonic() < end:
            time.sleep(0.05)
        assert list(folder.parent.glob(".iter*/__0_0.distcp")), "it never began"
        process.terminate()
        assert process.wait(timeout=30) != 0
    assert names_in(tmp_path) == []


def test_the_manifest_says_where_everything_came_from(written: Path) -> None:
    found = json.loads((written / "megatron_muon_manifest.json").read_text())
    assert found["tensors"]["a"] == {"shape": [5, 7], "dtype": "float32", "rule": "given"}
    assert set(found["files"]) == {".metadata", "metadata.json", "__0_0.distcp"}


def test_files_share_the_bytes_evenly() -> None:
    items = [
        writing._Item(key=str(n), dtype=None, content=OutBlob(key="", content=b""), nbytes=n)
        for n in range(1, 40)
    ]
    sizes = [sum(item.nbytes for item in part) for part in writing._spread(items, 3)]
    assert sum(sizes) == sum(range(1, 40)) and max(sizes) - min(sizes) <= 2
