"""Writes a distributed checkpoint: several data files, several processes, all or nothing.

Everything goes into a folder beside the target, which gets its name when the last byte is on disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from megatron_muon.offline.data_files import Progress, write_files
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.index import INDEX_FILE
from megatron_muon.offline.manifest import (
    MANIFEST_FILE,
    copy_others,
    digest_of,
    is_of_checkpoint,
    listed_files,
    manifest,
)
from megatron_muon.offline.outputs import Output
from megatron_muon.offline.reading import BACKEND_FILE, COMMON_FILE, TRACKER, Checkpoint
from megatron_muon.offline.safe_pickle import dump_torch
from megatron_muon.offline.signals import signals_held


def write_checkpoint(
    folder: Path,
    output: Output,
    *,
    source: Checkpoint | None = None,
    overwrite: bool = False,
    workers: int = 1,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint, or leave nothing.

    Args:
        folder: The folder of the iteration, ``…/iter_0000100``.
        output: What goes into it.
        source: The checkpoint that it is made from.
        overwrite: Replace a checkpoint that is there.
        workers: Number of processes that write; 1 for this one alone.
        progress: Called now and then with the bytes written since.
    """
    with (
        _one_sentence(folder, "nothing was left of it"),
        _beside(folder, source, overwrite) as staging,
    ):
        digests = write_files(staging, output, source, workers, progress or (lambda count: None))
        digests[INDEX_FILE] = digest_of(staging / INDEX_FILE)
        if output.common_in_file:
            digests[COMMON_FILE] = _write(staging / COMMON_FILE, dump_torch(output.common))
        text = json.dumps(output.backend).encode()
        digests[BACKEND_FILE] = _write(staging / BACKEND_FILE, text)
        if source is not None:
            digests |= copy_others(source.folder, staging)
        listed = manifest(output, digests, None if source is None else source.folder)
        _write(staging / MANIFEST_FILE, json.dumps(listed, indent=1).encode())
        _sync_folder(staging)
        with signals_held():
            _take_name(staging, folder)


def write_tracker(root: Path, step: int) -> None:
    """Let a run that loads from ``root`` find this iteration."""
    with _one_sentence(root / TRACKER, f"the checkpoint is there: --ckpt-step {step} finds it"):
        staging = root / f".{TRACKER}.{os.getpid()}"
        try:
            staging.write_text(str(step), encoding="utf-8")
            staging.replace(root / TRACKER)
        finally:
            staging.unlink(missing_ok=True)


# ---- all or nothing ---------------------------------------------------------------------------


@contextmanager
def _beside(folder: Path, source: Checkpoint | None, overwrite: bool) -> Iterator[Path]:
    """A new folder beside another, gone at the end unless it was renamed."""
    check_target(folder, source, overwrite=overwrite)
    made = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = _unused(folder, "writing")
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if not folder.exists():
            for parent in made:
                if not any(parent.iterdir()):
                    parent.rmdir()


def check_target(folder: Path, source: Checkpoint | None, *, overwrite: bool) -> None:
    """Nothing but a checkpoint is ever replaced, and nothing of the source."""
    if source is not None:
        own, target = source.folder.resolve(), folder.resolve()
        if own == target:
            raise CheckpointError(f"{folder} is the source itself; name another folder.")
        if own in target.parents or target in own.parents:
            where = "is inside the source" if own in target.parents else "holds the source"
            raise CheckpointError(f"{folder} {where} {source.folder}; name another folder.")
    above = folder.parent.resolve()
    for parent in (above, *above.parents):
        if parent.exists() and not parent.is_dir():
            raise CheckpointError(f"{parent} is a file; name a folder.")
        if (parent / INDEX_FILE).is_file():
            raise CheckpointError(
                f"{parent} is a checkpoint itself; name the folder that runs save into and load "
                "from."
            )
    if not os.path.lexists(folder):
        return
    if not overwrite:
        raise CheckpointError(f"{folder} exists; type --overwrite to replace it.")
    if folder.is_symlink() or not folder.is_dir():
        kind = "a symbolic link" if folder.is_symlink() else "a file"
        raise CheckpointError(f"{folder} is {kind}, which is not replaced; name another folder.")
    strange = sorted(path.name for path in folder.iterdir() if not is_of_checkpoint(path))
    if strange and not set(strange) <= listed_files(folder).keys():
        raise CheckpointError(
            f"{folder} holds {strange[0]}, which is of no checkpoint, and is not replaced; move it "
            "away, or name another folder."
        )


def _unused(folder: Path, purpose: str) -> Path:
    """A name beside a folder; another run of the same number may have been killed there."""
    ends = ("", *(f"-{number}" for number in range(1, 1000)))
    names = (f".{folder.name}.{purpose}.{os.getpid()}{end}" for end in ends)
    return next(path for name in names if not (path := folder.with_name(name)).exists())


def left_behind(folder: Path) -> list[str]:
    """Sentences on what runs that were killed, or are under way, have beside a folder."""
    found = []
    for path in sorted(folder.parent.glob(f".{folder.name}.*.[0-9]*")):
        what = "is half of a checkpoint; remove it"
        if ".replaced." in path.name:
            what = "was to be replaced; look whether you need it"
        found.append(f"{path} is of a run that was killed, or is still under way. It {what}.")
    return found


def _take_name(staging: Path, folder: Path) -> None:
    old = None
    if folder.exists():
        old = _unused(folder, "replaced")
        folder.rename(old)
    try:
        staging.rename(folder)
    except OSError:
        if old is not None:
            old.rename(folder)
        raise
    _sync_folder(folder.parent)
    if old is not None:
        try:
            shutil.rmtree(old)
        except OSError as error:
            raise CheckpointError(
                f"{folder} is whole, but what it replaced cannot be removed "
                f"({error.strerror or error}): remove {old}."
            ) from error


@contextmanager
def _one_sentence(path: Path, left: str) -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise CheckpointError(
            f"a process that wrote {path} was killed, perhaps for want of memory: type --workers 1."
        ) from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        more = "; free some space, or name another disk" if full else ""
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror or error}), and {left}{more}."
        ) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, data: bytes) -> str:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return hashlib.sha256(data).hexdigest()
