"""Settings that were given to an optimizer which does not take them: refused, never ignored."""

from __future__ import annotations

import sys
from typing import Any

from megatron_muon.config import OPTIMIZERS, Flag, MatrixConfig
from megatron_muon.flags import FLAGS

SPLIT_FROM = "--dmuon-split-min-gflop"
IDLE_SPLIT = f"{SPLIT_FROM} has no effect with --dmuon-split-ranks 1: remove one of them"


def stray_setting_problems(settings: MatrixConfig) -> list[str]:
    """The same as ``stray_flag_problems`` of settings made in Python, by the same table."""
    if settings.optimizer not in OPTIMIZERS:
        return []
    default = MatrixConfig(optimizer=settings.optimizer)
    changed = [f for f in FLAGS if getattr(settings, f.field) != getattr(default, f.field)]
    taken = {flag.field for flag in FLAGS if settings.optimizer in flag.setting_of}
    problems = [
        f"MatrixConfig.{flag.field} has no effect with {settings.optimizer}: leave it at "
        f"{getattr(default, flag.field)!r} or set optimizer='{flag.optimizers[0]}'"
        for flag in changed
        if flag.field not in taken
    ]
    is_idle = settings.split_ranks == 1 and any(flag.name == SPLIT_FROM for flag in changed)
    return [*problems, IDLE_SPLIT] if settings.optimizer == "dmuon" and is_idle else problems


def stray_flag_problems(args: Any) -> list[str]:
    """A sentence for every flag of ours, or of muon's, that ``--optimizer`` does not take.

    Args:
        args: Megatron's arguments before ``translate_arguments`` changed any.
    """
    chosen = args.optimizer
    given = [flag for flag in FLAGS if _is_given(args, flag)]
    problems = [
        f"{flag.name} has no effect with --optimizer {chosen}: remove it or type --optimizer "
        + " or --optimizer ".join(flag.optimizers)
        for flag in given
        if chosen not in flag.optimizers and (chosen in OPTIMIZERS or not flag.is_megatron_flag)
    ]
    is_idle = args.dmuon_split_ranks == 1 and any(flag.name == SPLIT_FROM for flag in given)
    if chosen == "dmuon" and is_idle:
        problems.append(IDLE_SPLIT)
    if chosen not in OPTIMIZERS and args.muon_scale_mode == "match_rms_adamw":
        problems.append(
            "--muon-scale-mode match_rms_adamw is dmuon's: type --optimizer dmuon, or "
            "--muon-scale-mode spectral --muon-extra-scale-factor 0.2"
            if chosen == "muon"
            else "--muon-scale-mode has no effect without --optimizer dmuon: remove it"
        )
    return problems


def _is_given(args: Any, flag: Flag) -> bool:
    """Whether the value is not the default, or the flag stands on the command line with it."""
    typed = {token.partition("=")[0] for token in sys.argv[1:]}
    return flag.name in typed or getattr(args, flag.dest) != flag.default
