"""The table of measured times that ``python -m megatron_muon.benchmark`` writes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron_muon.benchmark import BATCHES, default_shapes, main, parse_shapes
from megatron_muon.placement import load_cost_table


@dataclass(frozen=True, kw_only=True)
class Done:
    """The result of a command."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*flags: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["benchmark", "--quick", *flags])
        try:
            code = main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        message = capsys.readouterr()
        return Done(code=code, out=message.out, err=message.err)

    return command


def test_a_table_is_written_that_training_reads(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    done = run("--cost-table", str(path), "--cost-shapes", "32x64,64x32,16x16")
    assert done.code == 0
    table = load_cost_table(path)
    assert (table.steps, table.dtype) == (5, "bfloat16" if torch.cuda.is_available() else "float32")
    assert [(e.short, e.long, e.batch) for e in table.measured] == [
        (short, long, batch) for short, long in ((16, 16), (32, 64)) for batch in BATCHES
    ]
    assert f"--dmuon-cost-table {path}" in done.out
    assert "32x64, batch of 4" in done.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--cost-shapes", "32"), "'32' is not a shape: type for example 4096x14336,1024x4096"),
        (("--cost-shapes", "32x0"), "'32x0' is not a shape"),
        (("--cost-shapes", ""), "'' is not a shape"),
        (("--cost-steps", "0"), "--cost-steps is 0; it must be >= 1"),
    ],
)
def test_invalid_flags_are_refused(
    run: Run, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    done = run("--cost-table", str(tmp_path / "costs.json"), *flags)
    assert done.code == 2
    assert message in done.err
    assert not list(tmp_path.iterdir())


def test_without_a_file_the_error_names_the_flag_and_the_other_command(run: Run) -> None:
    done = run()
    assert done.code == 2
    assert "--cost-table FILE" in done.err and "make benchmark" in done.err


def test_a_missing_folder_is_refused_before_measuring(run: Run, tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "costs.json", tmp_path):
        done = run("--cost-table", str(path))
        assert done.code == 2 and "is not a file in an existing folder" in done.err


def test_shapes() -> None:
    assert parse_shapes("4096x14336, 1024x4096") == ((4096, 14336), (1024, 4096))
    assert (256, 1024) in default_shapes(torch.device("cpu"))
