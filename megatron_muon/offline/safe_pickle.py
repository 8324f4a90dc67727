"""Pickles of a checkpoint, read without running anything that is in them.

A pickle names functions and classes, and an ordinary unpickler calls them. Here only the names on
an allow-list become what they say. Every other name becomes an inert stand-in: it remembers the
name, the arguments and the state, calls nothing, and can be written again as it was, because the
arguments that Megatron keeps in a checkpoint hold enumerations and settings of its own.
"""

from __future__ import annotations

import argparse
import collections
import copyreg
import io
import pathlib
import pickle
import types
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch._utils import _rebuild_parameter, _rebuild_tensor_v2
from torch.serialization import _get_layout

from megatron_muon.offline.errors import CheckpointError

WRITTEN_AGAIN = ("megatron.", "transformer_engine.", "emerging_optimizers.")
"""Packages whose names may stand, inert, in what is written; all others are only read."""

WRITTEN_AGAIN_NAMES = frozenset(
    {
        "numpy.dtype",
        "numpy.ndarray",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy._core.numeric._frombuffer",
        "numpy.core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy.core.numeric._frombuffer",
        "signal.Signals",
    }
)
"""Further such names: numpy has others that run text (random state holds arrays)."""

PIECE = 1 << 22
"""Bytes that are read at once."""


class InertType(type):
    """Type of a stand-in; calling it (a pickle's REDUCE) runs nothing."""

    module_name: str
    global_name: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """A stand-in of this type."""
        made: Any = Inert.__new__(cls, *args, **kwargs)  # type: ignore[arg-type]
        made.is_called = True
        return made

    @property
    def full_name(cls) -> str:
        """Dotted name that the pickle gave."""
        return f"{cls.module_name}.{cls.global_name}"


class Inert(metaclass=InertType):
    """An object of a type that is not on the allow-list: what a pickle says of it, nothing more."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Without a call (a pickle's NEWOBJ)."""
        made = object.__new__(cls)
        made.is_called = False
        made.args, made.kwargs = args, kwargs
        made.state = None
        made.elements, made.items = [], []
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, value: Any) -> None:
        """An element of what the pickle treats as a list."""
        self.elements.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        """Several of them."""
        self.elements.extend(values)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def __repr__(self) -> str:
        values = ", ".join(repr(value) for value in self.args)
        return f"{type(self).full_name}({values})"

    # Equal to what says the same, so that settings can be compared.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inert) and _content(self) == _content(other)

    def __hash__(self) -> int:
        return hash(type(self).full_name)

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Any
    elements: list[Any]
    items: list[tuple[Any, Any]]
    is_called: bool


def _content(inert: Inert) -> tuple[Any, ...]:
    name = type(inert).full_name
    return name, inert.args, inert.kwargs, inert.state, inert.elements, inert.items


@dataclass(frozen=True)
class _StorageKind:
    """Element type that a storage's class stands for; None when bytes."""

    dtype: torch.dtype | None


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


def _rebuild_typed(
    storage: torch.TypedStorage,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
    dtype: torch.dtype,
    metadata: Any = None,
) -> torch.Tensor:
    """``torch._utils._rebuild_tensor_v3``: a tensor of a type that has no storage class."""
    whole = torch.empty(0, dtype=dtype)
    return whole.set_(storage._untyped_storage, offset, size, stride)


def _encode_latin1(text: str, encoding: str = "latin1") -> bytes:
    """``_codecs.encode`` as a pickle of protocol 2 calls it for bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"asks for the codec {encoding!r}")
    return text.encode(encoding)


def _allowed() -> dict[tuple[str, str], Any]:
    plain = {
        ("argparse", "Namespace"): argparse.Namespace,
        ("types", "SimpleNamespace"): types.SimpleNamespace,
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("pathlib", "PosixPath"): pathlib.PurePosixPath,
        ("pathlib", "PurePosixPath"): pathlib.PurePosixPath,
        ("_io", "BytesIO"): io.BytesIO,
        ("_codecs", "encode"): _encode_latin1,
        ("torch", "Size"): torch.Size,
        ("torch", "device"): torch.device,
        ("torch.serialization", "_get_layout"): _get_layout,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
        ("torch._utils", "_rebuild_tensor_v3"): _rebuild_typed,
        ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
        ("torch.storage", "UntypedStorage"): _StorageKind(None),
    }
    for kind in (set, frozenset, slice, complex, bytearray, range, list, dict, tuple):
        plain["builtins", kind.__name__] = kind
    for name, dtype in _STORAGES.items():
        plain["torch", name] = _StorageKind(dtype)
    for name in dir(torch):
        if isinstance(getattr(torch, name), torch.dtype):
            plain["torch", name] = getattr(torch, name)
    return plain


ALLOWED: Mapping[tuple[str, str], Any] = types.MappingProxyType(_allowed())
"""(module, name) to what it becomes; none of them runs code or opens anything."""


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        stream: IO[bytes],
        more: Mapping[tuple[str, str], Any],
        archive: zipfile.ZipFile | None = None,
        root: str = "",
    ) -> None:
        super().__init__(stream)
        self._more = more
        self._archive, self._root = archive, root
        self._storages: dict[str, torch.TypedStorage] = {}
        self.inert: dict[tuple[str, str], InertType] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = (module.replace("__builtin__", "builtins"), name)
        if key in self._more:
            return self._more[key]
        if key in ALLOWED:
            return ALLOWED[key]
        # Written again as a line each: a line more in a name would be an instruction.
        if not all(part.isidentifier() for part in f"{module}.{name}".split(".")):
            raise pickle.UnpicklingError(f"refers to {module!r} {name!r}, which is no name")
        if key not in self.inert:
            names = {"module_name": module, "global_name": name}
            self.inert[key] = InertType(name, (Inert,), names)
        return self.inert[key]

    def persistent_load(self, pid: Any) -> Any:
        if self._archive is None:
            raise pickle.UnpicklingError("refers to data outside of it")
        kind, storage, key, _, numel = pid
        if kind != "storage" or not isinstance(storage, _StorageKind):
            raise pickle.UnpicklingError(f"refers to an unknown {kind}")
        if key not in self._storages:
            dtype = storage.dtype or torch.uint8
            untyped = _read_storage(self._archive, f"{self._root}/data/{key}", numel, dtype)
            self._storages[key] = torch.TypedStorage(  # type: ignore[no-untyped-call]
                wrap_storage=untyped, dtype=dtype, _internal=True
            )
        return self._storages[key]


def _read_storage(
    archive: zipfile.ZipFile, name: str, numel: int, dtype: torch.dtype
) -> torch.UntypedStorage:
    """The bytes of a storage, read piece by piece into their place; zipfile checks their CRC."""
    size = archive.getinfo(name).file_size
    if size != numel * dtype.itemsize:
        raise pickle.UnpicklingError(f"has {size} bytes where {numel} elements of {dtype} belong")
    data = torch.empty(size, dtype=torch.uint8)
    view, done = memoryview(data.numpy()), 0
    with archive.open(name) as stream:
        while piece := stream.read(PIECE):
            view[done : done + len(piece)] = piece
            done += len(piece)
    return data.untyped_storage()


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a pickle held.

    Attributes:
        value: The object.
        inert: Dotted names of everything in it that became a stand-in.
    """

    value: Any
    inert: frozenset[str]

    @property
    def foreign(self) -> list[str]:
        """Stand-ins of packages that have no business in a checkpoint."""
        return sorted(
            name
            for name in self.inert
            if not name.startswith(WRITTEN_AGAIN) and name not in WRITTEN_AGAIN_NAMES
        )


