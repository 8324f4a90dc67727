"""torch.save files not written by export: checked before anything is written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.foreign import read_foreign, read_names
from megatron_muon.offline.momenta import Convention, conversion_factor
from megatron_muon.offline.torch_files import write_torch_file

PLAIN: dict[str, Any] = {
    "format": "megatron_muon plain 1",
    "step": 3,
    "momentum": {"kind": "average", "factor": 0.9},
    "model": {"a": torch.ones(2, 2)},
    "state": {"a": {"momentum_buffer": torch.ones(2, 2)}},
}


def _state(value: object) -> dict[str, Any]:
    return {"state": {"a": {"momentum_buffer": value}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"a": [1.0]}}, "a is a list in"),
        ({"model": {"a": None}}, "a is a NoneType in"),
        ({"model": {"a": torch.ones(2, 2).to_sparse()}}, r"a is a torch.sparse_coo or quantized"),
        (_state(3.0), "momentum_buffer of a is a float in"),
        (_state(torch.ones(2, device="meta")), "momentum_buffer of a is a meta tensor in"),
        ({"state": {"a": {"bogus": torch.ones(2)}}}, "has the state bogus of a; supported are"),
        ({"state": {"a": {5: torch.ones(2)}}}, "has the state 5 of a"),
        ({"momentum": "average"}, "has momentum 'average'"),
        ({"momentum": {"kind": "mean", "factor": 0.9}}, "has momentum"),
        ({"momentum": {"kind": "sum"}}, r"the factor is None; .* in \[0, 1\)"),
        ({"momentum": {"kind": "sum", "factor": math.nan}}, r"the factor is nan; .* in \[0, 1\)"),
        ({"momentum": {"kind": "sum", "factor": 1.0}}, r"the factor is 1.0; .* in \[0, 1\)"),
        ({"step": "abc"}, "says step 'abc'"),
        ({"step": -7}, "says step -7"),
        ({"step": math.nan}, "says step nan"),
        ({"step": torch.ones(2)}, "says step tensor"),
    ],
)
def test_a_plain_file_is_checked(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    torch.save(PLAIN, tmp_path / "right.pt")
    found = read_foreign(tmp_path / "right.pt")
    assert found.names == {"a"} and found.steps == {3}
    torch.save(PLAIN | change, tmp_path / "wrong.pt")
    with pytest.raises(CheckpointError, match=message):
        read_foreign(tmp_path / "wrong.pt")


def test_the_convention_of_momenta_is_not_guessed(tmp_path: Path) -> None:
    """Only if the factor is required."""
    torch.save(PLAIN | {"momentum": None}, tmp_path / "file.pt")
    kept = read_foreign(tmp_path / "file.pt").momenta["a"]
    assert conversion_factor(kept, Convention(kind="average", factor=0.5)) == 1.0
    with pytest.raises(CheckpointError, match="does not say how its momenta are defined"):
        conversion_factor(kept, Convention(kind="sum", factor=0.5))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([None], "has a group of parameters that does not list them"),
        ([{"momentum": 0.9}], "has a group of parameters that does not list them"),
        ([{"params": [[0]], "momentum": 0.9}], "has a group of parameters that does not list them"),
        ([{"params": [0, 1, 2, 3], "momentum": 0.9}], "has 2 names, and .* has parameter 3"),
        ([{"params": [0, -1], "momentum": 0.9}], "has 2 names, and .* has parameter -1"),
        ([{"params": [0], "momentum": 0.9}], "has 2 names, and .* has 1 parameters"),
    ],
)
def test_numbers_have_one_name_each(tmp_path: Path, groups: list[Any], message: str) -> None:
    (tmp_path / "names").write_text("a\nb\n")
    names = read_names(tmp_path / "names")
    state = {"state": {0: {"momentum_buffer": torch.ones(2, 2)}}, "param_groups": groups}
    torch.save(state | {"param_groups": [{"params": [0, 1], "momentum": 0.9}]}, tmp_path / "right")
    assert read_foreign(tmp_path / "right", names=[names]).names == {"a"}
    torch.save(state, tmp_path / "wrong")
    with pytest.raises(CheckpointError, match=message):
        read_foreign(tmp_path / "wrong", names=[names])


def test_a_file_of_torch_is_not_named_otherwise(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"name it \.pt"):
        write_torch_file(tmp_path / "a.safetensors", {}, overwrite=False)
    with pytest.raises(CheckpointError, match="is a folder; name a file"):
        write_torch_file(tmp_path, {}, overwrite=False)
    with pytest.raises(CheckpointError, match=r"cannot be written .*too long"):
        write_torch_file(tmp_path / ("x" * 300), {}, overwrite=False)
