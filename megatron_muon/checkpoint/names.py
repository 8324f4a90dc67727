"""Names of optimizer state in a distributed checkpoint.

Every state of a parameter has the key, shape and sharding of the parameter in the model part, with
a prefix: ``optimizer.state.<state>.<model key>``, as in megatron-core for ``fully_reshardable``
Adam and for its own muon. A right factor belongs to one logical matrix and is stored whole under
the name of the matrix.
"""

from __future__ import annotations

import re

MASTER = "fp32_param"
"""Master weights."""

MOMENTUM = "momentum_buffer"
"""Momentum of a matrix, named as in megatron-core's own muon."""

ADAM_STATES = ("exp_avg", "exp_avg_sq")
"""Adam's two moments."""

MASTER_OF_ADAM = "param"
"""Master weights in megatron-core's ``fully_reshardable`` state of Adam."""

RIGHT_FACTOR = "right_factor"
"""Orth-Dion's V of a logical matrix."""

STATES = (MASTER, MOMENTUM, *ADAM_STATES, RIGHT_FACTOR)

_READ = "|".join((*STATES, MASTER_OF_ADAM))
_KEY = re.compile(
    rf"(?:chained_(?P<chained>\d+)\.)?optimizer\.state\.(?P<state>{_READ})\.(?P<name>.+)"
)
_ANY_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:state\.)?(?P<state>[^.]+)\..+")


def state_key(state: str, name: str) -> str:
    """Return the key of a state of a parameter (by model key) or of a matrix (by its name)."""
    return f"optimizer.state.{state}.{name}"


def split_state_key(key: str) -> tuple[str, str] | None:
    """Split a key, also with megatron-core's ``chained_<i>.``, into (state, name); else None."""
    match = _KEY.fullmatch(key)
    return (match["state"], match["name"]) if match else None


def unknown_state(key: str) -> str | None:
    """Return the state of a key if it is none of ``STATES``; None for all other keys."""
    match = _ANY_STATE.fullmatch(key)
    return match["state"] if match and split_state_key(key) is None else None
