"""The plan of an imported checkpoint: the form of one, the values of a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from megatron_muon.checkpoint.names import (
    ADAM_STATES,
    MASTER,
    MASTER_OF_ADAM,
    MOMENTUM,
    RIGHT_FACTOR,
    split_state_key,
)
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.file_values import FactorFromFile, FromFile
from megatron_muon.offline.foreign import Foreign
from megatron_muon.offline.index import TensorInfo
from megatron_muon.offline.momenta import Convention, conversion_factor, matrix_convention
from megatron_muon.offline.outputs import (
    OutBlob,
    OutChunk,
    Output,
    OutTensor,
    Zeros,
    copied,
    whole,
)
from megatron_muon.offline.parameters import (
    StoredParameter,
    model_tensors,
    require_names,
    stored_parameters,
)
from megatron_muon.offline.plain_names import Names, PlainTensor, plain_tensors
from megatron_muon.offline.reading import Checkpoint, require_known
from megatron_muon.offline.source_state import source_state
from megatron_muon.offline.torch_files import Steps
from megatron_muon.offline.wrapper_names import prefix_of_some, without_wrappers

_SHOWN = 10
"""Most entries that are listed on one line."""


def plan_import(
    foreign: Foreign,
    like: Checkpoint,
    *,
    names: Names,
    rows: int | None,
    is_partial: bool,
) -> Output:
    """Everything of the checkpoint that is written.

    Args:
        foreign: What the file holds.
        like: The checkpoint whose form it gets.
        names: ``megatron`` or ``hf``.
        rows: Of the vocabulary.
        is_partial: Whether weights may be lacking.

    Raises:
        CheckpointError: Names or shapes do not match, with the reason.
    """
    return _Import(foreign, like, names=names, rows=rows, is_partial=is_partial).output()


class _Import:
    def __init__(
        self,
        foreign: Foreign,
        like: Checkpoint,
        *,
        names: Names,
        rows: int | None,
        is_partial: bool,
    ) -> None:
        self.like = like
        self.model = model_tensors(like)
        self.parameters = stored_parameters(self.model, like.common)
        require_names(self.parameters, like.common)
        self.source = source_state(like, self.parameters)
        self.plain: dict[str, list[PlainTensor]] = {}
        self.by_matrix: dict[str, PlainTensor] = {}
        for plain in plain_tensors(self.parameters, names, rows):
            self.plain.setdefault(plain.parameter.name, []).append(plain)
            self.by_matrix[plain.matrix] = plain
        known = {plain.name: plain for found in self.plain.values() for plain in found}
        self.foreign, self.removed = without_wrappers(foreign, known)
        self.kept = matrix_convention(self.source.optimizer, like.common, self.source.groups, None)
        self._require_names(known, is_partial)
        self.zeros: list[str] = []
        self.left: list[str] = []
        self.taken: set[tuple[str, str]] = set()
        self.factors: set[float] = set()
        self.fresh_adam: set[str] = set()

    def _require_names(self, known: Mapping[str, PlainTensor], is_partial: bool) -> None:
        strange = sorted(self.foreign.names - known.keys())
        if strange:
            example = next((n for n in known if "proj" in n or "linear" in n), min(known))
            more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
            raise CheckpointError(
                f"{self.foreign.path} has {strange[0]}{more}, which {self.like.folder} has not; "
                f"its names look like {example} (--names megatron or hf)"
                f"{prefix_of_some(strange, self.foreign, known)}."
            )
        # Those without state as well: a router's correction bias is a weight of the model.
        lacking = [name for name in known if name not in self.foreign.weights]
        if self.foreign.weights and lacking and not is_partial:
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            raise CheckpointError(
                f"{self.foreign.path} lacks the weight {lacking[0]}{more}; type --partial to keep "
                f"those of {self.like.folder}."
            )
        for name, steps in self.foreign.weights.items():
            self._require_shape(known[name], self.foreign.tensor(steps), name)
        for name, states in self.foreign.states.items():
            for state, steps in states.items():
                if not state.startswith(RIGHT_FACTOR):
                    self._require_shape(
                        known[name], self.foreign.tensor(steps), f"{state} of {name}"
                    )

    def _require_shape(self, plain: PlainTensor, found: torch.Tensor, what: str) -> None:
        if tuple(found.shape) != plain.shape:
            shape = tuple(found.shape)
            vocabulary = ".word_embeddings." in plain.parameter.key or "output_layer" in (
                plain.parameter.key
            )
            hint = f"; type --vocab-size {shape[0]}" if shape and vocabulary else ""
            raise CheckpointError(
                f"{what} has shape {shape} in {self.foreign.path}, and is to have "
                f"{plain.shape}{hint}."
            )
        stored = self.model[plain.parameter.key].dtype
        if not found.dtype.is_floating_point and found.dtype != stored:
            raise CheckpointError(
                f"{what} has element type {found.dtype} in {self.foreign.path}, which is no "
                "floating-point type."
            )

    # ---- tensors ------------------------------------------------------------------------------

    def output(self) -> Output:
        """The plan of everything."""
        tensors = [self._out(key, info) for key, info in self.like.tensors.items()]
        return Output(
            tensors=tuple(tensors),
            blobs=tuple(
                OutBlob(key=key, content=place)
                for key, place in self.like.blobs_to_pass_on().items()
            ),
            common=self._common(),
            common_in_file=self.like.common.in_file,
            backend=self.like.backend,
            notes=tuple(self._notes()),
        )

    def _out(self, key: str, info: TensorInfo) -> OutTensor:
        if key in self.model:
            return self._stacked(key, info, self.parameters[key], "")
        known = split_state_key(key)
        if known is None:
            return copied(info, key, "copied")
        state, name = known
        if state == RIGHT_FACTOR:
            return self._factor(key, info, name)
        state = MASTER if state == MASTER_OF_ADAM else state
        found = self.parameters.get(name) or (self.plain[name][0].parameter,)
        return self._stacked(key, info, found, state)

    def _stacked(
        self, key: str, info: TensorInfo, found: Sequence[StoredParameter], state: str
    ) -> OutTensor:
        """A tensor of the model, or of a state, parameter by parameter."""
        values = [self._value(parameter, state) for parameter in found]
        if all(value is None for value in values):
            self.left += [f"{state or 'weight'} of {p.name}" for p in found]
            return copied(info, key, "kept from --like")
        chunks = []
        for parameter, value in zip(found, values, strict=True):
            is_whole = len(info.shape) == len(parameter.facts.shape)
            box = whole(info) if is_whole else parameter.box(info)
            if value is None:
                self.left.append(f"{state or 'weight'} of {parameter.name}")
            chunks.append(OutChunk(offset=box.offset, shape=box.shape, value=value or box))
        return OutTensor(
            key=key,
            shape=info.shape,
            dtype=info.dtype,
            chunks=tuple(chunks),
            rule=f"{state or 'weight'} from {self.foreign.path.name}",
        )

    def _value(self, parameter: StoredParameter, state: str) -> FromFile | Zeros | None:
        """Where a parameter's weight or state comes from; None to keep that of ``like``."""
        plain = self.plain[parameter.name]
        if not state:
            # Without masters of its own ``like`` has fp32 weights, where those of the file belong.
            states = self.source.states[parameter.name]
            masters = {p.name: self.foreign.states.get(p.name, {}).get(MASTER) for p in plain}
            if states and MASTER not in states and None not in masters.values():
                return self._from(plain, masters)
            return self._from(plain, {p.name: self.foreign.weights.get(p.name) for p in plain})
        found = {p.name: self.foreign.states.get(p.name, {}).get(state) for p in plain}
        if state == MASTER and None in found.values():
            weights = {p.name: self.foreign.weights.get(p.name) for p in plain}
            return self._from(plain, weights)
        # A first moment without its second one would make steps many times too large.
        together = ADAM_STATES if state in ADAM_STATES else (state,)
        self.taken |= {(p.name, state) for p in plain}
        if any(s not in self.foreign.states.get(p.name, {}) for p in plain for s in together):
            self.zeros.append(f"{state} of {parameter.name}")
            if state in ADAM_STATES:
                self.fresh_adam.add(parameter.name)
            return Zeros()
        factor = 1.0
        if state == MOMENTUM:
            factors = {self._factor_of(self.foreign.momenta[p.name]) for p in plain}
            if len(factors) > 1:
                raise CheckpointError(
                    f"the parts of {parameter.name} have momenta of different factors."
                )
            factor = factors.pop()
            self.factors.add(factor)
        return self._from(plain, found, factor)

    def _factor_of(self, convention: Convention) -> float:
        factor = conversion_factor(convention, self.kept)
        if factor is None:
            raise CheckpointError(
                "a momentum that Dion kept with mu 0 says nothing of the average; leave it out."
            )
        return factor

    def _from(
        self,
        plain: Sequence[PlainTensor],
        steps: Mapping[str, Steps | None],
        factor: float = 1.0,
    ) -> FromFile | None:
        parts = [(p, steps[p.name]) for p in plain]
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
        """A right factor: that of the file, else of ``like``, from which it finds its way."""
        plain = self.by_matrix.get(matrix)
        name, label = (plain.name, RIGHT_FACTOR) if plain else ("", "")
        base, bracket, part = matrix.partition("[")
        if plain is None and base in self.plain and not self.plain[base][0].part:
            name, label = self.plain[base][0].name, f"{RIGHT_FACTOR}{bracket}{part}"
        steps = self.foreign.states.get(name, {}).get(label)
        if steps is None:
            self.left.append(f"right factor of {matrix}")
            return copied(info, key, "kept from --like")
        self.taken.add((name, label))
        found = self.foreign.tensor(steps)
        if tuple(found.shape) != info.shape:
            raise CheckpointError(
                f"the right factor of {name} has shape {tuple(found.shape)} in "
                f"{self.foreign.path}, and is to have {info.shape} (--orth-dion-rank-fraction)."
            )
        value = FactorFromFile(path=self.foreign.path, steps=steps)
        return OutTensor(
            key=key,
            shape=info.shape,
            dtype=info.dtype,
            chunks=(OutChunk(offset=(0, 0), shape=info.shape, value=value),),
            rule=f"right factor from {self.foreign.path.name}",
        )

    # ---- the rest -----------------------------------------------------------------------------

    def _common(self) -> dict[str, object]:
        """The common state of ``like``, with the steps that the file says; 0 for an Adam anew."""
        require_known(self.like.common.loaded, "the common state of --like")
        value = dict(self.like.common.value)
        steps = {0} if self.fresh_adam else self.foreign.steps
        if steps:
            value["optimizer"] = _with_step(value.get("optimizer"), max(steps))
        return value

    def _notes(self) -> Iterator[str]:
        yield f"iteration, schedule and arguments are those of {self.like.folder}"
        if self.removed:
            yield f"names in the file are those of a wrapped model: {self.removed} was removed"
        if self.foreign.unread:
            shown = ", ".join(self.foreign.unread[:_SHOWN])
            more = len(self.foreign.unread) - _SHOWN
            yield f"entries of the file that are not used: {shown}" + (
                f" and {more} more" if more > 0 else ""
            )
        if self.zeros:
            yield (
                f"{len(self.zeros)} states are not in the file (Adam's: not both) and start at "
                "zero:"
            )
            yield from (f"  {entry}" for entry in self.zeros)
        if self.fresh_adam:
            yield (
                f"Adam starts anew on {len(self.fresh_adam)} parameters, so its step count starts "
                "at 0"
            )
        elif any(state == ADAM_STATES[0] for _, state in self.taken):
            yield from self._notes_on_steps()
        if self.factors - {1.0}:
            factors = ", ".join(f"{factor:g}" for factor in sorted(self.factors))
            yield f"momenta are kept in another way in the file: they are multiplied by {factors}"
        strange = sorted(
            f"{state} of {name}"
            for name, states in self.foreign.states.items()
            for state in states
            if state != MASTER and (name, state) not in self.taken
        )
        if strange:
            yield (
                f"{len(strange)} states of the file are left out, for which --like, a checkpoint "
                f"of {self.source.optimizer}, has no place:"
            )
            yield from (f"  {entry}" for entry in strange)
        if self.left:
            yield f"{len(self.left)} tensors are not in the file and are those of --like:"
            yield from (f"  {entry}" for entry in self.left)

    def _notes_on_steps(self) -> Iterator[str]:
        """Megatron counts the steps of Adam once for all parameters."""
        steps = self.foreign.steps
        if not steps:
            yield "the file does not say how many steps Adam has made: the count is that of --like"
        elif len(steps) > 1:
            yield (
                f"Adam has made between {min(steps)} and {max(steps)} steps on the parameters of "
                f"the file: the count is {max(steps)} for all"
            )


def _with_step(state: object, step: int) -> object:
    """A copy in which every parameter group has made so many steps."""
    if isinstance(state, dict):
        return {
            key: _like_step(value, step)
            if key in ("step", "common_step")
            else _with_step(value, step)
            for key, value in state.items()
        }
    if isinstance(state, list):
        return [_with_step(value, step) for value in state]
    return state


def _like_step(value: object, step: int) -> object:
    """A step count in the form of another one: torch's Adam keeps a tensor."""
    return torch.full_like(value, step) if isinstance(value, torch.Tensor) else step
