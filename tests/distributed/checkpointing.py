"""Saves and loads of a training run, and the expected state of a rank, for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import tiny_gpt
from tests.distributed.training import Run, build, gather, replica_hashes
from tests.tiny_models import is_matrix
from tests.whole_parameters import assemble, cut, global_name, unwrapped

Whole = dict[tuple[str, str], torch.Tensor]
"""(state, parameter or matrix) to the whole tensor."""


def content(
    chunks: list[Any], optimizer: Any, schedule: Any, *, is_loading: bool, kind: str
) -> dict[str, Any]:
    """Return the state dict of model, optimizer and scheduler as in Megatron's training code.

    Args:
        chunks: Wrapped model chunks.
        optimizer: The optimizer.
        schedule: Megatron's scheduler.
        is_loading: As in Megatron.
        kind: Sharding type of the optimizer's state.
    """
    metadata = {"distrib_optim_sharding_type": kind}
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    models = {
        name: chunk.module.sharded_state_dict(metadata=metadata)
        for name, chunk in zip(names, chunks, strict=True)
    }
    state = optimizer.sharded_state_dict(
        models["model"] if len(chunks) == 1 else models, is_loading=is_loading, metadata=metadata
    )
    return {**models, "optimizer": state, "opt_param_scheduler": schedule.state_dict()}


def save(
    chunks: list[Any],
    optimizer: Any,
    schedule: Any,
    folder: Path,
    kind: str = "fully_reshardable",
) -> None:
    """Save as Megatron does; all weights must have been gathered."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8

    folder.mkdir(exist_ok=True)
    stored = content(chunks, optimizer, schedule, is_loading=False, kind=kind)
    # As the writer does with tensors on a GPU.
    force_all_tensors_to_non_fp8(stored)
    dist_checkpointing.save(stored, str(folder))


def load(
    chunks: list[Any],
    optimizer: Any,
    schedule: Any,
    folder: Path,
    kind: str = "fully_reshardable",
    *,
    lose_weights: bool = False,
) -> None:
    """Load as Megatron does.

    Args:
        chunks: Wrapped model chunks.
        optimizer: The optimizer.
        schedule: Megatron's scheduler.
        folder: What was saved.
        kind: Sharding type of the optimizer's state.
        lose_weights: Overwrite the weights that were loaded before the optimizer gets its state, to
            show that they come from its masters. Only where these are no views of the weights.
    """
    from megatron.core import dist_checkpointing

    wanted = content(chunks, optimizer, schedule, is_loading=True, kind=kind)
    loaded = dist_checkpointing.load(wanted, str(folder))
    for number, chunk in enumerate(chunks):
        name = "model" if len(chunks) == 1 else f"model{number}"
        chunk.module.load_state_dict(loaded[name], strict=False)
        if lose_weights:
            with torch.no_grad():
                for parameter in chunk.parameters():
                    parameter.fill_(float("nan"))
    optimizer.load_state_dict(loaded["optimizer"])
    schedule.load_state_dict(loaded["opt_param_scheduler"])


def poison(chunks: list[Any], optimizer: Any) -> None:
    """Overwrite weights and state, so that correct values must come from a checkpoint."""
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
        for child in optimizer.chained_optimizers:
            child.optimizer.initialize_state(child.config)
            for main, states in child.optimizer.state.items():
                main.data.fill_(float("nan"))
                for name, value in states.items():
                    if isinstance(value, torch.Tensor) and name != "step":
                        value.fill_(float("nan"))
            for factor in right_factors(child).values():
                factor.fill_(float("nan"))


def right_factors(child: Any) -> dict[str, torch.Tensor]:
    """V of the matrices that this rank owns."""
    return {} if child.exchange is None else child.exchange.owned_state


def _held(chunks: list[Any], optimizer: Any) -> Iterator[tuple[Any, str, Any, Any, Any]]:
    """(model, global name, parameter, its optimizer, this rank's (start, stop) or None)."""
    for chunk in chunks:
        bare = unwrapped(chunk)
        for name, parameter in bare.named_parameters():
            for child in optimizer.chained_optimizers:
                if all(parameter not in buffer.param_index_map for buffer in child.buffers):
                    continue
                held = None
                if parameter in child.model_param_gbuf_map:
                    held = child._get_model_param_range_map(parameter)["param"]
                yield bare, name, parameter, child, held


