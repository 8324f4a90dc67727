"""Names of optimizer state in a distributed checkpoint.

Every state of a parameter has the parameter's own key, shape and sharding in the model part of the
checkpoint, under a prefix: ``optimizer.state.<state>.<model key>``, as megatron-core names it for
``fully_reshardable`` Adam and for its own muon. A right factor belongs to one logical matrix and is
stored whole under that matrix's name.
"""

from __future__ import annotations

import re

MASTER = "fp32_param"
"""Master weights."""

MOMENTUM = "momentum_buffer"
"""Momentum of a matrix, the name that megatron-core's own muon uses."""

ADAM_STATES = ("exp_avg", "exp_avg_sq")
"""Adam's two moments."""

MASTER_OF_ADAM = "param"
"""Name of the master weights in megatron-core's ``fully_reshardable`` state of Adam."""

RIGHT_FACTOR = "right_factor"
"""Orth-Dion's V of a logical matrix."""

STATES = (MASTER, MOMENTUM, *ADAM_STATES, RIGHT_FACTOR)

_READ = "|".join((*STATES, MASTER_OF_ADAM))
_KEY = re.compile(
    rf"(?:chained_(?P<chained>\d+)\.)?optimizer\.state\.(?P<state>{_READ})\.(?P<name>.+)"
)
_ANY_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:state\.)?(?P<state>[^.]+)\..+")


def state_key(state: str, name: str) -> str:
    """Key of a state of a parameter (by its model key) or of a matrix (by its own name)."""
    return f"optimizer.state.{state}.{name}"


def split_state_key(key: str) -> tuple[str, str] | None:
    """(state, name) of a key, also with megatron-core's ``chained_<i>.``; None for another key."""
    match = _KEY.fullmatch(key)
    return (match["state"], match["name"]) if match else None


def unknown_state(key: str) -> str | None:
    """Name of the state that a key is of, where it is none of ``STATES``; None for other keys."""
    match = _ANY_STATE.fullmatch(key)
    return match["state"] if match and split_state_key(key) is None else None
