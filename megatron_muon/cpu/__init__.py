"""Unmodified megatron-core on a CPU, over gloo.

``enable()`` replaces, in the running process and for its whole life, the calls into CUDA that
Megatron makes without asking.  Call it before the first import of ``megatron``.  Nothing else of
this package imports it: a GPU run never sees a stand-in.

What is replaced, in which module of this folder, and why:

========================================  ====================  ====================================
stand-in                                  where                 reason
========================================  ====================  ====================================
tensor factories, ``Tensor.new_*``:       ``devices``           many call sites name the current
device ``cuda`` or an index means the                           CUDA device
CPU; ``pin_memory`` is dropped
``Tensor.to``, ``.cuda``,                 ``devices``           same; ``Module.to`` and ``.cuda`` go
``.pin_memory``, ``.record_stream``                             through them
``Tensor.type()`` says ``torch.cuda.*``   ``devices``           the optimizers compare these strings
``torch.load`` onto ``cuda``              ``devices``           extra states are loaded to ``cuda``
``Stream``, ``Event``, ``stream``,        ``streams``           constructed and queried everywhere;
``current_stream``, …                                           a CPU runs in program order
``is_available``, ``device_count``,       ``cuda_queries``      asserted on and logged
``synchronize``, ``memory_*``,
``get_device_properties``, nvtx, …
``torch.accelerator`` queries             ``cuda_queries``      a CUDA build without a driver still
                                                                names an accelerator: optimizers and
                                                                process groups then ask the driver
``CUDA_VISIBLE_DEVICES`` is emptied       ``cuda_queries``      a GPU that is there stays unused
``CUDA_DEVICE_MAX_CONNECTIONS`` is 1      ``cuda_queries``      asserted on under tensor parallelism
unless set
CUDA generator is the CPU's default       ``rng``               the RNG tracker saves, forks and
one; ``_lazy_call`` calls at once                               restores CUDA generator states
list ``all_gather`` of uneven sizes       ``collectives``       gloo wants equal sizes
float8 travels as bytes                   ``collectives``       gloo has no float8
tensor split sizes become lists           ``collectives``       MoE dispatcher passes tensors
coalescing manager issues its             ``collectives``       gloo silently writes garbage when a
operations one by one                                           coalesced gather mixes dtypes
``isend`` sends a copy                    ``collectives``       Megatron frees the buffer at once,
                                                                gloo reads it later
Adam, SGD as ``apex.optimizers``          ``optimizers``,       Megatron resumes its distributed
                                          ``absent_modules``    optimizer only when ``step`` is in
                                                                the parameter group
Transformer Engine, Apex and ``amp_C``    ``absent_modules``    where installed they would be
are hidden                                                      preferred and need a GPU
stub of Megatron's triton kernels         ``absent_modules``    imported without a guard; only where
                                                                triton is absent
``torch.compile`` returns its function    ``absent_modules``    Megatron compiles small functions at
                                                                import: a C++ compiler and minutes
norm with ``sequence_parallel`` marks     ``megatron_patches``  ``WrappedTorchNorm`` refuses
                                                                sequence parallel
``compile_helpers`` does nothing          ``megatron_patches``  the wheel ships the helper compiled
                                                                and no Makefile; ``make`` fails
the queue server of a checkpoint save     ``megatron_patches``  a spawned one runs the script's
is forked                                                       imports again, without stand-ins,
                                                                and takes seconds
no warning "CPU RNG state changed"        ``megatron_patches``  here the CPU generator *is* the one
                                                                that is forked
========================================  ====================  ====================================

There are no streams on a CPU, hence no races between them: a CPU run cannot show an ordering bug.
"""

from __future__ import annotations

import sys

from megatron_muon.cpu.flags import default_flags

__all__ = ["default_flags", "enable", "is_enabled", "leave"]

_enabled = False


def is_enabled() -> bool:
    """Whether ``enable()`` has been called in this process."""
    return _enabled


def enable() -> None:
    """Put every stand-in in place, for the life of the process.

    Calling it again does nothing.

    Raises:
        RuntimeError: ``megatron.core`` was imported before: it has already bound the real functions
            by name and chosen its optimizers, so replacing them now would have half an effect.
    """
    global _enabled
    if _enabled:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron_muon.cpu.enable() was called after megatron.core had been imported; "
            "call it before the first import of megatron."
        )

    # Imported here so that importing this package alone costs nothing and replaces nothing.
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
    # From here on a failure must not be answered by a second round of replacing.
    _enabled = True

    # The only part that imports megatron, and so the last.
    from megatron_muon.cpu import megatron_patches

    megatron_patches.install()


def leave() -> None:
    """Let go of all process groups, at the end of a run.

    Megatron's scripts leave that to the end of the process. A gloo thread that still lets go of a
    tensor while Python shuts down aborts the process (seen once, after the last iteration).
    """
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
