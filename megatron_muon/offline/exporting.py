"""``export``: writes a checkpoint as a ``torch.save`` file, keyed by weight names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from megatron_muon.checkpoint.names import ADAM_STATES, MASTER, MOMENTUM, RIGHT_FACTOR
from megatron_muon.offline.common_state import add_run_config_flag
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.foreign import PLAIN_FORMAT
from megatron_muon.offline.momenta import Convention, conversion_factor
from megatron_muon.offline.outputs import Box, described
from megatron_muon.offline.plain_names import (
    Names,
    PlainTensor,
    add_name_flags,
    plain_tensors,
    vocabulary,
)
from megatron_muon.offline.progress import ProgressReport
from megatron_muon.offline.reading import Checkpoint
from megatron_muon.offline.source_state import SourceState
from megatron_muon.offline.torch_files import ToWrite, tensors_in, write_torch_file

HELP = "write weights and optimizer state as a torch.save file, keyed by name"

_MUON: Final = {
    "cautious_wd": False,
    "nesterov": False,
    "flatten": False,
    "adjust_lr": "spectral_norm",
}
_DION: Final = {"rank_multiple_of": 1, "oversample": 1.25}
"""Default settings of microsoft/dion's optimizers."""

_TORCH_MUON: Final = {
    "ns_coefficients": (3.4445, -4.775, 2.0315),
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": None,
}
_TORCH_ADAMW: Final = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""Default settings of torch's optimizers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``export``."""
    parser.add_argument("source", help="folder of an iteration, or that a run saves into")
    parser.add_argument("target", type=Path, help="file to write")
    parser.add_argument("--step", type=int, help="iteration of the source; default: the last one")
    parser.add_argument(
        "--format",
        choices=("plain", "torch-muon", "dion"),
        default="plain",
        help="plain: weights and states by name; torch-muon: state dicts of torch.optim.Muon and "
        "AdamW; dion: state dict of microsoft/dion",
    )
    add_name_flags(parser)
    add_run_config_flag(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_argument(
        "--dry-run", action="store_true", help="write nothing, print every tensor and its source"
    )


def run(options: argparse.Namespace) -> int:
    """Export."""
    checkpoint = Checkpoint(options.source, options.step, options.run_config)
    if checkpoint.folder.resolve() in options.target.resolve().parents:
        raise CheckpointError(f"{options.target} is inside the source; name another file.")
    export = _Export(checkpoint, options.format, options.names, vocabulary(options))
    content, notes = export.content(), list(export.notes())
    found = tensors_in(content)
    if options.dry_run:
        for steps, tensor in found:
            print(f"{' / '.join(map(str, steps))}  {described(tensor.shape, tensor.dtype)}")
    else:
        report = ProgressReport(sum(tensor.nbytes for _, tensor in found))
        write_torch_file(options.target, content, overwrite=options.overwrite, progress=report)
        report.finish()
        notes.append(f"written to {options.target}")
    print(*notes, sep="\n", end="\n" if notes else "")
    return 0


class _Export:
    """The content of a file, whose tensors are read when they are written."""

    def __init__(self, checkpoint: Checkpoint, layout: str, names: Names, rows: int | None) -> None:
        self.checkpoint, self.layout, self.names = checkpoint, layout, names
        self.source = SourceState(checkpoint, may_lack=True)
        self.saved = self.source.momentum_convention()
        self.momentum = _convention_of(layout, self.saved)
        self.weights: dict[str, ToWrite] = {}
        self.states: dict[str, dict[str, ToWrite]] = {}
        for plain in plain_tensors(self.source.parameters, names, rows):
            states = self.source.states[plain.parameter.name]
            box = plain.parameter.box(self.source.model[plain.parameter.key])
            if layout != "plain":  # which stores both
                box = states.get(MASTER, box)
            self.weights[plain.name] = self._to_write(plain, box, box.info.dtype)
            self.states[plain.name] = dict(self._states(plain, states))

    def _states(
        self, plain: PlainTensor, states: Mapping[str, Box]
    ) -> Iterator[tuple[str, ToWrite]]:
        for state, box in states.items():
            factor = conversion_factor(self.saved, self.momentum) if state == MOMENTUM else 1.0
            if factor is None:
                raise CheckpointError(
                    f"the momentum of {plain.name} cannot be recovered from Orth-Dion's with "
                    "momentum 0; type --format plain."
                )
            yield state, self._to_write(plain, replace(box, factor=factor), torch.float32)
        # One right factor of a plain matrix; of a fused weight one per part, with its name.
        for name, info in self.source.factors.items():
            is_own = name.partition("[")[0] == plain.parameter.name
            if is_own and (name == plain.matrix or not plain.part):
                read = partial(self.checkpoint.read, info.key)
                factor_of = RIGHT_FACTOR + name.removeprefix(plain.matrix)
                yield factor_of, ToWrite(shape=info.shape, dtype=info.dtype, make=read)

    def _to_write(self, plain: PlainTensor, box: Box, dtype: torch.dtype) -> ToWrite:
        def read() -> torch.Tensor:
            return plain.take(box.tensor(self.checkpoint, plain.parameter.facts.shape, dtype))

        return ToWrite(shape=plain.shape, dtype=dtype, make=read)

    def notes(self) -> Iterator[str]:
        """Yield sentences for the user."""
        saved, target = self.saved, self.momentum
        if target != saved and any(MOMENTUM in states for states in self.states.values()):
            yield (
                f"momenta are rescaled from the convention {saved.kind} to {target.kind} of factor "
                f"{target.known:g}"
            )
        if self.layout != "plain":
            yield (
                "learning rate, weight decay, betas and eps of the groups are those of the saved "
                "run; all other settings are the optimizer's defaults: check them before training"
            )
            yield "weights are the fp32 masters, where the run has them"

    # ---- layouts ------------------------------------------------------------------------------

    def content(self) -> dict[str, Any]:
        """Return the content of the file."""
        if self.layout == "torch-muon":
            return {"model": self.weights, **self._of_torch()}
        if self.layout == "dion":
            return {"model": self.weights, "optimizer": self._of_dion()}
        has_momenta = any(MOMENTUM in states for states in self.states.values())
        kept = self.momentum
        return {
            "format": PLAIN_FORMAT,
            "iteration": int(self.source.common.value.get("iteration", 0)),
            "step": self.source.steps,
            "names": self.names,
            "optimizer": self.source.optimizer,
            "momentum": {"kind": kept.kind, "factor": kept.known} if has_momenta else None,
            "model": self.weights,
            "state": {name: states for name, states in self.states.items() if states},
        }

    def _with(self, state: str) -> list[str]:
        """Return the names that have a state."""
        return [name for name, states in self.states.items() if state in states]

    def _of_torch(self) -> dict[str, Any]:
        """Return state dicts of torch.optim.Muon and torch.optim.AdamW, one group each."""
        matrices, adam = self._with(MOMENTUM), self._with(ADAM_STATES[0])
        for name in matrices:
            shape = self.states[name][MOMENTUM].shape
            if len(shape) != 2:
                raise CheckpointError(
                    f"torch.optim.Muon supports matrices only, and {name} has shape {shape}; type "
                    "--format plain."
                )
        numbers = _settings(self.source)
        shared = {"lr": numbers["lr"], "weight_decay": numbers["weight_decay"]}
        muon_group = {
            **shared,
            "momentum": self.momentum.known if matrices else 0.0,
            "nesterov": numbers["nesterov"],
            **_TORCH_MUON,
        }
        adam_group = {**shared, "betas": numbers["betas"], "eps": numbers["eps"], **_TORCH_ADAMW}
        count = float(self.source.steps)
        step = ToWrite(shape=(), dtype=torch.float32, make=lambda: torch.tensor(count))
        muon_states = {name: {MOMENTUM: self.states[name][MOMENTUM]} for name in matrices}
        adam_states = {
            name: {"step": step, **{state: self.states[name][state] for state in ADAM_STATES}}
            for name in adam
        }
        return {
            "muon": _state_dict([(muon_group, matrices)], muon_states),
            "adamw": _state_dict([(adam_group, adam)], adam_states),
        }

    def _of_dion(self) -> dict[str, Any]:
        """Return a state dict of microsoft/dion's Muon or Dion, with AdamW as a second group."""
        matrices, adam = self._with(MOMENTUM), self._with(ADAM_STATES[0])
        is_dion = self.momentum.kind == "dion"
        states: dict[str, dict[str, ToWrite]] = {}
        for name in matrices:
            states[name] = {"momentum": self.states[name][MOMENTUM]}
            if is_dion and RIGHT_FACTOR not in self.states[name]:
                raise CheckpointError(
                    f"{name} has no single right factor, which Dion requires; type --names hf, "
                    "which splits fused weights."
                )
            if is_dion:
                states[name]["Q"] = self.states[name][RIGHT_FACTOR]
        for name in adam:
            first, second = (self.states[name][state] for state in ADAM_STATES)
            states[name] = {"momentum": first, "variance": second}
        numbers = _settings(self.source)
        # Every group has all settings of the optimizer, since loading replaces the constructor's.
        shared = {
            "step": self.source.steps,
            "lr": numbers["lr"],
            "weight_decay": numbers["weight_decay"],
            "mu": self.momentum.known,
            "beta1": numbers["betas"][0],
            "beta2": numbers["betas"][1],
            "epsilon": numbers["eps"],
            **(_DION | {"rank_fraction": numbers["rank_fraction"]} if is_dion else _MUON),
        }
        groups = [
            ({**shared, "algorithm": "dion" if is_dion else "muon"}, matrices),
            ({**shared, "algorithm": "adamw"}, adam),
        ]
        return _state_dict(groups, states)


def _convention_of(layout: str, saved: Convention) -> Convention:
    """Return the convention of a layout for momenta of a saved convention."""
    if layout == "torch-muon":
        return replace(saved, kind="average")
    if layout == "dion" and saved.kind == "average":
        return replace(saved, kind="sum")
    return saved


def _settings(source: SourceState) -> dict[str, Any]:
    """Return the settings of the saved run that groups outside Megatron also have."""
    adam: Mapping[str, Any] = next((g for g in source.groups if "betas" in g), {})
    required = partial(source.common.required, section="optimizer")
    betas = adam.get("betas") or (required("adam_beta1"), required("adam_beta2"))
    found = {
        "lr": float(adam.get("max_lr") or adam.get("lr") or required("lr")),
        "weight_decay": float(required("weight_decay")),
        "betas": tuple(map(float, betas)),
        "eps": float(adam["eps"] if "eps" in adam else required("adam_eps")),
        "nesterov": False,
    }
    if source.optimizer == "orth_dion":
        found["rank_fraction"] = float(required("orth_dion_rank_fraction"))
    elif source.optimizer in ("muon", "dmuon"):
        found["nesterov"] = bool(required("muon_nesterov"))
    return found


def _state_dict(
    groups: Sequence[tuple[dict[str, Any], Sequence[str]]],
    states: Mapping[str, Mapping[str, ToWrite]],
) -> dict[str, Any]:
    """Build the ``Optimizer.state_dict`` of an optimizer with named parameters."""
    numbers = {name: i for i, name in enumerate(n for _, names in groups for n in names)}
    return {
        "state": {numbers[name]: kept for name, kept in states.items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in names], "param_names": list(names)}
            for group, names in groups
            if names
        ],
    }