def load_pickle(
    stream: IO[bytes], *, source: str, more: Mapping[tuple[str, str], Any] | None = None
) -> Loaded:
    """Read one plain pickle.

    Args:
        stream: Where it starts.
        source: What it is, for the message.
        more: Further names that become real things.

    Raises:
        CheckpointError: It is no whole pickle.
    """
    return _load(_Unpickler(stream, more or {}), source)


def load_torch(stream: IO[bytes], *, source: str) -> Loaded:
    """Read what ``torch.save`` wrote, tensors included.

    Args:
        stream: A seekable stream that holds this alone.
        source: What it is, for the message.

    Raises:
        CheckpointError: It is no whole file of ``torch.save``'s zip format.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            root = pickle_root(archive)
            order = f"{root}/byteorder"
            if order in archive.namelist() and archive.read(order) != b"little":
                raise CheckpointError(f"{source} was written by a big-endian machine.")
            pickled = io.BytesIO(archive.read(f"{root}/data.pkl"))
            return _load(_Unpickler(pickled, {}, archive, root), source)
    except (zipfile.BadZipFile, KeyError, EOFError, OSError, NotImplementedError) as error:
        raise CheckpointError(f"{source} is damaged or not of torch.save: {error}.") from error


def pickle_root(archive: zipfile.ZipFile) -> str:
    """Folder in the archive that ``torch.save`` put everything into.

    Raises:
        KeyError: There is none.
    """
    for name in archive.namelist():
        root, _, last = name.rpartition("/")
        if last == "data.pkl":
            return root
    raise KeyError("no data.pkl")


def _load(unpickler: _Unpickler, source: str) -> Loaded:
    try:
        value = unpickler.load()
    except (CheckpointError, zipfile.BadZipFile):
        raise
    except Exception as error:  # a foreign pickle can fail in any way
        raise CheckpointError(f"{source} cannot be read as a pickle: {error}.") from error
    names = frozenset(kind.full_name for kind in unpickler.inert.values())
    return Loaded(value=value, inert=names)


class _Pickler(pickle._Pickler):
    """Writes stand-ins as what they stand for; in Python, for only that can be taught it."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, pathlib.PurePosixPath):
            return pathlib.PosixPath, (str(obj),)
        if not isinstance(obj, Inert):
            return NotImplemented
        kind = type(obj)
        rest = obj.state, iter(obj.elements) if obj.elements else None, _items(obj)
        if obj.is_called:
            return (kind, obj.args, *rest)
        if obj.kwargs:
            return (copyreg.__newobj_ex__, (kind, obj.args, obj.kwargs), *rest)  # type: ignore[attr-defined]
        return (copyreg.__newobj__, (kind, *obj.args), *rest)  # type: ignore[attr-defined]

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if not isinstance(obj, InertType):
            super().save_global(obj, name)  # type: ignore[misc]
            return
        names = f"{obj.module_name}\n{obj.global_name}\n".encode()
        self.write(pickle.GLOBAL + names)  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


def _items(obj: Inert) -> Iterator[tuple[Any, Any]] | None:
    return iter(obj.items) if obj.items else None


def dump_torch(value: Any) -> bytes:
    """What ``torch.save`` writes of a value that ``load_torch`` gave, stand-ins included."""
    stream = io.BytesIO()
    module = types.SimpleNamespace(Pickler=_Pickler, __name__="megatron_muon")
    torch.save(value, stream, pickle_module=module)
    return stream.getvalue()
