"""Replaces the few functions of Megatron itself that cannot run on a CPU."""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
from typing import Any


def mark_norms_under_sequence_parallel() -> None:
    """Use torch's norms instead of Transformer Engine's under sequence parallelism."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    @functools.wraps(original)
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        # The norm is computed row by row on any part of the sequence. torch's norm only lacks the
        # mark by which the gradients of its parameters are summed over the tensor ranks.
        whole_sequence = copy.copy(config)
        whole_sequence.sequence_parallel = False
        norm = original(cls, whole_sequence, *args, **kwargs)
        for param in norm.parameters():
            param.sequence_parallel = True
        return norm

    WrappedTorchNorm.__new__ = new


def _use_the_compiled_dataset_helpers() -> None:
    from megatron.core.datasets import utils

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        # A checkout, not the wheel: Megatron's own function compiles the extension.
        return

    def compile_helpers() -> None:
        """Do nothing, as the wheel contains the compiled extension."""

    utils.compile_helpers = compile_helpers


def _fork_the_checkpoint_queue() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    original = filesystem_async.get_write_results_queue

    @functools.wraps(original)
    def get_write_results_queue(mp_mode: str = "fork") -> Any:
        return original(mp_mode="fork")

    filesystem_async.get_write_results_queue = get_write_results_queue


def _fork_the_checkpoint_worker() -> None:
    """Fork the process, as a spawned one would use CUDA without the replacements."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    original = PersistentAsyncCaller._get_process.__func__

    @functools.wraps(original)
    def get_process(cls: type, rank: int, mp_mode: str = "fork", *args: Any, **kwargs: Any) -> Any:
        return original(cls, rank, "fork", *args, **kwargs)

    PersistentAsyncCaller._get_process = classmethod(get_process)


def _copy_saved_tensors() -> None:
    """Copy tensors as from device to host, as training continues while the file is written."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    original = FileSystemWriterAsync.prepare_write_data

    @functools.wraps(original)
    def prepare_write_data(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.write_buckets = [
            (path, name, (objects, [(item, tensor.clone()) for item, tensor in tensors]))
            for path, name, (objects, tensors) in self.write_buckets
        ]

    FileSystemWriterAsync.prepare_write_data = prepare_write_data


def _silence_rng_warning() -> None:
    from megatron.core.tensor_parallel import random

    def keep(record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()

    logging.getLogger(random.__name__).addFilter(keep)


def install() -> None:
    """Import Megatron and install the replacements."""
    mark_norms_under_sequence_parallel()
    _use_the_compiled_dataset_helpers()
    _fork_the_checkpoint_queue()
    _fork_the_checkpoint_worker()
    _copy_saved_tensors()
    _silence_rng_warning()
