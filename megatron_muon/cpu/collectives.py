"""Adds features of NCCL's collectives that Megatron uses and gloo lacks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

_FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)

# Collectives that only move bytes. Some have one of two names, by the version of torch.
_MOVING = (
    "all_gather",
    "all_gather_single",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "recv",
    "scatter",
    "send",
)


class CoalescedWork:
    """Result of the coalescing manager: handles of the operations issued at its end."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def append(self, work: Any) -> None:
        """Add a handle; completed operations have none."""
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        """Wait for every operation."""
        for work in self.works:
            work.wait()


class PaddedGatherWork:
    """Handle of an all-gather of padded pieces; waiting also fills the caller's tensors."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Wait, then copy the pieces out, once."""
        self._work.wait(*args, **kwargs)
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True

    def is_completed(self) -> bool:
        """Return True after the pieces have been copied out."""
        return self._finish is None


def _as_bytes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.view(torch.uint8) if value.dtype in _FLOAT8 else value
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return [_as_bytes(v) for v in value]
    return value


def _send_float8_as_bytes(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        return original(
            *(_as_bytes(a) for a in args), **{k: _as_bytes(v) for k, v in kwargs.items()}
        )

    return collective


def _gather_uneven(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather(
        tensor_list: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({piece.numel() for piece in tensor_list}) <= 1:
            return original(tensor_list, tensor, group, async_op)
        # All ranks pass the same sizes, and so compute the same padded size.
        longest = max(piece.numel() for piece in tensor_list)
        padded = tensor.new_zeros(longest)
        padded[: tensor.numel()] = tensor.detach().reshape(-1)
        received = [torch.empty_like(padded) for _ in tensor_list]

        def copy_out() -> None:
            with torch.no_grad():
                for piece, whole in zip(tensor_list, received, strict=True):
                    piece.copy_(whole[: piece.numel()].view(piece.shape))

        work = original(received, padded, group, async_op)
        if async_op and work is not None:
            return PaddedGatherWork(work, copy_out)
        copy_out()
        return None

    return all_gather


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def _split_by_lists(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return original(
            output,
            input,
            _as_list(output_split_sizes),
            _as_list(input_split_sizes),
            group,
            async_op,
        )

    return all_to_all_single


def _send_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The handle keeps the copy alive until the operation completes.
        return original(tensor.detach().clone(), *args, **kwargs)

    return isend


@contextlib.contextmanager
def _coalescing_manager(
    group: Any = None, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[CoalescedWork]:
    """Record the operations as torch does, but issue them separately at the end."""
    group = group or c10d._get_default_group()
    recorded = c10d._world.pg_coalesce_state.setdefault(group, [])
    if recorded:
        raise ValueError("Coalescing managers of one process group cannot be nested.")
    coalesced = CoalescedWork()
    try:
        yield coalesced
    finally:
        # Popped first, as issuing would record again; after an error nothing is issued.
        recorded = c10d._world.pg_coalesce_state.pop(group)
    for operation in recorded:
        arguments = (
            (operation.tensor,)
            if operation.dst_tensor is None
            else (operation.dst_tensor, operation.tensor)
        )
        options = {} if operation.redop is None else {"op": operation.redop}
        coalesced.append(operation.op(*arguments, **options, group=group, async_op=async_ops))


def _rebind(name: str, replacement: Any) -> None:
    """Replace a function where torch defines and exports it."""
    for owner in (c10d, dist):
        if hasattr(owner, name):
            setattr(owner, name, replacement)


def install() -> None:
    """Install the replacements in ``torch.distributed``."""
    _rebind("_coalescing_manager", _coalescing_manager)
    for name, wrap in (
        ("all_gather", _gather_uneven),
        ("all_to_all_single", _split_by_lists),
        ("isend", _send_copy),
    ):
        _rebind(name, wrap(getattr(c10d, name)))
    for name in _MOVING:
        if hasattr(c10d, name):
            _rebind(name, _send_float8_as_bytes(getattr(c10d, name)))
