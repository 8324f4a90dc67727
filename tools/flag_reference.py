"""Writes docs/flags.md from the table of flags.

make flag-reference
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_muon.config import OPTIMIZERS, Flag, MatrixConfig, Range
from megatron_muon.flags import FLAGS

PAGE = ROOT / "docs" / "flags.md"
BEGINNING = """# Flags

Written by `make flag-reference` from `megatron_muon/config.py`; a test compares them.

`-m megatron_muon.launch` in front of the script adds `--optimizer dmuon`, `--optimizer orth_dion`
and the flags below; `--muon-…` are Megatron's own. A flag that the chosen optimizer does not take
is refused, and so is a value that is not allowed. In Python the same settings are the fields of
`MatrixConfig`; a flag with `no` in its name turns its field off. Flags marked ° are also those of
`python -m megatron_muon.checkpoint convert`."""
TITLES = {
    OPTIMIZERS: "Both optimizers",
    ("dmuon",): "`--optimizer dmuon`",
    ("orth_dion",): "`--optimizer orth_dion`",
}
IN_PYTHON = {field.name: field.default for field in fields(MatrixConfig)}


def page() -> str:
    """The whole of docs/flags.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield BEGINNING
    for optimizers, title in TITLES.items():
        yield from ("", f"## {title}", "", "| flag | field | meaning | values | default |")
        yield "|---|---|---|---|---|"
        for flag in FLAGS:
            if flag.optimizers == optimizers:
                help = flag.help.replace("|", r"\|")
                mark = " °" if flag.offline else ""
                yield (
                    f"| `{flag.name}`{mark} | `{flag.field}` | {help} | {_values(flag)} "
                    f"| {_default(flag)} |"
                )


def _values(flag: Flag) -> str:
    if isinstance(flag.values, Range):
        return flag.values.words
    return ", ".join(f"`{value}`" for value in flag.values or ())


def _default(flag: Flag) -> str:
    if isinstance(flag.default, bool):
        return "off"
    if flag.default in (None, []):
        return "auto" if getattr(flag.values, "or_auto", False) else ""
    if isinstance(flag.default, str):
        return f"`{flag.default}`"
    in_python = IN_PYTHON[flag.field]
    apart = "" if in_python == flag.default else f" ({in_python:g} in Python)"
    return f"{flag.default:g}{apart}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
