"""What is supported, and the sentences by which everything else is refused at start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatron_muon.config import OPTIMIZERS, MatrixConfig
from megatron_muon.flags import FLAGS, value_problems
from megatron_muon.integration.quantized import (
    is_quantized,
    quantized_kind_problem,
    transformer_engine_problem,
)
from megatron_muon.integration.refusals import config_refusals, flag_refusals
from megatron_muon.integration.stray_flags import stray_setting_problems
from megatron_muon.linalg import coefficient_schedule
from megatron_muon.placement import load_cost_table

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARAM_TYPES = (torch.nn.Parameter, FakeTensor)
"""Parameters that hold their own values; a fake one is that of a dry run."""


class CheckpointMismatchError(ValueError):
    """The checkpoint does not hold what this run's optimizer asks for; on every rank alike."""


class ConfigurationError(ValueError):
    """Everything that is wrong with a configuration, together.

    Attributes:
        problems: One sentence each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(
            f"megatron_muon: {count} configuration problem{'s' if count > 1 else ''}\n{lines}"
        )


def flag_problems(args: Any, *, data_parallel_size: int) -> list[str]:
    """Flags of Megatron that cannot go with the matrix optimizer.

    Args:
        args: Megatron's arguments before ``validate_args``.
        data_parallel_size: Data-parallel times context-parallel size.
    """
    problems = list(flag_refusals(args))
    if args.fp8_param_gather and (problem := transformer_engine_problem()) is not None:
        problems.append(problem)
    if not args.use_distributed_optimizer and data_parallel_size > 1:
        problems.append(
            f"--optimizer {args.optimizer} at data-parallel size {data_parallel_size} needs "
            "Megatron's distributed optimizer: add --use-distributed-optimizer"
        )
    return problems


def setting_problems(settings: MatrixConfig) -> list[str]:
    """Values of the matrix optimizer's own settings that are out of range."""
    problems = value_problems(settings)
    if settings.optimizer not in OPTIMIZERS:
        problems.append(
            f"MatrixConfig.optimizer is '{settings.optimizer}'; supported are "
            f"{', '.join(OPTIMIZERS)}"
        )
    if settings.cost_table is not None:
        try:
            load_cost_table(settings.cost_table)
        except ValueError as error:
            problems.append(str(error))
    return problems


def coefficient_problems(settings: MatrixConfig) -> list[str]:
    """A coefficient set, or a number of steps of it, that does not exist."""
    if settings.optimizer != "dmuon":
        return []
    try:
        coefficient_schedule(
            settings.coefficient_type, settings.num_ns_steps, settings.coefficients
        )
    except ValueError as error:
        return [str(error)]
    return []


def learning_rate_problems(
    settings: MatrixConfig, *, lr: float | None, min_lr: float | None
) -> list[str]:
    """Matrices whose minimum learning rate would be above their maximum.

    Args:
        settings: Settings of the matrix optimizer.
        lr: Adam's maximum, which matrices share unless set apart.
        min_lr: Adam's minimum, likewise.
    """
    highest = settings.lr if settings.lr is not None else lr
    lowest = settings.min_lr if settings.min_lr is not None else min_lr
    if highest is None or lowest is None or not 0.0 <= highest < lowest:
        return []
    return [
        (
            f"the learning rate of matrices has its maximum at {highest:.15g} and its minimum at "
            f"{lowest:.15g}: set --matrix-min-lr (or --min-lr) at or below --matrix-lr (or --lr)"
        )
    ]


MUON_FLAGS = tuple(flag for flag in FLAGS if flag.is_megatron_flag)
"""Flags whose destinations are fields of Megatron's ``OptimizerConfig``, too."""


def settings_of(config: Any, matrix_config: MatrixConfig | None) -> MatrixConfig:
    """The settings to train with: those given, or what Megatron's configuration says of muon.

    Args:
        config: Megatron's ``OptimizerConfig``.
        matrix_config: The user's settings, if any.
    """
    if matrix_config is not None:
        return matrix_config
    return MatrixConfig(**{flag.field: getattr(config, flag.dest) for flag in MUON_FLAGS})


