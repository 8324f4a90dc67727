"""The command line of ``convert``, and the end of every command that writes a checkpoint."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

from megatron_muon.offline.common_state import add_run_config_flag
from megatron_muon.offline.conversion import plan_conversion
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.manifest import notes_on_others
from megatron_muon.offline.outputs import Output
from megatron_muon.offline.progress import ProgressReport
from megatron_muon.offline.reading import TRACKER, Checkpoint, last_step
from megatron_muon.offline.settings import (
    TARGETS,
    ConvertSettings,
    add_matrix_flags,
    matrix_settings,
    parse_version,
    require_meaning,
)
from megatron_muon.offline.source_state import optimizer_of
from megatron_muon.offline.writing import (
    check_target,
    left_behind,
    write_checkpoint,
    write_tracker,
)

HELP = "turn one optimizer's state into another's"
MOST_WORKERS = 256
LARGE = 256 << 20
"""Bytes from which on several processes write."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``convert``."""
    parser.add_argument("source", help="folder of an iteration, or that a run saves into")
    parser.add_argument("target", help="folder to --load from afterwards")
    parser.add_argument("--to", required=True, choices=TARGETS, help="the optimizer to go on with")
    parser.add_argument("--step", type=int, help="iteration of the source; default: the last one")
    parser.add_argument(
        "--heavy-ball",
        type=float,
        metavar="BETA",
        help="the source's momentum is a sum (M = BETA M + G), not an average",
    )
    parser.add_argument(
        "--momentum-start",
        choices=("source", "zero"),
        help="the matrices' momentum: from the source's state (default), or zero",
    )
    parser.add_argument(
        "--right-factor-start",
        choices=("momentum", "seeded"),
        help="Orth-Dion's V: the momentum's leading right singular subspace (default), or the "
        "seeded start of training",
    )
    add_run_config_flag(parser)
    add_writing_flags(parser)
    add_matrix_flags(parser)


def add_writing_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of every command that writes a checkpoint."""
    parser.add_argument(
        "--megatron-version",
        type=parse_version,
        metavar="X.Y",
        help="megatron-core that is to read the result: before 0.19 the common state is common.pt, "
        "since then it is inside; default: as in the source",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that write; default: one below 256 MB, else one for each core, 8 at most",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="write nothing, print every tensor and its rule"
    )


def run(options: argparse.Namespace) -> int:
    """Convert."""
    checkpoint = Checkpoint(options.source, options.step, options.run_config)
    require_meaning(options, optimizer_of(checkpoint))
    settings = ConvertSettings(
        to=options.to,
        matrix=matrix_settings(options, checkpoint.common),
        heavy_ball=options.heavy_ball,
        momentum_start=options.momentum_start or "source",
        right_factor=options.right_factor_start or "momentum",
    )
    output = for_version(plan_conversion(checkpoint, settings), options.megatron_version)
    return write_output(output, options, checkpoint)


def for_version(output: Output, version: tuple[int, int] | None) -> Output:
    """The output with its common state where a version reads it: in ``common.pt`` up to 0.18."""
    return output if version is None else replace(output, common_in_file=version < (0, 19))


def write_output(output: Output, options: argparse.Namespace, source: Checkpoint) -> int:
    """Write a planned checkpoint, as ``target`` and the flags of ``add_writing_flags`` say."""
    output = replace(output, notes=(*output.notes, *notes_on_others(source.folder)))
    if options.dry_run:
        print(*output.tensors, *output.notes, sep="\n")
    step = output.common.get("iteration")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(f"the common state says iteration {step!r}, which is none.")
    root = Path(options.target)
    folder = root / f"iter_{step:07d}"
    workers, last = _workers(options.workers, output.nbytes), _last(root, options.overwrite)
    if options.dry_run:
        check_target(folder, source, overwrite=options.overwrite)
        print(f"would be written to {folder}")
        return 0
    report, overwrite = ProgressReport(output.nbytes), options.overwrite
    write_checkpoint(
        folder, output, source=source, overwrite=overwrite, workers=workers, progress=report
    )
    report.finish()
    if last is None or (overwrite and (last == "release" or last < step)):
        write_tracker(root, step)
    elif last != step:
        # Megatron takes --ckpt-step 0 for none, and looks for it only where there is a number.
        is_found = step > 0 and last != "release"
        how = (
            f"load with --ckpt-step {step}" if is_found else f"to load this one write {step} there"
        )
        print(f"{root / TRACKER} was left as it is, at {last}; {how}")
    print(*left_behind(folder), *output.notes, f"written to {folder}", sep="\n")
    return 0


def _last(root: Path, overwrite: bool) -> int | Literal["release"] | None:
    """The iteration in the tracker; with ``--overwrite`` a tracker without one is replaced."""
    try:
        return last_step(root)
    except CheckpointError:
        if not overwrite:
            raise
        return None


def _workers(asked: int | None, nbytes: int) -> int:
    if asked is not None:
        if not 1 <= asked <= MOST_WORKERS:
            raise CheckpointError(f"--workers is {asked}; it must be from 1 to {MOST_WORKERS}.")
        return asked
    cores = len(os.sched_getaffinity(0))
    return 1 if nbytes < LARGE else min(cores, 8)
