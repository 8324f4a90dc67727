"""What ``convert`` is told: flags on top of those that the run was saved with."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_muon.checkpoint.errors import CheckpointError
from megatron_muon.checkpoint.reading import CommonState
from megatron_muon.config import SCALE_MODE, MatrixConfig
from megatron_muon.linalg import STATE_DTYPES
from megatron_muon.matrices import Rule, load_rules, parse_rule

TARGETS = ("adam", "dmuon", "orth_dion", "muon")
"""Optimizers to convert to; ``muon`` is megatron-core's own, layer-wise."""

_FLAGS: Mapping[str, tuple[str, str]] = {
    # destination of the flag, as in Megatron's saved arguments -> (field of MatrixConfig, flag)
    "muon_split_qkv": ("split_qkv", "--muon-no-split-qkv"),
    "matrix_split_gate_up": ("split_gate_up", "--matrix-no-split-gate-up"),
    "matrix_split_mla": ("split_mla", "--matrix-no-split-mla"),
    "matrix_split_ssm": ("split_ssm", "--matrix-no-split-ssm"),
    "matrix_split_heads": ("split_heads", "--matrix-split-heads"),
    "matrix_min_dim": ("min_dim", "--matrix-min-dim"),
    "orth_dion_rank_fraction": ("rank_fraction", "--orth-dion-rank-fraction"),
    "orth_dion_rank_multiple_of": ("rank_multiple_of", "--orth-dion-rank-multiple-of"),
    "orth_dion_momentum": ("momentum", "--orth-dion-momentum"),
    "orth_dion_state_dtype": ("state_dtype", "--orth-dion-state-dtype"),
}


_MATRIX_FLAGS: Mapping[str, str] = {
    "matrix_rule": "--matrix-rule",
    "matrix_rules": "--matrix-rules",
    **{dest: flag for dest, (_, flag) in _FLAGS.items() if not dest.startswith("orth_dion")},
}
_ORTH_DION_FLAGS: Mapping[str, str] = {
    "right_factor_start": "--right-factor-start",
    **{dest: flag for dest, (_, flag) in _FLAGS.items() if dest.startswith("orth_dion")},
}


@dataclass(frozen=True, kw_only=True)
class ConvertSettings:
    """What ``convert`` is to do.

    Attributes:
        to: One of ``TARGETS``.
        matrix: Settings of the target's matrices.
        heavy_ball: β when the source's momentum is a sum of gradients and no average.
        momentum_start: ``source``, or ``zero`` to let the matrices start without momentum.
        right_factor: Where Orth-Dion's V comes from: ``momentum`` or ``seeded``.
        megatron_version: Version of megatron-core that is to read the result, None for the
            source's home of the common state.
    """

    to: str
    matrix: MatrixConfig
    heavy_ball: float | None = None
    momentum_start: Literal["source", "zero"] = "source"
    right_factor: Literal["momentum", "seeded"] = "momentum"
    megatron_version: tuple[int, int] | None = None

    @property
    def v_dtype(self) -> torch.dtype:
        """Element type of V."""
        return STATE_DTYPES[self.matrix.state_dtype]

    def common_in_file(self, source_in_file: bool) -> bool:
        """Whether the common state is to be ``common.pt``: megatron-core up to 0.18 wants it."""
        if self.megatron_version is None:
            return source_in_file
        return self.megatron_version < (0, 19)


