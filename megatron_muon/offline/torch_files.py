"""``torch.save`` files: read without executing code, written one tensor at a time."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_muon.offline.errors import CheckpointError, first_line
from megatron_muon.offline.outputs import require_form


@dataclass(frozen=True, kw_only=True)
class ToWrite:
    """A tensor to be written; ``make`` is called once, when it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


def write_torch_file(
    path: Path,
    content: Mapping[str, Any],
    *,
    overwrite: bool,
    progress: Callable[[int], None] = lambda count: None,
) -> None:
    """Write nested dicts with ``ToWrite`` for tensors, with at most one tensor in memory.

    The file is first written without elements (``torch.serialization.skip_data``), which are then
    filled in. It appears under its name when complete. ``HuggingFaceStorageWriter`` is not used, as
    it holds all tensors of a file.
    """
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} would be a torch.save file; name it .pt.")
    staging = path.with_name(f".{path.name}.writing.{os.getpid()}")
    try:
        if path.is_dir():
            raise CheckpointError(f"{path} is a folder; name a file.")
        if path.exists() and not overwrite:
            raise CheckpointError(f"{path} exists; type --overwrite to replace it.")
        _write(staging, content, progress)
        staging.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as the latter
        raise CheckpointError(
            f"{path} cannot be written ({first_line(error)}), and no partial output was left."
        ) from error
    finally:
        with suppress(OSError):
            staging.unlink(missing_ok=True)


def _write(path: Path, content: Mapping[str, Any], progress: Callable[[int], None]) -> None:
    with FakeTensorMode() as mode:
        outline = _outline(content)
        with torch.serialization.skip_data(materialize_fake_tensors=True), mode:
            torch.save(outline, path)
        places = torch.load(path, weights_only=True)
    with path.open("r+b", buffering=0) as stream:
        pairs = zip(tensors_in(content), tensors_in(places), strict=True)
        for (steps, wanted), (_, place) in pairs:
            values = wanted.make()
            require_form(values, wanted.shape, wanted.dtype, ".".join(map(str, steps)))
            if values.numel():
                stream.seek(place.untyped_storage()._checkpoint_offset)
                data = memoryview(values.contiguous().flatten().view(torch.uint8).numpy())
                while data:
                    data = data[stream.write(data) :]
            progress(wanted.nbytes)
        os.fsync(stream.fileno())


def _outline(content: Any) -> Any:
    if isinstance(content, ToWrite):
        return torch.empty(content.shape, dtype=content.dtype)
    if isinstance(content, Mapping):
        return {key: _outline(value) for key, value in content.items()}
    return content


def tensors_in(content: Any, steps: tuple[str | int, ...] = ()) -> list[tuple[Any, Any]]:
    """Return the tensors (or ``ToWrite``) of nested dicts, with the keys of each."""
    if isinstance(content, ToWrite | torch.Tensor):
        return [(steps, content)]
    if not isinstance(content, Mapping):
        return []
    return [found for key, value in content.items() for found in tensors_in(value, (*steps, key))]


def read_torch_file(path: Path) -> Any:
    """Return the dict (or list of dicts) of a file; its tensors stay on disk until used."""
    is_zip = zipfile.is_zipfile(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({first_line(error)}).") from error
    except pickle.UnpicklingError as error:
        if is_zip:
            raise CheckpointError(
                f"{path} holds objects other than tensors and plain values, which are not loaded: "
                "save the state dict only, without the optimizer or model object."
            ) from error
        raise CheckpointError(
            f"{path} is not a torch.save file, or an old one with objects other than tensors and "
            "plain values."
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is not a torch.save file ({first_line(error)}).") from error
    parts = found if isinstance(found, list | tuple) else [found]
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise CheckpointError(f"{path} holds a {type(found).__name__}; a dict is required.")
    return found
