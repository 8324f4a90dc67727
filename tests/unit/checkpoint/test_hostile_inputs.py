"""Inputs that no run writes: each is refused in one sentence and changes nothing."""

from __future__ import annotations

import argparse
import io
import math
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.config import MatrixConfig
from megatron_muon.matrices import Rule
from megatron_muon.offline import command as command_line
from megatron_muon.offline.convert_command import write_output
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.reading import Checkpoint, CommonState
from megatron_muon.offline.safe_pickle import Loaded, load_pickle
from megatron_muon.offline.settings import (
    TARGETS,
    ConvertSettings,
    matrix_settings,
    parse_version,
    require_effect,
    saved_flags,
)
from megatron_muon.offline.torch_files import read_torch_file
from megatron_muon.offline.verification import compare
from megatron_muon.offline.writing import check_target, write_checkpoint
from tests.unit.checkpoint.small_output import WHOLE, output

TRACKER = "latest_checkpointed_iteration.txt"


# ---- pickles ----------------------------------------------------------------------------------


def test_a_name_with_a_line_in_it_is_refused() -> None:
    """Names are written back as lines: a second line would be an instruction."""
    module = "numpy.linalg\nnorm\n0cposix\nsystem\n(Vtrue\ntR0cargparse"
    pickled = io.BytesIO()
    writer = pickle._Pickler(pickled, protocol=4)  # type: ignore[attr-defined]
    writer.write(pickle.PROTO + b"\x04")
    writer.save(module)
    writer.save("Namespace")
    writer.write(pickle.STACK_GLOBAL + pickle.STOP)
    pickled.seek(0)
    with pytest.raises(CheckpointError, match="which is not a name"):
        load_pickle(pickled, source="x")


@pytest.mark.parametrize(
    ("module", "name", "is_foreign"),
    [
        ("numpy._core.multiarray", "_reconstruct", False),
        ("numpy", "dtype", False),
        ("megatron.core.transformer.enums", "AttnBackend", False),
        ("numpy.testing._private.utils", "runstring", True),
        ("numpy", "load", True),
        ("signal", "raise_signal", True),
    ],
)
def test_of_numpy_only_arrays_are_passed_on(module: str, name: str, is_foreign: bool) -> None:
    found = load_pickle(io.BytesIO(f"c{module}\n{name}\n.".encode()), source="x")
    assert found.foreign == ([f"{module}.{name}"] if is_foreign else [])


# ---- the index --------------------------------------------------------------------------------


def _lose_a_chunk(entry: Any) -> None:
    entry.chunks = entry.chunks[:-1]


def _lose_all_chunks(entry: Any) -> None:
    entry.chunks = []


def _grow(entry: Any) -> None:
    entry.size = torch.Size((300, 7))


def _lengthen_a_chunk(entry: Any) -> None:
    entry.chunks[2].sizes = torch.Size((4, 7))


def _name_a_type(entry: Any) -> None:
    object.__setattr__(entry.properties, "dtype", "float")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_lose_a_chunk, "hold 21 of its 35 elements"),
        (_lose_all_chunks, "hold 0 of its 35 elements"),
        (_grow, "hold 35 of its 2100 elements"),
        (_lengthen_a_chunk, "a chunk of a exceeds its shape"),
        (_name_a_type, "a has the dtype 'float'"),
    ],
)
def test_chunks_cover_their_tensor(
    written: Path, change: Callable[[Any], None], message: str
) -> None:
    """Also if they are only copied."""
    path = written / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata.state_dict_metadata["a"])
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=f"is damaged: .*{message}"):
        Checkpoint(written)


# ---- verify -----------------------------------------------------------------------------------


def _with_first(folder: Path, value: float) -> Checkpoint:
    whole = WHOLE.clone()
    whole[0, 0] = value
    changed = output()
    for chunk in changed.tensors[0].chunks:
        object.__setattr__(chunk.value, "tensor", lambda *_, c=chunk: _rows(whole, c))
    write_checkpoint(folder, changed)
    return Checkpoint(folder)


