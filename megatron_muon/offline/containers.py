"""Finds the weights and optimizers in a ``torch.save`` file, in any nesting of containers.

Scripts nest weights and the state dicts of one or several optimizers in dicts and lists of their
own. Every tensor of a file must belong to one of them, so that state in an unknown form is not
mistaken for missing state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from megatron_muon.offline.errors import CheckpointError

WEIGHTS: Final = ("model", "module", "model_state_dict", "state_dict", "weights")
"""Keys under which scripts, torch's tutorials, Lightning and DeepSpeed keep weights."""

_Steps = tuple[str | int, ...]
"""Keys that lead to a value in nested dicts and lists."""

FLAT_STATE, FLAT_GROUPS = "state.", "param_groups."
"""Prefixes of a state dict that ``torch.distributed.checkpoint.state_dict`` has flattened."""


@dataclass(kw_only=True)
class Contents:
    """The parts of a file.

    Attributes:
        weights: The weights, by name.
        where: The entry of the weights, empty without weights.
        optimizers: The entry and the state dict of every optimizer, in the file's order.
        unread: Entries without tensors of either, such as ``epoch``.
    """

    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    where: str = ""
    optimizers: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def _label(steps: _Steps) -> str:
    """Return an entry in Python's notation: ``optimizers[0]``, ``app.model``."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return text.removeprefix(".") or "the file itself"


def find_contents(content: Any, path: Path) -> Contents:
    """Find the weights and every optimizer in the value of ``torch.load``."""
    found = Contents()
    if not _visit(content, (), found, path):
        keys = content if isinstance(content, Mapping) else ()
        raise CheckpointError(
            f"{path} holds neither weights nor the state dict of an optimizer: its keys are "
            f"{', '.join(sorted(map(str, keys))[:5]) or 'none'}."
        )
    return found


def _visit(value: Any, steps: _Steps, found: Contents, path: Path) -> bool:
    """Add weights and optimizers to ``found``; return True when there are any in ``value``."""
    if is_flat(value):
        found.optimizers.append((_label(steps), value))
        return True
    if _is_weights(value, is_file=not steps) and (not steps or steps[-1] in WEIGHTS):
        if found.where:
            raise CheckpointError(
                f"{path} has weights as {found.where} and as {_label(steps)}: save only those to "
                "be imported."
            )
        found.where = _label(steps)
        found.weights = {name: v for name, v in value.items() if _is_weight(name, v)}
        found.unread += [_label((*steps, k)) for k in value if k not in found.weights]
        return True
    is_tensor = isinstance(value, torch.Tensor) and value.dim()
    if is_tensor and (value.is_floating_point() or value.is_complex()):
        raise CheckpointError(
            f"{path} has the tensor {_label(steps)}, which belongs neither to weights "
            f"({', '.join(WEIGHTS)}) nor to an optimizer's state dict ('state' and 'param_groups', "
            f"or flattened to '{FLAT_STATE}<name>.<field>'); save it without this entry."
        )
    is_optimizer = _is_state_dict(value)
    if is_optimizer:
        found.optimizers.append((_label(steps), value))
    inner = [
        (key, _visit(child, (*steps, key), found, path))
        for key, child in _children(value)
        if not (is_optimizer and key in ("state", "param_groups"))
    ]
    holds = is_optimizer or any(held for _, held in inner)
    if holds:
        found.unread += [_label((*steps, key)) for key, held in inner if not held]
    return holds


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


def _is_state_dict(value: Any) -> bool:
    """Return True for a value of ``Optimizer.state_dict``."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list | tuple)
    )


def is_flat(value: Any) -> bool:
    """Return True for an optimizer's flattened state dict."""
    return (
        isinstance(value, Mapping)
        and all(isinstance(key, str) for key in value)
        and all(key.startswith((FLAT_STATE, FLAT_GROUPS)) for key in value)
        and any(key.startswith(FLAT_STATE) for key in value)
    )


def _is_weight(name: Any, value: Any) -> bool:
    """Return True for a weight in a model's state dict, not a layer's extra state."""
    return isinstance(value, torch.Tensor) and not str(name).endswith("_extra_state")


def _is_weights(value: Any, *, is_file: bool) -> bool:
    """Return True for a model's state dict; a whole file must consist of tensors only."""
    if not isinstance(value, Mapping):
        return False
    tensors = sum(isinstance(inner, torch.Tensor) for inner in value.values())
    nested = any(isinstance(inner, Mapping) for inner in value.values())
    return tensors > 0 and (tensors == len(value) if is_file else not nested)
