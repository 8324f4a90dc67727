"""Reads weights and optimizer state from a ``torch.save`` file.

The plain format of ``export`` is ``{"model": {name: w}, "state": {name: {state: x}}, …}``. Any
other file holds weights and optimizers' state dicts in any containers (``containers``): a state
dict is ``{"state": {i or name: {…}}, "param_groups": […]}``, or the same flattened. Its fields
identify the optimizer:

``momentum_buffer``: torch.optim.Muon, an average (``buf.lerp_(grad, 1 - momentum)``); in a group
with ``dampening``, torch.optim.SGD, a sum.
``momentum``: Muon of microsoft/dion, a sum, M ← μ M + G.
``momentum`` and ``Q``: Dion of microsoft/dion; Q is the right factor.
``momentum`` and ``variance``: AdamW of microsoft/dion, averages.
``exp_avg`` and ``exp_avg_sq``: torch.optim.AdamW, averages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

import torch

from megatron_muon.checkpoint.names import ADAM_STATES, MASTER, MOMENTUM, RIGHT_FACTOR
from megatron_muon.offline.containers import (
    FLAT_GROUPS,
    FLAT_STATE,
    find_contents,
    is_flat,
)
from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.momenta import Convention, Kind, factor_in_range
from megatron_muon.offline.torch_files import read_torch_file

PLAIN_FORMAT = "megatron_muon plain 1"
_PLAIN_ENTRIES: Final = frozenset(
    {"format", "iteration", "step", "names", "optimizer", "momentum", "model", "state"}
)
_PLAIN_STATES: Final = (MASTER, MOMENTUM, *ADAM_STATES, RIGHT_FACTOR)


@dataclass(kw_only=True)
class Foreign:
    """The content of a file, whose tensors stay on disk until used.

    Attributes:
        path: The file.
        weights: Weights by name.
        states: States by name and by our state name.
        momenta: The convention of each momentum, by name.
        steps: Adam's step counts, empty where the file has none.
        unread: Unused entries.
    """

    path: Path
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    momenta: dict[str, Convention] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    unread: list[str] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """All parameter names."""
        return self.weights.keys() | self.states.keys()


def read_foreign(
    path: Path, *, names: Sequence[Sequence[str]] = (), heavy_ball: float | None = None
) -> Foreign:
    """Return the content of a file; no tensor is read.

    Args:
        path: The file.
        names: For every optimizer that numbers its parameters, their names in order.
        heavy_ball: β of a ``momentum_buffer`` that is a sum, by the user's flag.
    """
    content = read_torch_file(path)
    found = Foreign(path=path)
    if isinstance(content, Mapping) and content.get("format") == PLAIN_FORMAT:
        _require_names_for((), names, path)
        _read_plain(content, found)
    else:
        contents = find_contents(content, path)
        found.weights, found.unread = contents.weights, contents.unread
        numbered = [
            where for where, state in contents.optimizers if _has_numbers_alone(state, path)
        ]
        _require_names_for(numbered, names, path)
        lists = iter(names)
        for _, state in contents.optimizers:
            if is_flat(state):
                entries = _flat_entries(state)
            else:
                given = next(lists) if _has_numbers_alone(state, path) else None
                entries = _entries(state, given, path)
            for name, values, group in entries:
                _put(found, name, values, group, heavy_ball)
    _require_dense(found)
    return found


def _has_numbers_alone(state: Mapping[str, Any], path: Path) -> bool:
    """Return True when some parameters of a state dict have no names."""
    return any(_names_of(group, path) is None for group in state.get("param_groups", ()))


def _names_of(group: Any, path: Path) -> Sequence[Any] | None:
    """Return the names of a group's parameters, None where they are only numbered."""
    keys = group.get("params") if isinstance(group, Mapping) else None
    if not isinstance(keys, list) or not all(isinstance(key, int | str) for key in keys):
        raise CheckpointError(f"{path} has a group of parameters that does not list them.")
    names: Sequence[Any] | None = group.get("param_names")
    return keys if names is None and all(isinstance(key, str) for key in keys) else names