def add_matrix_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of training that say what is a matrix and how large its factors are."""
    group = parser.add_argument_group(
        "as in training", "Default: what the checkpoint's run was given, else training's default."
    )
    group.add_argument(
        "--matrix-rule", action="append", default=[], metavar="GLOB:KEY=VALUE,…", help="a rule"
    )
    group.add_argument("--matrix-rules", metavar="FILE", help="JSON list of rules")
    group.add_argument(
        "--matrix-min-dim", type=int, metavar="N", help="matrices that are thinner go to Adam"
    )
    for flag, dest, what in (
        ("--muon-no-split-qkv", "muon_split_qkv", "the fused QKV weight"),
        ("--matrix-no-split-gate-up", "matrix_split_gate_up", "gate and up"),
        ("--matrix-no-split-mla", "matrix_split_mla", "a projection of latent attention"),
        ("--matrix-no-split-ssm", "matrix_split_ssm", "a packed projection of Mamba"),
    ):
        group.add_argument(
            flag, action="store_false", dest=dest, default=None, help=f"{what} as one matrix"
        )
    group.add_argument(
        "--matrix-split-heads", action="store_true", default=None, help="a matrix for each head"
    )
    only = "with --to orth_dion: "
    group.add_argument(
        "--orth-dion-rank-fraction", type=float, metavar="X", help=f"{only}rank over smaller side"
    )
    group.add_argument(
        "--orth-dion-rank-multiple-of", type=int, metavar="N", help=f"{only}rank is rounded up to"
    )
    group.add_argument(
        "--orth-dion-momentum", type=float, metavar="X", help=f"{only}factor of the momentum"
    )
    group.add_argument(
        "--orth-dion-state-dtype", choices=tuple(STATE_DTYPES), help=f"{only}element type of V"
    )


def require_meaning(options: argparse.Namespace, source: str) -> None:
    """Refuse flags that change nothing.

    Args:
        options: Of ``convert``; a flag that was not given is None or empty.
        source: Whose state the checkpoint holds.

    Raises:
        CheckpointError: With all such flags.
    """
    target = options.to
    idle: dict[str, str] = {}
    if target != "orth_dion":
        idle |= _ORTH_DION_FLAGS
    if target in ("adam", "muon"):
        idle |= _MATRIX_FLAGS
    if target == "adam":
        idle |= {"momentum_start": "--momentum-start", "heavy_ball": "--heavy-ball"}
    found = [flag for dest, flag in idle.items() if getattr(options, dest) not in (None, [])]
    why = f"no effect with --to {target}"
    if not found and options.heavy_ball is not None and source == "adam":
        found, why = ["--heavy-ball"], "no effect on Adam's moments, which are averages"
    if not found and options.heavy_ball is not None and options.momentum_start == "zero":
        found, why = ["--heavy-ball"], "no effect with --momentum-start zero"
    if found:
        raise CheckpointError(f"{', '.join(found)} has {why}; leave it out.")


def matrix_settings(options: argparse.Namespace, common: CommonState) -> MatrixConfig:
    """Settings of the target's matrices: flags first, then the saved run's, then the defaults.

    Raises:
        CheckpointError: A rule or a value that does not exist.
    """
    changes: dict[str, Any] = {}
    for dest, (field, _) in _FLAGS.items():
        value = getattr(options, dest, None)
        if value is None:
            value = common.argument(dest)
        if value is not None:
            changes[field] = value
    settings = replace(
        MatrixConfig(optimizer=options.to, scale_mode=SCALE_MODE.get(options.to, "")),
        rules=_rules(options, common),
        **changes,
    )
    if not 0.0 < settings.rank_fraction <= 1.0:
        raise CheckpointError(
            f"--orth-dion-rank-fraction is {settings.rank_fraction}; it must be in (0, 1]."
        )
    if settings.min_dim < 1:
        raise CheckpointError(f"--matrix-min-dim is {settings.min_dim}; it must be at least 1.")
    if settings.rank_multiple_of < 1:
        raise CheckpointError(
            f"--orth-dion-rank-multiple-of is {settings.rank_multiple_of}; it must be at least 1."
        )
    if not 0.0 <= settings.momentum < 1.0:
        raise CheckpointError(f"--orth-dion-momentum is {settings.momentum}; it must be in [0, 1).")
    return settings


def _rules(options: argparse.Namespace, common: CommonState) -> tuple[Rule, ...]:
    file, texts = options.matrix_rules, list(options.matrix_rule)
    if file is None and not texts and options.to not in ("adam", "muon"):
        file = common.argument("matrix_rules")
        texts = list(common.argument("matrix_rule") or ())
        if file is not None and not Path(file).exists():
            raise CheckpointError(
                f"the checkpoint's run had --matrix-rules {file}, which is not here: name the file."
            )
    try:
        from_file = () if file is None else load_rules(file)
        return (*from_file, *(parse_rule(text) for text in texts))
    except ValueError as error:
        raise CheckpointError(f"{error}.") from error


def saved_flags(settings: ConvertSettings) -> dict[str, Any]:
    """Our flags as a run of the target would have saved them."""
    found = {dest: getattr(settings.matrix, field) for dest, (field, _) in _FLAGS.items()}
    found["matrix_rules"] = None
    found["matrix_rule"] = [_text(rule) for rule in settings.matrix.rules]
    return found


def _text(rule: Rule) -> str:
    fields = ("optimizer", "split", "lr_mult", "wd_mult")
    values = ((field, getattr(rule, field)) for field in fields)
    return f"{rule.pattern}:" + ",".join(f"{k}={v}" for k, v in values if v is not None)


def parse_version(text: str) -> tuple[int, int]:
    """(major, minor) of ``0.19`` or ``0.19.2``.

    Raises:
        argparse.ArgumentTypeError: It is no version.
    """
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None or (int(match[1]), int(match[2])) < (0, 5):
        raise argparse.ArgumentTypeError(f"'{text}' is no version; type for example 0.19")
    return int(match[1]), int(match[2])
