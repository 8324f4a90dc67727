"""``export``: a checkpoint as a file of ``torch.save``, keyed by the names of its weights."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_muon.checkpoint.names import MASTER, MOMENTUM, RIGHT_FACTOR
from megatron_muon.offline.common_state import CommonState, add_run_config_flag
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.export_layouts import FORMATS, Exported, convention_of, laid_out
from megatron_muon.offline.index import TensorInfo
from megatron_muon.offline.momenta import Convention, conversion_factor, matrix_convention
from megatron_muon.offline.outputs import Box
from megatron_muon.offline.parameters import model_tensors, require_names, stored_parameters
from megatron_muon.offline.plain_names import Names, PlainTensor, plain_tensors
from megatron_muon.offline.progress import ProgressReport
from megatron_muon.offline.reading import Checkpoint
from megatron_muon.offline.source_state import SourceState, source_state
from megatron_muon.offline.torch_files import ToWrite, tensors_in, write_torch_file

HELP = "write weights and optimizer state as a file of torch.save, keyed by name"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``export``."""
    parser.add_argument("source", help="folder of an iteration, or that a run saves into")
    parser.add_argument("target", type=Path, help="file to write")
    parser.add_argument("--step", type=int, help="iteration of the source; default: the last one")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="plain",
        help="plain: weights and states by name; torch-muon: state dicts of torch.optim.Muon and "
        "AdamW; dion: state dict of microsoft/dion",
    )
    add_name_flags(parser)
    add_run_config_flag(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    parser.add_argument(
        "--dry-run", action="store_true", help="write nothing, print every tensor and its source"
    )


def add_name_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of ``import`` and ``export`` on names outside Megatron."""
    parser.add_argument(
        "--names",
        choices=("megatron", "hf"),
        default="megatron",
        help="of weights in the file: Megatron's own, layers and experts one by one, or those of "
        "Llama, Qwen, Mixtral and DeepSeek models, fused weights taken apart",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="rows of embeddings and output layer that are no padding, which is left out of the "
        "file; default: all rows are in it",
    )


def vocabulary(options: argparse.Namespace) -> int | None:
    """Rows of the vocabulary that are no padding, None for all of them.

    Megatron's saved ``vocab_size`` does not say: a tokenizer may add rows of its own to it.

    Raises:
        CheckpointError: The user's number is none.
    """
    asked: int | None = options.vocab_size
    if asked is not None and asked < 1:
        raise CheckpointError(f"--vocab-size is {asked}; it must be at least 1.")
    return asked


def run(options: argparse.Namespace) -> int:
    """Export."""
    checkpoint = Checkpoint(options.source, options.step, options.run_config)
    if checkpoint.folder.resolve() in options.target.resolve().parents:
        raise CheckpointError(f"{options.target} is inside the source; name another file.")
    content, notes = plan_export(
        checkpoint,
        layout=options.format,
        names=options.names,
        rows=vocabulary(options),
    )
    found = tensors_in(content)
    if options.dry_run:
        for steps, tensor in found:
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            dtype = str(tensor.dtype).removeprefix("torch.")
            print(f"{' / '.join(map(str, steps))}  {shape}  {dtype}")
        print(*notes, sep="\n", end="\n" if notes else "")
        return 0
    report = ProgressReport(sum(tensor.nbytes for _, tensor in found))
    write_torch_file(options.target, content, overwrite=options.overwrite, progress=report)
    report.finish()
    print(*notes, sep="\n", end="\n" if notes else "")
    print(f"written to {options.target}")
    return 0


def plan_export(
    checkpoint: Checkpoint, *, layout: str, names: Names, rows: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Content of the file, its tensors to be read when their turn comes, and what to tell.

    Args:
        checkpoint: The source.
        layout: One of ``FORMATS``.
        names: ``megatron`` or ``hf``.
        rows: Of the vocabulary.

    Raises:
        CheckpointError: It cannot be exported, with the reason.
    """
    model = model_tensors(checkpoint)
    parameters = stored_parameters(model, checkpoint.common)
    require_names(parameters, checkpoint.common)
    source = source_state(checkpoint, parameters, may_lack=True)
    saved = matrix_convention(source.optimizer, checkpoint.common, source.groups, None)
    kept = convention_of(layout, saved)
    factors = _by_parameter(source.factors)
    weights, states = {}, {}
    for plain in plain_tensors(parameters, names, rows):
        box = plain.parameter.box(model[plain.parameter.key])
        if layout != "plain":  # which has a place for both
            box = source.states[plain.parameter.name].get(MASTER, box)
        weights[plain.name] = _to_write(checkpoint, plain, box, box.info.dtype)
        states[plain.name] = _states(checkpoint, source, plain, (saved, kept))
        own = factors.get(plain.parameter.name, {})
        states[plain.name] |= _factors(checkpoint, own, plain)
    exported = Exported(
        iteration=int(checkpoint.common.value.get("iteration", 0)),
        step=source.steps,
        names=names,
        optimizer=source.optimizer,
        momentum=kept,
        settings={} if layout == "plain" else _settings(checkpoint.common, source),
        weights=weights,
        states=states,
    )
    notes = []
    if kept != saved and any(MOMENTUM in state for state in states.values()):
        notes.append(
            f"momenta are kept as {kept.kind} of factor {kept.known:g} there, and were "
            f"{saved.kind}: they are multiplied"
        )
    if layout != "plain":
        notes.append(
            "learning rates, weight decay and the like of the groups are those of the saved run; "
            "the optimizer's own settings are its defaults: look at them before you train"
        )
        notes.append("weights are the fp32 masters, where the run has some")
    return laid_out(layout, exported), notes


def _to_write(checkpoint: Checkpoint, plain: PlainTensor, box: Box, dtype: torch.dtype) -> ToWrite:
    shape = plain.parameter.facts.shape

    def read() -> torch.Tensor:
        whole = box.tensor(checkpoint, shape, dtype)
        return plain.take(whole) if shape else whole

    return ToWrite(shape=plain.shape, dtype=dtype, make=read)


def _states(
    checkpoint: Checkpoint,
    source: SourceState,
    plain: PlainTensor,
    conventions: tuple[Convention, Convention],
) -> dict[str, ToWrite]:
    saved, kept = conventions
    found = {}
    for state, box in source.states[plain.parameter.name].items():
        factor = conversion_factor(saved, kept) if state == MOMENTUM else 1.0
        if factor is None:
            raise CheckpointError(
                f"the momentum of {plain.name} cannot be told from what Orth-Dion kept with "
                "momentum 0; type --format plain."
            )
        found[state] = _to_write(checkpoint, plain, replace(box, factor=factor), torch.float32)
    return found


def _by_parameter(
    factors: Mapping[str, TensorInfo],
) -> Mapping[str, Mapping[str, TensorInfo]]:
    """Right factors by parameter and by matrix, whose name begins with its parameter's."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in factors.items():
        found.setdefault(name.partition("[")[0], {})[name] = info
    return found


def _factors(
    checkpoint: Checkpoint, factors: Mapping[str, TensorInfo], plain: PlainTensor
) -> dict[str, ToWrite]:
    """Right factors: one of a plain matrix; of a fused weight one for each part, named by it."""
    found = {}
    for name, info in factors.items():
        if plain.part and name != plain.matrix:
            continue
        label = RIGHT_FACTOR + name.removeprefix(plain.matrix)
        found[label] = ToWrite(
            shape=info.shape, dtype=info.dtype, make=partial(checkpoint.read, info.key)
        )
    return found


def _settings(common: CommonState, source: SourceState) -> dict[str, Any]:
    """Numbers of the saved run that groups outside Megatron have, too."""
    adam: Mapping[str, Any] = next((g for g in source.groups if "betas" in g), {})
    required = partial(common.required, section="optimizer")
    betas = adam.get("betas") or (required("adam_beta1"), required("adam_beta2"))
    found = {
        "lr": float(adam.get("max_lr") or adam.get("lr") or required("lr")),
        "weight_decay": float(required("weight_decay")),
        "betas": tuple(map(float, betas)),
        "eps": float(adam["eps"] if "eps" in adam else required("adam_eps")),
    }
    if source.optimizer == "orth_dion":
        fraction = float(required("orth_dion_rank_fraction"))
        return found | {"nesterov": False, "rank_fraction": fraction}
    is_muon = source.optimizer in ("muon", "dmuon")
    return found | {"nesterov": bool(is_muon and required("muon_nesterov"))}
