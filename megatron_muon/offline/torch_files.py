"""Files of ``torch.save``: read without running anything, written one tensor at a time."""

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

from megatron_muon.offline.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class ToWrite:
    """A tensor of a file that is written; ``make`` is called once, when its turn comes."""

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
    """Write a file for ``torch.load``, with no more than one tensor in memory at a time.

    The file is written without the tensors' elements first (``torch.serialization.skip_data``),
    which are then put in their places. It appears under its name when it is complete.
    ``HuggingFaceStorageWriter`` is not used: it holds all tensors of a file.

    Args:
        path: The file.
        content: Nested dicts and lists of plain values, with ``ToWrite`` where tensors go.
        overwrite: Replace a file that is there.
        progress: Called with the bytes of every tensor that is written.
    """
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} would be a file of torch.save; name it .pt.")
    staging = path.with_name(f".{path.name}.writing.{os.getpid()}")
    try:
        if path.is_dir():
            raise CheckpointError(f"{path} is a folder; name a file.")
        if path.exists() and not overwrite:
            raise CheckpointError(f"{path} exists; type --overwrite to replace it.")
        _write(staging, content, progress)
        staging.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer reports a full disk by the latter
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be written ({reason}), and nothing was left of it."
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
            if values.dtype != wanted.dtype or tuple(values.shape) != wanted.shape:
                raise CheckpointError(
                    f"{'.'.join(map(str, steps))} came out as {values.dtype} "
                    f"{tuple(values.shape)}, and is to be {wanted.dtype} {wanted.shape}."
                )
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
    """The tensors (or ``ToWrite``) of nested dicts, with the keys that lead to each."""
    if isinstance(content, ToWrite | torch.Tensor):
        return [(steps, content)]
    if not isinstance(content, Mapping):
        return []
    return [found for key, value in content.items() for found in tensors_in(value, (*steps, key))]


def read_torch_file(path: Path) -> Any:
    """The dict (or list of dicts) of a file; its tensors are left on disk until they are used."""
    is_zip = zipfile.is_zipfile(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}).") from error
    except pickle.UnpicklingError as error:
        if is_zip:
            raise CheckpointError(
                f"{path} holds more than tensors and plain values, which is not loaded: save the "
                "state dict alone, without the optimizer or model object."
            ) from error
        raise CheckpointError(
            f"{path} is no file of torch.save, or an old one with more than tensors and plain "
            "values."
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is no file of torch.save ({text}).") from error
    parts = found if isinstance(found, list | tuple) else [found]
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise CheckpointError(f"{path} holds a {type(found).__name__} where a dict belongs.")
    return found
