"""A checkpoint is written completely or not at all, and replaces nothing unintended."""

from __future__ import annotations

import hashlib
import io
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.offline import data_files
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.reading import Checkpoint
from megatron_muon.offline.writing import stale_folders, write_checkpoint, write_tracker
from tests.unit.checkpoint.small_output import WHOLE, names_in, output

ROOT = Path(__file__).parents[3]


def test_nothing_is_overwritten_without_the_flag(written: Path) -> None:
    before = (written / "__0_0.distcp").stat().st_mtime_ns
    with pytest.raises(CheckpointError, match=r"exists; type --overwrite"):
        write_checkpoint(written, output())
    assert (written / "__0_0.distcp").stat().st_mtime_ns == before
    write_checkpoint(written, output(), overwrite=True)
    assert (written / "__0_0.distcp").stat().st_mtime_ns != before
    assert names_in(written.parent) == ["iter_0000003", "latest_checkpointed_iteration.txt"]


def _is_a_file(folder: Path) -> None:
    folder.write_text("thesis")


def _is_a_link(folder: Path) -> None:
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir()
    (elsewhere / ".metadata").write_text("")
    folder.symlink_to(elsewhere)


def _holds_something_else(folder: Path) -> None:
    folder.mkdir()
    (folder / "__0_0.distcp").write_text("")
    (folder / "thesis").mkdir()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (_is_a_file, "is a file, which is not replaced; name another"),
        (_is_a_link, "is a symbolic link, which is not replaced; name another"),
        (
            _holds_something_else,
            "holds thesis, which is not part of a checkpoint, and is not replaced",
        ),
    ],
)
def test_only_a_checkpoint_is_replaced(
    tmp_path: Path, make: Callable[[Path], None], sentence: str
) -> None:
    folder = tmp_path / "iter_0000003"
    make(folder)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=sentence):
        write_checkpoint(folder, output(), overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_save_that_was_not_finished_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    for name in ("__0_0.distcp", "common.pt", "metadata.json", ".metadata.tmp", "integrity.json"):
        (folder / name).write_text("")
    write_checkpoint(folder, output(), overwrite=True)
    assert torch.equal(Checkpoint(folder).read("a"), WHOLE)


@pytest.mark.parametrize("where", ["iter_0000003/more/iter_0000003", "."])
def test_source_and_target_are_apart(written: Path, where: str) -> None:
    before = sorted(written.parent.rglob("*"))
    with pytest.raises(CheckpointError, match=r"(is inside|holds) the source .*name another"):
        write_checkpoint(
            written.parent / where, output(), source=Checkpoint(written), overwrite=True
        )
    assert sorted(written.parent.rglob("*")) == before


def test_an_invalid_file_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be written .*too long"):
        write_checkpoint(tmp_path / ("x" * 300) / "iter_0000003", output())


def test_an_unwritable_tracker_is_reported(written: Path) -> None:
    tracker = written.parent / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    tracker.mkdir()
    with pytest.raises(CheckpointError, match="checkpoint is complete: --ckpt-step 3 finds it"):
        write_tracker(written.parent, 3)
    assert names_in(written.parent) == ["iter_0000003", tracker.name]


@pytest.mark.parametrize(
    ("failure", "workers", "sentence"),
    [
        ("raises", 1, "Input/output error"),
        ("raises", 2, "Input/output error"),
        ("dies", 2, "was killed, perhaps out of memory"),
        ("dtype", 1, r"is torch.float64 \(2, 7\) and should be torch.float32"),
    ],
)
def test_a_failure_leaves_nothing(
    tmp_path: Path, failure: str, workers: int, sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        write_checkpoint(tmp_path / "run" / "iter_0000003", output(failure), workers=workers)
    assert names_in(tmp_path) == []


def test_a_failure_keeps_the_checkpoint_to_be_replaced(written: Path) -> None:
    with pytest.raises(CheckpointError):
        write_checkpoint(written, output("raises"), overwrite=True)
    assert torch.equal(Checkpoint(written).read("a"), WHOLE)
    assert names_in(written.parent) == ["iter_0000003", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize("missing", [1, 100, None], ids=["last byte", "last piece", "most"])
def test_a_full_disk_leaves_nothing(written: Path, tmp_path: Path, missing: int | None) -> None:
    """A limit on file sizes simulates a full disk: writing fails in the middle of a file.

    Where there is room for a part of a piece the system writes that part, and says so; only the
    next piece, if there is one, is an error.
    """
    size = (written / "__0_0.distcp").stat().st_size
    limit = 1000 if missing is None else size - missing
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"File too large.*no partial output was left.*free some"
        ):
            write_checkpoint(tmp_path / "other" / "iter_0000003", output())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "other").exists()


def test_partial_writes_are_completed(tmp_path: Path) -> None:
    """Linux writes at most 2 GiB minus a page at a time; here it is five bytes."""

    class Reluctant(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:5])

    with Reluctant(tmp_path / "file", "wb") as stream:
        file = data_files._HashingFile(stream)
        assert file.write(WHOLE.numpy()) == WHOLE.nbytes == file.position
    content = (tmp_path / "file").read_bytes()
    assert content == WHOLE.numpy().tobytes()
    assert file.digest == hashlib.sha256(content).hexdigest()