def _states(child: Any, parameter: Any, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """This rank's ranges by state, taken from the optimizer without the code under test."""
    groups = (*child.model_fp32_groups, *child.model_float16_groups)
    mains = (*child.shard_fp32_groups, *child.shard_fp32_from_float16_groups)
    main = next(
        main
        for models, shards in zip(groups, mains, strict=True)
        for model, main in zip(models, shards, strict=True)
        if model is parameter
    )
    kept = child.optimizer.state[main]
    return {"fp32_param": main.data} | {key: kept[key] for key in names}


def state_names(name: str, parameter: torch.Tensor, to_adam: str) -> tuple[str, ...]:
    """States that are kept of a parameter besides its master weights, by its global name."""
    if is_matrix(name, parameter) and not fnmatchcase(name, to_adam):
        return ("momentum_buffer",)
    return ("exp_avg", "exp_avg_sq")


def whole_state(
    chunks: list[Any], optimizer: Any, to_adam: str = "", *, only_masters: bool = False
) -> Whole:
    """Gather whole tensors of the state of this rank's part of the model; collective.

    Args:
        chunks: Wrapped model chunks.
        optimizer: The optimizer.
        to_adam: Pattern of matrices that a rule sends to Adam.
        only_masters: Whether to leave out what else is kept.
    """
    found: Whole = {}
    for bare, name, parameter, child, held in _held(chunks, optimizer):
        key = global_name(bare, name)
        names = () if only_masters else state_names(key, parameter, to_adam)
        for state in ("fp32_param", *names):
            local = torch.zeros(parameter.numel())
            if held is not None:
                local[held.start : held.end] = _states(child, parameter, names)[state]
            dist.all_reduce(local, group=child.data_parallel_group)
            found[state, key] = assemble(bare, name, parameter, local.view(parameter.shape))
    if only_masters:
        return found
    mine = [
        (name, factor.clone())
        for child in optimizer.chained_optimizers
        for name, factor in right_factors(child).items()
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found |= {("right_factor", name): v for theirs in everyone for name, v in theirs}
    return found


def assert_holds(chunks: list[Any], optimizer: Any, whole: Whole, to_adam: str = "") -> None:
    """Compare this rank's ranges of all state, and all its weights, with whole tensors, bit by bit.

    Args:
        chunks: Wrapped model chunks.
        optimizer: The optimizer.
        whole: What ``whole_state`` gave at the layout of the save.
        to_adam: Pattern of matrices that a rule sends to Adam.
    """
    compared = 0
    for bare, name, parameter, child, held in _held(chunks, optimizer):
        key = global_name(bare, name)
        weight = cut(bare, name, parameter, whole["fp32_param", key]).to(parameter.dtype)
        assert torch.equal(parameter.detach(), weight), f"weight of {key}"
        if held is None:
            continue
        names = state_names(key, parameter, to_adam)
        for state, values in _states(child, parameter, names).items():
            expected = cut(bare, name, parameter, whole[state, key]).reshape(-1)
            assert torch.equal(values, expected[held.start : held.end]), f"{state} of {key}"
            compared += 1
    for child in optimizer.chained_optimizers:
        for name, factor in right_factors(child).items():
            assert torch.equal(factor, whole["right_factor", name]), f"V of {name}"
            compared += 1
    assert compared


def state_bytes(optimizer: Any) -> dict[Any, bytes]:
    """Every tensor of the optimizer: masters and state, by position."""
    found = {}
    for number, child in enumerate(optimizer.chained_optimizers):
        for parameter in child.get_parameters():
            key = (number, len(found))
            found[key, "master"] = parameter.detach().numpy().tobytes()
            for name, value in child.optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor):
                    found[key, name] = value.view(torch.uint8).numpy().tobytes()
    return found


def train_between(
    rank: int, run: Run, start: int, stop: int, load_from: Path | None, save_to: Path | None
) -> dict[str, Any]:
    """Steps ``start`` to ``stop`` of a run, between two checkpoints or none.

    Returns:
        Losses, and hashes, bytes and groups of the state at the end.
    """
    chunks, optimizer, schedule = build(dataclasses.replace(run, steps=20))
    if load_from is not None:
        poison(chunks, optimizer)
        load(chunks, optimizer, schedule, load_from)
    losses = []
    for step in range(start, stop):
        optimizer.zero_grad()
        micro_batches = tiny_gpt.batch(step, global_batch=16, micro_batch=2)
        losses.append(tiny_gpt.forward_backward(chunks, micro_batches, optimizer))
        assert optimizer.step()[0]
        schedule.step(1)
    gather(chunks)
    if save_to is not None:
        save(chunks, optimizer, schedule, save_to)
    return {
        "losses": losses,
        "weights": replica_hashes(chunks),
        "state": state_bytes(optimizer),
        "right_factors": {
            name: factor.float().numpy().tobytes()
            for child in optimizer.chained_optimizers
            for name, factor in child.exchange.owned_state.items()
        },
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
    }
