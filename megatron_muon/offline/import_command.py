"""``import``: weights and optimizer state of a ``torch.save`` file as a Megatron checkpoint.

What the file cannot say (arguments, parameter groups, the schedule, shapes with their padding) is
taken from a checkpoint of the same model, of any iteration.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megatron_muon.offline.common_state import add_run_config_flag
from megatron_muon.offline.convert_command import add_writing_flags, write_output
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.export_command import add_name_flags, vocabulary
from megatron_muon.offline.foreign import read_foreign, read_names
from megatron_muon.offline.importing import plan_import
from megatron_muon.offline.reading import Checkpoint

HELP = "turn a file of torch.save into a Megatron checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``import``."""
    parser.add_argument("file", type=Path, help="what torch.save wrote")
    parser.add_argument("target", help="folder to --load from afterwards")
    parser.add_argument(
        "--like",
        required=True,
        metavar="CHECKPOINT",
        help="a checkpoint of the same model and optimizer, of any iteration: arguments, groups "
        "and shapes are its own",
    )
    parser.add_argument("--step", type=int, help="its iteration; default: the last one")
    parser.add_argument(
        "--param-names",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="names of parameters, one to a line, for a state dict that numbers them; once for "
        "each such optimizer of the file, in its order",
    )
    parser.add_argument(
        "--heavy-ball",
        type=float,
        metavar="BETA",
        help="momentum_buffer is a sum (M = BETA M + G), not an average",
    )
    parser.add_argument(
        "--partial", action="store_true", help="keep the weights of --like that the file lacks"
    )
    add_name_flags(parser)
    add_run_config_flag(parser)
    add_writing_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Import."""
    like = Checkpoint(options.like, options.step, options.run_config)
    beta = options.heavy_ball
    if beta is not None and not 0.0 <= beta < 1.0:
        raise CheckpointError(f"--heavy-ball is {beta}; it must be in [0, 1).")
    names = [read_names(file) for file in options.param_names]
    foreign = read_foreign(options.file, names=names, heavy_ball=beta)
    version = options.megatron_version
    output = plan_import(
        foreign,
        like,
        names=options.names,
        rows=vocabulary(options),
        is_partial=options.partial,
    )
    if version is not None:
        output = replace(output, common_in_file=version < (0, 19))
    return write_output(output, options, like)
