"""Files beside a distributed checkpoint that others put there, as Megatron-Bridge does."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from megatron_muon.offline.index import INDEX_FILE
from megatron_muon.offline.manifest import MANIFEST_FILE
from megatron_muon.offline.reading import BACKEND_FILE, COMMON_FILE
from megatron_muon.offline.run_config import RUN_CONFIG_FILE

_OWN: Final = (INDEX_FILE, f"{INDEX_FILE}.tmp", COMMON_FILE, BACKEND_FILE, MANIFEST_FILE)
_INTEGRITY: Final = "integrity.json"
"""Megatron's hashes of a checkpoint's files, which are others in another one."""

_BRIDGE: Final = (RUN_CONFIG_FILE, "train_state.pt")


def is_of_checkpoint(path: Path) -> bool:
    """Whether this is what saves of Megatron and its bridge or this tool write, finished or not."""
    if path.is_dir():
        return path.name == "modelopt_state"
    return path.name in (*_OWN, _INTEGRITY, *_BRIDGE) or path.suffix == ".distcp"


def others(folder: Path) -> Iterator[Path]:
    """What is in a checkpoint's folder besides the checkpoint."""
    for path in sorted(folder.iterdir()):
        if path.name not in (*_OWN, _INTEGRITY) and path.suffix != ".distcp":
            yield path


def copy_others(source: Path, target: Path) -> dict[str, str]:
    """Copy the files among them; their SHA-256 by name."""
    digests = {}
    for path in others(source):
        if path.is_file():
            with path.open("rb") as reader, (target / path.name).open("wb") as writer:
                shutil.copyfileobj(reader, writer)
                writer.flush()
                os.fsync(writer.fileno())
            with (target / path.name).open("rb") as reader:
                digests[path.name] = hashlib.file_digest(reader, "sha256").hexdigest()
    return digests


def notes_on_others(folder: Path) -> Iterator[str]:
    """Sentences on what becomes of them."""
    files = [path.name for path in others(folder) if path.is_file()]
    left = [path.name for path in others(folder) if not path.is_file()]
    if files:
        yield f"copied as they are from {folder}: {', '.join(files)}"
    if left:
        yield f"not copied from {folder}: {', '.join(left)}; copy them yourself if they are needed"
