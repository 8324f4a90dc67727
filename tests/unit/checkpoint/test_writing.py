"""Writing and reading a checkpoint: torch reads the same, damage is reported, writes are atomic.

Conversions have tests of their own on what real runs saved; here are files and bytes only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_muon.offline import data_files
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.index import Place
from megatron_muon.offline.manifest import manifest_problems
from megatron_muon.offline.outputs import (
    OutChunk,
    Output,
    OutTensor,
    copied,
)
from megatron_muon.offline.reading import Checkpoint
from megatron_muon.offline.writing import write_checkpoint
from tests.unit.checkpoint.small_output import WHOLE, Given, names_in, output

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("workers", [1, 2, 256])
@pytest.mark.parametrize("in_file", [False, True])
def test_torch_reads_the_written_checkpoint(tmp_path: Path, workers: int, in_file: bool) -> None:
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
    assert all(isinstance(chunk.value, Place) for chunk in plan.tensors[0].chunks)
    write_checkpoint(tmp_path / "copy", plan, source=source)
    assert torch.equal(Checkpoint(tmp_path / "copy").read("renamed"), WHOLE)


def test_a_folder_of_a_run_leads_to_its_last_iteration(written: Path) -> None:
    assert Checkpoint(written.parent).folder == written
    assert Checkpoint(written.parent, 3).folder == written
    with pytest.raises(CheckpointError, match=r"no iter_0000004 in .*; there is iter_0000003"):
        Checkpoint(written.parent, 4)


def change_index(folder: Path, change: Callable[[Metadata], None]) -> None:
    """The index is changed to a form that no current run writes."""
    import pickle

    metadata = FileSystemReader(str(folder)).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_chunk_sizes_without_prepended_axes_are_understood(tmp_path: Path) -> None:
    """megatron-core writes them so if chunks form no regular grid."""
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
def test_damage_is_one_sentence(written: Path, damage: str) -> None:
    change, sentence = DAMAGES[damage]
    change(written)
    with pytest.raises(CheckpointError, match=sentence) as error:
        Checkpoint(written).read("a")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_changed_file_is_detected_by_its_hash(written: Path) -> None:
    path = written / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert list(manifest_problems(written)) == [
        "__0_0.distcp was changed after it was written (SHA-256 differs)"
    ]


def test_a_file_outside_of_the_checkpoint_is_not_opened(written: Path) -> None:
    def lead_out(metadata: Metadata) -> None:
        for place in (metadata.storage_data or {}).values():
            place.relative_path = "../../secret"

    change_index(written, lead_out)
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        Checkpoint(written)


def test_the_manifest_lists_all_sources(written: Path) -> None:
    found = json.loads((written / "megatron_muon_manifest.json").read_text())
    assert found["tensors"]["a"] == {"shape": [5, 7], "dtype": "float32", "rule": "given"}
    assert set(found["files"]) == {".metadata", "metadata.json", "__0_0.distcp"}


def test_files_share_the_bytes_evenly() -> None:
    nbytes = {MetadataIndex(str(n)): n for n in range(1, 40)}
    items = [WriteItem(index, WriteItemType.BYTE_IO) for index in nbytes]
    parts = data_files.spread(items, nbytes, 3)
    sizes = [sum(nbytes[item.index] for item in part) for part in parts]
    assert sum(sizes) == sum(range(1, 40)) and max(sizes) - min(sizes) <= 2
