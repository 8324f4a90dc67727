"""Settings of ``convert``: its flags, then those of the saved run."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_muon.config import OPTIMIZERS, Flag, MatrixConfig
from megatron_muon.flags import FLAGS, add_flag, read_settings, value_problems
from megatron_muon.linalg import STATE_DTYPES
from megatron_muon.matrices import Family, Rule, merged_rule, route, unmatched_rules
from megatron_muon.offline.common_state import CommonState
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.parameters import StoredParameter

TARGETS = ("adam", "dmuon", "orth_dion", "muon")
"""Target optimizers; ``muon`` is megatron-core's own, layer-wise."""

OFFLINE = tuple(flag for flag in FLAGS if flag.offline)
"""Flags of training that select matrices and size their factors."""


def no_split_flag(family: Family) -> str:
    """Return the flag that treats each packed weight of a family as one matrix."""
    return next(flag.name for flag in OFFLINE if flag.field == f"split_{family}")


@dataclass(frozen=True, kw_only=True)
class ConvertSettings:
    """Settings of a conversion.

    Attributes:
        to: One of ``TARGETS``.
        matrix: Settings of the target's matrices.
        heavy_ball: β if the source's momentum is a sum of gradients, not an average.
        momentum_start: ``source``, or ``zero`` to start matrices without momentum.
        right_factor: Source of Orth-Dion's V: ``momentum`` or ``seeded``.
    """

    to: str
    matrix: MatrixConfig
    heavy_ball: float | None = None
    momentum_start: Literal["source", "zero"] = "source"
    right_factor: Literal["momentum", "seeded"] = "momentum"

    @property
    def v_dtype(self) -> torch.dtype:
        """Dtype of V."""
        return STATE_DTYPES[self.matrix.state_dtype]


def add_matrix_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of training that select matrices and size their factors."""
    group = parser.add_argument_group(
        "as in training", "Default: the value of the checkpoint's run, else training's default."
    )
    for flag in OFFLINE:
        only = "" if flag.optimizers == OPTIMIZERS else f"With --to {flag.optimizers[0]}: "
        add_flag(group, flag, default=None, help=only + flag.help)


def require_effect(options: argparse.Namespace, source: str) -> None:
    """Refuse flags without effect."""
    target = options.to
    idle = {flag.dest: flag.name for flag in OFFLINE if target not in flag.optimizers}
    if target != "orth_dion":
        idle = {"right_factor_start": "--right-factor-start"} | idle
    if target == "adam":
        idle |= {"momentum_start": "--momentum-start", "heavy_ball": "--heavy-ball"}
    found = [flag for dest, flag in idle.items() if getattr(options, dest) is not None]
    why = f"no effect with --to {target}"
    if not found and options.heavy_ball is not None and source == "adam":
        found, why = ["--heavy-ball"], "no effect on Adam's moments, which are averages"
    if not found and options.heavy_ball is not None and options.momentum_start == "zero":
        found, why = ["--heavy-ball"], "no effect with --momentum-start zero"
    if found:
        raise CheckpointError(f"{', '.join(found)} has {why}; leave it out.")


def matrix_settings(options: argparse.Namespace, common: CommonState) -> MatrixConfig:
    """Return the settings of the target's matrices: flags, else the saved run's, else defaults."""
    given: dict[str, Any] = {}
    has_rules = options.matrix_rules is not None or options.matrix_rule is not None
    for flag in _flags_of(options.to):
        value = getattr(options, flag.dest)
        if value is None and not (has_rules and flag.field == "rules"):
            value = common.argument(flag.dest)
            if flag.dest == "matrix_rules" and value is not None and not Path(value).exists():
                raise CheckpointError(
                    f"the checkpoint's run had --matrix-rules {value}, which does not exist here: "
                    "name the file."
                )
        if value is not None:
            given[flag.dest] = value
    settings, problems = read_settings(options.to, given)
    problems += value_problems(settings)
    if problems:
        raise CheckpointError(f"{'; '.join(problems)}.")
    return settings


def saved_flags(settings: ConvertSettings) -> dict[str, Any]:
    """Return our flags as a run of the target would save them."""
    found = {flag.dest: getattr(settings.matrix, flag.field) for flag in _flags_of(settings.to)}
    rules = [_text(rule) for rule in settings.matrix.rules]
    return found | {"matrix_rules": None, "matrix_rule": rules}


def _flags_of(target: str) -> Iterator[Flag]:
    return (flag for flag in OFFLINE if target in flag.optimizers)


def _text(rule: Rule) -> str:
    fields = ("optimizer", "split", "lr_mult", "wd_mult")
    values = ((field, getattr(rule, field)) for field in fields)
    return f"{rule.pattern}:" + ",".join(f"{k}={v}" for k, v in values if v is not None)


def target_routes(
    parameters: Sequence[StoredParameter], settings: ConvertSettings
) -> dict[str, bool]:
    """Return, by name, whether a parameter is a matrix by the rules of training."""
    names = [parameter.name for parameter in parameters]
    unmatched = unmatched_rules(settings.matrix.rules, names)
    if unmatched:
        example = next((name for name in names if "linear" in name), names[0])
        raise CheckpointError(
            f"rule '{unmatched[0]}' (--matrix-rule or --matrix-rules) matches no trainable "
            f"parameter; names look like '{example}'."
        )
    if settings.to == "adam":
        return dict.fromkeys(names, False)
    if settings.to == "muon":
        routes = {parameter.name: _is_upstream_matrix(parameter) for parameter in parameters}
        if not any(routes.values()):
            raise CheckpointError("megatron-core's muon would train none of the parameters.")
        return routes
    rules, min_dim = settings.matrix.rules, settings.matrix.min_dim
    try:
        chosen = {
            p.name: route(p.facts, merged_rule(rules, p.name), min_dim=min_dim) for p in parameters
        }
    except ValueError as error:
        raise CheckpointError(f"{error}.") from error
    routes = {name: to.optimizer == "matrix" for name, to in chosen.items()}
    if not any(routes.values()):
        reasons = Counter(to.reason for to in chosen.values()).most_common()
        raise CheckpointError(
            f"no parameter is a matrix by the rules, so there is nothing for {settings.to} to "
            f"train: {', '.join(f'{count} {reason}' for reason, count in reasons)} "
            f"(--matrix-min-dim is {min_dim})."
        )
    return routes


def _is_upstream_matrix(parameter: StoredParameter) -> bool:
    """Apply megatron-core's ``_is_nonlinear_or_embedding``: its muon trains routers as well."""
    pieces = parameter.name.split(".")
    is_flagged = "word_embeddings" in pieces or "output_layer" in pieces
    return len(parameter.facts.shape) == 2 and not is_flagged


def parse_version(text: str) -> tuple[int, int]:
    """Return (major, minor) of ``0.19`` or ``0.19.2``, as a type for argparse."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None or (int(match[1]), int(match[2])) < (0, 5):
        raise argparse.ArgumentTypeError(f"'{text}' is not a version; type for example 0.19")
    return int(match[1]), int(match[2])
