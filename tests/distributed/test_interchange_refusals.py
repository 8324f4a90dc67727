"""import and export of invalid inputs: one sentence, and no partial output."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.interchange import (
    HIDDEN,
    Runs,
    as_stored,
    exported,
    like,
    same,
    tool,
)


def _rename(content: dict[str, Any]) -> Any:
    content["model"]["model.layers.0.nothing.weight"] = torch.zeros(2)
    return content


def _lose(content: dict[str, Any]) -> Any:
    del content["model"]["model.layers.1.mlp.up_proj.weight"]
    return content


def _reshape(content: dict[str, Any]) -> Any:
    content["model"]["lm_head.weight"] = torch.zeros(61, HIDDEN)
    return content


def _integers(content: dict[str, Any]) -> Any:
    name = "model.norm.weight"
    content["state"][name]["exp_avg"] = torch.zeros(HIDDEN, dtype=torch.int32)
    return content


def _objects(content: dict[str, Any]) -> Any:
    return {"model": torch.nn.Linear(2, 2)}


def _other_fields(content: dict[str, Any]) -> Any:
    state = {"state": {"model.norm.weight": {"sum": torch.zeros(HIDDEN)}}}
    return {**state, "param_groups": [{"params": ["model.norm.weight"]}]}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_rename, "has model.layers.0.nothing.weight, which"),
        (_lose, "lacks the weight model.layers.1.mlp.up_proj.weight; type --partial"),
        (_reshape, "lm_head.weight has shape (61, 32) in"),
        (_integers, "exp_avg of model.norm.weight has dtype torch.int32"),
        (_objects, "holds objects other than tensors and plain values, which are not loaded"),
        (
            _other_fields,
            "the state of model.norm.weight has the fields sum, which belong to none of the",
        ),
        (lambda _: [1, 2], "holds a list; a dict is required"),
        (lambda _: {"a": 1}, "holds neither weights nor the state dict of an optimizer"),
    ],
)
def test_an_invalid_file_is_refused_by_a_sentence(
    runs: Runs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[dict[str, Any]], Any],
    message: str,
) -> None:
    saved, other = runs("dense", "dmuon")
    content = exported(saved, tmp_path / "hf.pt", "--names", "hf")
    torch.save(damage(content), tmp_path / "wrong.pt")
    arguments = (*like(other), "--names", "hf")
    assert tool("import", tmp_path / "wrong.pt", tmp_path / "back", *arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert message in line
    assert not (tmp_path / "back").exists()


def test_a_file_not_of_torch_is_refused(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, other = runs("dense", "dmuon")
    exported(saved, tmp_path / "file.pt")
    data = (tmp_path / "file.pt").read_bytes()
    for name, content in (("cut.pt", data[: len(data) // 2]), ("text.pt", b"hello"), ("no", b"")):
        (tmp_path / name).write_bytes(content)
        assert tool("import", tmp_path / name, tmp_path / "back", *like(other)) == 2
        assert f"{name} " in capsys.readouterr().err.strip().splitlines()[-1]
    assert tool("import", tmp_path / "none.pt", tmp_path / "back", *like(other)) == 2
    assert "No such file" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_export_refuses_unsupported_layouts(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, _ = runs("dense", "orth_dion")
    path = tmp_path / "file.pt"
    for flags, message in (
        (("--vocab-size", "65"), "has 64 rows, fewer than the vocabulary of 65"),
        (("--vocab-size", "0"), "--vocab-size is 0"),
        (("--format", "dion"), "has no single right factor, which Dion requires; type --names hf"),
    ):
        assert tool("export", saved.folder, path, *flags) == 2
        assert message in capsys.readouterr().err
        assert not path.exists()
    exported(saved, path)
    before = path.read_bytes()
    assert tool("export", saved.folder, path) == 2
    assert "exists; type --overwrite" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert tool("export", saved.folder, path, "--overwrite", "--names", "hf") == 0
    assert path.read_bytes() != before
    assert tool("export", saved.folder, tmp_path / "dry.pt", "--dry-run") == 0
    assert (
        "state / decoder.final_layernorm.weight / exp_avg  32  float32" in capsys.readouterr().out
    )
    assert {entry.name for entry in tmp_path.iterdir()} == {"file.pt"}


def test_all_rows_of_the_vocabulary_are_kept_by_default(runs: Runs, tmp_path: Path) -> None:
    """A tokenizer may have rows above the requested vocabulary; none is lost."""
    saved, other = runs("dense", "dmuon")
    assert tool("export", saved.folder, tmp_path / "all.pt") == 0
    content = torch.load(tmp_path / "all.pt", weights_only=True)
    same(content["model"], as_stored(saved.weights))
    arguments = (tmp_path / "all.pt", tmp_path / "back", "--like", other.folder)
    assert tool("import", *arguments) == 0
    assert tool("verify", saved.folder, tmp_path / "back") == 0


def test_a_reader_that_goes_away_is_no_error(runs: Runs) -> None:
    saved, _ = runs("dense", "dmuon")
    command = [sys.executable, "-m", "megatron_muon.checkpoint", "inspect", str(saved.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        message = process.stderr.read()
    assert b"Traceback" not in message and b"BrokenPipe" not in message
    assert process.returncode == 0


@pytest.mark.slow
def test_a_full_disk_leaves_nothing(runs: Runs, tmp_path: Path) -> None:
    saved, other = runs("dense", "orth_dion")
    exported(saved, tmp_path / "whole.pt")
    before = {entry.name for entry in tmp_path.iterdir()}
    for command in (
        ("export", saved.folder, tmp_path / "file.pt"),
        ("import", tmp_path / "whole.pt", tmp_path / "back", *like(other)),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "megatron_muon.checkpoint", *map(str, command)],
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=_small_files,
        )
        assert done.returncode == 2
        assert "Traceback" not in done.stderr and "no partial output was left" in done.stderr
        assert {entry.name for entry in tmp_path.iterdir()} == before


def _small_files() -> None:
    """Writing above 100,000 bytes fails, as on a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
