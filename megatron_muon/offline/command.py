"""Distributed checkpoints offline: no GPU, no process group, no Megatron.

    python -m megatron_muon.checkpoint {inspect,convert,import,export,verify} …

Nothing in a checkpoint is ever run, sources are never changed, and what is written appears under
its name when it is complete.
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
from megatron_muon.offline.signals import SIGNALS

COMMANDS: dict[str, Any] = {
    "inspect": inspection,
    "convert": convert_command,
    "import": importing,
    "export": exporting,
    "verify": verification,
}
"""Name to the module that holds HELP, add_arguments and run."""

TRACEBACK = "MEGATRON_MUON_TRACEBACK"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m megatron_muon.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 when all is well, 1 on differences, 2 with a sentence on an error."""
    options = parser().parse_args(arguments)
    # What is ignored (nohup, a job in the background) stays so.
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, _end) for number in heard}
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except CheckpointError as error:
        print(f"megatron_muon: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who reads the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("megatron_muon: interrupted; nothing was left half-written.", file=sys.stderr)
        return 130
    except Exception as error:  # a file that nobody meant to exist can fail in any way
        if os.environ.get(TRACEBACK):
            raise
        print(
            f"megatron_muon: {options.command} cannot make sense of what it was given "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]}); type {TRACEBACK}=1 "
            "before the command to see where.",
            file=sys.stderr,
        )
        return 2
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    """Unwind, so that what was begun is removed; once, for removing takes its time."""
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt
