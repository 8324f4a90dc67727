"""Counts kernel launches, FLOPs, host reads and allocated bytes inside a ``with`` block."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Matrix products, and the position of the first factor."""

_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_"}
)
_MAX_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36}
_MAX_BLOCKS = 320
_BLOCK = 1 << 16
"""Limits of one launch by number of tensor lists: ATen/native/cuda/MultiTensorApply.cuh."""


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the work of a GPU, by operation.

    Attributes:
        kernels: Kernel launches by operation.
        slow: Tensors of list operations processed one by one, as layouts or dtypes differ.
        flops: Floating-point operations of matrix products.
        alive: Bytes of live tensors created inside.
        peak: Maximum of ``alive``.

    Args:
        known: Tensors whose memory is not counted.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[str] = Counter()
        self.slow: Counter[str] = Counter()
        self.flops = 0
        self.alive = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        for tensor in known:
            self._watch(tensor.untyped_storage())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count it."""
        found = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        for value in found if isinstance(found, list | tuple) else (found,):
            if isinstance(value, torch.Tensor):
                self._see(value)
        if name in _PRODUCTS:
            left, right = args[_PRODUCTS[name] :][:2]
            self.flops += 2 * left.numel() * right.shape[-1]
        is_kernel = func.namespace == "aten" and name not in _ALLOCATIONS and not _is_view(func)
        if is_kernel and any(_is_tensor(a) or isinstance(a, list | tuple) for a in args):
            self.kernels[name] += self._launches(name, args)
        return found

    def _see(self, value: torch.Tensor) -> None:
        storage = value.untyped_storage()
        if storage._cdata not in self._sizes:
            self._watch(storage)
            self.alive += storage.nbytes()
            self.peak = max(self.peak, self.alive)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self._release, storage._cdata)

    def _release(self, key: int) -> None:
        self.alive -= self._sizes.pop(key, 0)

    def _launches(self, name: str, args: Sequence[Any]) -> int:
        if not name.startswith("_foreach"):
            return 1
        lists = [a for a in args if isinstance(a, list | tuple) and a and _is_tensor(a[0])]
        if _is_fast(name, lists):
            return _multi_tensor_launches(lists)
        self.slow[name] += len(lists[0])
        return len(lists[0])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not func._schema.is_mutable


def _is_fast(name: str, lists: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Return True if one kernel processes whole lists: ATen/native/ForeachUtils.h."""
    each = [{t.dtype for t in one} for one in lists]
    same_dtypes = len(set.union(*each)) == 1 or ("copy" in name and all(len(d) == 1 for d in each))
    return (
        same_dtypes
        and all(
            torch._prims_common.is_non_overlapping_and_dense_or_false(t)
            for one in lists
            for t in one
        )
        and all(
            a.shape == b.shape
            and all(
                size == 1 or x == y
                for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True)
            )
            for one in lists[1:]
            for a, b in zip(lists[0], one, strict=True)
        )
    )


def _multi_tensor_launches(lists: Sequence[Sequence[torch.Tensor]]) -> int:
    launches = blocks = tensors = 0
    for tensor in lists[0]:
        tensors += 1
        blocks += -(-tensor.numel() // _BLOCK)
        launches += blocks // _MAX_BLOCKS
        if blocks >= _MAX_BLOCKS:
            blocks %= _MAX_BLOCKS
            tensors = 1 if blocks else 0
        if tensors >= _MAX_TENSORS.get(len(lists), 36):
            launches, tensors, blocks = launches + 1, 0, 0
    return launches + (blocks > 0)


def count_host_reads(run: Callable[[], object]) -> int:
    """Count reads of a fake tensor's value by the host.

    Flags read as False and ``nonzero`` as empty, so that branches depending on them are skipped.
    """
    reads = 0
    originals = {name: getattr(torch.Tensor, name) for name in ("nonzero", "__bool__")}

    def nonzero(self: torch.Tensor, **_: Any) -> torch.Tensor:
        nonlocal reads
        reads += 1
        return torch.empty((0, self.dim()), dtype=torch.int64, device=self.device)

    def is_set(self: torch.Tensor) -> bool:
        nonlocal reads
        reads += 1
        return False

    torch.Tensor.nonzero, torch.Tensor.__bool__ = nonzero, is_set  # type: ignore[assignment,method-assign]
    try:
        run()
    except DataDependentOutputException as error:
        raise RuntimeError(f"the step reads the value of a tensor ({error})") from error
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)
    return reads
