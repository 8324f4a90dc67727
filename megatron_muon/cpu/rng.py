"""Replaces the CUDA generator by the CPU's default generator.

Megatron draws initial weights and dropout inside a fork of the CUDA generator. On a CPU they come
from the default generator, which is therefore forked, saved and restored.

On a GPU only the model draws from the CUDA generator. Here a starting data loader would do so as
well, and change the dropout of a resumed run: its draws are undone.
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


def _preserve_rng_state(start: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it preserves the state of the default generator."""

    @functools.wraps(start)
    def started(*args: Any, **kwargs: Any) -> Any:
        state = torch.default_generator.get_state()
        try:
            return start(*args, **kwargs)
        finally:
            torch.default_generator.set_state(state)

    return started


def install() -> None:
    """Install these functions in ``torch.cuda`` and ``torch.cuda.random``."""
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    iterator.__init__ = _preserve_rng_state(iterator.__init__)  # type: ignore[method-assign]
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
