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
from megatron_muon.offline.manifest import notes_on_foreign_files
from megatron_muon.offline.outputs import Output
from megatron_muon.offline.progress import ProgressReport
from megatron_muon.offline.reading import TRACKER, Checkpoint, last_step
from megatron_muon.offline.settings import (
    TARGETS,
    ConvertSettings,
    add_matrix_flags,
    matrix_settings,
    parse_version,
    require_effect,
)
from megatron_muon.offline.source_state import optimizer_of
from megatron_muon.offline.writing import (
    check_target,
    stale_folders,
    write_checkpoint,
    write_tracker,
)

HELP = "turn one optimizer's state into another's"
MAX_WORKERS = 256
LARGE = 256 << 20
"""Bytes above which several processes write."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``convert``."""
    parser.add_argument("source", help="folder of an iteration, or that a run saves into")
    parser.add_argument("target", help="folder to --load from afterwards")
    parser.add_argument("--to", required=True, choices=TARGETS, help="the target optimizer")
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
        help="initial momentum of matrices: from the source's state (default), or zero",
    )
    parser.add_argument(
        "--right-factor-start",
        choices=("momentum", "seeded"),
        help="initial V of Orth-Dion: the momentum's leading right singular subspace (default), or "
        "the seeded V of a new run",
    )
    add_run_config_flag(parser)
    add_writing_flags(parser)
    add_matrix_flags(parser)


def add_writing_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every command that writes a checkpoint."""
    parser.add_argument(
        "--megatron-version",
        type=parse_version,
        metavar="X.Y",
        help="megatron-core that will read the result: before 0.19 the common state is common.pt, "
        "since then it is an entry; default: as in the source",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing target")
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="writing processes; default: one below 256 MB, else one per core, at most 8",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="write nothing, print every tensor and its rule"
    )


def run(options: argparse.Namespace) -> int:
    """Convert."""
    checkpoint = Checkpoint(options.source, options.step, options.run_config)
    require_effect(options, optimizer_of(checkpoint))
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
    """Return the output with its common state where a version reads it (file up to 0.18)."""
    return output if version is None else replace(output, common_in_file=version < (0, 19))


def write_output(output: Output, options: argparse.Namespace, source: Checkpoint) -> int:
    """Write a planned checkpoint to ``target`` by the flags of ``add_writing_flags``."""
    output = replace(output, notes=(*output.notes, *notes_on_foreign_files(source.folder)))
    if options.dry_run:
        print(*output.tensors, *output.notes, sep="\n")
    step = output.common.get("iteration")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(f"the common state says iteration {step!r}, which is invalid.")
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
        # Megatron ignores --ckpt-step 0, and any --ckpt-step where the tracker has no number.
        is_found = step > 0 and last != "release"
        how = (
            f"load with --ckpt-step {step}" if is_found else f"to load this one write {step} to it"
        )
        print(f"{root / TRACKER} was not changed and says {last}; {how}")
    print(*stale_folders(folder), *output.notes, f"written to {folder}", sep="\n")
    return 0


def _last(root: Path, overwrite: bool) -> int | Literal["release"] | None:
    """Return the iteration in the tracker; with ``--overwrite`` an invalid tracker is replaced."""
    try:
        return last_step(root)
    except CheckpointError:
        if not overwrite:
            raise
        return None


def _workers(requested: int | None, nbytes: int) -> int:
    if requested is None:
        return 1 if nbytes < LARGE else min(len(os.sched_getaffinity(0)), 8)
    if not 1 <= requested <= MAX_WORKERS:
        raise CheckpointError(f"--workers is {requested}; it must be from 1 to {MAX_WORKERS}.")
    return requested
