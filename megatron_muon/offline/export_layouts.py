"""How an exported file is laid out, for whom it is meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_muon.checkpoint.names import ADAM_STATES, MOMENTUM, RIGHT_FACTOR
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.foreign import PLAIN_FORMAT
from megatron_muon.offline.momenta import Convention
from megatron_muon.offline.torch_files import ToWrite

FORMATS = ("plain", "torch-muon", "dion")

_MUON = {"cautious_wd": False, "nesterov": False, "flatten": False, "adjust_lr": "spectral_norm"}
_DION = {"rank_multiple_of": 1, "oversample": 1.25}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What is exported, by plain name.

    Attributes:
        iteration: Of the checkpoint.
        step: Steps that the optimizer has made.
        names: ``megatron`` or ``hf``.
        optimizer: Whose state it was.
        momentum: How momenta are kept in the file.
        settings: Learning rate, weight decay and Adam's numbers of the saved run.
        weights: The weights.
        states: Their states, by our names.
    """

    iteration: int
    step: int
    names: str
    optimizer: str
    momentum: Convention
    settings: Mapping[str, Any]
    weights: Mapping[str, ToWrite]
    states: Mapping[str, Mapping[str, ToWrite]]


def convention_of(layout: str, saved: Convention) -> Convention:
    """How a layout keeps momenta, of a checkpoint that keeps them as ``saved``."""
    if layout == "torch-muon":
        return replace(saved, kind="average")
    if layout == "dion" and saved.kind == "average":
        return replace(saved, kind="sum")
    return saved


def laid_out(layout: str, exported: Exported) -> dict[str, Any]:
    """Content of the file.

    Args:
        layout: One of ``FORMATS``.
        exported: Everything.

    Raises:
        CheckpointError: A state has no place in this layout.
    """
    if layout == "plain":
        momentum = exported.momentum
        has_momenta = any(MOMENTUM in kept for kept in exported.states.values())
        about = {"kind": momentum.kind, "factor": momentum.known} if has_momenta else None
        return {
            "format": PLAIN_FORMAT,
            "iteration": exported.iteration,
            "step": exported.step,
            "names": exported.names,
            "optimizer": exported.optimizer,
            "momentum": about,
            "model": dict(exported.weights),
            "state": {name: dict(kept) for name, kept in exported.states.items() if kept},
        }
    if layout == "torch-muon":
        return {"model": dict(exported.weights), **_of_torch(exported)}
    return {"model": dict(exported.weights), "optimizer": _of_dion(exported)}


def _split(exported: Exported) -> tuple[list[str], list[str]]:
    """Names with a momentum, and names with Adam's state."""
    matrices = [name for name, kept in exported.states.items() if MOMENTUM in kept]
    adam = [name for name, kept in exported.states.items() if ADAM_STATES[0] in kept]
    return matrices, adam


def _of_torch(exported: Exported) -> dict[str, Any]:
    """State dicts of torch.optim.Muon and of torch.optim.AdamW, a group each."""
    matrices, adam = _split(exported)
    numbers = exported.settings
    flat = [name for name in matrices if len(exported.states[name][MOMENTUM].shape) != 2]
    if flat:
        raise CheckpointError(
            f"torch.optim.Muon takes matrices only, and {flat[0]} has shape "
            f"{exported.states[flat[0]][MOMENTUM].shape}; type --format plain."
        )
    muon_group = {
        "lr": numbers["lr"],
        "weight_decay": numbers["weight_decay"],
        "momentum": exported.momentum.known if matrices else 0.0,
        "nesterov": numbers["nesterov"],
        "ns_coefficients": (3.4445, -4.775, 2.0315),
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": None,
    }
    adam_group = {
        "lr": numbers["lr"],
        "betas": tuple(numbers["betas"]),
        "eps": numbers["eps"],
        "weight_decay": numbers["weight_decay"],
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    }
    step = ToWrite(
        shape=(),
        dtype=torch.float32,
        make=lambda: torch.tensor(float(exported.step)),
    )
    return {
        "muon": _state_dict(
            [(muon_group, matrices)],
            {name: {"momentum_buffer": exported.states[name][MOMENTUM]} for name in matrices},
        ),
        "adamw": _state_dict(
            [(adam_group, adam)],
            {
                name: {"step": step, **{s: exported.states[name][s] for s in ADAM_STATES}}
                for name in adam
            },
        ),
    }


def _of_dion(exported: Exported) -> dict[str, Any]:
    """State dict of microsoft/dion's Muon or Dion, with its AdamW in a group of its own."""
    matrices, adam = _split(exported)
    numbers = exported.settings
    algorithm = "dion" if exported.momentum.kind == "dion" else "muon"
    lacking = [name for name in matrices if RIGHT_FACTOR not in exported.states[name]]
    if algorithm == "dion" and lacking:
        raise CheckpointError(
            f"{lacking[0]} has no right factor of its own, which Dion needs; type --names hf, "
            "where fused weights are taken apart."
        )
    beta1, beta2 = numbers["betas"]
    # Every group has all of the optimizer's settings; loading replaces those it was built with.
    shared = {
        "step": exported.step,
        "lr": numbers["lr"],
        "weight_decay": numbers["weight_decay"],
        "mu": exported.momentum.known,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": numbers["eps"],
        **(_DION if algorithm == "dion" else _MUON),
    }
    if algorithm == "dion":
        shared["rank_fraction"] = numbers["rank_fraction"]
    groups = [
        ({**shared, "algorithm": algorithm}, matrices),
        ({**shared, "algorithm": "adamw"}, adam),
    ]
    states: dict[str, dict[str, ToWrite]] = {}
    for name in matrices:
        kept = exported.states[name]
        states[name] = {"momentum": kept[MOMENTUM]}
        if algorithm == "dion":
            states[name]["Q"] = kept[RIGHT_FACTOR]
    for name in adam:
        first, second = (exported.states[name][state] for state in ADAM_STATES)
        states[name] = {"momentum": first, "variance": second}
    return _state_dict(groups, states)


def _state_dict(
    groups: Sequence[tuple[dict[str, Any], Sequence[str]]],
    states: Mapping[str, Mapping[str, ToWrite]],
) -> dict[str, Any]:
    """As ``Optimizer.state_dict`` of an optimizer that was given named parameters."""
    numbers = {name: i for i, name in enumerate(n for _, names in groups for n in names)}
    return {
        "state": {numbers[name]: dict(kept) for name, kept in states.items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in names], "param_names": list(names)}
            for group, names in groups
            if names
        ],
    }
