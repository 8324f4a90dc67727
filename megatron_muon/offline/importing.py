"""``import``: turns weights and optimizer state of a ``torch.save`` file into a checkpoint.

What the file does not contain (arguments, parameter groups, the schedule, padded shapes) is taken
from a checkpoint of the same model, of any iteration.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megatron_muon.checkpoint.names import (
    ADAM_STATES,
    MASTER,
    MASTER_OF_ADAM,
    MOMENTUM,
    RIGHT_FACTOR,
    split_state_key,
)
from megatron_muon.offline.common_state import add_run_config_flag
from megatron_muon.offline.convert_command import add_writing_flags, for_version, write_output
from megatron_muon.offline.errors import CheckpointError, and_more
from megatron_muon.offline.foreign import Foreign, read_foreign, read_names
from megatron_muon.offline.index import TensorInfo
from megatron_muon.offline.momenta import conversion_factor
from megatron_muon.offline.outputs import (
    OutChunk,
    Output,
    OutTensor,
    Zeros,
    copied,
    in_one_chunk,
    whole,
)
from megatron_muon.offline.parameters import StoredParameter
from megatron_muon.offline.plain_names import (
    FromFile,
    Names,
    PlainTensor,
    add_name_flags,
    explain_kept_prefix,
    plain_tensors,
    vocabulary,
    without_wrappers,
)
from megatron_muon.offline.reading import Checkpoint
from megatron_muon.offline.source_state import SourceState

HELP = "turn a torch.save file into a Megatron checkpoint"

_MAX_SHOWN = 10
"""Maximum number of entries listed on one line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``import``."""
    parser.add_argument("file", type=Path, help="a torch.save file")
    parser.add_argument("target", help="folder to --load from afterwards")
    parser.add_argument(
        "--like",
        required=True,
        metavar="CHECKPOINT",
        help="a checkpoint of the same model and optimizer, of any iteration, which provides "
        "arguments, groups and shapes",
    )
    parser.add_argument("--step", type=int, help="its iteration; default: the last one")
    parser.add_argument(
        "--param-names",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="parameter names, one per line, for a state dict that numbers them; once for each "
        "such optimizer of the file, in its order",
    )
    parser.add_argument(
        "--heavy-ball",
        type=float,
        metavar="BETA",
        help="momentum_buffer is a sum (M = BETA M + G), not an average",
    )
    parser.add_argument(
        "--partial", action="store_true", help="keep the weights of --like that the file lacks"
    )
    add_name_flags(parser)
    add_run_config_flag(parser)
    add_writing_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Import."""
    like = Checkpoint(options.like, options.step, options.run_config)
    beta = options.heavy_ball
    if beta is not None and not 0.0 <= beta < 1.0:
        raise CheckpointError(f"--heavy-ball is {beta}; it must be in [0, 1).")
    names = [read_names(file) for file in options.param_names]
    foreign = read_foreign(options.file, names=names, heavy_ball=beta)
    planned = _Import(foreign, like, options.names, vocabulary(options), options.partial)
    output = for_version(planned.output(), options.megatron_version)
    return write_output(output, options, like)


