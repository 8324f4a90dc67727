"""Replaces the CUDA generator by the CPU's default generator.

Megatron draws initial weights and dropout inside a fork of the CUDA generator. On a CPU they come
from the default generator, which is therefore forked, saved and restored.

On a GPU only the model draws from the CUDA generator. Here a starting data loader would do so as
well, and change the dropout of a resumed run: its draws are undone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data


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
    generator = torch.default_generator
    replacements: dict[str, Any] = {
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": lambda new_state, device="cuda": generator.set_state(new_state),
        "set_rng_state_all": lambda new_states: [generator.set_state(s) for s in new_states],
        "manual_seed": lambda seed: generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: generator.manual_seed(int(seed)),
        "seed": lambda: generator.seed(),
        "seed_all": lambda: generator.seed(),
        "initial_seed": lambda: generator.initial_seed(),
        "_lazy_call": lambda callback, **_: callback(),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
        setattr(torch.cuda.random, name, replacement)
    torch.cuda.default_generators = (torch.default_generator,)