def _rows(whole: torch.Tensor, chunk: Any) -> torch.Tensor:
    return whole[chunk.offset[0] : chunk.offset[0] + chunk.shape[0]]


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        (math.inf, 1.0, False),
        (1.0, math.inf, False),
        (math.inf, -math.inf, False),
        (math.nan, 1.0, False),
        (math.inf, math.inf, True),
        (math.nan, math.nan, True),
        (1.0, 1.05, True),
    ],
)
def test_no_tolerance_covers_inf(tmp_path: Path, one: float, other: float, is_equal: bool) -> None:
    first, second = _with_first(tmp_path / "1", one), _with_first(tmp_path / "2", other)
    assert (dict(compare(first, second, 0.1))["a"] is None) is is_equal


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_a_tolerance_is_a_number(
    written: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    arguments = ["verify", str(written), str(written)]
    assert command_line.main(arguments) == 0
    assert command_line.main([*arguments, f"--tolerance={value}"]) == 2
    assert f"--tolerance is {float(value)}; it must be" in capsys.readouterr().err


def test_nothing_is_not_equal(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["verify", str(written), str(written), "--part", "optimizer"]) == 2
    assert "there is nothing to compare" in capsys.readouterr().err


# ---- targets ----------------------------------------------------------------------------------


def _options(target: Path, **changes: Any) -> argparse.Namespace:
    values = {"target": target, "overwrite": False, "dry_run": False, "workers": 1}
    return argparse.Namespace(**(values | changes))


def test_the_tracker_does_not_go_back(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, source = tmp_path / "other", Checkpoint(written)
    root.mkdir()
    for before, after in ((None, "3"), ("2", "3"), ("", "3"), ("release", "3"), ("7", "7")):
        if before is not None:
            (root / TRACKER).write_text(before)
        assert write_output(output(), _options(root, overwrite=True), source) == 0
        assert (root / TRACKER).read_text() == after
    assert "was not changed and says 7; load with --ckpt-step 3" in capsys.readouterr().out


def test_megatron_ignores_steps_after_a_release(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / TRACKER).write_text("release")
    assert write_output(output(), _options(tmp_path / "other"), Checkpoint(written)) == 0
    assert "says release; to load this one write 3 to it" in capsys.readouterr().out


def test_no_checkpoint_goes_into_another(written: Path) -> None:
    with pytest.raises(CheckpointError, match="is a checkpoint itself; name the folder that runs"):
        check_target(written / "iter_0000003", None, overwrite=True)
    with pytest.raises(CheckpointError, match="is a file; name a folder"):
        check_target(written / "__0_0.distcp" / "iter_0000003", None, overwrite=True)
    # Not in it, though its name is on the way.
    check_target(written / ".." / "new" / "iter_0000003", None, overwrite=True)
    (written.parents[1] / ".metadata").mkdir()
    check_target(written.parent / "new" / "iter_0000003", None, overwrite=True)


def _elsewhere(written: Path) -> Checkpoint:
    """Return a copy of the checkpoint."""
    shutil.copytree(written.parent, written.parent.with_name("elsewhere"))
    return Checkpoint(written.parent.with_name("elsewhere"))


def test_a_dry_run_reports_an_existing_target(written: Path) -> None:
    with pytest.raises(CheckpointError, match="exists; type --overwrite"):
        write_output(output(), _options(written.parent, dry_run=True), _elsewhere(written))


@pytest.mark.parametrize("iteration", [-5, True, "3", None])
def test_an_iteration_is_a_number(written: Path, iteration: object) -> None:
    plan = output()
    plan.common["iteration"] = iteration
    with pytest.raises(CheckpointError, match="says iteration"):
        write_output(plan, _options(written / "new"), Checkpoint(written))


def test_a_full_disk_is_reported_at_every_write(tmp_path: Path) -> None:
    """Also in torch's writer, which raises its own error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    write_checkpoint(tmp_path / "whole", output())
    size = (tmp_path / "whole" / "__0_0.distcp").stat().st_size
    for limit in range(1, size, 97):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(CheckpointError, match="File too large"):
                write_checkpoint(tmp_path / "part", output())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not (tmp_path / "part").exists()


# ---- the command line -------------------------------------------------------------------------


def test_ignored_signals_stay_ignored(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under nohup."""
    handlers = []

    def hears(options: argparse.Namespace) -> int:
        handlers.extend(signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM))
        return 0

    monkeypatch.setattr(command_line.COMMANDS["inspect"], "run", hears)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        command_line.main(["inspect", str(written)])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert handlers == [signal.SIG_IGN, command_line._interrupt]


def test_unexpected_errors_are_one_sentence(
    written: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(options: argparse.Namespace) -> int:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr(command_line.COMMANDS["inspect"], "run", fails)
    monkeypatch.delenv(command_line.TRACEBACK, raising=False)
    assert command_line.main(["inspect", str(written)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "inspect failed on an input" in line and "(ZeroDivisionError: division)" in line
    monkeypatch.setenv(command_line.TRACEBACK, "1")
    with pytest.raises(ZeroDivisionError):
        command_line.main(["inspect", str(written)])


def _convert(*flags: str) -> argparse.Namespace:
    return command_line.build_parser().parse_args(["convert", "a", "b", *flags])


@pytest.mark.parametrize(
    ("target", "flags", "message"),
    [
        ("dmuon", ["--orth-dion-rank-fraction", "0.5"], "--orth-dion-rank-fraction"),
        ("dmuon", ["--right-factor-start", "seeded"], "--right-factor-start"),
        ("adam", ["--momentum-start", "zero"], "--momentum-start"),
        (
            "adam",
            ["--matrix-min-dim", "4", "--matrix-split-heads"],
            "--matrix-split-heads, --matrix-min-dim",
        ),
        ("muon", ["--matrix-rule", "*:optimizer=adam"], "--matrix-rule"),
        ("dmuon", ["--heavy-ball", "0.9"], "--heavy-ball"),
        ("adam", ["--heavy-ball", "0.9"], "--heavy-ball"),
        ("dmuon", ["--heavy-ball", "0.9", "--momentum-start", "zero"], "--heavy-ball"),
    ],
)
def test_flags_without_effect_are_refused(target: str, flags: list[str], message: str) -> None:
    for each in TARGETS:
        require_effect(_convert("--to", each), "adam")
    with pytest.raises(CheckpointError, match=f"^{message}.* has no effect .*; leave it out"):
        require_effect(_convert("--to", target, *flags), "adam")
    require_effect(_convert("--to", "dmuon", "--heavy-ball", "0.9"), "muon")


def _settings_of(saved: dict[str, Any], *flags: str, to: str = "orth_dion") -> MatrixConfig:
    """Return the settings of ``convert`` from its flags and the saved arguments."""
    common = Loaded(value={"args": argparse.Namespace(**saved)}, inert=frozenset())
    return matrix_settings(_convert("--to", to, *flags), CommonState(in_file=True, loaded=common))


def test_flags_override_the_saved_ones_and_are_saved() -> None:
    saved = {"matrix_min_dim": 8, "orth_dion_momentum": 0.5, "matrix_rule": ["a:split=none"]}
    found = _settings_of(saved, "--orth-dion-momentum", "0.25", "--muon-no-split-qkv")
    assert found == MatrixConfig(
        optimizer="orth_dion",
        min_dim=8,
        momentum=0.25,
        split_qkv=False,
        rules=(Rule(pattern="a", split="none"),),
    )
    again = saved_flags(ConvertSettings(to="orth_dion", matrix=found))
    assert _settings_of(again) == found
    # A rule on the command line stands for all saved ones, also those of a file.
    other = _settings_of({**saved, "matrix_rules": "/gone.json"}, "--matrix-rule", "b:lr_mult=2")
    assert other.rules == (Rule(pattern="b", lr_mult=2.0),)


def test_saved_flags_of_the_other_optimizer_are_neither_read_nor_replaced() -> None:
    saved = {"matrix_min_dim": 8, "orth_dion_momentum": 0.5, "orth_dion_rank_fraction": 0.125}
    found = _settings_of(saved, to="dmuon")
    assert found == MatrixConfig(min_dim=8)
    again = saved_flags(ConvertSettings(to="dmuon", matrix=found))
    assert again["matrix_min_dim"] == 8 and not again.keys() & {*saved} - {"matrix_min_dim"}


@pytest.mark.parametrize(
    ("saved", "flags", "sentence"),
    [
        ({"matrix_min_dim": "many"}, (), "--matrix-min-dim is 'many'; it must be an integer >= 1."),
        ({"orth_dion_state_dtype": "fp8"}, (), "--orth-dion-state-dtype is 'fp8'; supported are"),
        ({"matrix_split_heads": "no"}, (), "--matrix-split-heads is 'no'; supported are True, "),
        (
            {"matrix_rules": "/gone.json"},
            (),
            "had --matrix-rules /gone.json, which does not exist here",
        ),
        (
            {"orth_dion_momentum": 1.0},
            ("--matrix-min-dim", "0", "--matrix-rule", "x"),
            "(?s)a rule needs a pattern.*min-dim is 0; it.*-momentum is 1.0; it must be >= 0 and <",
        ),
    ],
)
def test_invalid_settings_are_refused_together(
    saved: dict[str, Any], flags: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        _settings_of(saved, *flags)


@pytest.mark.parametrize("text", ["new", "0", "0.4"])
def test_a_version_is_one_that_there_was(text: str) -> None:
    assert parse_version("0.18.1") == (0, 18)
    with pytest.raises(argparse.ArgumentTypeError, match="type for example"):
        parse_version(text)


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"neither a checkpoint nor a run's --save folder.*iteration\.txt\."
    ):
        Checkpoint(tmp_path)
    (tmp_path / "iter_0000003").mkdir()
    with pytest.raises(CheckpointError, match=r"but iter_0000003: name one of them"):
        Checkpoint(tmp_path)
    for text in ("9" * 5000, "-1", "", "three"):
        (tmp_path / TRACKER).write_text(text)
        with pytest.raises(CheckpointError, match="which is not an iteration"):
            Checkpoint(tmp_path)
    (tmp_path / TRACKER).unlink()
    (tmp_path / TRACKER).mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        Checkpoint(tmp_path)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_torch_file(tmp_path / "nothing.pt")
    assert os.listdir(tmp_path) == []
