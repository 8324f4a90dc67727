"""State outside Megatron: what a file of ``torch.save`` holds, told from its content.

``plain``: what ``export`` writes, ``{"model": {name: w}, "state": {name: {state: x}}, …}``.
A state dict of torch: ``{"state": {i or name: {…}}, "param_groups": […]}``, alone, or beside the
weights as ``{"model": …, "muon": …, "adamw": …}`` or ``{"model": …, "optimizer": …}``. The fields
tell whose it is:

``momentum_buffer``: torch.optim.Muon, an average (``buf.lerp_(grad, 1 - momentum)``).
``momentum``: Muon of microsoft/dion, a sum, M ← μ M + G.
``momentum`` and ``Q``: its Dion; Q is the right factor.
``momentum`` and ``variance``: its AdamW, averages.
``exp_avg`` and ``exp_avg_sq``: torch.optim.AdamW, averages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

import torch

from megatron_muon.checkpoint.errors import CheckpointError
from megatron_muon.checkpoint.momenta import Convention, Kind, factor_in_range
from megatron_muon.checkpoint.names import ADAM_STATES, MASTER, MOMENTUM, RIGHT_FACTOR
from megatron_muon.checkpoint.torch_files import Steps, at, read_torch_file

PLAIN_FORMAT = "megatron_muon plain 1"
OPTIMIZER_KEYS = ("optimizer", "muon", "adamw")
_PLAIN_STATES: Final = (MASTER, MOMENTUM, *ADAM_STATES, RIGHT_FACTOR)


@dataclass(kw_only=True)
class Foreign:
    """Everything that a file holds.

    Attributes:
        path: The file.
        weights: Where each weight is, by name.
        states: Where each state is, by name and by our name of the state.
        momenta: How the momentum of a name is kept.
        step: Steps that Adam has made, None where the file does not say.
    """

    path: Path
    weights: dict[str, Steps] = field(default_factory=dict)
    states: dict[str, dict[str, Steps]] = field(default_factory=dict)
    momenta: dict[str, Convention] = field(default_factory=dict)
    step: int | None = None

    @property
    def names(self) -> set[str]:
        """All names of parameters."""
        return self.weights.keys() | self.states.keys()

    def tensor(self, steps: Steps) -> torch.Tensor:
        """One of its tensors, on disk until it is used."""
        found: torch.Tensor = at(read_torch_file(self.path), steps)
        return found


def read_foreign(
    path: Path, *, names: Sequence[str] | None = None, heavy_ball: float | None = None
) -> Foreign:
    """Find everything in a file; no tensor is read.

    Args:
        path: The file.
        names: Parameters in the order of their numbers, for a state dict that holds numbers alone.
        heavy_ball: β when the user says that ``momentum_buffer`` is a sum.

    Raises:
        CheckpointError: It is no such file, or its parameters have no names.
    """
    content = read_torch_file(path)
    found = Foreign(path=path)
    if content.get("format") == PLAIN_FORMAT:
        _read_plain(content, found)
    elif _is_state_dict(content):
        _read_state_dict(content, (), found, names, heavy_ball)
    elif "model" not in content and _all_tensors(content):
        found.weights = {name: (name,) for name in content}
    else:
        present = [k for k in OPTIMIZER_KEYS if _is_state_dict(content.get(k))]
        weights = content.get("model")
        if isinstance(weights, Mapping):
            found.weights = {n: ("model", n) for n, t in weights.items() if _is_tensor(t)}
        for key in present:
            _read_state_dict(content[key], (key,), found, names, heavy_ball)
        if not present and not found.weights:
            raise CheckpointError(
                f"{path} holds neither weights nor the state dict of an optimizer: its keys are "
                f"{', '.join(sorted(map(str, content))[:5])}."
            )
    _require_dense(content, found)
    return found


def _require_dense(content: Mapping[str, Any], found: Foreign) -> None:
    """Refuse what is no tensor, or none whose elements are in the file."""
    listed = dict(found.weights)
    for name, states in found.states.items():
        listed |= {f"{state} of {name}": steps for state, steps in states.items()}
    for what, steps in listed.items():
        value = at(content, steps)
        kind = "" if _is_tensor(value) else f"a {type(value).__name__}"
        if not kind and (value.is_meta or value.layout != torch.strided or value.is_quantized):
            kind = "a meta tensor" if value.is_meta else f"a {value.layout} or quantized tensor"
        if kind or not isinstance(steps[-1], str):
            raise CheckpointError(
                f"{what} is {kind or 'no name'} in {found.path}, where a dense tensor belongs."
            )


def read_names(path: Path) -> list[str]:
    """Names of parameters, one to a line.

    Raises:
        CheckpointError: The file cannot be read, or a name stands in it twice.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"--param-names {path} cannot be read ({error}).") from error
    names = [line for line in lines if line]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise CheckpointError(f"--param-names {path} names {twice[0]} twice.")
    return names


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _all_tensors(content: Mapping[Any, Any]) -> bool:
    return bool(content) and all(
        isinstance(name, str) and _is_tensor(value) for name, value in content.items()
    )


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
    )


