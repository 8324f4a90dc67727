"""``python -m megatron_muon.launch SCRIPT …``: hooks first, then the script as ``__main__``."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from megatron_muon.integration.versions import MegatronVersionError, require_megatron

USAGE = (
    "usage: python -m megatron_muon.launch [--cpu] pretrain_gpt.py <arguments of the script> "
    "--optimizer {dmuon,orth_dion}\n"
    "  Runs an unmodified Megatron training script with our optimizers and flags known to it;\n"
    "  the script's own --help lists them.\n"
    "  --cpu  run real megatron-core on CPU over gloo (slow; for trying out and tests)"
)


def main(argv: Sequence[str]) -> int:
    """Run a Megatron script with our hooks installed.

    Args:
        argv: Our flags, the script, its arguments.

    Returns:
        Exit code: 2 for anything that is refused at start; otherwise what the script gives.
    """
    arguments = list(argv)
    on_cpu = False
    while arguments and arguments[0].startswith("-"):
        flag = arguments.pop(0)
        if flag == "--cpu":
            on_cpu = True
        elif flag in ("-h", "--help"):
            print(USAGE)
            return 0
        else:
            return _refuse(f"unknown flag {flag} before the script\n{USAGE}")
    if not arguments:
        return _refuse(f"no script given\n{USAGE}")
    script = arguments[0]
    if not os.path.isfile(script):
        return _refuse(f"script {script} does not exist; give the path of pretrain_gpt.py")
    # As python itself does for a script: its folder comes first on the path.
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        require_megatron(training=True)
        if not on_cpu and not _has_gpu():
            return _refuse(
                "no CUDA GPU was found; to run on CPU put --cpu before the script: "
                f"python -m megatron_muon.launch --cpu {script} …"
            )
        if on_cpu:
            from megatron_muon import cpu

            cpu.enable()
            arguments += missing_flags(arguments, cpu.default_flags())
        from megatron_muon.integration.hooks import install

        install()
    except MegatronVersionError as error:
        return _refuse(str(error))
    from megatron_muon.integration.support import CheckpointMismatchError, ConfigurationError

    sys.argv = arguments
    try:
        runpy.run_path(script, run_name="__main__")
    except (ConfigurationError, CheckpointMismatchError) as error:
        # Raised by every rank together: one sentence, no traceback of each.
        return _refuse(str(error))
    if on_cpu:
        cpu.leave()
    return 0


def missing_flags(given: Sequence[str], defaults: Sequence[str]) -> list[str]:
    """The flags of ``defaults`` (with their values) that are not among ``given``."""
    result: list[str] = []
    keep = False
    for word in defaults:
        if word.startswith("--"):
            keep = word not in given and not any(g.startswith(f"{word}=") for g in given)
        if keep:
            result.append(word)
    return result


def _has_gpu() -> bool:
    # Imported late: a missing Megatron is to be said even where torch is missing too.
    import torch

    return torch.cuda.is_available()


def _refuse(message: str) -> int:
    # One rank of each node: what is wrong may be wrong on one node alone, as a file that it lacks.
    if int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))) == 0:
        print(message, file=sys.stderr, flush=True)
    return 2
