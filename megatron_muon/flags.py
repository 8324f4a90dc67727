"""The flags declared in ``config``: added to a parser, read, and checked."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from megatron_muon import linalg
from megatron_muon.config import OPTIMIZERS, Flag, MatrixConfig, Range
from megatron_muon.matrices import Rule, load_rules, parse_rule

FLAGS: tuple[Flag, ...] = tuple(
    replace(
        flag,
        field=field.name,
        help=flag.help or field.metadata["help"],
        default=field.default if flag.default is ... else flag.default,
        values=(
            tuple(getattr(linalg, flag.values)) if isinstance(flag.values, str) else flag.values
        ),
    )
    for field in fields(MatrixConfig)
    for flag in field.metadata.get("flags", ())
)
"""All flags that set a field of ``MatrixConfig``, ours and Megatron's."""


def add_flag(group: argparse._ArgumentGroup, flag: Flag, **changed: Any) -> None:
    """Add one of our flags to a parser.

    Args:
        group: Argument group of the parser.
        flag: One of ``FLAGS``.
        changed: Arguments of ``add_argument`` that override the flag's own.
    """
    how: dict[str, Any] = {"dest": flag.dest, "default": flag.default, "help": flag.help}
    if isinstance(flag.default, bool):
        how["action"] = "store_false" if flag.default else "store_true"
    else:
        kind = flag.values.kind if isinstance(flag.values, Range) else str
        how["action"] = "append" if flag.default == [] else "store"
        how["type"] = _or_auto(kind) if getattr(flag.values, "or_auto", False) else kind
        how["choices"] = flag.values if isinstance(flag.values, tuple) else None
        how["metavar"] = flag.metavar or {int: "N", float: "X"}.get(kind)
    group.add_argument(flag.name, **how | changed)


def _or_auto(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text == "auto" else kind(text)

    # argparse shows the name in its error on an invalid value.
    read.__name__ = getattr(kind, "__name__", "value")
    return read


def read_settings(optimizer: str, given: Mapping[str, Any]) -> tuple[MatrixConfig, list[str]]:
    """Return the settings of an optimizer, and errors of values that cannot be parsed.

    Args:
        optimizer: The optimizer whose flags are read.
        given: Values of flags by attribute of the arguments; a missing one has the default of its
            setting.
    """
    values = {
        flag.field: given[flag.dest]
        for flag in FLAGS
        if optimizer in flag.optimizers and flag.dest in given
    }
    problems: list[str] = []

    def parsed[T](parse: Callable[[str], T], text: str | None, otherwise: T) -> T:
        try:
            return otherwise if text is None else parse(text)
        except ValueError as error:
            problems.append(str(error))
            return otherwise

    nothing: tuple[Rule, ...] = ()
    values["rules"] = parsed(load_rules, given.get("matrix_rules"), nothing)
    for text in given.get("matrix_rule") or ():
        values["rules"] += parsed(lambda rule: (parse_rule(rule),), text, nothing)
    if "coefficients" in values:
        values["coefficients"] = parsed(linalg.parse_coefficients, values["coefficients"], None)
    return MatrixConfig(optimizer=optimizer, **values), problems


def value_problems(settings: MatrixConfig) -> list[str]:
    """Return an error for every setting of the optimizer with an invalid value."""
    found = (
        flag.problem(getattr(settings, flag.field))
        for flag in FLAGS
        # An unknown optimizer has the settings common to both.
        if settings.optimizer in flag.setting_of or flag.optimizers == OPTIMIZERS
    )
    return [problem for problem in found if problem is not None]
