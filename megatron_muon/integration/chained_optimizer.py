"""All optimizers of a rank as one: skipped steps, and checkpoints that load at every layout."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.utils import log_single_rank

from megatron_muon.checkpoint.names import RIGHT_FACTOR
from megatron_muon.exchange import gather_objects
from megatron_muon.integration.checkpoint_state import SHARDING_TYPES, stored_parts
from megatron_muon.integration.schedule import LoadedRates

logger = logging.getLogger(__name__)


class MatrixChainedOptimizer(ChainedOptimizer):
    """``ChainedOptimizer`` that skips a step whose gradient norm is not finite, or too large.

    Megatron skips only when a loss scaler found the inf or nan; without one (bf16, fp32) it would
    write it into every weight. Its ``grad_norm_skip_threshold`` holds on ranks that have parameters
    only; the others would wait for the exchange. The norm is the same number on all ranks, so all
    of them skip, and no byte of weights or state changes.
    """

    _last_norm: Any = 0.0

    loaded_rates: LoadedRates | None = None
    """Rates of the checkpoint that was loaded, for Megatron's scheduler to decide on."""

    def get_grad_norm(self) -> Any:
        """The global norm, remembered for the decision."""
        self._last_norm = super().get_grad_norm()
        return self._last_norm

    def step_with_ready_grads(self) -> bool:
        """Step all optimizers, or none and return False."""
        norm, self._last_norm = float(self._last_norm), 0.0
        # A chain without optimizers has no configuration.
        threshold = getattr(getattr(self, "config", None), "grad_norm_skip_threshold", math.inf)
        if not math.isfinite(norm) or norm > threshold:
            log_single_rank(
                logger,
                logging.WARNING,
                f"megatron_muon: the gradient norm is {norm}, the step is skipped on all ranks",
            )
            return False
        stepped: bool = super().step_with_ready_grads()
        return stepped

    # ---- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Groups and gradient scaler of all optimizers, as one; without parameter state."""
        states = [child.state_dict() for child in self.chained_optimizers]
        groups = [group for state in states for group in state["optimizer"]["param_groups"]]
        scalers = [state["grad_scaler"] for state in states if "grad_scaler" in state]
        return {
            "optimizer": {"param_groups": groups},
            **({"grad_scaler": scalers[0]} if scalers else {}),
        }

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """All state, in a form that loads at every layout; both sharding types give the same.

        How many optimizers a rank has depends on its pipeline stage, so all are stored as one. All
        ranks call it together: one collective finds out what the other stages hold.

        Args:
            model_sharded_state_dict: The model's, with parameters as data.
            is_loading: True to load into the tensors of the result.
            **kwargs: Megatron's ``metadata`` (or the older ``sharding_type``).

        Raises:
            ValueError: Another sharding type, or a parameter that is stored in an unknown way.
        """
        sharding_type = _sharding_type(kwargs, is_loading=is_loading)
        parts = stored_parts(model_sharded_state_dict)
        state = self.state_dict()
        mine: dict[str, set[tuple[str, ...]]] = {}
        for child in self.chained_optimizers:
            mine |= child.stored_states(parts)
        everyone = gather_objects((mine, state["optimizer"]["param_groups"]))
        mixed = _mixed(theirs for theirs, _ in everyone)
        if not is_loading:
            state["optimizer"]["param_groups"] = _distinct(
                g for _, groups in everyone for g in groups
            )
        param_state: dict[str, Any] = {RIGHT_FACTOR: {}}
        for child in self.chained_optimizers:
            found = child.param_state_in_model_space(parts, mixed, is_loading=is_loading)
            param_state[RIGHT_FACTOR] |= found.pop(RIGHT_FACTOR, {})
            param_state |= found
        return {
            **state,
            "param_state": param_state,
            "param_state_sharding_type": sharding_type,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` or ``sharded_state_dict`` gave; all ranks together.

        With parameter state the weights are derived from the loaded masters, and gathered: every
        copy of a weight has the same bits, whatever the model part of the checkpoint held.
        """
        here = [group for theirs in gather_objects(_plain(self.param_groups)) for group in theirs]
        self.loaded_rates = LoadedRates.of(here, state_dict["optimizer"]["param_groups"])
        for child in self.chained_optimizers:
            child.load_state_dict(state_dict)
        self._synchronize_steps()
        if "param_state" in state_dict:
            self._gather_masters()

    @torch.no_grad()
    def _gather_masters(self) -> None:
        """Derive all weights from the masters."""
        staged = getattr(getattr(self, "config", None), "reuse_grad_buf_for_mxfp8_param_ag", False)
        if staged:
            # MXFP8 weights are gathered through the gradient buffers.
            for chunk in self.model_chunks:
                chunk.zero_grad_buffer()
        for child in self.chained_optimizers:
            if not staged:
                child._copy_main_params_to_model_params()
            elif not child.is_stub_optimizer:
                child._copy_main_params_to_param_buffer()
        for chunk in self.model_chunks:
            chunk.start_param_sync(force_sync=True)


def _plain(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _sharding_type(kwargs: Mapping[str, Any], *, is_loading: bool) -> str:
    asked = kwargs.get("sharding_type") or (kwargs.get("metadata") or {}).get(
        "distrib_optim_sharding_type"
    )
    if asked in SHARDING_TYPES:
        return str(asked)
    supported = " and ".join(f"'{name}'" for name in SHARDING_TYPES)
    if is_loading:
        raise ValueError(
            f"the checkpoint's optimizer state has sharding type '{asked}', and ours loads "
            f"{supported}: type --no-load-optim to start the optimizer anew from the checkpoint's "
            "weights"
        )
    raise ValueError(
        f"the matrix optimizer's state cannot be saved with sharding type '{asked}'; supported are "
        f"{supported}: type --ckpt-format torch_dist"
    )


def _mixed(everyone: Iterable[Mapping[str, set[tuple[str, ...]]]]) -> set[str]:
    """Keys of tensors of which not all layers, on all ranks, keep the same states."""
    states: dict[str, set[tuple[str, ...]]] = {}
    for theirs in everyone:
        for key, kinds in theirs.items():
            states.setdefault(key, set()).update(kinds)
    return {key for key, kinds in states.items() if len(kinds) > 1}


def _distinct(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of all pipeline stages, each once, in the order of ranks."""
    return list({repr(sorted(group.items())): group for group in groups}.values())