def _muon_problems(config: Any, settings: MatrixConfig) -> Iterator[str]:
    """What Megatron's configuration says of muon, where the settings say something else."""
    defaults = {f.name: f.default for f in fields(config)}
    for flag in MUON_FLAGS:
        value, set_to = getattr(config, flag.dest), getattr(settings, flag.field)
        # The command line has another default of the momentum than the class.
        if value in (defaults[flag.dest], flag.default):
            continue
        if settings.optimizer not in flag.optimizers:
            yield (
                f"OptimizerConfig.{flag.dest} is {value!r}; it has no effect on "
                f"{settings.optimizer}: set it to {defaults[flag.dest]!r}"
            )
        elif value != set_to:
            yield (
                f"OptimizerConfig.{flag.dest} is {value!r} and MatrixConfig.{flag.field} is "
                f"{set_to!r}: set MatrixConfig's, or give no MatrixConfig"
            )


def config_problems(config: Any, settings: MatrixConfig, model_chunks: Sequence[Any]) -> list[str]:
    """What is wrong for ``get_matrix_optimizer``, whoever calls it.

    Args:
        config: Megatron's ``OptimizerConfig``.
        settings: Settings of the matrix optimizer.
        model_chunks: The wrapped model chunks.
    """
    problems = [*coefficient_problems(settings), *setting_problems(settings)]
    problems += stray_setting_problems(settings)
    problems += learning_rate_problems(settings, lr=config.lr, min_lr=config.min_lr)
    problems += _muon_problems(config, settings)
    if config.optimizer != "adam":
        problems.append(
            f"OptimizerConfig.optimizer is '{config.optimizer}': scalar parameters are trained "
            "with Adam, set optimizer='adam'"
        )
    ddp_configs = [chunk.ddp_config for chunk in model_chunks if hasattr(chunk, "ddp_config")]
    if len(ddp_configs) < len(model_chunks):
        problems.append("wrap every model chunk in megatron.core DistributedDataParallel first")
    if not config.use_distributed_optimizer or not all(
        ddp_config.use_distributed_optimizer for ddp_config in ddp_configs
    ):
        problems.append(
            "the matrix optimizer needs Megatron's distributed optimizer: set "
            "use_distributed_optimizer=True in OptimizerConfig and DistributedDataParallelConfig"
        )
    model_configs = [chunk.config for chunk in model_chunks if hasattr(chunk, "config")]
    problems += config_refusals(config, ddp_configs, model_configs, settings.optimizer)
    return problems


def model_problems(model_chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Parameters and modules of a kind that the optimizer cannot train, one sentence per kind.

    Args:
        model_chunks: The model chunks, wrapped or not.
    """
    kinds: dict[str, str] = {}
    for chunk in model_chunks:
        for name, parameter in chunk.named_parameters():
            is_plain = type(parameter) in PARAM_TYPES and parameter.dtype in PARAM_DTYPES
            if is_plain or not parameter.requires_grad:
                continue
            what = f"{type(parameter).__name__} of {parameter.dtype}"
            sentence: str | None = (
                f"parameter {name} is a {what}; supported are plain parameters of fp32, bf16 or "
                "fp16, and Transformer Engine's FP8 tensors: build the model without sharded "
                "weights"
            )
            if is_quantized(parameter):
                sentence = quantized_kind_problem(name, parameter)
            if sentence is not None:
                kinds.setdefault(what, sentence)
        for name, module in chunk.named_modules():
            kind = type(module)
            if any(base.__module__.partition(".")[0] == "modelopt" for base in kind.__mro__):
                sentence = (
                    f"module {name} is a {kind.__name__} of NVIDIA ModelOpt, which computes "
                    "weights from masks or quantizers and is not supported yet: train the model "
                    "before it is converted"
                )
                kinds.setdefault("modelopt", sentence)
    return list(kinds.values())
