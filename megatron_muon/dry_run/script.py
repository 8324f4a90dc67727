"""Runs a training script, unmodified, until its optimizer is built."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megatron_muon.cpu import default_flags
from megatron_muon.dry_run import fake_cuda, fake_groups, quantized
from megatron_muon.integration.support import ConfigurationError

# Flags of a CPU run that are not needed here, as neither backend nor workers are started.
_ONLY_ON_CPU = ("--distributed-backend", "--num-workers")

REMOVED = ("--tp-comm-overlap", "--moe-grouped-gemm", "--moe-permute-fusion", "--moe-router-fusion")
"""Flags without a value that select kernels of Transformer Engine and change no matrix."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """The state of the script when its optimizer was built.

    Attributes:
        mode: The mode that creates fake tensors.
        args: Megatron's arguments, validated.
        model_chunks: Model chunks of this rank, wrapped.
        optimizer: Our chain of optimizers.
        summaries: Their parts of the start-up table.
        replaced: Flags that were set for the dry run.
        stand_ins: What stands in for Transformer Engine, one sentence each.
    """

    mode: FakeTensorMode
    args: Any
    model_chunks: Sequence[Any]
    optimizer: Any
    summaries: Sequence[Any]
    replaced: tuple[str, ...]
    stand_ins: tuple[str, ...] = ()


class _BuiltError(Exception):
    """Returns the optimizer from inside the script."""

    def __init__(self, optimizer: Any, model_chunks: Sequence[Any], summaries: Any) -> None:
        self.optimizer, self.model_chunks, self.summaries = optimizer, model_chunks, summaries


def build(
    command: Sequence[str],
    *,
    world_size: int,
    rank: int,
    ranks_per_node: int = 8,
    capability: tuple[int, int] = (9, 0),
) -> Built:
    """Run a script as one rank of a world until its optimizer is built.

    Replaces CUDA, process groups and parts of Megatron for the life of this process.

    Raises:
        ConfigurationError: As a real run would.
        RuntimeError: The script ended without building an optimizer of ours.
    """
    fake_cuda.install(capability=capability)
    fake_groups.join(world_size=world_size, rank=rank, ranks_per_node=ranks_per_node)
    from megatron_muon.dry_run import megatron_patches
    from megatron_muon.integration import builder
    from megatron_muon.integration.hooks import install

    install()
    megatron_patches.install()
    is_asked = quantized.asked_for(command)
    stand_ins = quantized.install(capability) if is_asked else quantized.StandIns()
    import megatron.training.training as training

    requested, original = training.get_megatron_optimizer, builder.get_matrix_optimizer
    summaries: list[Any] = []

    def built(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        if stand_ins.problems:
            raise ConfigurationError(sorted(stand_ins.problems))
        optimizer = original(config, model_chunks, *args, **kwargs)
        raise _BuiltError(optimizer, model_chunks, summaries)

    def only_ours(config: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(config, "matrix_config", None) is None:
            raise ConfigurationError(
                [f"--optimizer {config.optimizer} cannot be planned: type --optimizer dmuon"]
            )
        return requested(config, *args, **kwargs)

    training.get_megatron_optimizer = only_ours

    def report(settings: Any, everyone: Sequence[Any]) -> str:
        summaries[:] = everyone
        return ""

    for name, value in (
        ("get_matrix_optimizer", built),
        ("check_agreement", lambda **_: None),
        ("startup_report", report),
    ):
        setattr(builder, name, value)
    # No planned or counted quantity depends on the value.
    item = torch.Tensor.item
    torch.Tensor.item = lambda self: 0.0 if isinstance(self, FakeTensor) else item(self)  # type: ignore[method-assign]
    script, replaced = command[0], _replaced_flags()
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    sys.argv = [*(word for word in command if word not in REMOVED), *replaced]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode:
            runpy.run_path(script, run_name="__main__")
    except _BuiltError as found:
        from megatron.training import get_args

        return Built(
            mode=mode,
            args=get_args(),
            model_chunks=found.model_chunks,
            optimizer=found.optimizer,
            summaries=found.summaries,
            replaced=tuple(replaced),
            stand_ins=tuple(stand_ins.said),
        )
    finally:
        torch.Tensor.item = item  # type: ignore[method-assign]
    raise RuntimeError(f"{script} ended without building an optimizer of --optimizer dmuon")


def _replaced_flags() -> list[str]:
    """Return flags that select layers which are built without a GPU, to follow the command's."""
    found: list[str] = []
    skipped = False
    for word in default_flags():
        if word.startswith("--"):
            skipped = word in _ONLY_ON_CPU
        if not skipped:
            found.append(word)
    return found
