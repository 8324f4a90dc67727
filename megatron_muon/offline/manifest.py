"""Files beside the data: the manifest, and foreign files in a checkpoint's folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from megatron_muon.offline.common_state import RUN_CONFIG_FILE
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.index import INDEX_FILE
from megatron_muon.offline.outputs import Output
from megatron_muon.offline.reading import BACKEND_FILE, COMMON_FILE

MANIFEST_FILE = "megatron_muon_manifest.json"

_OWN: Final = (
    *(INDEX_FILE, f"{INDEX_FILE}.tmp", COMMON_FILE, BACKEND_FILE, MANIFEST_FILE),
    "integrity.json",  # Megatron's hashes of the files, invalid once converted
)
_BRIDGE: Final = (RUN_CONFIG_FILE, "train_state.pt")


def manifest(output: Output, digests: Mapping[str, str], source: Path | None) -> dict[str, Any]:
    """Return the manifest of a checkpoint: hashes of all files, the rule of every tensor."""
    return {
        "format": 1,
        "source": None if source is None else str(source),
        "notes": list(output.notes),
        "files": {name: {"sha256": digests[name]} for name in sorted(digests)},
        "tensors": {
            tensor.key: {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "rule": tensor.rule,
            }
            for tensor in sorted(output.tensors, key=lambda tensor: tensor.key)
        },
    }


def listed_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in the manifest, by name; empty without a manifest."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        return {}
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {str(name): str(entry["sha256"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error


def manifest_problems(folder: Path) -> Iterator[str]:
    """Yield a sentence for every file that differs from the manifest."""
    for name, digest in listed_files(folder).items():
        if not (folder / name).is_file():
            yield f"{name} is missing"
        elif digest_of(folder / name) != digest:
            yield f"{name} was changed after it was written (SHA-256 differs)"


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ---- foreign files, such as those of Megatron-Bridge -------------------------------------------


def is_checkpoint_file(path: Path) -> bool:
    """Return True for a file that Megatron, its bridge or this tool writes, finished or not."""
    if path.is_dir():
        return path.name == "modelopt_state"
    return path.name in (*_OWN, *_BRIDGE) or path.suffix == ".distcp"


def foreign_files(folder: Path) -> list[Path]:
    """Return everything in a checkpoint's folder that is not part of the checkpoint."""
    return sorted(
        path for path in folder.iterdir() if path.name not in _OWN and path.suffix != ".distcp"
    )


def copy_foreign_files(source: Path, target: Path) -> dict[str, str]:
    """Copy the foreign files, not folders; return their SHA-256 by name."""
    digests = {}
    for path in foreign_files(source):
        if path.is_file():
            copy = target / path.name
            with path.open("rb") as reader, copy.open("wb") as writer:
                shutil.copyfileobj(reader, writer)
                writer.flush()
                os.fsync(writer.fileno())
            digests[path.name] = digest_of(copy)
    return digests


def notes_on_foreign_files(folder: Path) -> Iterator[str]:
    """Yield sentences on the foreign files that are copied, and those that are not."""
    files = [path.name for path in foreign_files(folder) if path.is_file()]
    left = [path.name for path in foreign_files(folder) if not path.is_file()]
    if files:
        yield f"copied unchanged from {folder}: {', '.join(files)}"
    if left:
        yield f"not copied from {folder}: {', '.join(left)}; copy them yourself if they are needed"
