"""Our flags on Megatron's command line, and their translation before Megatron validates."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_muon.config import MatrixConfig
from megatron_muon.integration.support import (
    ConfigurationError,
    coefficient_problems,
    flag_problems,
    learning_rate_problems,
    setting_problems,
)
from megatron_muon.linalg import COMPUTE_POLICIES, SCALE_MODES, parse_coefficients
from megatron_muon.matrices import Rule, load_rules, parse_rule

OPTIMIZERS = ("dmuon",)
"""Values that we add to ``--optimizer``."""


def add_matrix_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Extend Megatron's parser: ``--optimizer dmuon``, one more scale mode, our flags.

    Args:
        parser: The parser after all of Megatron's own arguments were added.
    """
    actions = {option: action for action in parser._actions for option in action.option_strings}
    _extend_choices(actions["--optimizer"], OPTIMIZERS)
    _extend_choices(actions["--muon-scale-mode"], tuple(SCALE_MODES))
    group = parser.add_argument_group(title="matrix optimizer (megatron_muon)")
    group.add_argument(
        "--matrix-lr",
        type=float,
        help="Maximum learning rate of matrices. Default: --lr.",
    )
    group.add_argument(
        "--matrix-min-lr",
        type=float,
        help="Minimum learning rate of matrices. Default: --min-lr.",
    )
    group.add_argument(
        "--matrix-weight-decay",
        type=float,
        help="Weight decay of matrices, constant. Default: as for the other parameters.",
    )
    group.add_argument(
        "--matrix-rule",
        action="append",
        default=[],
        metavar="GLOB:KEY=VALUE,…",
        help="Rule for the parameters whose name matches GLOB: optimizer=matrix|adam, "
        "split=default|none|parts|heads, lr_mult=X, wd_mult=X. May be repeated; the later rule "
        "wins. A rule that matches nothing is an error.",
    )
    group.add_argument(
        "--matrix-rules",
        metavar="FILE",
        help="JSON list of rules: objects with 'pattern' and the keys of --matrix-rule.",
    )
    group.add_argument(
        "--dmuon-no-split-gate-up",
        action="store_false",
        dest="dmuon_split_gate_up",
        help="Orthogonalize gate and up of a gated MLP as one matrix.",
    )
    group.add_argument(
        "--dmuon-no-split-mla",
        action="store_false",
        dest="dmuon_split_mla",
        help="Orthogonalize every projection of multi-latent attention as one matrix, not its "
        "content and rotary queries, its keys and its values apart.",
    )
    group.add_argument(
        "--dmuon-no-split-ssm",
        action="store_false",
        dest="dmuon_split_ssm",
        help="Orthogonalize the packed input projection of a Mamba or gated delta-net layer as "
        "one matrix.",
    )
    group.add_argument(
        "--dmuon-split-heads",
        action="store_true",
        help="Orthogonalize every attention head of the QKV and MLA projections on its own.",
    )
    group.add_argument(
        "--matrix-min-dim",
        type=int,
        default=MatrixConfig.min_dim,
        help="Matrices with a side shorter than this are trained with Adam.",
    )
    group.add_argument(
        "--dmuon-coefficients",
        metavar="a,b,c;a,b,c;…",
        help="Newton-Schulz coefficients for --muon-coefficient-type custom.",
    )
    group.add_argument(
        "--dmuon-compute-dtype",
        default=MatrixConfig.compute_dtype,
        choices=COMPUTE_POLICIES,
        help="Element type of the Newton-Schulz iteration; auto takes bf16 where it is fast.",
    )
    group.add_argument(
        "--dmuon-exchange-buffer-mb",
        type=float,
        default=MatrixConfig.exchange_buffer_mb,
        help="Bound on a rank's exchange buffers and assembled matrices, in MiB.",
    )
    return parser


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
    settings, problems = _read_settings(args, optimizer)
    if problems:
        raise ConfigurationError(problems)
    return settings


