"""The manifest of a written checkpoint: hashes of all files, the source of all tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.outputs import Output

MANIFEST_FILE = "megatron_muon_manifest.json"


def manifest(output: Output, digests: Mapping[str, str], source: Path | None) -> dict[str, Any]:
    """What the manifest says.

    Args:
        output: What was written.
        digests: SHA-256 of every file.
        source: Folder that it was made from.
    """
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
    """SHA-256 of every file that the manifest lists, by name; none without a manifest.

    Raises:
        CheckpointError: The manifest is damaged.
    """
    path = folder / MANIFEST_FILE
    if not path.exists():
        return {}
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {str(name): str(entry["sha256"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error


def manifest_problems(folder: Path) -> Iterable[str]:
    """A sentence for every file that is not as the manifest says; none without a manifest.

    Raises:
        CheckpointError: The manifest is damaged.
    """
    for name, digest in listed_files(folder).items():
        if not (folder / name).is_file():
            yield f"{name} is missing"
            continue
        with (folder / name).open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                yield f"{name} is not the file that was written (SHA-256 differs)"
