"""Distributed checkpoints offline: no GPU, no process group, no Megatron.

    python -m megatron_muon.checkpoint {inspect,convert,import,export,verify} …

No code in a checkpoint is executed, sources are never modified, and output appears under its final
name only when it is complete.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from megatron_muon.offline import (
    convert_command,
    exporting,
    importing,
    inspection,
    verification,
)
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.signals import SIGNALS, handled_by

COMMANDS: dict[str, Any] = {
    "inspect": inspection,
    "convert": convert_command,
    "import": importing,
    "export": exporting,
    "verify": verification,
}
"""Command name to the module that defines HELP, add_arguments and run."""

TRACEBACK = "MEGATRON_MUON_TRACEBACK"


def build_parser() -> argparse.ArgumentParser:
    """Build the command line."""
    command_line = argparse.ArgumentParser(
        prog="python -m megatron_muon.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = command_line.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return command_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 on differences, 2 on an error."""
    options = build_parser().parse_args(arguments)
    with handled_by(_interrupt):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except CheckpointError as error:
        print(f"megatron_muon: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the output closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("megatron_muon: interrupted; no partial output was left.", file=sys.stderr)
        return 130
    except Exception as error:  # a malformed file can fail in any way
        if os.environ.get(TRACEBACK):
            raise
        print(
            f"megatron_muon: {options.command} failed on an input that it does not support "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]}); type {TRACEBACK}=1 "
            "before the command for the traceback.",
            file=sys.stderr,
        )
        return 2


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Unwind so that partial output is removed; further signals must not interrupt the removal."""
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt
