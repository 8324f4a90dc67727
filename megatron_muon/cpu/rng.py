"""The CUDA generator is the CPU's default generator.

Megatron draws initial weights and dropout inside a fork of the CUDA generator.  On a CPU these
draws come from the default generator, so that is the one to fork, save and restore.

On a GPU nothing but the model draws from the CUDA generator.  Here a data loader would draw from it
too, when it starts, and a resumed run would see other dropout: it is left out of that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils.data


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _get_rng_state_all() -> list[torch.Tensor]:
    return [torch.default_generator.get_state()]


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(new_state)


def _set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for state in new_states:
        torch.default_generator.set_state(state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _manual_seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _seed() -> None:
    torch.default_generator.seed()


def _seed_all() -> None:
    torch.default_generator.seed()


def _initial_seed() -> int:
    return torch.default_generator.initial_seed()


def _lazy_call(callback: Callable[[], None], **_: Any) -> None:
    callback()


def _without_drawing(start: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, after which the default generator is where it was."""

    @functools.wraps(start)
    def started(*args: Any, **kwargs: Any) -> Any:
        state = torch.default_generator.get_state()
        try:
            return start(*args, **kwargs)
        finally:
            torch.default_generator.set_state(state)

    return started


def install() -> None:
    """Put these functions into ``torch.cuda`` and ``torch.cuda.random``."""
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    iterator.__init__ = _without_drawing(iterator.__init__)  # type: ignore[method-assign]
    replacements: dict[str, Any] = {
        "get_rng_state": _get_rng_state,
        "get_rng_state_all": _get_rng_state_all,
        "set_rng_state": _set_rng_state,
        "set_rng_state_all": _set_rng_state_all,
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed_all,
        "seed": _seed,
        "seed_all": _seed_all,
        "initial_seed": _initial_seed,
        "_lazy_call": _lazy_call,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
        setattr(torch.cuda.random, name, replacement)
    torch.cuda.default_generators = (torch.default_generator,)
