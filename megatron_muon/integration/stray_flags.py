"""Settings that were given to an optimizer which does not take them: refused, never ignored."""

from __future__ import annotations

import sys
from typing import Any

from megatron_muon.config import SCALE_MODE, MatrixConfig

MUON_DEFAULTS: dict[str, Any] = {
    "--muon-momentum": 0.9,
    "--muon-nesterov": False,
    "--muon-scale-mode": "spectral",
    "--muon-extra-scale-factor": 1.0,
    "--muon-coefficient-type": "quintic",
    "--muon-num-ns-steps": 5,
}
"""Megatron's defaults of its own flags that dmuon takes and Orth-Dion does not."""

BOTH: dict[str, Any] = {
    "--matrix-lr": None,
    "--matrix-min-lr": None,
    "--matrix-weight-decay": None,
    "--matrix-rule": [],
    "--matrix-rules": None,
    "--matrix-min-dim": MatrixConfig.min_dim,
    "--matrix-no-split-gate-up": True,
    "--matrix-no-split-mla": True,
    "--matrix-no-split-ssm": True,
    "--matrix-split-heads": False,
    "--matrix-exchange-buffer-mb": MatrixConfig.exchange_buffer_mb,
    "--matrix-ranks-per-node": None,
}

OWN: dict[str, dict[str, Any]] = {
    "dmuon": {
        "--dmuon-coefficients": None,
        "--dmuon-compute-dtype": MatrixConfig.compute_dtype,
        "--dmuon-exchange-dtype": MatrixConfig.exchange_dtype,
        "--dmuon-split-ranks": MatrixConfig.split_ranks,
        "--dmuon-split-min-gflop": MatrixConfig.split_min_gflop,
        "--dmuon-cost-table": None,
    },
    "orth_dion": {
        "--orth-dion-rank-fraction": MatrixConfig.rank_fraction,
        "--orth-dion-rank-multiple-of": MatrixConfig.rank_multiple_of,
        "--orth-dion-momentum": MatrixConfig.momentum,
        "--orth-dion-right-factor": MatrixConfig.right_factor,
        "--orth-dion-scale-mode": SCALE_MODE["orth_dion"],
        "--orth-dion-rank-compensation": False,
        "--orth-dion-state-dtype": MatrixConfig.state_dtype,
        "--orth-dion-exchange": MatrixConfig.exchange,
    },
}

SPLIT_FROM = "--dmuon-split-min-gflop"
IDLE_SPLIT = (
    f"{SPLIT_FROM} has no effect without --dmuon-split-ranks: remove it or type "
    "--dmuon-split-ranks 8"
)


def stray_setting_problems(settings: MatrixConfig) -> list[str]:
    """The same as ``stray_flag_problems`` of settings made in Python, by the same table."""
    takes = {**OWN, "dmuon": OWN["dmuon"] | MUON_DEFAULTS}
    # Orth-Dion's has no flag.
    own = {"extra_scale_factor", *map(_field, takes.get(settings.optimizer, ()))}
    default = MatrixConfig(optimizer=settings.optimizer)
    problems = [
        f"MatrixConfig.{field} has no effect with {settings.optimizer}: leave it at "
        f"{getattr(default, field)!r} or set optimizer='{optimizer}'"
        for optimizer, flags in takes.items()
        for field in map(_field, flags)
        if field not in own and getattr(settings, field) != getattr(default, field)
    ]
    is_idle = settings.split_ranks == 1 and settings.split_min_gflop != default.split_min_gflop
    if settings.optimizer == "dmuon" and is_idle:
        problems.append(IDLE_SPLIT)
    return problems


def _field(flag: str) -> str:
    """Field of ``MatrixConfig`` that a flag of one optimizer sets."""
    name = destination(flag)
    for prefix in ("dmuon_", "orth_dion_", "muon_"):
        name = name.removeprefix(prefix)
    return name


def stray_flag_problems(args: Any) -> list[str]:
    """A sentence for every flag of ours, or of muon's, that ``--optimizer`` does not take.

    Args:
        args: Megatron's arguments before ``translate_arguments`` changed any.
    """
    chosen = args.optimizer
    problems = [
        _sentence(flag, chosen, f"--optimizer {' or --optimizer '.join(OWN)}")
        for flag in _given(args, BOTH)
        if chosen not in OWN
    ]
    for optimizer, flags in OWN.items():
        if chosen != optimizer:
            problems += [
                _sentence(flag, chosen, f"--optimizer {optimizer}") for flag in _given(args, flags)
            ]
    split_from = {SPLIT_FROM: MatrixConfig.split_min_gflop}
    if chosen == "dmuon" and args.dmuon_split_ranks == 1 and _given(args, split_from):
        problems.append(IDLE_SPLIT)
    if chosen == "orth_dion":
        problems += [
            _sentence(flag, chosen, "--optimizer dmuon") for flag in _given(args, MUON_DEFAULTS)
        ]
    elif args.muon_scale_mode == "match_rms_adamw" and chosen != "dmuon":
        problems.append(
            "--muon-scale-mode match_rms_adamw is dmuon's: type --optimizer dmuon, or "
            "--muon-scale-mode spectral --muon-extra-scale-factor 0.2"
            if chosen == "muon"
            else "--muon-scale-mode has no effect without --optimizer dmuon: remove it"
        )
    return problems


def _given(args: Any, defaults: dict[str, Any]) -> list[str]:
    """Flags whose value is not the default, or that stand on the command line with it."""
    typed = {token.partition("=")[0] for token in sys.argv[1:]}
    return [
        flag
        for flag, default in defaults.items()
        if flag in typed or getattr(args, destination(flag)) != default
    ]


def destination(flag: str) -> str:
    """Attribute of the arguments that a flag sets."""
    return flag.removeprefix("--").replace("-", "_").replace("_no_split", "_split")


def _sentence(flag: str, chosen: str, instead: str) -> str:
    return f"{flag} has no effect with --optimizer {chosen}: remove it or type {instead}"
