"""Our flags on Megatron's command line, and their translation before Megatron validates."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_muon.config import OPTIMIZERS, SCALE_MODE, MatrixConfig
from megatron_muon.integration.stray_flags import stray_flag_problems
from megatron_muon.integration.support import (
    ConfigurationError,
    coefficient_problems,
    flag_problems,
    learning_rate_problems,
    setting_problems,
)
from megatron_muon.linalg import (
    COMPUTE_POLICIES,
    EXCHANGE_POLICIES,
    RIGHT_FACTORS,
    SCALE_MODES,
    STATE_DTYPES,
    parse_coefficients,
)
from megatron_muon.matrices import Rule, load_rules, parse_rule


def add_matrix_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Extend Megatron's parser: ``--optimizer dmuon``, one more scale mode, our flags.

    Args:
        parser: The parser after all of Megatron's own arguments were added.
    """
    _mend_help(parser)
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
        "--matrix-no-split-gate-up",
        action="store_false",
        dest="matrix_split_gate_up",
        help="Orthogonalize gate and up of a gated MLP as one matrix.",
    )
    group.add_argument(
        "--matrix-no-split-mla",
        action="store_false",
        dest="matrix_split_mla",
        help="Orthogonalize every projection of multi-latent attention as one matrix, not its "
        "content and rotary queries, its keys and its values apart.",
    )
    group.add_argument(
        "--matrix-no-split-ssm",
        action="store_false",
        dest="matrix_split_ssm",
        help="Orthogonalize the packed input projection of a Mamba or gated delta-net layer as "
        "one matrix.",
    )
    group.add_argument(
        "--matrix-split-heads",
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
        "--dmuon-exchange-dtype",
        default=MatrixConfig.exchange_dtype,
        choices=EXCHANGE_POLICIES,
        help="Element type of what travels; auto is bf16 where the iteration has 16 bits.",
    )
    group.add_argument(
        "--dmuon-split-ranks",
        type=int,
        default=MatrixConfig.split_ranks,
        help="Most owners among which one matrix is split where that balances them better.",
    )
    group.add_argument(
        "--dmuon-split-min-gflop",
        type=float,
        default=MatrixConfig.split_min_gflop,
        help="Matrices that take fewer operations than this are not split.",
    )
    group.add_argument(
        "--dmuon-cost-table",
        metavar="FILE",
        help="Measured times to balance owners by, from python -m megatron_muon.benchmark "
        "--cost-table FILE. Default: counted operations.",
    )
    group.add_argument(
        "--matrix-ranks-per-node",
        type=int,
        help="Neighbouring ranks on one node; owners are chosen on the node of a matrix where "
        "that costs no time. Default: what torchrun says.",
    )
    group.add_argument(
        "--matrix-exchange-buffer-mb",
        type=float,
        default=MatrixConfig.exchange_buffer_mb,
        help="Bound on a rank's exchange buffers and assembled matrices, in MiB.",
    )
    _add_orth_dion_arguments(parser)
    return parser


def _add_orth_dion_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(title="orth_dion (megatron_muon)")
    group.add_argument(
        "--orth-dion-rank-fraction",
        type=float,
        default=MatrixConfig.rank_fraction,
        help="Rank over the smaller side of a matrix, above 0, at most 1.",
    )
    group.add_argument(
        "--orth-dion-rank-multiple-of",
        type=int,
        default=MatrixConfig.rank_multiple_of,
        help="The rank is rounded up to a multiple of this, but not above the smaller side.",
    )
    group.add_argument(
        "--orth-dion-momentum",
        type=float,
        default=MatrixConfig.momentum,
        help="Share of the captured part that the momentum keeps (error feedback).",
    )
    group.add_argument(
        "--orth-dion-right-factor",
        default=MatrixConfig.right_factor,
        choices=RIGHT_FACTORS,
        help="qr: QR with positive diagonal; polar: polar factor; colnorm: Dion.",
    )
    group.add_argument(
        "--orth-dion-scale-mode",
        default=SCALE_MODE["orth_dion"],
        choices=tuple(SCALE_MODES),
        help="Scale of the update by the matrix's global shape.",
    )
    group.add_argument(
        "--orth-dion-rank-compensation",
        action="store_true",
        help="Multiply the update by sqrt(smaller side / rank).",
    )
    group.add_argument(
        "--orth-dion-state-dtype",
        default=MatrixConfig.state_dtype,
        choices=tuple(STATE_DTYPES),
        help="Element type in which V is kept between steps.",
    )
    group.add_argument(
        "--orth-dion-exchange",
        default=MatrixConfig.exchange,
        choices=("auto", "factors", "matrix"),
        help="What travels; auto takes for each matrix what moves fewer bytes.",
    )


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
    common = MatrixConfig(
        optimizer=optimizer,
        split_qkv=args.muon_split_qkv,
        split_gate_up=args.matrix_split_gate_up,
        split_mla=args.matrix_split_mla,
        split_ssm=args.matrix_split_ssm,
        split_heads=args.matrix_split_heads,
        min_dim=args.matrix_min_dim,
        exchange_buffer_mb=args.matrix_exchange_buffer_mb,
        ranks_per_node=args.matrix_ranks_per_node,
        lr=args.matrix_lr,
        min_lr=args.matrix_min_lr,
        weight_decay=args.matrix_weight_decay,
        rules=rules,
    )
    if optimizer == "orth_dion":
        return replace(
            common,
            momentum=args.orth_dion_momentum,
            scale_mode=args.orth_dion_scale_mode,
            rank_fraction=args.orth_dion_rank_fraction,
            rank_multiple_of=args.orth_dion_rank_multiple_of,
            right_factor=args.orth_dion_right_factor,
            rank_compensation=args.orth_dion_rank_compensation,
            exchange=args.orth_dion_exchange,
            state_dtype=args.orth_dion_state_dtype,
        ), problems
    return replace(
        common,
        momentum=args.muon_momentum,
        nesterov=args.muon_nesterov,
        scale_mode=args.muon_scale_mode,
        extra_scale_factor=args.muon_extra_scale_factor,
        coefficient_type=args.muon_coefficient_type,
        coefficients=attempt(parse_coefficients, args.dmuon_coefficients, None),
        num_ns_steps=args.muon_num_ns_steps,
        compute_dtype=args.dmuon_compute_dtype,
        exchange_dtype=args.dmuon_exchange_dtype,
        split_ranks=args.dmuon_split_ranks,
        split_min_gflop=args.dmuon_split_min_gflop,
        cost_table=args.dmuon_cost_table,
    ), problems


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
    args.optimizer = "adam"


def _data_parallel_size(args: Any) -> int:
    """Data- times context-parallel size, before ``validate_args`` works it out."""
    model_parallel = (args.tensor_model_parallel_size or 1) * (
        args.pipeline_model_parallel_size or 1
    )
    return max(1, int(args.world_size) // model_parallel)
