"""Names of parameters in files of models that were wrapped: by DDP, ``torch.compile``, FSDP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Final

from megatron_muon.offline.errors import CheckpointError
from megatron_muon.offline.foreign import Foreign

_ANYWHERE: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Pieces that wrappers of single layers put into names, and that no model has of its own."""


def without_wrappers(foreign: Foreign, known: Collection[str]) -> tuple[Foreign, str]:
    """The content of a file under the names of the bare model.

    A prefix is removed where all weights (or all states) have it: ``module.``, and any other after
    which all names are known.

    Args:
        foreign: What the file holds.
        known: All names that the model has.

    Returns:
        The content, and what was removed from names, empty for nothing.

    Raises:
        CheckpointError: Two names become one.
    """
    weights, states = _bare(foreign.weights, known), _bare(foreign.states, known)
    for names in (weights, states):
        twice = [name for name, count in Counter(names.values()).items() if count > 1]
        if twice:
            raise CheckpointError(
                f"{foreign.path} has {twice[0]} twice, of a wrapped model and of a bare one."
            )
    removed = {piece for new in (weights, states) for piece in _removed(new)}
    renamed = replace(
        foreign,
        weights={weights[name]: steps for name, steps in foreign.weights.items()},
        states={states[name]: kept for name, kept in foreign.states.items()},
        momenta={states[name]: kept for name, kept in foreign.momenta.items()},
    )
    return renamed, ", ".join(sorted(f"'{piece}.'" for piece in removed))


def _bare(names: Iterable[str], known: Collection[str]) -> Mapping[str, str]:
    """New name by old one."""
    split = {name: [piece for piece in name.split(".") if piece not in _ANYWHERE] for name in names}
    columns = zip(*(pieces[:-1] for pieces in split.values()), strict=False)
    shared = [column[0] for column in takewhile(lambda column: len({*column}) == 1, columns)]
    depth = next((i for i, piece in enumerate(shared) if piece != "module"), len(shared))
    for length in range(len(shared) + 1):
        if all(".".join(pieces[length:]) in known for pieces in split.values()):
            depth = length
            break
    return {name: ".".join(pieces[depth:]) for name, pieces in split.items()}


def _removed(new_names: Mapping[str, str]) -> Iterable[str]:
    """What was removed: the prefix, and pieces inside of names."""
    for old, new in new_names.items():
        pieces = old.split(".")
        yield from (piece for piece in _ANYWHERE if piece in pieces)
        left = [piece for piece in pieces if piece not in _ANYWHERE]
        prefix = left[: len(left) - len(new.split("."))]
        if prefix:
            yield ".".join(prefix)


def prefix_of_some(strange: Iterable[str], foreign: Foreign, known: Collection[str]) -> str:
    """Why a prefix of names was not removed, as a part of a sentence; empty if they have none.

    Args:
        strange: Names that the model does not have.
        foreign: What the file holds.
        known: All names that the model has.
    """
    for dotted in strange:
        pieces = dotted.split(".")
        length = next((i for i in range(1, len(pieces)) if ".".join(pieces[i:]) in known), 0)
        if length:
            prefix = ".".join(pieces[:length]) + "."
            other = next((n for n in sorted(foreign.names) if not n.startswith(prefix)), None)
            if other is not None:
                return (
                    f"; the prefix '{prefix}' is removed where all names have it, and {other} does "
                    "not have it"
                )
    return ""
