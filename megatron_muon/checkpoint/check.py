"""Compares the state that a run's optimizer loads with a checkpoint's, before anything loads.

torch's loader reports a difference with a traceback that lists every key of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_muon.checkpoint.names import ADAM_STATES, MOMENTUM, RIGHT_FACTOR, split_state_key
from megatron_muon.config import OPTIMIZERS

Shapes = Mapping[str, tuple[int, ...]]
"""Key in the checkpoint to the global shape of its tensor."""

START_ANEW = "--no-load-optim starts the optimizer anew from the checkpoint's weights"


def convert_it(optimizer: str, flags: str = "") -> str:
    """The command that converts another optimizer's state to this one's."""
    command = f"python -m megatron_muon.checkpoint convert FOLDER NEW --to {optimizer}{flags}"
    return f"convert its state with {command}, and load NEW"


def optimizer_of(keys: Iterator[str] | Mapping[str, Any]) -> str:
    """Which optimizer wrote these keys, in words; empty without any optimizer state."""
    found = [key for key in keys if "optimizer." in key]
    if not found:
        return ""
    if any(".gbuf_idx_" in key for key in found):
        return "Megatron's Adam with the distributed optimizer"
    states = {known[0] for key in found if (known := split_state_key(key))}
    if RIGHT_FACTOR in states:
        return "orth_dion"
    if MOMENTUM in states:
        is_chained = any(key.startswith("chained_") for key in found)
        return "megatron-core's muon" if is_chained else "dmuon"
    return "Megatron's Adam" if states else "another optimizer"


def another_optimizer(saved: str, ours: str, *, to_type: str | None = None) -> str:
    """The sentence on state of ``saved`` in a run of ``ours``; ``to_type`` would go on with it."""
    with_it = f"type --optimizer {to_type} to go on with it, " if to_type else ""
    return (
        f"the checkpoint holds optimizer state of {saved}, and this run is --optimizer "
        f"{ours}: {with_it}{convert_it(ours)}, or {START_ANEW}"
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
    states: dict[str, set[str]] = {}
    for key in found:
        state_and_name = split_state_key(key)
        if state_and_name:
            states.setdefault(state_and_name[1], set()).add(state_and_name[0])
    for key, shape in wanted.items():
        kind, sentence = _problem(key, shape, found.get(key), states, optimizer)
        if kind:
            problems.setdefault(kind, sentence)
    return list(problems.values())


def _problem(
    key: str,
    shape: tuple[int, ...],
    saved: tuple[int, ...] | None,
    states: Mapping[str, set[str]],
    optimizer: str,
) -> tuple[str, str]:
    """(kind, sentence) on one key, empty where it fits. One sentence of a kind is enough."""
    if saved == shape:
        return "", ""
    state, name = split_state_key(key) or ("", key)
    if state == RIGHT_FACTOR and saved is not None:
        short = shape[0]
        same = f" {saved[1] / short:g} (and the --orth-dion-rank-multiple-of it had)"
        return "rank", (
            f"V of {name} has rank {saved[1]} in the checkpoint and {shape[1]} here: "
            f"type --orth-dion-rank-fraction{same}, "
            f"{convert_it('orth_dion', f' --orth-dion-rank-fraction {shape[1] / short:g}')}, or "
            f"{START_ANEW}"
        )
    if saved is not None:
        return "size", (
            f"{name} has shape {_by(saved)} in the checkpoint and {_by(shape)} here: it is another "
            f"model; give the flags of the saved one, or {START_ANEW}"
        )
    if name in states:
        then, now = _trained_with(states[name]), _trained_with({state})
        return "rule", (
            f"{name} was trained with {then} in the checkpoint and is with {now} here: give "
            f"the --matrix-rule and --matrix-min-dim of the saved run, "
            f"{convert_it(optimizer)} (with those of this run), or {START_ANEW}"
        )
    return "name", (
        f"{name} has no optimizer state in the checkpoint: it is another model, is split in "
        "another way (--matrix-…, --muon-no-split-qkv), or a --matrix-rule names single layers "
        f"in one of the two runs only; {START_ANEW}"
    )


def _trained_with(states: set[str]) -> str:
    return "Adam" if states & set(ADAM_STATES) else "the matrix optimizer"


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)
