"""Reads pickles of a checkpoint without executing them.

An ordinary unpickler calls the functions and classes that a pickle names. Here a name on the
allow-list is resolved, and any other becomes an inert stand-in, which records its name, arguments
and state, calls nothing, and can be written back unchanged: the arguments saved by Megatron contain
its own enumerations and settings.

The allow-list is that of ``torch.load(weights_only=True)``, which alone does not suffice. With a
stub for each name of ``get_unsafe_globals_in_checkpoint`` it reads Megatron's enumerations, but it
refuses the pickle protocol of ``.metadata`` and instances of dict subclasses, and does not check
CRCs.
"""

from __future__ import annotations

import argparse
import copyreg
import io
import pathlib
import pickle
import types
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import IO, Any, Final

import torch
from torch._weights_only_unpickler import _get_allowed_globals

from megatron_muon.offline.errors import CheckpointError

WRITTEN_AGAIN: Final = ("megatron.", "transformer_engine.", "emerging_optimizers.")
"""Packages whose stand-ins are written back; those of all others are only read."""

WRITTEN_AGAIN_NAMES: Final = frozenset(
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
"""Further such names (random state contains arrays); other names of numpy execute text."""

_PIECE: Final = 1 << 22
"""Bytes read at a time."""


def _encode_latin1(text: str, encoding: str = "latin1") -> bytes:
    """Replace ``_codecs.encode``, which protocol 2 calls for bytes, for this codec only."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"requests the codec {encoding!r}")
    return text.encode(encoding)


ALLOWED: Final[Mapping[str, Any]] = {
    **_get_allowed_globals(),
    **{f"builtins.{kind.__name__}": kind for kind in (frozenset, slice, range, list, dict, tuple)},
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "pathlib.PosixPath": pathlib.PurePosixPath,
    "pathlib.PurePosixPath": pathlib.PurePosixPath,
    "_io.BytesIO": io.BytesIO,
    "_codecs.encode": _encode_latin1,
}
"""Dotted name to its value; none of them executes code or opens a file."""


class InertType(type):
    """Type of a stand-in; calling it (a pickle's REDUCE) executes nothing."""

    module_name: str
    global_name: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create a stand-in of this type."""
        made: Any = Inert.__new__(cls, *args, **kwargs)  # type: ignore[arg-type]
        made.is_called = True
        return made

    @property
    def full_name(cls) -> str:
        """Dotted name in the pickle."""
        return f"{cls.module_name}.{cls.global_name}"


class Inert(metaclass=InertType):
    """An object of a type that is not on the allow-list, as the pickle describes it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Any
    elements: list[Any]
    items: list[tuple[Any, Any]]
    is_called: bool

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create a stand-in without a call (a pickle's NEWOBJ)."""
        made = object.__new__(cls)
        made.args, made.kwargs, made.state = args, kwargs, None
        made.elements, made.items = [], []
        made.is_called = False
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def extend(self, values: Iterable[Any]) -> None:
        """Record elements of an object that the pickle treats as a list."""
        self.elements.extend(values)

    def append(self, value: Any) -> None:
        """Record one element."""
        self.elements.append(value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def __repr__(self) -> str:
        values = ", ".join(repr(value) for value in self.args)
        return f"{type(self).full_name}({values})"

    # Equal by content, so that settings can be compared.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inert) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash(type(self).full_name)

    def _content(self) -> tuple[Any, ...]:
        name = type(self).full_name
        return name, self.args, self.kwargs, self.state, self.elements, self.items


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """An object from a pickle, and the dotted names of its stand-ins."""

    value: Any
    inert: frozenset[str]

    @property
    def foreign(self) -> list[str]:
        """Stand-ins of packages that do not belong in a checkpoint."""
        return sorted(
            name
            for name in self.inert
            if not name.startswith(WRITTEN_AGAIN) and name not in WRITTEN_AGAIN_NAMES
        )


def require_known(loaded: Loaded, what: str) -> None:
    """Refuse to write back functions or classes of unknown packages."""
    if loaded.foreign:
        raise CheckpointError(
            f"{what} refers to {loaded.foreign[0]}, which does not belong in a checkpoint; it was "
            "not executed and is not copied."
        )


class _Unpickler(pickle.Unpickler):
    """Reads a pickle; with an archive, also the storages of ``torch.save`` under ``root``."""

    def __init__(
        self,
        stream: IO[bytes],
        more: Mapping[str, Any],
        archive: zipfile.ZipFile | None = None,
        root: str = "",
    ) -> None:
        super().__init__(stream)
        self._names = {**ALLOWED, **more}
        self._archive, self._root = archive, root
        self._storages: dict[str, torch.TypedStorage] = {}
        self.inert: dict[str, InertType] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module.replace('__builtin__', 'builtins')}.{name}"
        if full in self._names:
            return self._names[full]
        # Names are written back as lines, so a line break in a name would be an instruction.
        if not all(part.isidentifier() for part in full.split(".")):
            raise pickle.UnpicklingError(f"refers to {module!r} {name!r}, which is not a name")
        if full not in self.inert:
            names = {"module_name": module, "global_name": name}
            self.inert[full] = InertType(name, (Inert,), names)
        return self.inert[full]

    def persistent_load(self, pid: Any) -> Any:
        if self._archive is None:
            raise pickle.UnpicklingError("refers to external data")
        kind, storage, key, _, numel = pid
        dtype = torch.uint8 if storage is torch.UntypedStorage else getattr(storage, "dtype", None)
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"refers to an unknown {kind}")
        if key not in self._storages:
            untyped = _read_storage(self._archive, f"{self._root}/data/{key}", numel, dtype)
            self._storages[key] = torch.TypedStorage(  # type: ignore[no-untyped-call]
                wrap_storage=untyped, dtype=dtype, _internal=True
            )
        return self._storages[key]


def _read_storage(
    archive: zipfile.ZipFile, name: str, numel: int, dtype: torch.dtype
) -> torch.UntypedStorage:
    """Read a storage piece by piece; zipfile checks its CRC."""
    size = archive.getinfo(name).file_size
    if size != numel * dtype.itemsize:
        raise pickle.UnpicklingError(f"has {size} bytes for {numel} elements of {dtype}")
    data = torch.empty(size, dtype=torch.uint8)
    view, done = memoryview(data.numpy()), 0
    with archive.open(name) as stream:
        while piece := stream.read(_PIECE):
            view[done : done + len(piece)] = piece
            done += len(piece)
    return data.untyped_storage()


def load_pickle(stream: IO[bytes], *, source: str, more: Mapping[str, Any] | None = None) -> Loaded:
    """Read one plain pickle; ``more`` extends the allow-list."""
    return _load(_Unpickler(stream, more or {}), source)


def load_torch(stream: IO[bytes], *, source: str) -> Loaded:
    """Read a stream of ``torch.save``, tensors included."""
    try:
        with zipfile.ZipFile(stream) as archive:
            names = archive.namelist()
            pickled = next((name for name in names if name.endswith("/data.pkl")), None)
            if pickled is None:
                raise KeyError("no data.pkl")
            root = pickled.removesuffix("/data.pkl")
            order = f"{root}/byteorder"
            if order in names and archive.read(order) != b"little":
                raise CheckpointError(f"{source} was written by a big-endian machine.")
            return _load(_Unpickler(io.BytesIO(archive.read(pickled)), {}, archive, root), source)
    except (zipfile.BadZipFile, KeyError, EOFError, OSError, NotImplementedError) as error:
        raise CheckpointError(f"{source} is damaged or not a torch.save file: {error}.") from error


def _load(unpickler: _Unpickler, source: str) -> Loaded:
    try:
        value = unpickler.load()
    except (CheckpointError, zipfile.BadZipFile):
        raise
    except Exception as error:  # a malformed pickle can fail in any way
        raise CheckpointError(f"{source} cannot be read as a pickle: {error}.") from error
    names = frozenset(kind.full_name for kind in unpickler.inert.values())
    return Loaded(value=value, inert=names)


class _Pickler(pickle._Pickler):
    """Writes stand-ins as the original objects; only the pickler in Python can be extended so."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, pathlib.PurePosixPath):
            return pathlib.PosixPath, (str(obj),)
        if not isinstance(obj, Inert):
            return NotImplemented
        kind = type(obj)
        rest = obj.state, iter(obj.elements), iter(obj.items)
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


def dump_torch(value: Any) -> bytes:
    """Return the ``torch.save`` file of a value of ``load_torch``, including stand-ins."""
    stream = io.BytesIO()
    module = types.SimpleNamespace(Pickler=_Pickler, __name__="megatron_muon")
    torch.save(value, stream, pickle_module=module)
    return stream.getvalue()
