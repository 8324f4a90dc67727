"""Writes a distributed checkpoint atomically: several data files, several processes.

Everything is written into a folder beside the target, which is renamed when complete.
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
from megatron_muon.offline.errors import CheckpointError, first_line
from megatron_muon.offline.index import INDEX_FILE
from megatron_muon.offline.manifest import (
    MANIFEST_FILE,
    copy_foreign_files,
    digest_of,
    is_checkpoint_file,
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
    """Write the folder of an iteration, ``…/iter_0000100``, completely or not at all."""
    with (
        _translate_errors(folder, "no partial output was left"),
        _staging_folder(folder, source, overwrite) as staging,
    ):
        digests = write_files(staging, output, source, workers, progress or (lambda count: None))
        digests[INDEX_FILE] = digest_of(staging / INDEX_FILE)
        if output.common_in_file:
            digests[COMMON_FILE] = _write(staging / COMMON_FILE, dump_torch(output.common))
        text = json.dumps(output.backend).encode()
        digests[BACKEND_FILE] = _write(staging / BACKEND_FILE, text)
        if source is not None:
            digests |= copy_foreign_files(source.folder, staging)
        listed = manifest(output, digests, None if source is None else source.folder)
        _write(staging / MANIFEST_FILE, json.dumps(listed, indent=1).encode())
        _sync_folder(staging)
        with signals_held():
            _publish(staging, folder)


def write_tracker(root: Path, step: int) -> None:
    """Make this iteration the one that a run loads from ``root``."""
    complete = f"the checkpoint is complete: --ckpt-step {step} finds it"
    with _translate_errors(root / TRACKER, complete):
        staging = root / f".{TRACKER}.{os.getpid()}"
        try:
            staging.write_text(str(step), encoding="utf-8")
            staging.replace(root / TRACKER)
        finally:
            staging.unlink(missing_ok=True)


# ---- all or nothing ---------------------------------------------------------------------------


@contextmanager
def _staging_folder(folder: Path, source: Checkpoint | None, overwrite: bool) -> Iterator[Path]:
    """Create a folder beside the target, removed at the end unless it was renamed."""
    check_target(folder, source, overwrite=overwrite)
    created = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = _unused(folder, "writing")
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if not folder.exists():
            for parent in created:
                if not any(parent.iterdir()):
                    parent.rmdir()


def check_target(folder: Path, source: Checkpoint | None, *, overwrite: bool) -> None:
    """Refuse to replace anything but a checkpoint, or any part of the source."""
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
                f"{parent} is a checkpoint itself; name the folder that runs --save to and --load "
                "from."
            )
    if not os.path.lexists(folder):
        return
    if not overwrite:
        raise CheckpointError(f"{folder} exists; type --overwrite to replace it.")
    if folder.is_symlink() or not folder.is_dir():
        kind = "a symbolic link" if folder.is_symlink() else "a file"
        raise CheckpointError(f"{folder} is {kind}, which is not replaced; name another folder.")
    foreign = sorted(path.name for path in folder.iterdir() if not is_checkpoint_file(path))
    if foreign and not set(foreign) <= listed_files(folder).keys():
        raise CheckpointError(
            f"{folder} holds {foreign[0]}, which is not part of a checkpoint, and is not replaced; "
            "move it away, or name another folder."
        )


def _unused(folder: Path, purpose: str) -> Path:
    """Return an unused name beside a folder; a killed run may have had the same process id."""
    ends = ("", *(f"-{number}" for number in range(1, 1000)))
    names = (f".{folder.name}.{purpose}.{os.getpid()}{end}" for end in ends)
    return next(path for name in names if not (path := folder.with_name(name)).exists())


def stale_folders(folder: Path) -> list[str]:
    """Return sentences on folders that killed or concurrent runs have beside a folder."""
    found = []
    for path in sorted(folder.parent.glob(f".{folder.name}.*.[0-9]*")):
        what = "is an incomplete checkpoint; remove it"
        if ".replaced." in path.name:
            what = "is a checkpoint that was being replaced; check whether you need it"
        found.append(f"{path} belongs to a run that was killed or is still running. It {what}.")
    return found


def _publish(staging: Path, folder: Path) -> None:
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
                f"{folder} is complete, but the replaced folder cannot be removed "
                f"({first_line(error)}): remove {old}."
            ) from error


@contextmanager
def _translate_errors(path: Path, outcome: str) -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise CheckpointError(
            f"a process that wrote {path} was killed, perhaps out of memory: type --workers 1."
        ) from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        more = "; free some space, or name another disk" if full else ""
        raise CheckpointError(
            f"{path} cannot be written ({first_line(error)}), and {outcome}{more}."
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