_TERMINATED = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}]
import signal
from megatron_muon.offline.command import _interrupt
from megatron_muon.offline.writing import write_checkpoint
from tests.unit.checkpoint.small_output import output
signal.signal(signal.SIGTERM, _interrupt)
try:
    write_checkpoint(Path({folder!r}), output({failure!r}), workers={workers})
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "failure", "workers"),
    [(signal.SIGTERM, "sleeps", 1), (signal.SIGINT, "sleeps", 1), (signal.SIGINT, "naps", 2)],
)
def test_a_terminated_run_leaves_nothing(
    tmp_path: Path, number: signal.Signals, failure: str, workers: int
) -> None:
    """As by Ctrl-C, which all processes receive: no file, no process, no traceback."""
    folder = tmp_path / "run" / "iter_0000003"
    code = _TERMINATED.format(root=str(ROOT), folder=str(folder), failure=failure, workers=workers)
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        end = time.monotonic() + 60
        while len(list(folder.parent.glob(".iter*/*.distcp"))) < workers:
            assert time.monotonic() < end, "it never began"
            time.sleep(0.05)
        os.killpg(process.pid, number)
        assert process.wait(timeout=30) == 130
        assert process.stderr is not None and process.stderr.read() == b""
    assert names_in(tmp_path) == []
    assert not _is_alive(process.pid)


def _is_alive(group: int) -> bool:
    """Return True if a process group has a live process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    """A killed parent leaves its files, but no process writing them."""
    folder = tmp_path / "run" / "iter_0000003"
    code = _TERMINATED.format(root=str(ROOT), folder=str(folder), failure="sleeps", workers=2)
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        end = time.monotonic() + 60
        while len(list(folder.parent.glob(".iter*/*.distcp"))) < 2:
            assert time.monotonic() < end, "it never began"
            time.sleep(0.05)
        process.kill()
    while _is_alive(process.pid):
        assert time.monotonic() < end, "processes are left"
        time.sleep(0.1)
    assert not folder.exists()
    (left,) = stale_folders(folder)
    assert f".iter_0000003.writing.{process.pid} belongs to a run that was killed" in left


def test_the_process_id_of_a_killed_run_may_recur(written: Path) -> None:
    """As in a container, where the first process always has the same id."""
    for purpose in ("writing", "replaced"):
        written.with_name(f".{written.name}.{purpose}.{os.getpid()}").mkdir()
    write_checkpoint(written, output(), overwrite=True)
    assert torch.equal(Checkpoint(written).read("a"), WHOLE)
    assert len(stale_folders(written)) == 2


def test_nothing_comes_between_two_names(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the old checkpoint was renamed waits until the new one has its name.

    Also in a process with another thread, which blocks no signal and may be the one that gets it.
    """
    is_over = threading.Event()
    threading.Thread(target=is_over.wait, daemon=True).start()
    renamed = []

    def interrupted(self: Path, target: Path) -> None:
        os.rename(self, target)
        renamed.append(target.name)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(written, output(), overwrite=True)
    is_over.set()
    assert renamed[-1] == written.name and len(renamed) == 2
    assert torch.equal(Checkpoint(written).read("a"), WHOLE)
    assert stale_folders(written) == []


def _dies_with_the_lock(count: int) -> None:
    data_files._written.get_lock().acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_killed_with_the_lock_blocks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "_add_written", _dies_with_the_lock)
    with pytest.raises(CheckpointError, match="was killed"):
        write_checkpoint(tmp_path / "iter_0000003", output(), workers=2)
    assert names_in(tmp_path) == []


@pytest.mark.slow
def test_a_killed_process_ends_the_run(tmp_path: Path) -> None:
    """As out of memory; also with the command line's signal handlers installed."""
    folder = tmp_path / "run" / "iter_0000003"
    code = _TERMINATED.format(root=str(ROOT), folder=str(folder), failure="dies", workers=2)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "a process that wrote" in ended.stderr and "KeyboardInterrupt" not in ended.stderr
    assert names_in(tmp_path) == []