def _read_plain(content: Mapping[str, Any], found: Foreign) -> None:
    weights, states = content.get("model"), content.get("state")
    if not isinstance(weights, Mapping) or not isinstance(states, Mapping):
        raise CheckpointError(f"{found.path} lacks its model or its state.")
    found.weights = {name: ("model", name) for name in weights}
    about = content.get("momentum") or {"kind": "average", "factor": 0.0}
    kind: Any = about.get("kind") if isinstance(about, Mapping) else None
    if kind not in get_args(Kind):
        raise CheckpointError(
            f"{found.path} says that its momentum is {about!r}; its kind is one of "
            f"{', '.join(get_args(Kind))}, with a factor."
        )
    convention = Convention(kind=kind, factor=factor_in_range(about.get("factor"), "the factor"))
    for name, kept in states.items():
        strange = [s for s in kept if not str(s).startswith(_PLAIN_STATES)]
        if strange:
            raise CheckpointError(
                f"{found.path} has the state {strange[0]} of {name}, which is none of "
                f"{', '.join(_PLAIN_STATES)}."
            )
        found.states[name] = {state: ("state", name, state) for state in kept}
        found.momenta[name] = convention
    step = content.get("step")
    found.step = None if step is None else _step(step, found.path)


def _step(value: Any, path: Path) -> int:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1 << 53:
        raise CheckpointError(f"{path} says step {value!r}, which is no number of steps.")
    return int(value)


def _read_state_dict(
    content: Mapping[str, Any],
    before: Steps,
    found: Foreign,
    given: Sequence[str] | None,
    heavy_ball: float | None,
) -> None:
    named = dict(_named(content["param_groups"], given, found.path))
    for key, kept in content["state"].items():
        if not isinstance(kept, Mapping) or key not in named:
            what = "is in none of its groups" if key not in named else "is no dict"
            raise CheckpointError(f"{found.path} has state of parameter {key}, which {what}.")
        name, group = named[key]
        where = {
            field: (*before, "state", key, field)
            for field, value in kept.items()
            if _is_tensor(value)
        }
        states, convention = _translated(name, where, group, heavy_ball)
        if name in found.states:
            raise CheckpointError(f"{found.path} has state of {name} twice.")
        found.states[name] = states
        if convention is not None:
            found.momenta[name] = convention
        step = kept.get("step", group.get("step"))
        if step is not None and ADAM_STATES[0] in states:
            found.step = max(found.step or 0, _step(step, found.path))


def _named(
    groups: Sequence[Mapping[str, Any]], given: Sequence[str] | None, path: Path
) -> Iterator[tuple[int | str, tuple[str, Mapping[str, Any]]]]:
    """(key in the state, (name, group)) of every parameter."""
    taken, all_numbered = 0, True
    for group in groups:
        listed = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(listed, list) or not all(isinstance(key, int | str) for key in listed):
            raise CheckpointError(f"{path} has a group of parameters that does not list them.")
        keys = listed
        taken += len(keys)
        names = group.get("param_names")
        if names is None and all(isinstance(key, str) for key in keys):
            names = keys
        all_numbered = all_numbered and names is None
        if names is None and given is not None:
            wrong = [key for key in keys if not isinstance(key, int) or not 0 <= key < len(given)]
            if wrong:
                raise CheckpointError(
                    f"--param-names has {len(given)} names, and {path} has parameter {wrong[-1]}, "
                    "counted from 0."
                )
            names = [given[key] for key in keys]
        if names is None:
            raise CheckpointError(
                f"{path} numbers its parameters and does not name them: name a file with "
                "--param-names, one name to a line in the order in which the optimizer got them."
            )
        if len(names) != len(keys):
            raise CheckpointError(f"{path} has {len(keys)} parameters and {len(names)} names.")
        for key, name in zip(keys, names, strict=True):
            yield key, (str(name), group)
    if given is not None and all_numbered and len(given) > taken:
        raise CheckpointError(
            f"--param-names has {len(given)} names, and {path} has {taken} parameters."
        )


def _translated(
    name: str, where: Mapping[str, Steps], group: Mapping[str, Any], heavy_ball: float | None
) -> tuple[dict[str, Steps], Convention | None]:
    """State of one parameter under our names, and how its momentum is kept."""
    fields = set(where) - {"step"}
    if fields == set(ADAM_STATES):
        return {state: where[state] for state in ADAM_STATES}, None
    if fields == {"momentum", "variance"}:
        return dict(zip(ADAM_STATES, (where["momentum"], where["variance"]), strict=True)), None
    if fields == {"momentum_buffer"}:
        if heavy_ball is not None:
            return {MOMENTUM: where["momentum_buffer"]}, Convention(kind="sum", factor=heavy_ball)
        beta = _factor(group, ("momentum",), name)
        return {MOMENTUM: where["momentum_buffer"]}, Convention(kind="average", factor=beta)
    if fields == {"momentum", "Q"}:
        mu = _factor(group, ("mu",), name)
        found = {MOMENTUM: where["momentum"], RIGHT_FACTOR: where["Q"]}
        return found, Convention(kind="dion", factor=mu)
    if fields == {"momentum"}:
        mu = _factor(group, ("mu",), name)
        return {MOMENTUM: where["momentum"]}, Convention(kind="sum", factor=mu)
    if not fields:
        return {}, None
    raise CheckpointError(
        f"the state of {name} has the fields {', '.join(sorted(fields))}, which are those of no "
        "optimizer that is known: torch.optim.Muon, AdamW, or Muon and Dion of microsoft/dion."
    )


def _factor(group: Mapping[str, Any], keys: Sequence[str], name: str) -> float:
    for key in keys:
        value = group.get(key)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = float(value)
        if isinstance(value, int | float) and 0.0 <= float(value) < 1.0:
            return float(value)
    raise CheckpointError(
        f"the group of {name} does not say its momentum's factor in [0, 1) as {' or '.join(keys)}."
    )
