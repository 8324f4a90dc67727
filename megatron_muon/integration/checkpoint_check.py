"""Does a checkpoint hold the state that this run's optimizer asks for? Asked before anything loads.

torch's loader answers the same question with a traceback that lists every key of the checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_muon.config import OPTIMIZERS
from megatron_muon.integration.combined_optimizer import MOMENTUM_KEY, RIGHT_FACTOR_KEY

Shapes = Mapping[str, tuple[int, ...]]
"""Key in the checkpoint to the global shape of its tensor."""

_OURS = re.compile(r"optimizer\.distributed\.dp_group_idx_\d+\.(?P<name>.+)\.(?P<state>[a-z_]+)")
_FACTOR = re.compile(rf"optimizer\.state\.{RIGHT_FACTOR_KEY}\.(?P<name>.+)")
_ADAM_STATES = {"exp_avg", "exp_avg_sq"}

START_ANEW = "--no-load-optim starts the optimizer anew from the checkpoint's weights"


def optimizer_of(keys: Iterator[str] | Mapping[str, Any]) -> str:
    """Which optimizer wrote these keys, in words; empty without any optimizer state."""
    found = [key for key in keys if "optimizer." in key]
    if not found:
        return ""
    if any(_FACTOR.fullmatch(key) for key in found):
        return "orth_dion"
    if any(".gbuf_idx_" in key for key in found):
        return "Megatron's Adam with the distributed optimizer"
    ours = [match for key in found if (match := _OURS.fullmatch(key))]
    if any(match["state"] == MOMENTUM_KEY for match in ours):
        return "dmuon"
    if any(f"optimizer.state.{MOMENTUM_KEY}." in key for key in found):
        return "megatron-core's muon"
    if any("optimizer.state.exp_avg" in key for key in found):
        return "Megatron's Adam"
    return "another optimizer"


def another_optimizer(saved: str, ours: str, *, to_type: str | None = None) -> str:
    """The sentence on state of ``saved`` in a run of ``ours``; ``to_type`` would go on with it."""
    with_it = f"type --optimizer {to_type} to go on with it, or " if to_type else ""
    return (
        f"the checkpoint holds optimizer state of {saved}, and this run is --optimizer "
        f"{ours}: {with_it}{START_ANEW}"
    )


def checkpoint_problems(wanted: Shapes, found: Shapes, optimizer: str) -> list[str]:
    """Sentences on what a checkpoint lacks; empty when it can be loaded.

    Args:
        wanted: What this rank asks for.
        found: What the checkpoint holds of optimizer state.
        optimizer: ``dmuon`` or ``orth_dion``, what this run trains with.
    """
    saved = optimizer_of(found)
    if not saved:
        return [f"the checkpoint holds no optimizer state: {START_ANEW}"]
    if saved != optimizer:
        known = saved if saved in OPTIMIZERS else None
        return [another_optimizer(saved, optimizer, to_type=known)]
    problems: dict[str, str] = {}
    names = {match["name"]: match["state"] for key in found if (match := _OURS.fullmatch(key))}
    for key, shape in wanted.items():
        kind, sentence = _problem(key, shape, found.get(key), names)
        if kind:
            problems.setdefault(kind, sentence)
    return list(problems.values())


def _problem(
    key: str, shape: tuple[int, ...], saved: tuple[int, ...] | None, names: Mapping[str, str]
) -> tuple[str, str]:
    """(kind, sentence) on one key, empty where it fits. One sentence of a kind is enough."""
    if saved == shape:
        return "", ""
    factor = _FACTOR.fullmatch(key)
    if factor and saved is not None:
        short = shape[0]
        same = f" {saved[1] / short:g} (and the --orth-dion-rank-multiple-of it had)"
        return "rank", (
            f"V of {factor['name']} has rank {saved[1]} in the checkpoint and {shape[1]} here: "
            f"type --orth-dion-rank-fraction{same}, or {START_ANEW}"
        )
    ours = _OURS.fullmatch(key)
    name = ours["name"] if ours else factor["name"] if factor else key
    if saved is not None:
        return "size", (
            f"{name} has {math.prod(saved):,} elements in the checkpoint and {math.prod(shape):,} "
            "here: it is another model, or was saved at another tensor-parallel size; optimizer "
            f"state loads at the same one only, or {START_ANEW}"
        )
    if ours and name in names:
        then = "Adam" if names[name] in _ADAM_STATES else "the matrix optimizer"
        now = "Adam" if ours["state"] in _ADAM_STATES else "the matrix optimizer"
        if then != now:
            return "rule", (
                f"{name} was trained with {then} in the checkpoint and is with {now} here: give "
                f"the --matrix-rule and --matrix-min-dim of the saved run, or {START_ANEW}"
            )
    return "name", (
        f"{name} has no optimizer state in the checkpoint: it is another model, another pipeline "
        f"layout or another split (--matrix-…, --muon-no-split-qkv); {START_ANEW}"
    )