def _require_names_for(numbered: Sequence[str], names: Sequence[Sequence[str]], path: Path) -> None:
    if len(names) == len(numbered):
        return
    if not numbered:
        raise CheckpointError(
            f"--param-names has no effect: {path} names all its parameters; leave it out."
        )
    which = ", ".join(numbered)
    if len(numbered) == 1:
        raise CheckpointError(
            f"{path} numbers its parameters ({which}) and does not name them: name a file with "
            "--param-names, one name per line in the order in which the optimizer received them."
        )
    raise CheckpointError(
        f"{path} numbers the parameters of {len(numbered)} optimizers ({which}), each from 0, and "
        "does not name them: name a file with --param-names for each, in this order, one name per "
        f"line in the order in which the optimizer received them; {len(names)} files are named."
    )


def _require_dense(found: Foreign) -> None:
    """Refuse entries that are not dense tensors with elements in the file."""
    listed: list[tuple[Any, str, Any]] = [(name, str(name), w) for name, w in found.weights.items()]
    for name, states in found.states.items():
        listed += [(name, f"{state} of {name}", value) for state, value in states.items()]
    for name, what, value in listed:
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)  # and no DTensor
        kind = "" if is_plain else f"a {type(value).__name__}"
        if not kind and (value.is_meta or value.layout != torch.strided or value.is_quantized):
            kind = "a meta tensor" if value.is_meta else f"a {value.layout} or quantized tensor"
        if kind or not isinstance(name, str):
            raise CheckpointError(
                f"{what} is {kind or 'not a name'} in {found.path}, where a dense tensor is "
                "required."
            )


def read_names(path: Path) -> list[str]:
    """Read parameter names, one per line."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"--param-names {path} cannot be read ({error}).") from error
    names = [line for line in lines if line]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise CheckpointError(f"--param-names {path} names {twice[0]} twice.")
    return names


# ---- the plain format -------------------------------------------------------------------------


def _read_plain(content: Mapping[str, Any], found: Foreign) -> None:
    strange = sorted(map(str, content.keys() - _PLAIN_ENTRIES))
    if strange:
        raise CheckpointError(
            f"{found.path} has the format of export and the entry {strange[0]}, which export does "
            "not write."
        )
    weights, states = content.get("model"), content.get("state")
    if not isinstance(weights, Mapping) or not isinstance(states, Mapping):
        raise CheckpointError(f"{found.path} lacks its model or its state.")
    found.weights = weights
    convention = _plain_convention(content.get("momentum"), found.path)
    for name, kept in states.items():
        strange = [s for s in kept if not str(s).startswith(_PLAIN_STATES)]
        if strange:
            raise CheckpointError(
                f"{found.path} has the state {strange[0]} of {name}; supported are "
                f"{', '.join(_PLAIN_STATES)}."
            )
        found.states[name] = dict(kept)
        found.momenta[name] = convention
    step = content.get("step")
    found.steps = set() if step is None else {_step(step, found.path)}


def _plain_convention(about: Any, path: Path) -> Convention:
    if about is None:  # there should be no momenta
        problem = f"{path} does not say how its momenta are defined (momentum: kind and factor)"
        return Convention(kind="average", factor=None, problem=problem)
    kind: Any = about.get("kind") if isinstance(about, Mapping) else None
    if kind not in get_args(Kind):
        raise CheckpointError(
            f"{path} has momentum {about!r}; its kind must be one of "
            f"{', '.join(get_args(Kind))}, with a factor."
        )
    return Convention(kind=kind, factor=factor_in_range(about.get("factor"), "the factor"))


def _step(value: Any, path: Path) -> int:
    value = _number(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1 << 53:
        raise CheckpointError(f"{path} says step {value!r}, which is not a number of steps.")
    return int(value)


def _number(value: Any) -> Any:
    """Return the number in a tensor of one element; any other value unchanged."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


# ---- state dicts ------------------------------------------------------------------------------

_Entry = tuple[str, Mapping[str, Any], Mapping[str, Any]]
"""State of one parameter: its name, the fields, its group."""


def _entries(state: Mapping[str, Any], given: Sequence[str] | None, path: Path) -> Iterator[_Entry]:
    named = dict(_named(state["param_groups"], given, path))
    for key, kept in state["state"].items():
        if not isinstance(kept, Mapping) or key not in named:
            what = "is in none of its groups" if key not in named else "is not a dict"
            raise CheckpointError(f"{path} has state of parameter {key}, which {what}.")
        name, group = named[key]
        yield name, kept, group


