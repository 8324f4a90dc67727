"""Runs unmodified megatron-core on a CPU, over gloo.

``enable()`` replaces Megatron's unconditional calls into CUDA, for the life of the process. Call it
before the first import of ``megatron``. Training on GPUs imports nothing of it.

Replacements:

========================================  ====================  ====================================
replacement                               module                reason
========================================  ====================  ====================================
tensor factories, ``Tensor.new_*``:       ``devices``           many call sites name the current
device ``cuda`` or an index means the                           CUDA device
CPU; ``pin_memory`` is dropped
``Tensor.to``, ``.cuda``,                 ``devices``           same; ``Module.to`` and ``.cuda`` go
``.pin_memory``, ``.record_stream``                             through them
``Tensor.type()`` is ``torch.cuda.*``     ``devices``           the optimizers compare these strings
``torch.load`` onto ``cuda``              ``devices``           extra states are loaded to ``cuda``
``Stream``, ``Event``, ``stream``,        ``streams``           constructed and queried everywhere;
``current_stream``, …                                           a CPU runs in program order
``is_available``, ``device_count``,       ``cuda_queries``      asserted on and logged
``synchronize``, ``memory_*``,
``get_device_properties``, nvtx, …
``torch.accelerator`` queries             ``cuda_queries``      a CUDA build without a driver still
                                                                names an accelerator: optimizers and
                                                                process groups then ask the driver
``CUDA_VISIBLE_DEVICES`` is emptied       ``cuda_queries``      an existing GPU stays unused
``CUDA_DEVICE_MAX_CONNECTIONS`` is 1      ``cuda_queries``      asserted on under tensor parallelism
unless set
CUDA generator is the CPU's default       ``rng``               the RNG tracker saves, forks and
one; ``_lazy_call`` calls at once                               restores CUDA generator states
list ``all_gather`` of uneven sizes       ``collectives``       gloo requires equal sizes
float8 is communicated as bytes           ``collectives``       gloo has no float8
tensor split sizes become lists           ``collectives``       MoE dispatcher passes tensors
coalescing manager issues its             ``collectives``       gloo silently writes garbage when a
operations one by one                                           coalesced gather mixes dtypes
``isend`` sends a copy                    ``collectives``       Megatron frees the buffer
                                                                immediately, gloo reads it later
Adam, SGD as ``apex.optimizers``          ``optimizers``,       Megatron resumes its distributed
                                          ``absent_modules``    optimizer only if ``step`` is in the
                                                                parameter group
Transformer Engine, Apex and ``amp_C``    ``absent_modules``    if installed they would be used and
are hidden                                                      require a GPU
stub of Megatron's triton kernels         ``absent_modules``    imported without a guard; only if
                                                                triton is absent
``torch.compile`` returns its function    ``absent_modules``    Megatron compiles small functions at
                                                                import: a C++ compiler and minutes
norm with ``sequence_parallel`` marks     ``megatron_patches``  ``WrappedTorchNorm`` refuses
                                                                sequence parallel
``compile_helpers`` does nothing          ``megatron_patches``  the wheel ships the helper compiled
                                                                and no Makefile; ``make`` fails
the queue server of a checkpoint save     ``megatron_patches``  a spawned one repeats the script's
is forked                                                       imports without replacements, and
                                                                takes seconds
no warning "CPU RNG state changed"        ``megatron_patches``  here the CPU generator *is* the
                                                                forked one
========================================  ====================  ====================================

There are no streams on a CPU, hence no races between them: a CPU run cannot show an ordering bug.
"""

from __future__ import annotations

import sys

from megatron_muon.cpu.flags import default_flags

__all__ = ["default_flags", "enable", "is_enabled", "leave"]

_enabled = False


def is_enabled() -> bool:
    """Return True after ``enable()`` in this process."""
    return _enabled


def enable() -> None:
    """Install all replacements for the life of the process; idempotent.

    Raises:
        RuntimeError: ``megatron.core`` was imported before: it has already bound the original
            functions by name and chosen its optimizers.
    """
    global _enabled
    if _enabled:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron_muon.cpu.enable() was called after megatron.core had been imported; "
            "call it before the first import of megatron."
        )

    # Imported here so that importing this package has no cost and no effect.
    from megatron_muon.cpu import (
        absent_modules,
        collectives,
        cuda_queries,
        devices,
        rng,
        streams,
    )

    for part in (cuda_queries, streams, rng, devices, collectives, absent_modules):
        part.install()
    # Replacements must not be applied twice, even after a failure from here on.
    _enabled = True

    # Last, as it is the only part that imports megatron.
    from megatron_muon.cpu import megatron_patches

    megatron_patches.install()


def leave() -> None:
    """Destroy all process groups at the end of a run.

    Megatron's scripts leave that to the end of the process. A gloo thread that releases a tensor
    during Python's shutdown aborts the process (observed once, after the last iteration).
    """
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
