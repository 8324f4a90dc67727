"""Compares the state that a run would load with a checkpoint's, before loading.

torch's loader reports a difference as a traceback that lists every key of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_muon.checkpoint.names import ADAM_STATES, MOMENTUM, RIGHT_FACTOR, split_state_key
from megatron_muon.config import OPTIMIZERS

Shapes = Mapping[str, tuple[int, ...]]
"""Key in the checkpoint to the global shape of its tensor."""

RESTART = "--no-load-optim restarts the optimizer from the checkpoint's weights"


def convert_advice(optimizer: str, flags: str = "") -> str:
    """Return the advice to convert another optimizer's state."""
    command = f"python -m megatron_muon.checkpoint convert FOLDER NEW --to {optimizer}{flags}"
    return f"convert its state with {command}, and load NEW"


def optimizer_of(keys: Iterator[str] | Mapping[str, Any]) -> str:
    """Return the name of the optimizer that wrote these keys; empty without optimizer state."""
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


def optimizer_mismatch(saved: str, ours: str, *, to_type: str | None = None) -> str:
    """Return the error for state of ``saved`` in a run of ``ours``; ``to_type`` continues it."""
    resume = f"type --optimizer {to_type} to continue with it, " if to_type else ""
    return (
        f"the checkpoint holds optimizer state of {saved}, and this run uses --optimizer "
        f"{ours}: {resume}{convert_advice(ours)}, or {RESTART}"
    )


def checkpoint_problems(wanted: Shapes, found: Shapes, optimizer: str) -> list[str]:
    """Return an error for each kind of mismatch between the requested and the saved state."""
    saved = optimizer_of(found)
    if not saved:
        return [f"the checkpoint holds no optimizer state: {RESTART}"]
    if saved != optimizer:
        known = saved if saved in OPTIMIZERS else None
        return [optimizer_mismatch(saved, optimizer, to_type=known)]
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
    """Return (kind, error) for one key, empty if it matches; one error per kind is shown."""
    if saved == shape:
        return "", ""
    state, name = split_state_key(key) or ("", key)
    if state == RIGHT_FACTOR and saved is not None:
        short = shape[0]
        same = f" {saved[1] / short:g} (and the saved run's --orth-dion-rank-multiple-of)"
        fraction = f" --orth-dion-rank-fraction {shape[1] / short:g}"
        return "rank", (
            f"V of {name} has rank {saved[1]} in the checkpoint and {shape[1]} here: "
            f"type --orth-dion-rank-fraction{same}, "
            f"{convert_advice('orth_dion', fraction)}, or "
            f"{RESTART}"
        )
    if saved is not None:
        return "size", (
            f"{name} has shape {_by(saved)} in the checkpoint and {_by(shape)} here: it is another "
            f"model; use the flags of the saved one, or {RESTART}"
        )
    if name in states:
        then, now = _trained_with(states[name]), _trained_with({state})
        return "rule", (
            f"{name} was trained with {then} in the checkpoint and is with {now} here: use "
            f"the --matrix-rule and --matrix-min-dim of the saved run, "
            f"{convert_advice(optimizer)} (with those of this run), or {RESTART}"
        )
    return "name", (
        f"{name} has no optimizer state in the checkpoint: it is another model, is split "
        "differently (--matrix-…, --muon-no-split-qkv), or a --matrix-rule names single layers "
        f"in one of the two runs only; {RESTART}"
    )


def _trained_with(states: set[str]) -> str:
    return "Adam" if states & set(ADAM_STATES) else "the matrix optimizer"


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)