def _flat_entries(state: Mapping[str, Any]) -> Iterator[_Entry]:
    """Parse ``state.<name>.<field>`` and ``param_groups.<name>.<option>``."""
    kept: dict[str, dict[str, Any]] = defaultdict(dict)
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in state.items():
        part, prefix = (kept, FLAT_STATE) if key.startswith(FLAT_STATE) else (groups, FLAT_GROUPS)
        name, _, entry = key.removeprefix(prefix).rpartition(".")
        part[name][entry] = value
    for name, values in kept.items():
        yield name, values, groups[name]


def _named(
    groups: Sequence[Mapping[str, Any]], given: Sequence[str] | None, path: Path
) -> Iterator[tuple[int | str, tuple[str, Mapping[str, Any]]]]:
    """Yield (key in the state, (name, group)) of every parameter."""
    taken = 0
    for group in groups:
        names, keys = _names_of(group, path), group["params"]
        taken += len(keys)
        if names is None:
            assert given is not None  # _require_names_for
            wrong = [key for key in keys if not isinstance(key, int) or not 0 <= key < len(given)]
            if wrong:
                raise CheckpointError(
                    f"--param-names has {len(given)} names, and {path} has parameter {wrong[-1]}, "
                    "counted from 0."
                )
            names = [given[key] for key in keys]
        if len(names) != len(keys):
            raise CheckpointError(f"{path} has {len(keys)} parameters and {len(names)} names.")
        for key, name in zip(keys, names, strict=True):
            yield key, (str(name), group)
    if given is not None and len(given) > taken:
        raise CheckpointError(
            f"--param-names has {len(given)} names, and {path} has {taken} parameters."
        )


def _put(
    found: Foreign,
    name: str,
    values: Mapping[str, Any],
    group: Mapping[str, Any],
    heavy_ball: float | None,
) -> None:
    """Add the state of one parameter; fields that are None are ignored."""
    fields = {entry: value for entry, value in values.items() if value is not None}
    if name in found.states:
        raise CheckpointError(f"{found.path} has state of {name} twice.")
    states = found.states[name] = _our_names(name, fields)
    if MOMENTUM in states:
        found.momenta[name] = _convention(name, fields, group, heavy_ball)
    step = values.get("step", group.get("step"))
    if step is not None and ADAM_STATES[0] in states:
        found.steps.add(_step(step, found.path))


def _our_names(name: str, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter under our names."""
    first, second = ADAM_STATES
    layouts: tuple[dict[str, str], ...] = (
        {},
        {first: first, second: second},
        {"momentum": first, "variance": second},
        {"momentum_buffer": MOMENTUM},
        {"momentum": MOMENTUM, "Q": RIGHT_FACTOR},
        {"momentum": MOMENTUM},
    )
    fields = kept.keys() - {"step"}
    for layout in layouts:
        if fields == layout.keys():
            return {ours: kept[theirs] for theirs, ours in layout.items()}
    raise CheckpointError(
        f"the state of {name} has the fields {', '.join(sorted(map(str, fields)))}, which belong "
        "to none of the supported optimizers: torch.optim.Muon, SGD, AdamW, or Muon and Dion of "
        "microsoft/dion."
    )


def _convention(
    name: str, fields: Mapping[str, Any], group: Mapping[str, Any], heavy_ball: float | None
) -> Convention:
    if "momentum_buffer" not in fields:
        return Convention(
            kind="dion" if "Q" in fields else "sum", factor=_factor(group, "mu", name)
        )
    if heavy_ball is not None:
        return Convention(kind="sum", factor=heavy_ball)
    factor = _factor(group, "momentum", name)
    if group.get("dampening"):
        raise CheckpointError(
            f"the group of {name} has dampening {group['dampening']!r}, so its momentum is neither "
            "an average nor a sum of gradients; type --heavy-ball BETA to treat it as a sum."
        )
    return Convention(kind="sum" if "dampening" in group else "average", factor=factor)


def _factor(group: Mapping[str, Any], key: str, name: str) -> float:
    value = _number(group.get(key))
    if isinstance(value, int | float) and 0.0 <= float(value) < 1.0:
        return float(value)
    found = "" if value is None else f", which is {value!r}"
    more = "; type --heavy-ball BETA if it is a sum of gradients" if key == "momentum" else ""
    raise CheckpointError(
        f"the group of {name} does not say its momentum's factor in [0, 1) as {key}{found}{more}."
    )
