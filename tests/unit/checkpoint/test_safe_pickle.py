"""Pickles of a checkpoint: no code is executed, and unknown objects are preserved."""

from __future__ import annotations

import argparse
import enum
import io
import os
import pickle
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.reading import Checkpoint
from megatron_muon.offline.safe_pickle import Inert, dump_torch, load_pickle, load_torch


class Touch:
    """A payload that creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def saved(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def test_a_payload_is_not_run(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    pickled = pickle.dumps({"a": Touch(target)})
    for found in (
        load_pickle(io.BytesIO(pickled), source="x"),
        load_torch(saved({"a": Touch(target)}), source="x"),
    ):
        assert not target.exists()
        assert isinstance(found.value["a"], Inert)
        assert found.foreign == ["posix.mkdir"]
    pickle.loads(pickled)
    assert target.exists(), "the payload works where it is run"


@pytest.mark.parametrize("text", ["print('run')", "__import__('os').getcwd()"])
def test_eval_is_no_name_that_is_known(text: str) -> None:
    pickled = b"cbuiltins\neval\n(V" + text.encode() + b"\ntR."
    found = load_pickle(io.BytesIO(pickled), source="x")
    assert isinstance(found.value, Inert)
    assert found.value.args == (text,)


def test_an_index_that_is_a_payload_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    with pytest.raises(CheckpointError, match="foreign pickle"):
        Checkpoint(tmp_path)
    assert not (tmp_path / "touched").exists()


class Mode(enum.Enum):
    FAST = "fast"


@dataclass
class Setting:
    name: str
    mode: Mode


class Names(list[str]):
    pass


def function(x: int) -> int:
    return x


@pytest.fixture
def megatron_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The objects above as if they were Megatron's."""
    module = types.ModuleType("megatron.pretended")
    for value in (Mode, Setting, Names, function):
        monkeypatch.setattr(value, "__module__", "megatron.pretended")
        setattr(module, value.__name__, value)
    monkeypatch.setitem(sys.modules, "megatron.pretended", module)
    return module


def test_unknown_objects_are_written_back_unchanged(megatron_module: Any) -> None:
    value = {
        "args": argparse.Namespace(
            mode=Mode.FAST,
            setting=Setting("a", Mode.FAST),
            names=Names(["x", "y"]),
            function=function,
            dtype=torch.bfloat16,
            path=Path("some/where"),
            shape=torch.Size([2, 3]),
            plain=[1, 2.5, None, True, "text", b"bytes", {3, 4}, (1,)],
        ),
        "tensor": torch.arange(6.0).view(2, 3).T,
    }
    value["again"] = value["tensor"]
    found = load_torch(saved(value), source="x")
    assert found.foreign == []
    assert found.inert == {
        f"megatron.pretended.{name}" for name in ("Mode", "Setting", "Names", "function")
    }
    args = found.value["args"]
    assert isinstance(args.mode, Inert) and isinstance(args.setting, Inert)
    assert args.dtype == torch.bfloat16 and args.plain == value["args"].plain
    again = torch.load(io.BytesIO(dump_torch(found.value)), weights_only=False)
    tensor = value.pop("tensor")
    assert torch.equal(again.pop("tensor"), tensor)
    assert torch.equal(again.pop("again"), value.pop("again"))
    assert again == value


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
)
def test_tensors_of_every_type_are_read(dtype: torch.dtype) -> None:
    tensor = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = load_torch(saved([tensor, tensor[1:3, ::2], torch.empty(0, dtype=dtype)]), source="x")
    whole, part, empty = found.value
    assert whole.dtype == part.dtype == dtype
    assert whole.view(torch.uint8).equal(tensor.view(torch.uint8))
    assert part.double().equal(tensor[1:3, ::2].double())
    assert empty.shape == (0,)


def test_a_flipped_byte_is_noticed() -> None:
    data = bytearray(saved(torch.arange(1000.0)).getvalue())
    at = data.index(torch.tensor([500.0]).numpy().tobytes())
    data[at] ^= 1
    with pytest.raises(CheckpointError, match=r"damaged.*CRC"):
        load_torch(io.BytesIO(data), source="x")


@pytest.mark.parametrize("data", [b"", b"no pickle at all", pickle.dumps([1, 2])[:-3]])
def test_an_invalid_pickle_is_refused(data: bytes) -> None:
    for load in (load_pickle, load_torch):
        with pytest.raises(CheckpointError, match="the file"):
            load(io.BytesIO(data), source="the file")
