"""User rules: glob on the parameter name -> optimizer, split, learning rate, weight decay."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

OptimizerChoice = Literal["matrix", "adam"]
SplitChoice = Literal["default", "none", "parts", "heads"]

_KEYS = ("optimizer", "split", "lr_mult", "wd_mult")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule; fields that are None keep the default.

    Attributes:
        pattern: Shell-style glob (``*``, ``?``, ``[…]``) on the whole parameter name.
        optimizer: ``matrix`` or ``adam``.
        split: Split of a packed parameter: ``none``, its ``parts``, every attention head of its
            parts (``heads``), or by the settings (``default``).
        lr_mult: Factor on the learning rate (maximum and minimum).
        wd_mult: Factor on the weight decay.
    """

    pattern: str
    optimizer: OptimizerChoice | None = None
    split: SplitChoice | None = None
    lr_mult: float | None = None
    wd_mult: float | None = None


def rule_from_mapping(pattern: str, values: Mapping[str, object], source: str) -> Rule:
    """Build one rule; ``source`` is its flag and text, for errors.

    Raises:
        ValueError: Unknown key or value.
    """
    if not pattern or not values:
        raise ValueError(
            f"{source}: a rule needs a pattern and at least one of {', '.join(_KEYS)}; "
            "type for example --matrix-rule '*.linear_proj.weight:optimizer=adam'"
        )
    for key in values:
        if key not in _KEYS:
            raise ValueError(
                f"{source}: unknown key '{key}'; supported keys are {', '.join(_KEYS)}"
            )
    for key, choices in (
        ("optimizer", get_args(OptimizerChoice)),
        ("split", get_args(SplitChoice)),
    ):
        if key in values and values[key] not in choices:
            raise ValueError(
                f"{source}: {key} is '{values[key]}'; supported are {', '.join(choices)}"
            )
    return Rule(
        pattern=pattern,
        optimizer=values.get("optimizer"),  # type: ignore[arg-type]
        split=values.get("split"),  # type: ignore[arg-type]
        lr_mult=_factor(values, "lr_mult", source),
        wd_mult=_factor(values, "wd_mult", source),
    )


def _factor(values: Mapping[str, object], key: str, source: str) -> float | None:
    if key not in values:
        return None
    value = values[key]
    try:
        # JSON's true would be 1.
        factor = -1.0 if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        factor = -1.0
    if not 0.0 <= factor < float("inf"):
        raise ValueError(f"{source}: {key} is '{values[key]}'; it must be a number >= 0")
    return factor


def parse_rule(text: str) -> Rule:
    """Parse ``GLOB:key=value,key=value``, the form of ``--matrix-rule``.

    Raises:
        ValueError: The text is invalid; the error says what to type.
    """
    source = f"--matrix-rule '{text}'"
    pattern, colon, assignments = text.rpartition(":")
    if not colon:
        assignments = ""
    values: dict[str, object] = {}
    for assignment in filter(None, assignments.split(",")):
        key, equals, value = (piece.strip() for piece in assignment.partition("="))
        if not equals:
            raise ValueError(f"{source}: '{assignment}' is not key=value")
        values[key] = value
    return rule_from_mapping(pattern.strip(), values, source)


def load_rules(path: str) -> tuple[Rule, ...]:
    """Read ``--matrix-rules``: a JSON list of objects with ``pattern`` and the keys of a rule.

    Raises:
        ValueError: The file cannot be read, is not such a list, or has an invalid rule.
    """
    source = f"--matrix-rules {path}"
    try:
        with open(path, encoding="utf-8") as stream:
            entries = json.load(stream)
    except (OSError, ValueError, RecursionError) as error:  # Not JSON, or not UTF-8.
        raise ValueError(f"{source}: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f'{source}: must be a list like [{{"pattern": "*", "lr_mult": 0.5}}]')
    rules = []
    for number, entry in enumerate(entries):
        values = dict(entry)
        pattern = str(values.pop("pattern", ""))
        rules.append(rule_from_mapping(pattern, values, f"{source} (rule {number})"))
    return tuple(rules)


def merged_rule(rules: Sequence[Rule], name: str) -> Rule:
    """Merge the rules that match one parameter; later rules take precedence, field by field."""
    fields: dict[str, object] = dict.fromkeys(_KEYS)
    for rule in rules:
        if fnmatchcase(name, rule.pattern):
            fields |= {key: value for key in fields if (value := getattr(rule, key)) is not None}
    return Rule(pattern=name, **fields)  # type: ignore[arg-type]


def unmatched_rules(rules: Sequence[Rule], names: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns that match none of the names."""
    known = list(names)
    return tuple(
        rule.pattern for rule in rules if not any(fnmatchcase(name, rule.pattern) for name in known)
    )