def _read_settings(args: Any, optimizer: str) -> tuple[MatrixConfig, list[str]]:
    """Settings from the flags, and what could not be read of them."""
    problems: list[str] = []

    def attempt[T](parse: Callable[[str], T], text: str | None, otherwise: T) -> T:
        if text is None:
            return otherwise
        try:
            return parse(text)
        except ValueError as error:
            problems.append(str(error))
            return otherwise

    nothing: tuple[Rule, ...] = ()
    rules = attempt(load_rules, args.matrix_rules, nothing)
    for text in args.matrix_rule:
        rules += attempt(lambda rule: (parse_rule(rule),), text, nothing)
    settings = MatrixConfig(
        optimizer=optimizer,
        momentum=args.muon_momentum,
        nesterov=args.muon_nesterov,
        scale_mode=args.muon_scale_mode,
        extra_scale_factor=args.muon_extra_scale_factor,
        coefficient_type=args.muon_coefficient_type,
        coefficients=attempt(parse_coefficients, args.dmuon_coefficients, None),
        num_ns_steps=args.muon_num_ns_steps,
        split_qkv=args.muon_split_qkv,
        split_gate_up=args.dmuon_split_gate_up,
        split_mla=args.dmuon_split_mla,
        split_ssm=args.dmuon_split_ssm,
        split_heads=args.dmuon_split_heads,
        min_dim=args.matrix_min_dim,
        compute_dtype=args.dmuon_compute_dtype,
        exchange_buffer_mb=args.dmuon_exchange_buffer_mb,
        lr=args.matrix_lr,
        min_lr=args.matrix_min_lr,
        weight_decay=args.matrix_weight_decay,
        rules=rules,
    )
    return settings, problems


def translate_arguments(args: Any) -> None:
    """Check our flags, then show Megatron adam with the distributed optimizer.

    Megatron's ``validate_args`` sends any optimizer that it does not know to its layer-wise path
    and switches the distributed optimizer off; so it must see ``adam`` and apply all its rules
    for that. Our own choice travels beside it in ``args.matrix_optimizer``.

    Raises:
        ConfigurationError: With every problem found; the same on every rank.
    """
    args.matrix_optimizer = None
    if args.optimizer not in OPTIMIZERS:
        _refuse_stray_flags(args)
        return
    data_parallel_size = _data_parallel_size(args)
    problems = flag_problems(args, data_parallel_size=data_parallel_size)
    args.matrix_optimizer = args.optimizer
    settings, unreadable = _read_settings(args, args.optimizer)
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
                "(dmuon is built on it; it shards nothing here)",
                flush=True,
            )
    args.optimizer = "adam"


def _data_parallel_size(args: Any) -> int:
    """Data- times context-parallel size, before ``validate_args`` works it out."""
    model_parallel = (args.tensor_model_parallel_size or 1) * (
        args.pipeline_model_parallel_size or 1
    )
    return max(1, int(args.world_size) // model_parallel)


def _refuse_stray_flags(args: Any) -> None:
    given = {
        "--matrix-lr": args.matrix_lr is not None,
        "--matrix-min-lr": args.matrix_min_lr is not None,
        "--matrix-weight-decay": args.matrix_weight_decay is not None,
        "--matrix-rule": bool(args.matrix_rule),
        "--matrix-rules": args.matrix_rules is not None,
        "--dmuon-no-split-gate-up": not args.dmuon_split_gate_up,
        "--dmuon-no-split-mla": not args.dmuon_split_mla,
        "--dmuon-no-split-ssm": not args.dmuon_split_ssm,
        "--dmuon-split-heads": args.dmuon_split_heads,
        "--matrix-min-dim": args.matrix_min_dim != MatrixConfig.min_dim,
        "--dmuon-coefficients": args.dmuon_coefficients is not None,
        "--dmuon-compute-dtype": args.dmuon_compute_dtype != MatrixConfig.compute_dtype,
        "--dmuon-exchange-buffer-mb": (
            args.dmuon_exchange_buffer_mb != MatrixConfig.exchange_buffer_mb
        ),
    }
    problems = [
        f"{flag} has no effect with --optimizer {args.optimizer}: remove it or type "
        "--optimizer dmuon"
        for flag, is_given in given.items()
        if is_given
    ]
    if args.optimizer != "muon" and args.muon_scale_mode == "match_rms_adamw":
        problems.append("--muon-scale-mode has no effect without --optimizer dmuon: remove it")
    if args.optimizer == "muon" and args.muon_scale_mode == "match_rms_adamw":
        problems.append(
            "--muon-scale-mode match_rms_adamw is dmuon's: type --optimizer dmuon, or "
            "--muon-scale-mode spectral --muon-extra-scale-factor 0.2"
        )
    if problems:
        raise ConfigurationError(problems)
