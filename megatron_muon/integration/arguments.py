"""Our flags on Megatron's command line, and their translation before Megatron validates."""

from __future__ import annotations

import argparse
import difflib
from typing import Any, NoReturn

from megatron_muon.config import OPTIMIZERS, MatrixConfig
from megatron_muon.flags import FLAGS, add_flag, read_settings
from megatron_muon.integration.stray_flags import stray_flag_problems
from megatron_muon.integration.support import (
    ConfigurationError,
    coefficient_problems,
    flag_problems,
    learning_rate_problems,
    setting_problems,
)


def add_matrix_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Extend Megatron's parser: ``--optimizer dmuon``, one more scale mode, our flags.

    Args:
        parser: The parser after all of Megatron's own arguments were added.
    """
    _mend_help(parser)
    actions = {option: action for action in parser._actions for option in action.option_strings}
    _extend_choices(actions["--optimizer"], OPTIMIZERS)
    ours = parser.add_argument_group(title="matrix optimizer (megatron_muon)")
    orth_dions = parser.add_argument_group(title="orth_dion (megatron_muon)")
    for flag in FLAGS:
        if not flag.is_megatron_flag:
            add_flag(orth_dions if flag.optimizers == ("orth_dion",) else ours, flag)
        elif isinstance(flag.values, tuple):
            _extend_choices(actions[flag.name], flag.values)
    _suggest_flags(parser)
    return parser


def _suggest_flags(parser: argparse.ArgumentParser) -> None:
    """Name the nearest flag of the parser beside one that it does not have."""
    fail = parser.error

    def fail_with_suggestion(message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            flags = [option for action in parser._actions for option in action.option_strings]
            for word in unknown.split():
                typed = word.partition("=")[0]
                near = difflib.get_close_matches(typed, flags, n=1)
                if typed.startswith("--") and near:
                    message += f"\n{typed} is no flag: did you mean {near[0]}?"
        fail(message)

    parser.error = fail_with_suggestion  # type: ignore[method-assign]


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escape what argparse cannot format: a lone % in Megatron's texts makes ``--help`` crash."""
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            try:
                parser._get_formatter()._expand_help(action)
            except (ValueError, TypeError, KeyError):
                action.help = action.help.replace("%", "%%")


def _extend_choices(action: argparse.Action, names: tuple[str, ...]) -> None:
    choices = list(action.choices or ())
    action.choices = choices + [name for name in names if name not in choices]


def matrix_config_from_args(args: Any) -> MatrixConfig | None:
    """Settings that the flags give, None when ``--optimizer`` is not ours.

    Args:
        args: Megatron's arguments after ``translate_arguments``. They hold plain values only,
            because Megatron stores them in checkpoints that are read with an allow-list.
    """
    optimizer = getattr(args, "matrix_optimizer", None)
    if optimizer is None:
        return None
    settings, problems = read_settings(optimizer, vars(args))
    if problems:
        raise ConfigurationError(problems)
    return settings


def translate_arguments(args: Any) -> None:
    """Check our flags, then show Megatron adam with the distributed optimizer.

    Megatron's ``validate_args`` sends any optimizer that it does not know to its layer-wise path
    and switches the distributed optimizer off; so it must see ``adam`` and apply all its rules
    for that. Our own choice travels beside it in ``args.matrix_optimizer``.

    Raises:
        ConfigurationError: With every problem found; the same on every rank.
    """
    args.matrix_optimizer = None
    problems = stray_flag_problems(args)
    if args.optimizer not in OPTIMIZERS:
        if problems:
            raise ConfigurationError(problems)
        return
    problems += flag_problems(args, data_parallel_size=_data_parallel_size(args))
    args.matrix_optimizer = args.optimizer
    settings, unreadable = read_settings(args.optimizer, vars(args))
    problems += unreadable
    # Coefficients that could not be read are no reason to ask for them again.
    if settings.coefficients is not None or args.dmuon_coefficients is None:
        problems += coefficient_problems(settings)
    problems += setting_problems(settings)
    problems += learning_rate_problems(settings, lr=args.lr, min_lr=args.min_lr)
    if problems:
        raise ConfigurationError(problems)
    if not args.use_distributed_optimizer:
        args.use_distributed_optimizer = True
        if args.rank == 0:
            print(
                "megatron_muon: data-parallel size is 1, --use-distributed-optimizer switched on "
                f"({args.matrix_optimizer} is built on it; it shards nothing here)",
                flush=True,
            )
    if not getattr(args, "dist_ckpt_optim_fully_reshardable", True):
        # Only this metadata lets Megatron load at another TP or PP; our form is the same without.
        args.dist_ckpt_optim_fully_reshardable = True
        if args.rank == 0:
            print(
                "megatron_muon: --dist-ckpt-optim-fully-reshardable switched on "
                f"(checkpoints of {args.matrix_optimizer} load at every layout, nothing is "
                "gathered for it)",
                flush=True,
            )
    _recommend_checkpoints_masters(args)
    args.optimizer = "adam"


def _recommend_checkpoints_masters(args: Any) -> None:
    """Where quantized weights are loaded without state, masters would be made of codes."""
    without_state = [
        flag
        for flag in ("no_load_optim", "finetune", "pretrained_checkpoint")
        if getattr(args, flag, None)
    ]
    # What is dequantized while it is read is put into quantized weights at once.
    streams = getattr(args, "stream_ckpt_dequant", False) and args.fp8_recipe != "tensorwise"
    reads_exactly = getattr(args, "load_main_params_from_ckpt", False) and not streams
    if args.fp8_param_gather and not reads_exactly and without_state and args.rank == 0:
        print(
            "megatron_muon: warning: with --fp8-param-gather and "
            f"--{without_state[0].replace('_', '-')} the fp32 masters are made from weights that "
            "are quantized already: add --load-main-params-from-ckpt --no-stream-ckpt-dequant to "
            "make them from what the checkpoint holds",
            flush=True,
        )


def _data_parallel_size(args: Any) -> int:
    """Data- times context-parallel size, before ``validate_args`` works it out."""
    model_parallel = (args.tensor_model_parallel_size or 1) * (
        args.pipeline_model_parallel_size or 1
    )
    return max(1, int(args.world_size) // model_parallel)
