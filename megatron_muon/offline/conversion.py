"""``convert``: rewrites the state of one optimizer as that of another.

Parameters are routed by the rules of training (``matrices.routing``). Weights are copied byte by
byte, and so is every state that only changes its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from megatron_muon.checkpoint.names import (
    ADAM_STATES,
    MASTER,
    MASTER_OF_ADAM,
    MOMENTUM,
    split_state_key,
    state_key,
)
from megatron_muon.config import OPTIMIZERS
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.index import Place
from megatron_muon.offline.momenta import Convention, adam_convention, conversion_factor
from megatron_muon.offline.outputs import (
    Box,
    OutChunk,
    Output,
    OutTensor,
    Zeros,
    copied,
    in_chunks_of,
    in_one_chunk,
)
from megatron_muon.offline.param_groups import (
    Target,
    arguments,
    content_metadata,
    optimizer_state,
)
from megatron_muon.offline.parameters import StoredParameter
from megatron_muon.offline.reading import Checkpoint
from megatron_muon.offline.right_factors import factor_tensors
from megatron_muon.offline.settings import ConvertSettings, saved_flags, target_routes
from megatron_muon.offline.source_state import SourceState


def plan_conversion(checkpoint: Checkpoint, settings: ConvertSettings) -> Output:
    """Return the converted checkpoint as a plan; reads only the index and the common state."""
    return _Conversion(checkpoint, settings).output()


_StatePlan = tuple[Box | Zeros, str]
"""One state of one parameter: the source of its elements, and its rule in words."""


class _Conversion:
    def __init__(self, checkpoint: Checkpoint, settings: ConvertSettings) -> None:
        self.checkpoint, self.settings = checkpoint, settings
        # Model tensors without state (position buffers, frozen weights) are not parameters.
        self.source = SourceState(checkpoint)
        self.model = self.source.model
        self.masters = self._masters()
        self.target: Convention = (
            Convention(kind="dion", factor=settings.matrix.momentum)
            if settings.to == "orth_dion"
            else Convention(kind="average", factor=0.0)
        )
        self.adam_source = adam_convention(self.source.groups)
        self.matrix_source = self.source.momentum_convention(settings.heavy_ball)
        self.trained = dict(self._trained())
        every = [parameter for found in self.trained.values() for parameter in found]
        self.is_matrix = target_routes(every, settings)
        # megatron-core's muon stores no masters of fp32 weights.
        is_fp32 = all(self.model[key].dtype == torch.float32 for key in self.trained)
        self.has_masters = settings.to != "muon" or not is_fp32
        self.zeros: list[str] = []
        self.fresh_adam: list[str] = []

    def _masters(self) -> dict[str, Box]:
        """Return the master weights by parameter name.

        Without ``--use-distributed-optimizer`` megatron-core saves no masters of fp32 weights; the
        weights themselves are the masters.
        """
        found = {}
        for key, parameters in self.source.parameters.items():
            for parameter in parameters:
                states = self.source.states[parameter.name]
                if MASTER in states:
                    found[parameter.name] = states[MASTER]
                elif states:
                    info = self.model[key]
                    if info.dtype != torch.float32:
                        raise CheckpointError(
                            f"the checkpoint has no fp32 masters (none of {parameter.name}), and "
                            f"its weights are {info.dtype}: save it with masters, for example from "
                            "a run with --use-distributed-optimizer and "
                            "--dist-ckpt-optim-fully-reshardable."
                        )
                    found[parameter.name] = parameter.box(info)
        return found

    def _trained(self) -> Iterator[tuple[str, tuple[StoredParameter, ...]]]:
        """Yield the keys of parameters with state, and these parameters."""
        for key, found in self.source.parameters.items():
            trained = tuple(p for p in found if p.name in self.masters)
            if trained and len(trained) != len(found):
                missing = next(p.name for p in found if p.name not in self.masters)
                raise CheckpointError(
                    f"{missing} has no master weights, while other layers of {key} have them."
                )
            if trained:
                yield key, trained

    # ---- tensors ------------------------------------------------------------------------------

    def output(self) -> Output:
        """Return the plan of the whole checkpoint."""
        tensors: list[OutTensor] = []
        for key, found in self.trained.items():
            tensors += self._state_tensors(key, found)
            if self.settings.to == "orth_dion":
                for parameter in found:
                    tensors += self._right_factors(parameter)
        stored = {tensor.key for tensor in tensors}  # with weights that are masters, too
        tensors += [
            copied(info, key, "weight, copied" if key in self.model else "copied")
            for key, info in self.checkpoint.tensors.items()
            if key not in stored and split_state_key(key) is None
        ]
        return Output(
            tensors=tuple(tensors),
            blobs=self._blobs(),
            common=self._common(),
            common_in_file=self.checkpoint.common.in_file,
            backend=self.checkpoint.backend,
            notes=tuple(self._notes()),
        )

    def _state_tensors(self, key: str, found: Sequence[StoredParameter]) -> Iterator[OutTensor]:
        plans = {p.name: self._plans(p) for p in found}
        kinds = {tuple(states) for states in plans.values()}
        if len(kinds) == 1:
            for state in next(iter(kinds)):
                yield self._stacked(state, key, found, [plans[p.name][state] for p in found])
            return
        # Layers with different states are stored separately, under their own names.
        for parameter in found:
            for state, (value, rule) in plans[parameter.name].items():
                key = self._key(state, parameter.name, parameter)
                yield in_one_chunk(key, parameter.facts.shape, torch.float32, rule, value)

    def _key(self, state: str, name: str, parameter: StoredParameter) -> str:
        """Return the key of a state of one parameter or of a stack of them."""
        if not self.has_masters:
            return name if state == MASTER else state_key(state, name)
        if self.settings.to == "muon":
            # megatron-core chains an optimizer of matrices and Adam.
            number = 0 if self.is_matrix[parameter.name] else 1
            return f"chained_{number}.{state_key(state, name)}"
        is_adams = self.settings.to == "adam" and state == MASTER
        return state_key(MASTER_OF_ADAM if is_adams else state, name)

    def _stacked(
        self,
        state: str,
        key: str,
        found: Sequence[StoredParameter],
        plans: Sequence[_StatePlan],
    ) -> OutTensor:
        """Return one state of all layers and experts of a model tensor."""
        name, model, dtype = self._key(state, key, found[0]), self.model[key], torch.float32
        rule = "; ".join(dict.fromkeys(rule for _, rule in plans))
        boxes = [value for value, _ in plans if isinstance(value, Box)]
        if not boxes:
            return in_chunks_of(model, name, dtype, rule, lambda chunk: Zeros())
        first = boxes[0]
        same = all((box.info, box.factor) == (first.info, first.factor) for box in boxes)
        if same and len(boxes) == len(plans) and first.info.shape == model.shape:
            if first.factor == 1.0 and first.info.dtype == dtype:
                return copied(first.info, name, rule)
            return in_chunks_of(
                first.info,
                name,
                dtype,
                rule,
                lambda chunk: replace(first, offset=chunk.offset, shape=chunk.shape),
            )
        places = [parameter.box(model) for parameter in found]
        chunks = tuple(
            OutChunk(offset=place.offset, shape=place.shape, value=value)
            for place, (value, _) in zip(places, plans, strict=True)
        )
        return OutTensor(key=name, shape=model.shape, dtype=dtype, chunks=chunks, rule=rule)

    # ---- one parameter ------------------------------------------------------------------------

    def _plans(self, parameter: StoredParameter) -> dict[str, _StatePlan]:
        name = parameter.name
        master = self.masters[name]
        is_weight = master.info.key in self.model
        words = "master from the weight" if is_weight else "master, copied"
        if not self.has_masters:
            words = "weight, copied" if is_weight else "weight, from the master"
        plans: dict[str, _StatePlan] = {MASTER: (master, words)}
        states = self.source.states[name]
        if self.is_matrix[name]:
            plans[MOMENTUM] = self._momentum(name, states)
            return plans
        if all(state in states for state in ADAM_STATES):
            for state in ADAM_STATES:
                plans[state] = states[state], f"{state}, copied"
            return plans
        # A first moment with a zero second moment would make steps far too large.
        self.fresh_adam.append(name)
        for state in ADAM_STATES:
            plans[state] = self._zero(state, name)
        return plans

    def _momentum(self, name: str, states: Mapping[str, Box]) -> _StatePlan:
        if self.settings.momentum_start == "zero":
            return self._zero(MOMENTUM, name)
        if MOMENTUM in states:
            box, convention, said = states[MOMENTUM], self.matrix_source, MOMENTUM
        elif ADAM_STATES[0] in states:
            box, convention, said = states[ADAM_STATES[0]], self.adam_source, ADAM_STATES[0]
        else:
            return self._zero(MOMENTUM, name)
        factor = conversion_factor(convention, self.target)
        if factor is None:
            return self._zero(MOMENTUM, name)
        words = "copied" if factor == 1.0 else f"times {factor:.6g}"
        return replace(box, factor=factor), f"momentum from {said}, {words}"

    def _zero(self, state: str, name: str) -> _StatePlan:
        self.zeros.append(f"{state} of {name}")
        return Zeros(), f"{state} starts at zero"

    def _right_factors(self, parameter: StoredParameter) -> Iterator[OutTensor]:
        if not self.is_matrix[parameter.name]:
            return
        states = self.source.states[parameter.name]
        momentum = states.get(MOMENTUM) or states.get(ADAM_STATES[0])
        if self.settings.momentum_start == "zero":
            momentum = None
        yield from factor_tensors(parameter, self.settings, momentum, self.source.factors)

    # ---- the rest -----------------------------------------------------------------------------

    def _blobs(self) -> dict[str, Place]:
        return {
            key: place
            for key, place in self.checkpoint.blobs_to_copy().items()
            if ".gbuf_idx_" not in key and "optimizer.distributed." not in key
        }

    def _common(self) -> dict[str, object]:
        value = self.source.common.rewritable("the common state")
        target = Target(
            optimizer=self.settings.to,
            source=self.source,
            has_matrices=any(self.is_matrix.values()),
            step=0 if self.fresh_adam else self.source.steps,
            momentum=self._upstream_momentum() if self.settings.to == "muon" else 0.0,
            has_masters=self.has_masters,
        )
        value["optimizer"] = optimizer_state(target)
        args = arguments(target, saved_flags(self.settings))
        if args is not None:
            value["args"] = args
        value["content_metadata"] = content_metadata(target)
        return value

    def _upstream_momentum(self) -> float:
        """Return β of megatron-core's muon, from the source's muon where it is one."""
        if self.source.optimizer in ("muon", "dmuon") and self.settings.heavy_ball is None:
            return self.matrix_source.known
        return float(self.checkpoint.common.required("muon_momentum", "optimizer"))

    def _notes(self) -> Iterator[str]:
        lacking = [name for name, m in self.masters.items() if m.info.key in self.model]
        if self.has_masters and lacking:
            some = len(lacking) < len(self.masters)
            of = f" of {len(lacking)} parameters ({lacking[0]}, …)" if some else ""
            yield f"this run saved no fp32 masters{of}: its fp32 weights become the masters"
        if not self.has_masters:
            yield "load it without --use-distributed-optimizer, as megatron-core's muon requires"
        if self.settings.to == "adam" and not self.checkpoint.common.argument(
            "use_distributed_optimizer", True
        ):
            yield "load it with --use-distributed-optimizer, which the saving run did not have"
        if self.zeros:
            yield f"{len(self.zeros)} states start at zero:"
            yield from (f"  {entry}" for entry in self.zeros)
        if self.fresh_adam:
            yield (
                f"Adam restarts on {len(self.fresh_adam)} parameters, so its step count starts at "
                "0 (bias correction)."
            )
        routers = [name for name in self.fresh_adam if ".router." in name]
        if routers and self.settings.to in OPTIMIZERS:
            yield (
                "routers were trained as matrices and are assigned to Adam here: to keep their "
                "momentum, type --matrix-rule '*.router.weight:optimizer=matrix', also in training."
            )