class _Import:
    """The plan of a checkpoint with the form of ``like`` and the values of a file."""

    def __init__(
        self,
        foreign: Foreign,
        like: Checkpoint,
        names: Names,
        rows: int | None,
        is_partial: bool,
    ) -> None:
        self.like = like
        self.source = SourceState(like)
        self.plain: dict[str, list[PlainTensor]] = {}
        self.by_matrix: dict[str, PlainTensor] = {}
        for plain in plain_tensors(self.source.parameters, names, rows):
            self.plain.setdefault(plain.parameter.name, []).append(plain)
            self.by_matrix[plain.matrix] = plain
        known = {plain.name: plain for found in self.plain.values() for plain in found}
        self.foreign, self.removed = without_wrappers(foreign, known)
        self._require_names(known, is_partial)
        self._require_shapes(known)
        self.kept = self.source.momentum_convention()
        self.zeros: list[str] = []
        self.kept_from_like: list[str] = []
        self.taken: set[tuple[str, str]] = set()
        self.factors: set[float] = set()
        self.fresh_adam: set[str] = set()

    # ---- checks -------------------------------------------------------------------------------

    def _require_names(self, known: Mapping[str, PlainTensor], is_partial: bool) -> None:
        path, folder = self.foreign.path, self.like.folder
        strange = sorted(self.foreign.names - known.keys())
        if strange:
            example = next((n for n in known if "proj" in n or "linear" in n), min(known))
            raise CheckpointError(
                f"{path} has {and_more(strange)}, which {folder} does not have; its names look "
                f"like {example} (--names megatron or hf)"
                f"{explain_kept_prefix(strange, self.foreign, known)}."
            )
        # Also those without state: a router's correction bias is a weight of the model.
        lacking = [name for name in known if name not in self.foreign.weights]
        if self.foreign.weights and lacking and not is_partial:
            raise CheckpointError(
                f"{path} lacks the weight {and_more(lacking)}; type --partial to keep those of "
                f"{folder}."
            )

    def _require_shapes(self, known: Mapping[str, PlainTensor]) -> None:
        entries = [(name, name, weight) for name, weight in self.foreign.weights.items()]
        entries += [
            (name, f"{state} of {name}", values)
            for name, states in self.foreign.states.items()
            for state, values in states.items()
            if not state.startswith(RIGHT_FACTOR)
        ]
        for name, what, found in entries:
            plain = known[name]
            shape, key = tuple(found.shape), plain.parameter.key
            if shape != plain.shape:
                is_vocabulary = ".word_embeddings." in key or "output_layer" in key
                hint = f"; type --vocab-size {shape[0]}" if shape and is_vocabulary else ""
                raise CheckpointError(
                    f"{what} has shape {shape} in {self.foreign.path}, and must have "
                    f"{plain.shape}{hint}."
                )
            stored = self.source.model[key].dtype
            if not found.dtype.is_floating_point and found.dtype != stored:
                raise CheckpointError(
                    f"{what} has dtype {found.dtype} in {self.foreign.path}, which is not a "
                    "floating-point dtype."
                )

    # ---- tensors ------------------------------------------------------------------------------

    def output(self) -> Output:
        """Return the plan of the whole checkpoint."""
        return Output(
            tensors=tuple(self._out(key, info) for key, info in self.like.tensors.items()),
            blobs=self.like.blobs_to_copy(),
            common=self._common(),
            common_in_file=self.like.common.in_file,
            backend=self.like.backend,
            notes=tuple(self._notes()),
        )

    def _out(self, key: str, info: TensorInfo) -> OutTensor:
        if key in self.source.model:
            return self._stacked(key, info, self.source.parameters[key], "")
        known = split_state_key(key)
        if known is None:
            return copied(info, key, "copied")
        state, name = known
        if state == RIGHT_FACTOR:
            return self._factor(key, info, name)
        state = MASTER if state == MASTER_OF_ADAM else state
        found = self.source.parameters.get(name) or (self.plain[name][0].parameter,)
        return self._stacked(key, info, found, state)

    def _stacked(
        self, key: str, info: TensorInfo, found: Sequence[StoredParameter], state: str
    ) -> OutTensor:
        """Return a tensor of the model or of a state, assembled by parameter."""
        word = state or "weight"
        chunks, is_kept = [], []
        for parameter in found:
            value = self._value(parameter, state)
            is_kept.append(value is None)
            if value is None:
                self.kept_from_like.append(f"{word} of {parameter.name}")
            is_whole = len(info.shape) == len(parameter.facts.shape)
            box = whole(info) if is_whole else parameter.box(info)
            chunks.append(OutChunk(offset=box.offset, shape=box.shape, value=value or box))
        if all(is_kept):
            return copied(info, key, "kept from --like")
        rule = f"{word} from {self.foreign.path.name}"
        return OutTensor(
            key=key, shape=info.shape, dtype=info.dtype, chunks=tuple(chunks), rule=rule
        )

    def _value(self, parameter: StoredParameter, state: str) -> FromFile | Zeros | None:
        """Return the source of a parameter's weight or state; None to keep that of ``like``."""
        plain = self.plain[parameter.name]
        states = [self.foreign.states.get(p.name, {}) for p in plain]
        weights = [self.foreign.weights.get(p.name) for p in plain]
        masters = [kept.get(MASTER) for kept in states]
        if not state:
            # If ``like`` has no masters, its fp32 weights are, and receive the file's masters.
            own = self.source.states[parameter.name]
            is_master = own and MASTER not in own and None not in masters
            return self._from(plain, masters if is_master else weights)
        if state == MASTER:
            return self._from(plain, weights if None in masters else masters)
        # A first moment with a zero second moment would make steps far too large.
        together = ADAM_STATES if state in ADAM_STATES else (state,)
        self.taken |= {(p.name, state) for p in plain}
        if any(needed not in kept for kept in states for needed in together):
            self.zeros.append(f"{state} of {parameter.name}")
            if state in ADAM_STATES:
                self.fresh_adam.add(parameter.name)
            return Zeros()
        factor = self._momentum_factor(parameter, plain) if state == MOMENTUM else 1.0
        return self._from(plain, [kept[state] for kept in states], factor)

    def _momentum_factor(self, parameter: StoredParameter, plain: Sequence[PlainTensor]) -> float:
        factors = {conversion_factor(self.foreign.momenta[p.name], self.kept) for p in plain}
        factor = factors.pop()
        if factors:
            raise CheckpointError(
                f"the parts of {parameter.name} have momenta with different factors."
            )
        if factor is None:
            raise CheckpointError(
                "a momentum of Dion with mu 0 does not determine the average; leave it out."
            )
        self.factors.add(factor)
        return factor

    def _from(
        self,
        plain: Sequence[PlainTensor],
        values: Iterable[torch.Tensor | None],
        factor: float = 1.0,
    ) -> FromFile | None:
        parts = list(zip(plain, values, strict=True))
        there = tuple((p, found) for p, found in parts if found is not None)
        if not there:
            return None
        if len(there) < len(parts):
            missing = next(p.name for p, found in parts if found is None)
            raise CheckpointError(
                f"{self.foreign.path} has {there[0][0].name} and lacks {missing}, which is part of "
                f"the same parameter {there[0][0].parameter.name}."
            )
        return FromFile(path=self.foreign.path, parts=there, factor=factor)

    def _factor(self, key: str, info: TensorInfo, matrix: str) -> OutTensor:
        """Return a right factor from the file, else that of ``like``, which training corrects."""
        plain = self.by_matrix.get(matrix)
        name, label = (plain.name, RIGHT_FACTOR) if plain else ("", "")
        base, bracket, part = matrix.partition("[")
        if plain is None and base in self.plain and not self.plain[base][0].part:
            name, label = self.plain[base][0].name, f"{RIGHT_FACTOR}{bracket}{part}"
        values = self.foreign.states.get(name, {}).get(label)
        if values is None:
            self.kept_from_like.append(f"right factor of {matrix}")
            return copied(info, key, "kept from --like")
        self.taken.add((name, label))
        if tuple(values.shape) != info.shape:
            raise CheckpointError(
                f"the right factor of {name} has shape {tuple(values.shape)} in "
                f"{self.foreign.path}, and must have {info.shape} (--orth-dion-rank-fraction)."
            )
        value = FromFile(path=self.foreign.path, parts=((None, values),))
        rule = f"right factor from {self.foreign.path.name}"
        return in_one_chunk(key, info.shape, info.dtype, rule, value)

    # ---- the rest -----------------------------------------------------------------------------

    def _common(self) -> dict[str, object]:
        """Return the common state of ``like`` with the file's step count; 0 if Adam restarts."""
        value = self.like.common.rewritable("the common state of --like")
        steps = {0} if self.fresh_adam else self.foreign.steps
        if steps:
            value["optimizer"] = _with_step(value.get("optimizer"), max(steps))
        return value

    def _notes(self) -> Iterator[str]:
        yield f"iteration, schedule and arguments are those of {self.like.folder}"
        if self.removed:
            yield f"names in the file are those of a wrapped model: {self.removed} was removed"
        if self.foreign.unread:
            shown = ", ".join(self.foreign.unread[:_MAX_SHOWN])
            more = len(self.foreign.unread) - _MAX_SHOWN
            yield f"unused entries of the file: {shown}" + (f" and {more} more" if more > 0 else "")
        yield from _listed(
            "states are not in the file (or only one of Adam's two) and start at zero", self.zeros
        )
        steps = self.foreign.steps
        if self.fresh_adam:
            yield (
                f"Adam restarts on {len(self.fresh_adam)} parameters, so its step count starts at 0"
            )
        elif any(state == ADAM_STATES[0] for _, state in self.taken):
            # Megatron has one step count of Adam for all parameters.
            if not steps:
                yield "the file has no step count of Adam: the count is that of --like"
            elif len(steps) > 1:
                yield (
                    f"Adam has made between {min(steps)} and {max(steps)} steps on the parameters "
                    f"of the file: the count is {max(steps)} for all"
                )
        if self.factors - {1.0}:
            factors = ", ".join(f"{factor:g}" for factor in sorted(self.factors))
            yield f"momenta have another convention in the file: they are multiplied by {factors}"
        unused = sorted(
            f"{state} of {name}"
            for name, states in self.foreign.states.items()
            for state in states
            if state != MASTER and (name, state) not in self.taken
        )
        optimizer = self.source.optimizer
        yield from _listed(
            f"states of the file are left out, as --like, a checkpoint of {optimizer}, has no "
            "such states",
            unused,
        )
        yield from _listed(
            "tensors are not in the file and are those of --like", self.kept_from_like
        )


def _listed(what: str, entries: Sequence[str]) -> Iterator[str]:
    """Yield a counted heading and its entries, if there are any."""
    if entries:
        yield f"{len(entries)} {what}:"
        yield from (f"  {entry}" for entry in entries)


def _with_step(state: object, step: int) -> object:
    """Return a copy with the step count of every group replaced; torch's Adam has a tensor."""
    if isinstance(state, list):
        return [_with_step(value, step) for value in state]
    if not isinstance(state, dict):
        return state
    found = {key: _with_step(value, step) for key, value in state.items()}
    for key in found.keys() & {"step", "common_step"}:
        kept = found[key]
        found[key] = torch.full_like(kept, step) if isinstance(kept, torch.Tensor) else step
    return found
